"""Decodes sampled tokens as they arrive, into whole characters and without any part of a stop string."""

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from bombus.errors import EngineFault

_NONE: Mapping[int, str] = MappingProxyType({})
_Decoder = codecs.getincrementaldecoder("utf-8")
_FIRST_MARK = 0xD800  # a surrogate: no decoded text contains one


class StopScanner:
    """Finds the first stop string in text that arrives in pieces. Holds back text that may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = ""  # the stop string that ended the text
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that may be sent, and whether a stop string is complete. Do not call this again after a stop
        string."""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            place, self.found = min(found)
            return text[:place], True
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text that was held back, which is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one completion.

    `pieces` contains the bytes that each token adds. `decoded` counts the characters of all tokens so far, and
    `released` counts those that may be sent. `names` maps tokens that decode to no text to their names in `stops`, the
    longest name first. In the search for stop strings, a mark takes the place of each such token; marks are never sent.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = (), names: Mapping[int, str] = _NONE) -> None:
        self._pieces = pieces
        self._decoder = _Decoder("replace")
        self._marks = {token: chr(_FIRST_MARK + place) for place, token in enumerate(names)}
        self._unmarked = {ord(mark): None for mark in self._marks.values()}
        self._marked = _marked(stops, names, self._marks) if names else {}
        self._scanner = StopScanner((*stops, *self._marked)) if stops else None
        self.stopped = False
        self.decoded = 0
        self.released = 0

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text that may be sent, and how many of `tokens` were used: all of them, unless a stop string ended
        the text.

        Raises `EngineFault` for an id outside the vocabulary.
        """
        pieces, marks = self._pieces, self._marks
        try:
            if self._scanner is None:
                return self._release(b"".join([pieces[token] for token in tokens]), False), len(tokens)
            out: list[str] = []
            for index, token in enumerate(tokens):
                out.append(self._release(pieces[token], False, marks.get(token, "")))
                if self.stopped:
                    return "".join(out), index + 1
            return "".join(out), len(tokens)
        except IndexError:
            raise EngineFault(f"a sampled token is outside the vocabulary of {len(pieces)} tokens") from None

    @property
    def stop(self) -> str:
        """The stop string that ended the text, or "" if the text has not ended at one."""
        found = self._scanner.found if self._scanner is not None else ""
        return self._marked.get(found, found)

    def finish(self) -> str:
        """Return the text that was held back, with `\\ufffd` for bytes that are not a whole character."""
        return "" if self.stopped else self._release(b"", True)

    def _release(self, piece: bytes, final: bool, mark: str = "") -> str:
        text = self._decoder.decode(piece, final)
        self.decoded += len(text)
        if self._scanner is not None:
            text, self.stopped = self._scanner.feed(text + mark)
            if final and not self.stopped:
                text += self._scanner.finish()
            if self._marks:
                text = text.translate(self._unmarked)
        self.released += len(text)
        return text


def _marked(stops: Sequence[str], names: Mapping[int, str], marks: Mapping[int, str]) -> dict[str, str]:
    """Map stop strings, with marks in place of token names, to the original stop strings.

    Stop strings that begin with a mark are left out, because sampling ends at that token anyway.
    """
    found: dict[str, str] = {}
    for stop in stops:
        text = stop
        for token, name in names.items():
            text = text.replace(name, marks[token])
        if text != stop and not text.startswith(tuple(marks.values())):
            found[text] = stop
    return found


def tokens_of_parts(pieces: Sequence[bytes], parts: Iterable[str]) -> int:
    """Count the tokens that contain any of these `parts` of the tokens' text. `pieces` has the bytes of each token.

    The parts must be in the order of the text. Counting ends at the first part that is not found, because such a part
    has bytes that are not a whole character.
    """
    text = b"".join(pieces)
    starts = [*accumulate(map(len, pieces), initial=0)]
    count = at = counted = 0  # `counted`: the tokens before this index have been examined
    for part in parts:
        sought = part.encode()
        place = text.find(sought, at)
        if place < 0:
            break
        at = place + len(sought)
        first, end = max(bisect_right(starts, place) - 1, counted), bisect_left(starts, at)
        count += max(end - first, 0)
        counted = max(end, counted)
    return count
