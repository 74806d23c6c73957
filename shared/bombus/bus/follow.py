"""Follows a hive's events and keeps their fold, which is how every service except the coordinator knows the state."""

import asyncio
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy

import msgspec

from bombus.bus import TRACEPARENT, Bus, Reader, Stored, snapshots
from bombus.errors import BusUnavailable, LogCorrupted, NewerEvent, StreamEndLost
from bombus.hive.events import AnyEvent, EpochOpened, decode_event
from bombus.hive.fold.evolve import evolve
from bombus.hive.levels import check_level
from bombus.hive.state import Hive

log = logging.getLogger(__name__)

Predicate = Callable[[Hive], bool]


class Follower:
    """Keeps `hive`, the fold of all events up to `position`. Start `run()` as a task; it ends when cancelled.

    `on_event(position, event)`, which may be set at any time, is called after each event is folded, and must not block.
    With `on_start`, every event still on the log is folded, and `on_start` is first called with the position and the
    state before these events. Without it, the fold begins at the newest snapshot.

    An event that only a newer release understands is skipped with a warning. That is safe because no decision is based
    on this fold, and the coordinator refuses what is not allowed. A reader that must not skip events is `strict`.
    """

    def __init__(
        self,
        bus: Bus,
        on_event: Callable[[int, AnyEvent], None] | None = None,
        on_start: Callable[[int, Hive], None] | None = None,
        strict: bool = False,
    ) -> None:
        self.hive = Hive()
        self.position = 0
        self._bus = bus
        self.on_event = on_event
        self._on_start = on_start
        self._strict = strict
        self._left_out: set[str] = set()  # subjects of skipped events
        self._newest: Stored | None = None
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def traceparent(self) -> str:
        """The trace of the event folded last; "" without tracing."""
        return "" if self._newest is None else self._newest.headers.get(TRACEPARENT, "")

    @property
    def stored_ns(self) -> int:
        """When the event folded last was stored; 0 before the first."""
        return 0 if self._newest is None else self._newest.written_ns

    async def run(self) -> None:
        """Fold until cancelled.

        Raises `LogCorrupted` at an unreadable event, `NewerLevel` and, if `strict`, `NewerEvent`.
        """
        while True:
            await self._start()
            self._wake()  # the snapshot may already include the last event
            async with Reader(self._bus, self._bus.subjects.events_stream, self.position + 1) as reader:
                while self._fold(await self._durable(await reader.read(), reader)):
                    self._wake()
            log.warning("the log was compacted beyond event %d: continuing from a snapshot", self.position)

    async def _start(self) -> None:
        """Load the state that precedes the first event to be read, waiting while the bus is unavailable."""
        while True:
            try:
                start = await snapshots.start_of(self._bus, from_first=self._on_start is not None)
                break
            except BusUnavailable as error:
                if self._bus.is_closed:
                    raise
                log.warning("waiting for the bus to load the state: %s", error)
        self.hive, self.position = start.hive, start.position
        if self._on_start is not None:
            self._on_start(start.position, deepcopy(start.hive))

    async def _durable(self, group: list[Stored], reader: Reader) -> list[Stored]:
        """Return a group; with `--durability power`, only once it is on the disk, because services act on what is
        folded.

        Raises `StreamEndLost` if the group was lost in a power cut.
        """
        if not self._bus.syncing.needed:
            return group
        is_sure = group[0].seq > reader.unsure
        while True:
            if not is_sure and not await self._is_there(group[-1]):
                raise StreamEndLost(self._bus.subjects.events_stream, group[-1].seq)
            try:
                await self._bus.syncing.wait()
                return group
            except BusUnavailable:
                if self._bus.is_closed:
                    raise
            is_sure = False

    async def _is_there(self, stored: Stored) -> bool:
        while True:
            try:
                return await self._bus.is_kept(self._bus.subjects.events_stream, stored.place)
            except BusUnavailable:
                if self._bus.is_closed:
                    raise

    def _fold(self, group: Sequence[Stored]) -> bool:
        """Fold a group. Return False if the events between our position and the group are gone."""
        for stored in group:
            if stored.seq != self.position + 1:
                return False
            event = self._read(stored)
            self.position = stored.seq
            self._newest = stored
            if event is None:
                continue
            evolve(self.hive, event)
            if self.on_event is not None:
                self.on_event(stored.seq, event)
        return True

    def _read(self, stored: Stored) -> AnyEvent | None:
        """Return an event, or None if it is skipped."""
        try:
            return read_event(stored)
        except NewerEvent as error:
            if self._strict:
                raise
            if stored.subject not in self._left_out:
                log.warning("%s. Such events are ignored here until then", error)
            self._left_out.add(stored.subject)
            return None

    def _wake(self) -> None:
        still_waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        for holds, future in self._waiting:
            if future.done():
                continue
            if holds():
                future.set_result(None)
            else:
                still_waiting.append((holds, future))
        self._waiting = still_waiting

    async def wait_for(self, predicate: Predicate, timeout_s: float | None = None) -> None:
        """Return once `predicate(hive)` is true. Raises `TimeoutError`."""
        await self._wait(lambda: predicate(self.hive), timeout_s)

    async def wait_position(self, position: int, timeout_s: float | None = 5.0) -> None:
        """Return once the fold has reached `position`. Raises `TimeoutError`."""
        await self._wait(lambda: self.position >= position, timeout_s)

    async def caught_up(self, timeout_s: float | None = 60.0) -> None:
        """Return once the fold includes everything that was on the log when this was called."""
        last = await self._bus.last(self._bus.subjects.events_stream)
        if last is not None:
            await self.wait_position(last.seq, timeout_s)

    async def _wait(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        if holds():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((holds, future))
        async with asyncio.timeout(timeout_s):
            await future


async def fold(bus: Bus) -> Hive:
    """Return the current state of a hive. Raises `TimeoutError`, `LogCorrupted` or `NewerLevel`."""
    follower = Follower(bus)
    tasks = [asyncio.create_task(each) for each in (follower.caught_up(), follower.run())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await done.pop()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return follower.hive


def read_event(stored: Stored) -> AnyEvent:
    """Decode the event in a message. Raises `NewerEvent` if the event is intact but this version does not know it.

    Raises `NewerLevel` for an epoch at a feature level that this version does not know, and `LogCorrupted` if the bytes
    are not an event.
    """
    try:
        event = decode_event(stored.data)
    except msgspec.ValidationError as error:
        own = importlib.metadata.version("bombus")
        raise NewerEvent(
            f"event {stored.seq} on {stored.subject} was written by a newer release than bombus {own}, which cannot "
            f"read it ({error}): upgrade bombus here"
        ) from error
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"event {stored.seq} on {stored.subject} is damaged: {error}") from error
    if isinstance(event, EpochOpened):
        check_level(event.level)
    return event
