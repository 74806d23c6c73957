"""Decode the JSON bodies of Atropos's clients. A refusal says where in the body the error is."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from bombus.errors import Refused
from bombus_gateway.atropos.refusals import UnfitBody
from bombus_gateway.decoding.json_body import BadParameter, decode_body

_BodyT = TypeVar("_BodyT")
_missing = re.compile(r"Object missing required field `([^`]*)`")
_byte = re.compile(r"\(byte (\d+)\)")
_not_finite = re.compile(rb"-?(?:NaN|Infinity)")
_mark = re.compile(rb'[\[\]{}"]')  # a bracket or the start of a string
_text = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_colon = re.compile(rb"\s*:")
_CHUNK_BYTES = 1 << 20
MARKS_MAX = 1 << 18  # maximum number of marks scanned to locate a number; takes a quarter of a second


def decode_at(decoder: msgspec.json.Decoder[_BodyT], body: bytes, place: str = "") -> _BodyT:
    """Decode a body, or the part of a body that is at `place`. Raises `UnfitBody` if the JSON does not fit the
    decoder's type.

    Python's `json` module writes NaN and infinities, which are not valid JSON. The refusal says where such a number is.
    """
    try:
        if not place:
            _check_utf8(body)  # the decoder does not check parts kept as raw JSON
        return decode_body(decoder, body, place)
    except UnicodeDecodeError as error:
        raise UnfitBody(place, f"The body is not UTF-8: {error}.", "json_invalid") from None
    except BadParameter as refusal:
        if found := _missing.search(refusal.why):
            where = within(refusal.param, found[1])
            raise UnfitBody(where, f"{where} is missing.", "missing") from None
        raise UnfitBody(refusal.param, refusal.why) from None
    except Refused as refusal:
        if found := _byte.search(refusal.why):
            _refuse_not_finite(body, int(found[1]), place)
        raise UnfitBody(place, refusal.why, "json_invalid") from None


def within(place: str, field: str) -> str:
    """Return the place of a field of the object at `place`."""
    return f"{place}.{field}" if place else field


def _check_utf8(body: bytes) -> None:
    """Raise `UnicodeDecodeError` unless a body is UTF-8. The body is checked in pieces, so that it is never copied as a
    whole."""
    if body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), _CHUNK_BYTES):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(body[start : start + _CHUNK_BYTES], final=start + _CHUNK_BYTES >= len(body))
        except UnicodeDecodeError as error:
            before = start - pending
            raise UnicodeDecodeError("utf-8", body, before + error.start, before + error.end, error.reason) from None


def _refuse_not_finite(body: bytes, end: int, place: str) -> None:
    """Raise `UnfitBody` if NaN or an infinity begins at the byte where decoding failed, or at the byte before it."""
    found = _not_finite.match(body, end) or _not_finite.match(body, max(end - 1, 0))
    if found is None:
        return
    steps = _steps_to(body, found.start())
    if steps is None:
        why = f"The number at byte {found.start()} is NaN or infinite; send finite numbers."
        raise UnfitBody(place, why)
    for step in steps:
        place = f"{place}[{step}]" if isinstance(step, int) else within(place, step)
    raise UnfitBody(place, f"{place} is NaN or infinite; send finite numbers.")


def _steps_to(body: bytes, end: int) -> list[str | int] | None:
    """Return the keys and indexes that lead to byte `end` of a body that is valid JSON up to there.

    Returns None if more than `MARKS_MAX` brackets and strings come before that byte. The body is not decoded: it may be
    large, and other requests would wait while Python creates objects for all of it.
    """
    steps: list[str | int] = []
    at = 0
    for number, (start, after) in enumerate(_marks(body, end)):
        if number == MARKS_MAX:
            return None
        _count_items(steps, body, at, start)
        at = after
        first = body[start : start + 1]
        if first == b'"':
            if steps and isinstance(steps[-1], str) and _colon.match(body, at):
                steps[-1] = json.loads(body[start:after])
        elif first in b"[{":
            steps.append(0 if first == b"[" else "")
        else:
            steps.pop()
    _count_items(steps, body, at, end)
    return steps


def _marks(text: bytes, end: int) -> Iterator[tuple[int, int]]:
    """Yield where each bracket and each string in JSON text begins and ends, up to byte `end`."""
    at = 0
    while mark := _mark.search(text, at, end):
        found = _text.match(text, mark.start(), end)
        at = mark.end() if found is None else found.end()
        yield mark.start(), at


def _count_items(steps: list[str | int], body: bytes, start: int, end: int) -> None:
    if steps and isinstance(steps[-1], int):
        steps[-1] += body.count(b",", start, end)
