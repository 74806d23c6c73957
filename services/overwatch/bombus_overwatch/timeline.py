"""A view that can go back in time: the newest events in chunks, each with a copy of the view at its start."""

from bisect import bisect_left
from collections import deque
from typing import TypeVar

import msgspec

from bombus.hive.events import Event
from bombus_overwatch.model import HiveView, fold

CHUNK_EVENTS = 1_000
CHUNKS_KEPT = 6  # enough that at least the newest 5,000 events can be shown again

T = TypeVar("T")


def replicate(value: T) -> T:
    """Return a copy that shares what cannot change: frozen structs, tuples, numbers and text.

    All values in a container are of the same kind, so its first value shows whether the values must be copied too. Only
    the types that the state and the view consist of are supported.
    """
    if isinstance(value, msgspec.Struct):
        if value.__struct_config__.frozen:
            return value
        fields = {name: replicate(getattr(value, name)) for name in value.__struct_fields__}
        return type(value)(**fields)
    if isinstance(value, dict):
        if not value or _shared(next(iter(value.values()))):
            return value.copy()  # type: ignore[return-value]
        return {key: replicate(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | deque):
        copied = value.copy()
        if copied and not _shared(copied[0]):
            for index, item in enumerate(value):
                copied[index] = replicate(item)
        return copied  # type: ignore[return-value]
    return value.copy() if isinstance(value, set) else value  # type: ignore[return-value]


def _shared(value: object) -> bool:
    if isinstance(value, msgspec.Struct):
        return bool(value.__struct_config__.frozen)
    return not isinstance(value, dict | list | deque | set)


class TimelineChunk:
    """Consecutive events, and the view before the first of them."""

    def __init__(self, start: HiveView) -> None:
        self.start = start
        self.positions: list[int] = []
        self.events: list[Event] = []


class Timeline:
    """The newest events of a log. `live` is the fold of all events so far on top of `start`; `at` returns an earlier
    view."""

    def __init__(
        self, start: HiveView | None = None, chunk_events: int = CHUNK_EVENTS, chunks_kept: int = CHUNKS_KEPT
    ) -> None:
        self.live = start or HiveView()
        self._chunk_events = chunk_events
        self._chunks: deque[TimelineChunk] = deque([TimelineChunk(replicate(self.live))], maxlen=chunks_kept)

    def fold(self, position: int, event: Event) -> None:
        chunk = self._chunks[-1]
        if len(chunk.events) >= self._chunk_events:
            chunk = TimelineChunk(replicate(self.live))
            self._chunks.append(chunk)
        chunk.positions.append(position)
        chunk.events.append(event)
        fold(self.live, position, event)

    @property
    def oldest(self) -> int:
        """The earliest position that can be shown."""
        return self._chunks[0].start.position

    @property
    def newest(self) -> int:
        return self.live.position

    def moved(self, position: int, events: int) -> int:
        """Return the position `events` events later (earlier if negative), limited to the events that are kept."""
        positions = [self.oldest, *(kept for chunk in self._chunks for kept in chunk.positions)]
        index = bisect_left(positions, position) + events
        return positions[min(max(index, 0), len(positions) - 1)]

    def at(self, position: int) -> HiveView:
        """Return a new view with all events up to `position`, which is limited to `oldest`."""
        chunk = self._chunks[0]
        for later in self._chunks:
            if later.start.position > position:
                break
            chunk = later
        view = replicate(chunk.start)
        for kept, event in zip(chunk.positions, chunk.events):
            if kept > position:
                break
            fold(view, kept, event)
        return view
