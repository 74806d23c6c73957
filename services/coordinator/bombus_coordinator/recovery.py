"""Fold the log for a starting leader, and find the leader's place in the inbox (R2). A standby keeps both up to
date."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

from bombus.bus import Bus, MessagePlace, Reader, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.headers import MSG_ID
from bombus.bus.snapshots import Snapshot
from bombus.errors import LogCorrupted, StreamEndLost
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus_coordinator.lease import Lease

log = logging.getLogger(__name__)

TRY_S = 0.2  # how often a standby tries to take the lease


class Overtaken(LogCorrupted):
    """Raised when the events that follow the fold are missing. `check_compacted` tells whether compaction removed
    them."""


class Fold:
    """The state after event `position`, with that event's message id and the inbox message that the event answers.

    `snapshot` is the position of the snapshot at which the fold began.
    """

    def __init__(self, start: Snapshot) -> None:
        self.snapshot = start.position
        self.hive: Hive = start.hive
        self.position = start.position
        self.event_id = start.event_id
        self.answered = MessagePlace(start.answered)

    @classmethod
    async def begin(cls, bus: Bus) -> Self:
        """Begin at the newest snapshot. Raises the same errors as `snapshots.start_of`."""
        return cls(await snapshots.start_of(bus))

    def apply(self, group: Sequence[Stored]) -> None:
        """Fold the next events. Raises `Overtaken` if there is a gap, and `LogCorrupted` if an event cannot be read."""
        for stored in group:
            if stored.seq != self.position + 1:
                raise Overtaken(f"the event log continues at {stored.seq} after {self.position}")
            evolve(self.hive, read_event(stored))
            self.position = stored.seq
        if group:
            self.event_id = group[-1].headers.get(MSG_ID, "")
            self.answered = group[-1].answers

    async def catch_up(self, bus: Bus) -> None:
        """Fold everything that is on the log now, and note which inbox message the last event answers.

        Raises `StreamEndLost` if the log is shorter than this fold.
        """
        newest = await bus.last(bus.subjects.events_stream)
        end = (await bus.state(bus.subjects.events_stream)).last_seq if newest is None else newest.seq
        if end < self.position:
            raise StreamEndLost(bus.subjects.events_stream, self.position)
        if newest is None:
            return
        if newest.seq == self.position:
            self.answered = newest.answers  # includes the digest, which a snapshot lacks
            return
        async with Reader(bus, bus.subjects.events_stream, self.position + 1) as reader:
            while self.position < newest.seq:
                self.apply(await reader.read())


async def stand_by(bus: Bus, lease: Lease) -> Fold:
    """Fold what the leader writes, until we hold the lease."""
    while True:
        fold = await Fold.begin(bus)
        try:
            await _follow(bus, fold, lease)
            return fold
        except Overtaken:
            await check_compacted(bus, fold)


async def check_compacted(bus: Bus, fold: Fold) -> None:
    """Return normally if compaction has removed events that were still to be folded: the fold then has to begin again
    at a snapshot.

    Otherwise the log has a gap, and this raises `LogCorrupted`.
    """
    if (await bus.state(bus.subjects.events_stream)).first_seq <= fold.position + 1:
        raise LogCorrupted(f"the event log has a gap: event {fold.position + 1} is missing")
    log.warning("the log was compacted beyond event %d: folding again from a snapshot", fold.position)


async def _follow(bus: Bus, fold: Fold, lease: Lease) -> None:
    loop = asyncio.get_running_loop()
    waits = False
    async with Reader(bus, bus.subjects.events_stream, fold.position + 1) as reader:
        while not await lease.acquire():
            if not waits:
                log.info("standing by: another coordinator leads hive %s", bus.subjects.hive)
            waits = True
            try_at = loop.time() + TRY_S
            try:
                async with asyncio.timeout_at(try_at):
                    while True:
                        fold.apply(await reader.read())
            except TimeoutError:
                pass
