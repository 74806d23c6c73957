"""Finds where the body of a tool call ends while it arrives: each character is read once, however text is split."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_OPENING, _CLOSING = "[{(", "]})"
_INSIDE = {
    # In JSON a line break cannot be in a string: one that is not closed before it is broken.
    "json": {'"': re.compile(r'\\.|(\n)|"', re.DOTALL)},
    "python": {"'": re.compile(r"\\.|()'", re.DOTALL), '"': re.compile(r'\\.|()"', re.DOTALL)},
    "": {},
}


def alternatives(marks: Sequence[str]) -> str:
    """Return a pattern that finds any of `marks`."""
    return "|".join(re.escape(mark) for mark in marks)


def held_back(text: str, at: int, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text`, after `at`, may be the beginning of one of `marks`."""
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
    """How to find the end of a body: its closing marker outside of strings, or, without one, its last bracket.

    `strings` is "json", "python" or "" where quotes mean nothing. A body of brackets begins with `bracket`; what may
    stand before that is a `head`.
    """

    close: str = ""
    strings: str = ""
    bracket: str = ""
    head: bool = False

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """Finds what counts outside of strings."""
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
        """Read on in `text` from `at`. Return how far the body goes in it, and whether it ends there.

        What is beyond that, and not yet the body's end, is to be handed in again with what follows it.
        """
        if not self._begun:
            start = self._begin(text, at)
            if start is None:
                return at, True  # not a body
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
        """Return where the first bracket is, or None if something else comes first."""
        if self._form.head:
            found = text.find(self._form.bracket, at)
            self._begun = found >= 0
            return found if found >= 0 else len(text)
        while at < len(text) and text[at].isspace():
            at += 1
        self._begun = text.startswith(self._form.bracket, at) and at < len(text)
        return at if self._begun or at == len(text) else None

    def _look_for_mark(self, text: str, at: int) -> tuple[int, bool]:
        """Go on to the end of the closing marker, or into a string, and return what `take` returns."""
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
        """Go on to the bracket that closes the first one, or into a string, and return what `take` returns."""
        if self._form.strings and not self._strings:
            return at, True  # a string was broken: the rest is text again
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
        """Look for the end of the string. Strings no longer count once one was broken."""
        pattern = self._inside[self._quote]
        for found in pattern.finditer(text, at):
            if found[0][0] == "\\":
                at = found.end()
                continue
            self._strings = not found[1]
            self._quote = ""
            return found.end(), True
        # Only a backslash, whose character is still to come, is looked at again.
        return len(text) - text.endswith("\\", at), False

    def _open_end(self, text: str, at: int) -> int:
        return len(text) - held_back(text, at, (self._form.close,))
