"""Tracks a trainer's work by the marks that it makes as it advances, and limits the time between marks.

Work runs in threads, which can be neither queried nor ended. So the working code calls `advanced` in its loops, and the
event loop compares the marks with its clock (watch.py). The limit follows the pace of recent work of the same kind.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")
GENEROUS = 20.0  # limit on a gap between marks: this many times the longest recent gap in the same kind of work
NEWEST = 8  # how many recent pieces of work of a kind determine its pace
STALLS = 3.0  # loads and writes make few marks, so their gaps may be this many times as long as in other work
SYNCED_BYTES_S = 50e6  # rate of a slow disk, for fsyncs, which make no marks
SETTLED_S = 300.0  # the shortest limit derived from a pace, since a file server may be unavailable for minutes


class Kind(StrEnum):
    """A kind of work. All work of the same kind shares a pace."""

    LOAD = "load"
    STEP = "step"
    OPERATION = "operation"
    SAMPLES = "samples"
    CHECKPOINT = "checkpoint"
    WEIGHTS = "weights"
    REMOVAL = "removal"


STORING = (Kind.CHECKPOINT, Kind.WEIGHTS)


@dataclass(eq=False)
class Work:
    """A piece of work in a thread, which writes `marks`, `stage` and `written_bytes`.

    `Works.look` writes the other counters. `limit_s` replaces the limit derived from the pace of its kind.
    """

    kind: Kind
    what: str
    limit_s: float | None = None
    marks: int = 0
    stage: str = ""
    written_bytes: int = 0
    marks_seen: int = 0
    still_s: float = 0.0  # time since the newest mark
    longest_s: float = 0.0  # longest time between two marks

    def __str__(self) -> str:
        return f"{self.what}, {self.stage}" if self.stage else self.what


@dataclass
class WorkPace:
    """The longest gaps in the newest pieces of work of one kind. The first piece is left out, because it compiles
    kernels."""

    longest_s: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    works: int = 0

    def note(self, longest_s: float) -> None:
        if self.works:
            self.longest_s.append(longest_s)
        self.works += 1

    def limit_s(self, first_s: float) -> float:
        """Return how long a gap may be: `first_s` until the pace is known."""
        if not self.longest_s:
            return first_s
        return max(GENEROUS * max(self.longest_s), min(first_s, SETTLED_S))


class Works:
    """The work in progress, and the pace of each kind of work.

    Until the pace of its kind is known, a piece of work may make no mark for `first_s`. If it stores something, the
    limit is `storing_s` if that is longer.
    """

    def __init__(self, first_s: float, storing_s: float = 0.0) -> None:
        self._first_s = first_s
        self._storing_s = max(first_s, storing_s)
        self._works: list[Work] = []
        self._paces: dict[Kind, WorkPace] = {}

    @contextmanager
    def of(self, work: Work) -> Iterator[None]:
        """Watch a piece of work for as long as it runs."""
        self._works.append(work)
        try:
            yield
        finally:
            self._works.remove(work)
            self._paces.setdefault(work.kind, WorkPace()).note(max(work.longest_s, work.still_s))

    def look(self, passed_s: float) -> Work | None:
        """Add `passed_s` to the time without a mark. Return a piece of work that exceeds its limit, or None."""
        for work in self._works:
            work.still_s += passed_s
            if work.marks != work.marks_seen:
                work.longest_s = max(work.longest_s, work.still_s)
                work.marks_seen, work.still_s = work.marks, 0.0
        return next((work for work in self._works if work.still_s > self.limit_s(work)), None)

    def limit_s(self, work: Work) -> float:
        """Return how long a piece of work may go without a mark: long enough to fsync all that it has written so
        far."""
        if work.limit_s is not None:
            return work.limit_s
        first_s = self._storing_s if work.kind in STORING else self._first_s
        return max(self._paces.get(work.kind, WorkPace()).limit_s(first_s), work.written_bytes / SYNCED_BYTES_S)

    @property
    def doing(self) -> str:
        """The work that began last, described in words; "" if there is none."""
        return str(self._works[-1]) if self._works else ""


_watched: ContextVar[Works | None] = ContextVar("watched", default=None)
_current: ContextVar[Work | None] = ContextVar("work", default=None)


def watch_here(works: Works) -> None:
    """Watch the work of this task, and of all tasks that it creates from now on."""
    _watched.set(works)


async def in_thread(kind: Kind, what: str, work: Callable[[], T], limit_s: float | None = None) -> T:
    """Run `work` in a watched thread. The event loop keeps following the log meanwhile, so that a stop can reach a
    step."""
    works = _watched.get()
    if works is None:
        return await asyncio.to_thread(work)
    watched = Work(kind, what, limit_s)
    token = _current.set(watched)  # the thread runs with a copy of this context
    try:
        with works.of(watched):
            return await asyncio.to_thread(work)
    finally:
        _current.reset(token)


def advanced(stage: str = "", written_bytes: int = 0) -> None:
    """Record a mark for this thread's work, with its new `stage` if given, and the bytes written since the last mark.

    Does nothing if the work is not watched.
    """
    work = _current.get()
    if work is not None:
        work.marks += 1
        work.written_bytes += written_bytes
        work.stage = stage or work.stage
