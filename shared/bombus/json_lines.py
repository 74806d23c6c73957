"""Files with a JSON object in each line, such as tasks and prompts: one reader, and one form of what it refuses."""

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
    """Return what `read` makes of each line that is not empty. It is given the line and its number.

    `what` says what a line stands for, and `option` where the path was given. Raises `Refused` for a file that cannot
    be read, is too large or has no such line, and with the number of the line of which `read` raises an error.
    """
    named = f"{option} {path}".strip()
    found = []
    try:
        if path.stat().st_size > bytes_max:
            raise Refused(Code.TOO_LARGE, f"{named} has over {bytes_max >> 20} MiB, which is the limit: split it")
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_read(path, what, read, line, number))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(Code.BAD_CONFIG, f"{named} cannot be read: {in_one_line(error)}") from error
    if not found:
        raise Refused(Code.BAD_CONFIG, f"{named} has no {what}: it takes a JSON object in each line")
    return found


def _read(path: Path, what: str, read: Callable[[str, int], T], line: str, number: int) -> T:
    try:
        return read(line, number)
    except WRONG as error:
        why = str(error) if type(error) is ValueError else in_one_line(error)  # a sentence of the reader's own
        raise Refused(Code.BAD_CONFIG, f"{path} line {number} is not a {what}: {why}") from error
