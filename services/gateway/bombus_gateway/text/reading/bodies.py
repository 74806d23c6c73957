"""Finds the end of a tool call's body as the text arrives, reading each character only once, however the text is
split."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_OPENING, _CLOSING = "[{(", "]})"
_INSIDE = {
    # A JSON string cannot contain a line break, so a string with a line break before its closing quote is broken.
    "json": {'"': re.compile(r'\\.|(\n)|"', re.DOTALL)},
    "python": {"'": re.compile(r"\\.|()'", re.DOTALL), '"': re.compile(r'\\.|()"', re.DOTALL)},
    "": {},
}


def alternatives(marks: Sequence[str]) -> str:
    """Return a pattern that finds any of `marks`."""
    return "|".join(re.escape(mark) for mark in marks)


def held_back(text: str, at: int, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text`, starting no earlier than `at`, that may be the beginning of
    one of `marks`."""
    for mark in marks:
        if text.find(mark[:1], at) >= 0:
            break
    else:
        return 0
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text) - at), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


@dataclass(frozen=True)
class BodyForm:
    """How to find the end of a body: at the closing mark `close` outside of strings, or at the closing bracket if
    `close` is empty.

    `strings` is "json", "python", or "" if quotes have no meaning. A body without `close` begins with `bracket` or, if
    `head` is true, may have other text before the bracket.
    """

    close: str = ""
    strings: str = ""
    bracket: str = ""
    head: bool = False

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """The pattern that finds the closing mark or the brackets, and the quotes that begin a string."""
        quotes = "".join(_INSIDE[self.strings])
        quote = f"[{quotes}]" if quotes else r"(?!)"
        marks = re.escape(self.close) if self.close else rf"[{re.escape(_OPENING + _CLOSING)}]"
        return re.compile(rf"{marks}|{quote}")


class BodyEnd:
    """Finds the end of one body."""

    def __init__(self, form: BodyForm) -> None:
        self._form = form
        self._inside = _INSIDE[form.strings]
        self._quote = ""
        self._strings = bool(form.strings)
        self._depth = 0
        self._begun = bool(form.close)

    def take(self, text: str, at: int) -> tuple[int, bool]:
        """Continue reading `text` from `at`. Return the offset reached, and whether the body ends there.

        If the body does not end there, the next call must be given the text after that offset again, followed by the
        next text.
        """
        if not self._begun:
            start = self._begin(text, at)
            if start is None:
                return at, True  # this is not a body
            if start == len(text):
                return start, False
            at = start
        look = self._look_for_mark if self._form.close else self._look_for_bracket
        while True:
            if self._quote:
                at, closed = self._string(text, at)
                if not closed:
                    return at, False
            at, ends = look(text, at)
            if not self._quote:
                return at, ends

    def _begin(self, text: str, at: int) -> int | None:
        """Return the offset of the first bracket. If the bracket may still follow, return the end of the text; if it
        cannot, return None."""
        if self._form.head:
            found = text.find(self._form.bracket, at)
            self._begun = found >= 0
            return found if found >= 0 else len(text)
        while at < len(text) and text[at].isspace():
            at += 1
        self._begun = text.startswith(self._form.bracket, at) and at < len(text)
        return at if self._begun or at == len(text) else None

    def _look_for_mark(self, text: str, at: int) -> tuple[int, bool]:
        """Read up to the end of the closing mark, or into a string. The result is like that of `take`."""
        close = self._form.close
        if not self._strings:
            place = text.find(close, at)
            return (place + len(close), True) if place >= 0 else (self._open_end(text, at), False)
        found = self._form.outside.search(text, at)
        if found is None:
            return self._open_end(text, at), False
        if found[0] == close:
            return found.end(), True
        self._quote = found[0]
        return found.end(), False

    def _look_for_bracket(self, text: str, at: int) -> tuple[int, bool]:
        """Read up to the bracket that closes the first one, or into a string. The result is like that of `take`."""
        if self._form.strings and not self._strings:
            return at, True  # a string was broken: the rest is plain text
        while found := self._form.outside.search(text, at):
            at = found.end()
            if found[0] in _OPENING:
                self._depth += 1
            elif found[0] in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    return at, True
            else:
                self._quote = found[0]
                return at, False
        return len(text), False

    def _string(self, text: str, at: int) -> tuple[int, bool]:
        """Read up to the end of the string. Return the offset, and whether the string ended.

        After a broken string, strings are no longer recognized.
        """
        pattern = self._inside[self._quote]
        for found in pattern.finditer(text, at):
            if found[0][0] == "\\":
                at = found.end()
                continue
            self._strings = not found[1]
            self._quote = ""
            return found.end(), True
        # Only a final backslash is re-read, since the character that it escapes is still to come.
        return len(text) - text.endswith("\\", at), False

    def _open_end(self, text: str, at: int) -> int:
        return len(text) - held_back(text, at, (self._form.close,))
