"""Reads files that have one JSON object per line, such as tasks and prompts, with the same error messages for all."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from bombus.errors import Code, Refused, in_one_line

FILE_BYTES_MAX = 4 << 30
WRONG = (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError)

T = TypeVar("T")


def read_json_lines(
    path: Path, what: str, read: Callable[[str, int], T], *, option: str = "", bytes_max: int = FILE_BYTES_MAX
) -> list[T]:
    """Call `read` with each non-empty line and its number, and return the results.

    `what` is a noun for the object on a line, and `option` is the option that gave the path. Raises `Refused` if the
    file cannot be read, is too large or has no non-empty line. If `read` raises an error, this raises `Refused` with
    the line's number.
    """
    named = f"{option} {path}".strip()
    found = []
    try:
        if path.stat().st_size > bytes_max:
            raise Refused(Code.TOO_LARGE, f"{named} exceeds the limit of {bytes_max >> 20} MiB: split it")
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_read(path, what, read, line, number))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(Code.BAD_CONFIG, f"{named} cannot be read: {in_one_line(error)}") from error
    if not found:
        raise Refused(Code.BAD_CONFIG, f"{named} has no {what}: it must have a JSON object on each line")
    return found


def _read(path: Path, what: str, read: Callable[[str, int], T], line: str, number: int) -> T:
    try:
        return read(line, number)
    except WRONG as error:
        why = str(error) if type(error) is ValueError else in_one_line(error)  # a sentence written by `read`
        raise Refused(Code.BAD_CONFIG, f"{path} line {number} is not a {what}: {why}") from error
