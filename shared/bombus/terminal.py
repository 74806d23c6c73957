"""Output to a terminal or a log, in which text from outside can neither forge a line nor control the terminal.

All output of bombus is printed with `say`, `complain` or `say_json`.
"""

import json
import re
import sys
from typing import TextIO

_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")


def escaped(text: str) -> str:
    """Return the text as one line, with every non-printable character escaped, as in `\\n` or `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def say(*lines: object, styled: bool = False, flush: bool = False, file: TextIO | None = None) -> None:
    """Print each line as a single line, with control characters escaped. With `styled`, keep colour sequences."""
    whole = "".join((_styled(str(line)) if styled else escaped(str(line))) + "\n" for line in lines)
    print(whole, end="", file=file, flush=flush)


def complain(*lines: object) -> None:
    """Print lines to stderr, as `say` does."""
    say(*lines, file=sys.stderr)


def say_json(value: object) -> None:
    """Print a value as JSON, escaped so that no character can control the terminal. It parses to the same value."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    say(*(json_escaped(line) for line in text.split("\n")))


def json_escaped(text: str) -> str:
    """Return JSON with every non-printable character written as `\\uXXXX`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else json.dumps(char)[1:-1]


def _styled(line: str) -> str:
    return "".join(part if _STYLE.fullmatch(part) else escaped(part) for part in _STYLE.split(line))
