"""Store bodies of scored groups once more that would keep their stream from being purged (R16).

A stream can be purged only up to the oldest body that is needed, so one group that fits no batch would keep everything
after it. Where few such groups have waited for long in a stream that is over half full, the leader copies their bodies
to its end, and says where they are now. A copy that nobody names is purged like any other body.
"""

import logging
import secrets
from collections.abc import Callable
from heapq import nsmallest

from bombus.bus import Bus, StreamState
from bombus.bus.large.parts import Parts
from bombus.errors import LogCorrupted
from bombus.hive.events import MovedBody
from bombus.hive.inbox import BodiesStored, GiveUpGroups, LostGroup
from bombus.hive.records import BodyRef
from bombus.hive.state import EngineState, Hive

log = logging.getLogger(__name__)

GROUPS_MAX = 1_000  # at once, of an engine
BYTES_MAX = 16 << 20
WORTH = 4  # times the bytes that are copied are expected to be purged for them


class BodyMover:
    """Copies bodies of groups that are queued to the end of their stream."""

    def __init__(self, bus: Bus, hive: Callable[[], Hive]) -> None:
        self._bus = bus
        self._hive = hive
        self._parts = Parts(bus, bus.subjects.trajectories_stream)

    async def move(self, below: int, stream: StreamState) -> None:
        """Move the oldest queued bodies of those before `below`, if much is purged for little that is copied.

        Raises `BusUnavailable`, also where the stream is full.
        """
        old = [(engine, _older(engine, below)) for engine in self._hive().engines.values()]
        size = sum(body.size for _, bodies in old for _, body in bodies)
        each = stream.bytes / max(1, stream.messages)
        if size * WORTH > each * (below - stream.first_seq):
            return
        for engine, bodies in old:
            await self._move(engine, nsmallest(GROUPS_MAX, bodies, key=lambda found: found[1].first))

    async def _move(self, engine: EngineState, bodies: list[tuple[int, BodyRef]]) -> None:
        run, copied = engine.run, 0
        moved: list[MovedBody] = []
        was: list[int] = []
        lost: dict[LostGroup, str] = {}
        for number, body in bodies:
            if copied and copied + body.size > BYTES_MAX:
                break
            copied += body.size
            try:
                found = await self._parts.fetch(body)
            except LogCorrupted as error:
                lost[LostGroup(number, body.first)] = str(error)
                continue
            moved.append(MovedBody(number, await self._parts.store(self._bus.subjects.trajectory(engine.name), found)))
            was.append(body.first)
        if moved:
            log.info("the bodies of %d scored groups of engine %s are stored once more", len(moved), engine.name)
            message = BodiesStored(id=_id(), engine=engine.name, moved=tuple(moved), was=tuple(was))
            await self._bus.inbox.send(message)
        if lost:
            why = next(reversed(lost.values()))
            log.error("%d scored groups of engine %s are lost and given up: %s", len(lost), engine.name, why)
            gone = GiveUpGroups(id=_id(), engine=engine.name, run=run, number=0, groups=tuple(lost), why=why)
            await self._bus.inbox.send(gone)


def _older(engine: EngineState, below: int) -> list[tuple[int, BodyRef]]:
    """Return the queued groups of an engine whose bodies begin before `below`, by number, with their bodies."""
    groups = engine.trajectories.queue.groups.items()
    return [(number, each.body) for number, each in groups if each.body is not None and each.body.first < below]


def _id() -> str:
    return f"bodies-{secrets.token_hex(16)}"
