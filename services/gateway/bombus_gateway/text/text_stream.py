"""Sampled tokens become text as they come: whole characters only, and nothing of a stop string ever leaks."""

import codecs
from collections.abc import Sequence

from bombus.errors import EngineFault


class StopScanner:
    """Finds the first stop string in a text that comes in pieces. Holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was completed). Nothing comes after it."""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one completion.

    `pieces` are the bytes that each token adds. `decoded` counts the characters that the tokens made so far, `released`
    those that may have gone out.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stops) if stops else None
        self.stopped = False
        self.decoded = 0
        self.released = 0

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """(text that may go out, how many of `tokens` were used: all of them unless a stop string ended it).

        Raises `EngineFault` for an id outside the vocabulary.
        """
        pieces = self._pieces
        try:
            if self._scanner is None:
                return self._release(b"".join([pieces[token] for token in tokens]), False), len(tokens)
            out: list[str] = []
            for index, token in enumerate(tokens):
                out.append(self._release(pieces[token], False))
                if self.stopped:
                    return "".join(out), index + 1
            return "".join(out), len(tokens)
        except IndexError:
            raise EngineFault(f"a sampled token is outside the vocabulary of {len(pieces)} tokens") from None

    def finish(self) -> str:
        """The rest of the text: what was held back, and `\\ufffd` for bytes that never became a character."""
        return "" if self.stopped else self._release(b"", True)

    def _release(self, piece: bytes, final: bool) -> str:
        text = self._decoder.decode(piece, final)
        self.decoded += len(text)
        if self._scanner is not None:
            text, self.stopped = self._scanner.feed(text)
            if final and not self.stopped:
                text += self._scanner.finish()
        self.released += len(text)
        return text
