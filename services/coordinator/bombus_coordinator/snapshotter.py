"""Take snapshots of a leader's state while it leads. They are encoded between appends and stored in the background."""

import asyncio
import logging
from collections.abc import Collection

from bombus.bus import Bus, StreamState, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import BombusError

log = logging.getLogger(__name__)

EVENTS = 20_000  # events between two snapshots; folding them takes a fifth of a second
SHARE = 16  # if events are large, a snapshot is due after 1 / SHARE of the stream's size
LAST_S = 5.0  # time allowed for the last snapshot when the leader stops


class SnapshotPace:
    """Decides when a snapshot is due: after `every` events, or when the new events fill a sixteenth of their stream."""

    def __init__(self, every: int = EVENTS) -> None:
        self.newest = 0  # position of the newest stored snapshot
        self._taken = 0  # position of the newest snapshot taken, stored or not
        self._every = every
        self._bytes = 0.0  # bytes written since the newest snapshot taken
        self._bytes_max = float("inf")
        self._asked = False

    def note(self, position: int, events: StreamState) -> None:
        """Note that there already is a snapshot at `position`. `events` is the state of the log's stream."""
        self.newest = self._taken = position
        since = min(max(0, events.last_seq - position), events.messages)
        self._bytes = events.bytes * since / max(1, events.messages)
        if events.max_bytes > 0:
            self._bytes_max = events.max_bytes / SHARE

    def wrote(self, size: int) -> None:
        """Note that `size` bytes were added to the log."""
        self._bytes += size

    def ask(self) -> None:
        """Request a snapshot as soon as the log is beyond the newest one, without waiting for more events: a full log
        may get none."""
        self._asked = True

    def is_due(self, position: int) -> bool:
        if self._asked:
            return position > self.newest
        since = position - self._taken
        return since > 0 and (since >= self._every or self._bytes >= self._bytes_max)

    def took(self, position: int) -> None:
        """Note that a snapshot was taken at `position`. If it cannot be stored, another can be requested right away."""
        self._taken = position
        self._bytes = 0.0
        self._asked = False

    def stored(self, position: int) -> None:
        """Note that the snapshot at `position` is stored."""
        self.newest = max(self.newest, position)


class Snapshotter:
    """Stores snapshots whenever they are due."""

    def __init__(self, bus: Bus, every: int = EVENTS) -> None:
        self.pace = SnapshotPace(every)
        self.held: Collection[int] = ()  # positions of snapshots that must not be removed
        self._bus = bus
        self._storing: asyncio.Task[None] | None = None

    def is_due(self, position: int) -> bool:
        idle = self._storing is None or self._storing.done()
        return idle and self.pace.is_due(position)

    def take(self, snapshot: Snapshot) -> None:
        """Encode a snapshot now, before the state changes, and store it in the background."""
        self.pace.took(snapshot.position)
        self._storing = asyncio.create_task(self._store(snapshots.encode(snapshot), snapshot.position))

    async def stop(self, last: Snapshot | None) -> None:
        """Wait for the snapshot that is being stored, then store `last`, so that the next leader has less to fold."""
        try:
            async with asyncio.timeout(LAST_S):
                if self._storing is not None:
                    await self._storing
                if last is not None and last.position > self.pace.newest:
                    await self._store(snapshots.encode(last), last.position)
        except TimeoutError:
            log.warning("the last snapshot was not stored within %.0f s; the log has everything", LAST_S)

    async def _store(self, body: bytes, position: int) -> None:
        try:
            await snapshots.store(self._bus, body, position)
            self.pace.stored(position)
            await snapshots.prune(self._bus, position, self.held)
            log.info("snapshot at event %d: %d bytes", position, len(body))
        except BombusError as error:  # the log has all events; a snapshot only saves time
            log.warning("no snapshot at event %d: %s", position, error)
