"""The fold of the log, from the newest good snapshot on (follow.py, recovery.py)."""

from collections.abc import Callable, Sequence

from bombus.bus import MessagePlace, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import BusUnavailable, LogCorrupted
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import FOLD, Hive
from bombus_coordinator.recovery import Overtaken
from tests.sim.link import Link, Reader
from tests.sim.loop import Future
from tests.sim.server import EVENTS_STREAM, Message, Server

RETRY_S = 1.0


def _start_of(server: Server) -> Snapshot:
    for position in sorted(server.snapshots, reverse=True):
        try:
            snapshot = snapshots.decode(server.get_snapshot(position))
        except LogCorrupted:
            continue
        stream = server.streams[EVENTS_STREAM]
        if not stream.first_seq - 1 <= position <= stream.last_seq:
            continue
        if position < stream.first_seq or stream.get(position).msg_id == snapshot.event_id:
            return snapshot
    assert server.streams[EVENTS_STREAM].first_seq == 1, "no snapshot makes up for the events that were removed"
    return Snapshot(fold=FOLD, position=0, event_id="", answered=0, hive=Hive())


class Fold:
    """The state up to event `position`, that event's message id, and the inbox sequence that it answers."""

    def __init__(self, start: Snapshot) -> None:
        self.hive = start.hive
        self.position = self.snapshot = start.position
        self.event_id = start.event_id
        self.place = MessagePlace(start.answered)

    @property
    def answered(self) -> int:
        return self.place.seq

    @classmethod
    async def begin(cls, link: Link) -> "Fold":
        while True:
            try:
                return cls(await link.call(lambda: _start_of(link.server)))
            except BusUnavailable:
                await link.process.sleep(RETRY_S)

    def apply(self, group: Sequence[Message]) -> None:
        for message in group:
            if message.seq != self.position + 1:
                raise Overtaken(f"the log continues at {message.seq} after {self.position}")
            evolve(self.hive, message.event)
            self.position = message.seq
        self.event_id = group[-1].msg_id
        self.place = group[-1].stored.answers

    async def catch_up(self, link: Link) -> None:
        """Fold everything that is on the log now."""
        newest = await link.last(EVENTS_STREAM)
        if newest is not None and newest.seq == self.position:
            self.place = newest.stored.answers  # a snapshot has no digest
        reader = Reader(link, EVENTS_STREAM, self.position + 1)
        while newest is not None and self.position < newest.seq:
            self.apply(await reader.read())


class Follower:
    """Keeps a fold up to date. `on_event` is called after each event."""

    def __init__(self, link: Link, on_event: Callable[[], None] | None = None) -> None:
        self.hive = Hive()
        self.position = 0
        self._link = link
        self._on_event = on_event
        self._waiting: list[tuple[Callable[[], bool], Future[None]]] = []

    async def run(self) -> None:
        while True:
            start = await Fold.begin(self._link)
            self.hive, self.position = start.hive, start.position
            reader = Reader(self._link, EVENTS_STREAM, self.position + 1)
            self._wake()
            while self._fold(await reader.read()):
                self._wake()

    def _fold(self, group: Sequence[Message]) -> bool:
        """Fold a group. Return False when the events between our position and it are gone."""
        for message in group:
            if message.seq != self.position + 1:
                return False
            evolve(self.hive, message.event)
            self.position = message.seq
            if self._on_event is not None:
                self._on_event()
        return True

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for holds, future in waiting:
            if future.done:
                continue
            if holds():
                future.set(None)
            else:
                self._waiting.append((holds, future))

    async def wait_for(self, holds: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """Return once `holds()` is true. Raises `TimeoutError`."""
        if holds():
            return
        future: Future[None] = Future(self._link.net.loop)
        if timeout_s:
            future.fail_after(timeout_s, TimeoutError())
        self._waiting.append((holds, future))
        await future

    async def caught_up(self) -> None:
        """Return once the fold has everything that is on the log now. Wait for as long as the bus is away."""
        while True:
            try:
                newest = await self._link.last(EVENTS_STREAM)
                break
            except BusUnavailable:
                await self._link.process.sleep(RETRY_S)
        await self.wait_for(lambda: newest is None or self.position >= newest.seq)
