"""Take snapshots of a leader's state while it leads: encoded between two appends, stored in the background."""

import asyncio
import logging

from bombus.bus import Bus, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import BombusError

log = logging.getLogger(__name__)

EVENTS = 20_000  # between two snapshots; folding them takes a fifth of a second
LAST_S = 5.0  # allowed for the snapshot when the leader stops


class Snapshotter:
    """Stores a snapshot after `every` so many events."""

    def __init__(self, bus: Bus, every: int = EVENTS) -> None:
        self._bus = bus
        self._newest = 0  # position
        self._every = every
        self._storing: asyncio.Task[None] | None = None

    def note(self, position: int) -> None:
        """Note that there is already a snapshot at `position`."""
        self._newest = position

    def is_due(self, position: int) -> bool:
        idle = self._storing is None or self._storing.done()
        return idle and position - self._newest >= self._every

    def take(self, snapshot: Snapshot) -> None:
        """Encode a snapshot now, before the state changes, and store it in the background."""
        self._newest = snapshot.position
        self._storing = asyncio.create_task(self._store(snapshots.encode(snapshot), snapshot.position))

    async def stop(self, last: Snapshot | None) -> None:
        """Wait for the snapshot that is being stored, then store `last`, which saves the next leader its fold."""
        try:
            async with asyncio.timeout(LAST_S):
                if self._storing is not None:
                    await self._storing
                if last is not None and last.position > self._newest:
                    await self._store(snapshots.encode(last), last.position)
        except TimeoutError:
            log.warning("the last snapshot was not stored within %.0f s; the log has everything", LAST_S)

    async def _store(self, body: bytes, position: int) -> None:
        try:
            await snapshots.save(self._bus, body, position)
            log.info("snapshot at event %d: %d bytes", position, len(body))
        except BombusError as error:  # the log has everything: a snapshot only saves time
            log.warning("no snapshot at event %d: %s", position, error)
