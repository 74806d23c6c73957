"""The data reported about an episode besides its reward: metadata, metrics, and whether it was a success.

None of it is used for training, so it must never cost an episode: a value that the log cannot store is converted, or
that value alone is left out, with a warning.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from itertools import islice
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

import msgspec

from bombus.errors import without_surrogates
from bombus.hive.bounded import trim
from bombus.hive.episodes import METADATA_BYTES_MAX
from bombus.hive.inbox import DEPTH_MAX

log = logging.getLogger(__name__)

METRICS_MAX = 1024
NAME_CHARACTERS_MAX = 256  # length of a metric's name
VALUES_MAX = METADATA_BYTES_MAX  # values examined in one report, as each takes at least one byte
WARNED_MAX = 1024  # number of places for which a warning is remembered
SHOWN_CHARACTERS = 100
_INTEGERS = range(-(1 << 63), 1 << 64)  # representable in MessagePack
_TOO_LARGE = (
    f"metadata and metrics of an episode may take {METADATA_BYTES_MAX} bytes together: store large data elsewhere"
)

_encode = msgspec.msgpack.Encoder().encode
_warned: dict[str, None] = {}


class AuxiliaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The data about an episode that the log stores besides its reward."""

    metadata: dict[str, Any]
    log_metrics: dict[str, float]
    is_success: bool | None


def read_report(metadata: object, log_metrics: object, is_success: object) -> AuxiliaryReport:
    """Return the parts of a report that the log can store. A list of numbers becomes its mean."""
    reading = _Reading()
    metrics = dict(reading.metrics(log_metrics))
    verdict = reading.verdict(is_success)
    return AuxiliaryReport(metadata=reading.metadata(metadata), log_metrics=metrics, is_success=verdict)


class _NotPlain(Exception):
    """Raised if a value cannot be represented in JSON, or does not fit. The text gives the reason."""


