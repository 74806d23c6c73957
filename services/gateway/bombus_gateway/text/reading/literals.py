"""Literals as models write them in tool calls: Python's, and Gemma's.

For invalid text, everything here raises `ValueError` and nothing else, because nesting is limited to less than Python's
recursion limit.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

DEPTH_MAX = 64  # nesting of lists and objects
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?(?![\w.])")
_CONSTANTS = {**PYTHON_CONSTANTS, "true": True, "false": False, "null": None, "none": None}
_GEMMA_KEY = re.compile(r"[^:{}\[\],]+")
_PYTHON_STRING = re.compile(r"""'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}


class Literals:
    """A cursor over literals: lists, objects, numbers, constants and strings.

    Strings are written as in Python, unless `quote` is given. In that case `quote` encloses strings, and object keys
    may be bare.
    """

    def __init__(self, text: str, quote: str = "") -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def done(self) -> bool:
        """Skip white space, and return whether the text has ended."""
        self._skip()
        return self._at == len(self._text)

    def take(self, mark: str) -> bool:
        """Skip white space, and `mark` if it comes next. Return whether the mark came next."""
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark!r} is missing")

    def name(self) -> str:
        """Read the name of a function or a parameter."""
        self._skip()
        return self._match(_NAME)[0]

    def items(self, close: str) -> Iterator[None]:
        """Yield at the start of each item. Skip the commas between items, and the mark `close` after the last item."""
        if self.take(close):
            return
        yield
        while not self.take(close):
            self.expect(",")
            yield

    def value(self, depth: int = 0) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
        if self.take("["):
            return self._list(depth + 1)
        if self.take("{"):
            return self.rest_of_object(depth + 1)
        return self._scalar()

    def rest_of_object(self, depth: int = 1) -> dict[str, Any]:
        """Read an object whose opening brace has already been read."""
        found: dict[str, Any] = {}
        for _ in self.items("}"):
            key = self._key()
            self.expect(":")
            found[key] = self.value(depth)
        return found

    def _list(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in self.items("]")]

    def _key(self) -> str:
        self._skip()
        if self._quote and not self._text.startswith(self._quote, self._at):
            return self._match(_GEMMA_KEY)[0].strip()
        return self._string()

    def _scalar(self) -> Any:
        self._skip()
        if self._text[self._at : self._at + 1] in ("'", '"') or (self._quote and self._ahead(self._quote)):
            return self._string()
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return float(number[0]) if number[1] or number[2] else int(number[0])
        word = self._match(_NAME)[0]
        if word not in _CONSTANTS:
            raise ValueError(f"{word!r} is not a value")
        return _CONSTANTS[word]

    def _string(self) -> str:
        if self._quote:
            self.expect(self._quote)
            end = self._text.index(self._quote, self._at)
            found = self._text[self._at : end]
            self._at = end + len(self._quote)
            return found
        match = self._match(_PYTHON_STRING)
        text = _ESCAPE.sub(_unescaped, match[1] if match[1] is not None else match[2])
        # As in JSON, two escapes may be the two halves of a surrogate pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"unexpected text at {self._at}")
        self._at = match.end()
        return match

    def _ahead(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at


def _unescaped(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3]
    if number:
        return chr(min(int(number, 16), sys.maxunicode + 1))  # `chr` raises `ValueError` for `sys.maxunicode + 1`
    return _ESCAPED.get(escape[4], "\\" + escape[4])
