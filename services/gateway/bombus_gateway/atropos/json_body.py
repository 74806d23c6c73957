"""JSON bodies of Atropos's clients: what is wrong with one is refused with its place."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.atropos.refusals import UnfitBody
from bombus_gateway.decoding.json_body import BadParameter, decode_body

_BodyT = TypeVar("_BodyT")
_missing = re.compile(r"Object missing required field `([^`]*)`")


def check_counts(body: bytes) -> None:
    """Raises `Refused` TOO_LARGE for a body of too many lists or values, without decoding it.

    Each takes two characters at least, so that short bodies need not be counted.
    """
    if len(body) > 2 * limits.TRAJECTORY_LISTS and body.count(b"[") + body.count(b"{") > limits.TRAJECTORY_LISTS:
        why = f"The body has more than {limits.TRAJECTORY_LISTS} lists and objects; send fewer groups in one request."
        raise Refused(Code.TOO_LARGE, why)
    if len(body) > 2 * limits.TRAJECTORY_NUMBERS and body.count(b",") > limits.TRAJECTORY_NUMBERS:
        why = f"The body has more than {limits.TRAJECTORY_NUMBERS} values; send fewer groups in one request."
        raise Refused(Code.TOO_LARGE, why)


def decode_at(decoder: msgspec.json.Decoder[_BodyT], body: bytes, place: str = "") -> _BodyT:
    """Decode a body, or the part of it at `place`. Raises `UnfitBody`.

    Python's own writer of JSON writes NaN and infinities, which are not JSON: they are refused where they stand.
    """
    try:
        if not body.isascii():
            body.decode()  # parts that are kept as they came were not looked into
        return decode_body(decoder, body, place)
    except UnicodeDecodeError as error:
        raise UnfitBody(place, f"The body is not UTF-8: {error}.", "json_invalid") from None
    except BadParameter as refusal:
        if found := _missing.search(refusal.why):
            where = within(refusal.param, found[1])
            raise UnfitBody(where, f"{where} is missing.", "missing") from None
        raise UnfitBody(refusal.param, refusal.why) from None
    except Refused as refusal:
        if b"NaN" in body or b"Infinity" in body:
            _refuse_not_finite(body)
        raise UnfitBody(place, refusal.why, "json_invalid") from None


def within(place: str, field: str) -> str:
    """Return the place of a field of what is at `place`."""
    return f"{place}.{field}" if place else field


def _refuse_not_finite(body: bytes) -> NoReturn:
    try:
        steps = _steps_to_not_finite(json.loads(body.decode()))
    except (ValueError, RecursionError):
        raise UnfitBody("", "The body could not be read as JSON.", "json_invalid") from None
    if steps is None:
        raise UnfitBody("", "The body could not be read as JSON.", "json_invalid")
    place = ""
    for step in steps:
        place = f"{place}[{step}]" if isinstance(step, int) else within(place, step)
    raise UnfitBody(place, f"{place} is NaN or infinite; send numbers that are finite.")


def _steps_to_not_finite(value: Any) -> list[str | int] | None:
    """Return the keys and indexes that lead to the first number that is not finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else []
    pairs: Iterable[tuple[str | int, Any]]
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list) and not _are_finite(value):
        pairs = enumerate(value)
    else:
        return None
    for key, inner in pairs:
        if (steps := _steps_to_not_finite(inner)) is not None:
            return [key, *steps]
    return None


def _are_finite(values: list[Any]) -> bool:
    """Return whether these are all finite numbers, without a look at each in Python: there may be millions."""
    try:
        return all(map(math.isfinite, values))
    except (TypeError, OverflowError):  # lists, texts, or integers beyond all floats: they are looked at one by one
        return False