class _Reading:
    """Reads one report. `room` is how many more bytes the report may take."""

    def __init__(self) -> None:
        self.room = METADATA_BYTES_MAX - 16  # room for the headers of both maps
        self._values_left = VALUES_MAX

    def metadata(self, given: object) -> dict[str, Any]:
        """Return the metadata. If not all of it fits, the smallest entries are kept."""
        if not isinstance(given, Mapping):
            given = self._fields("metadata", given)
        by_size = sorted(given.items(), key=lambda entry: _encoded_size(entry[1]))
        kept = {key: found[0] for key, value in by_size if (found := self._entry("metadata", key, value))}
        return {_name(key): kept[key] for key in given if key in kept}

    def _fields(self, place: str, given: object) -> Mapping[Any, Any]:
        """Convert a value that is not a mapping into one. Return an empty mapping if that is impossible."""
        try:
            found = {} if given is None else self._plain(given, place, DEPTH_MAX)
        except _NotPlain as error:
            _leave_out(place, str(error))
            return {}
        if isinstance(found, dict):
            return found
        _leave_out(place, f"{_shown(given)} is not a mapping")
        return {}

    def _entry(self, group: str, key: object, value: object) -> tuple[Any] | None:
        """Return an entry's value in JSON form, wrapped in a 1-tuple, or None if the entry was left out."""
        found = self._maybe(value, f"{group}.{key}", DEPTH_MAX - 1)
        return found if found and self._has_room(f"{group}.{key}", {_name(key): found[0]}) else None

    def _has_room(self, place: str, entry: dict[str, Any]) -> bool:
        size = len(_encode(entry))
        if size > self.room:
            _leave_out(place, f"it takes {size} bytes, but {_TOO_LARGE}")
            return False
        self.room -= size
        return True

    def metrics(self, given: object) -> Iterator[tuple[str, float]]:
        named = given if isinstance(given, Mapping) else self._fields("log_metrics", given)
        if len(named) > METRICS_MAX:
            _leave_out("log_metrics beyond the limit", f"there are {len(named)}, but only {METRICS_MAX} are kept")
        for key, value in islice(named.items(), METRICS_MAX):
            name, number = _name(key), self._number(value)
            if len(name) > NAME_CHARACTERS_MAX:
                _leave_out(f"log_metrics.{name}", f"its name is longer than {NAME_CHARACTERS_MAX} characters")
            elif number is None:
                _leave_out(f"log_metrics.{name}", f"{_shown(value)} is not a finite number, or a list of them")
            elif self._has_room(f"log_metrics.{name}", {name: number}):
                yield name, number

    def _number(self, value: object) -> float | None:
        """Return a metric as a number, the mean of a list of numbers, or None if the result is not finite."""
        try:
            plain = self._plain(value, "", DEPTH_MAX)
        except _NotPlain:
            return None
        numbers = plain if isinstance(plain, list) else [plain]
        if not numbers or not all(isinstance(each, int | float) for each in numbers):
            return None
        mean = math.fsum(each / len(numbers) for each in numbers)
        return mean if math.isfinite(mean) else None

    def verdict(self, given: object) -> bool | None:
        try:
            found = self._plain(given, "", DEPTH_MAX)
        except _NotPlain:
            found = ""
        if found is None or found in (0, 1):
            return None if found is None else bool(found)
        _leave_out("is_success", f"{_shown(given)} is neither true nor false")
        return None

    def _plain(self, value: object, place: str, depth: int) -> Any:
        """Return a value in JSON form, leaving out any of its parts that have no JSON form.

        Raises `_NotPlain` if the value itself has no JSON form.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise _NotPlain(_TOO_LARGE)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return without_surrogates(value)
        if isinstance(value, Integral | Real | Decimal):
            return _number_of(value)
        if depth == 0:
            raise _NotPlain(f"it is nested deeper than {DEPTH_MAX}")
        if isinstance(value, Mapping):
            found = {_name(key): self._maybe(one, f"{place}.{key}", depth - 1) for key, one in value.items()}
            return {name: each[0] for name, each in found.items() if each}
        if isinstance(value, Set | Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            several = [self._maybe(one, f"{place}[{index}]", depth - 1) for index, one in enumerate(value)]
            return [each[0] if each else None for each in several]
        return self._plain(_form_of(value), place, depth - 1)

    def _maybe(self, value: object, place: str, depth: int) -> tuple[Any] | None:
        """Return a value in JSON form in a 1-tuple, or leave it out and return None."""
        try:
            return (self._plain(value, place, depth),)
        except _NotPlain as error:
            _leave_out(place, str(error))
            return None


def _name(key: object) -> str:
    return without_surrogates(str(key))


def _encoded_size(value: object) -> int:
    """Return a value's encoded size in bytes, or 0 if it cannot be encoded as it is."""
    try:
        return len(_encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0


def _number_of(value: Integral | Real | Decimal) -> int | float | str | None:
    """Return a number in JSON form, or None if it is not finite. Raises `_NotPlain` if it has no JSON form."""
    try:
        if isinstance(value, Integral):
            return int(value) if int(value) in _INTEGERS else str(int(value))
        return float(value) if math.isfinite(value) else None
    except Exception as error:  # the number is too large, or its own code raises
        raise _NotPlain(f"{_shown(value)} cannot be represented in JSON") from error


def _form_of(value: object) -> object:
    """Return a simpler form of an object: the numbers in an array, the fields of a model, the text of a date.

    Raises `_NotPlain` if there is none.
    """
    try:
        if getattr(value, "nbytes", 0) > 8 * METADATA_BYTES_MAX:
            raise _NotPlain(_TOO_LARGE)
        if isinstance(value, bytes | bytearray):
            return bytes(value).decode(errors="backslashreplace")
        if isinstance(value, PurePath | BaseException):
            return str(value) if isinstance(value, PurePath) else repr(value)
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        for method in ("tolist", "model_dump"):  # a method of NumPy and torch, and one of pydantic
            if not isinstance(value, type) and callable(getattr(value, method, None)):
                return getattr(value, method)()
        return msgspec.to_builtins(value)  # dates, UUIDs, enums
    except _NotPlain:
        raise
    except Exception as error:  # any error raised by the value's own code means that it has no JSON form
        raise _NotPlain(f"{_shown(value)} cannot be represented in JSON") from error


def _shown(value: object) -> str:
    try:
        text = without_surrogates(repr(value))
    except Exception:  # raised by the value's own code: showing the type is enough
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def _leave_out(place: str, why: str) -> None:
    """Warn that a value is left out, once per place."""
    place = place[:SHOWN_CHARACTERS]
    if place not in _warned:
        _warned[place] = None
        trim(_warned, WARNED_MAX)
        log.warning("%s is left out of an episode's report (logged once): %s", place, why)
