"""Copy the bodies of rollout groups to the end of their stream if their present places keep it from being purged (R16).

A stream can be purged only up to the oldest body that is needed, so a single group that fits into no batch would keep
everything after it. If a few such groups have waited a long time in a stream that is over half full, the leader copies
their bodies to the end of the stream and records their new places. The last batch is kept until its trainer asks for
the next one. So its bodies are moved too, once the batch has been delivered or was handed out long ago. A copy that no
group names is purged like any other body.
"""

import logging
import secrets
from collections.abc import Callable
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from bombus.bus import Bus, StreamState
from bombus.bus.large.parts import Parts
from bombus.errors import LogCorrupted
from bombus.hive.events import MovedBody
from bombus.hive.inbox import BodiesStored, GiveUpGroups, LostGroup
from bombus.hive.records import BodyRef
from bombus.hive.state import EngineState, Hive

log = logging.getLogger(__name__)

LOOKED_AT_MAX = 16_384  # maximum number of groups considered: as many as the largest batch has
GROUPS_MAX = 1_000  # maximum number of groups moved per pass
BYTES_MAX = 16 << 20  # maximum size moved per pass; all bodies to move take at most half of the stream's free space
WORTH = 4  # bytes that must be expected to become purgeable, per byte copied


class _Movable(NamedTuple):
    first: int
    engine: str
    group: int
    holder: str
    body: BodyRef


class BodyMover:
    """Copies the bodies of waiting groups to the end of their stream."""

    def __init__(self, bus: Bus, hive: Callable[[], Hive]) -> None:
        self._bus = bus
        self._hive = hive
        self._parts = Parts(bus, bus.subjects.trajectories_stream)

    async def move(self, below: int, stream: StreamState) -> None:
        """Move the oldest bodies before `below`, if copying a little allows a lot to be purged.

        Raises `BusUnavailable`, also when the stream is full.
        """
        hive = self._hive()
        chosen = worth_moving(hive, below, stream)
        for engine in list(hive.engines.values()):
            bodies = [each for each in chosen if each.engine == engine.name]
            if bodies:
                await self._move(engine, bodies)

    async def _move(self, engine: EngineState, bodies: list[_Movable]) -> None:
        run = engine.run
        moved: list[MovedBody] = []
        was: list[int] = []
        lost: dict[LostGroup, str] = {}
        for each in bodies:
            try:
                found = await self._parts.fetch(each.body)
            except LogCorrupted as error:
                lost[LostGroup(each.group, each.first)] = str(error)
                continue
            subject = self._bus.subjects.trajectory(engine.name, each.holder)
            moved.append(MovedBody(each.group, await self._parts.store(subject, found)))
            was.append(each.first)
        if moved:
            log.info("the bodies of %d rollout groups of engine %s were stored again", len(moved), engine.name)
            message = BodiesStored(id=_id(), engine=engine.name, moved=tuple(moved), was=tuple(was))
            await self._bus.inbox.send(message)
        if lost:
            why = next(reversed(lost.values()))
            log.error("%d rollout groups of engine %s are lost and dropped: %s", len(lost), engine.name, why)
            gone = GiveUpGroups(id=_id(), engine=engine.name, run=run, number=0, groups=tuple(lost), why=why)
            await self._bus.inbox.send(gone)


def worth_moving(hive: Hive, below: int, stream: StreamState) -> list[_Movable]:
    """Return the oldest bodies to move so that the most can be purged, or none if the gain does not justify the
    copying.

    Nothing that follows a body can be purged if the body is needed and cannot be moved. If there are many bodies, only
    the first are returned; the same calculation finds the others next time.
    """
    older = (
        _Movable(group.body.first, engine.name, number, group.holder, group.body)
        for engine in hive.engines.values()
        for number, group in engine.trajectories.movable(hive.now_ns)
        if group.body is not None and group.body.first < below
        if number in engine.trajectories.queue.groups or group.body.first >= stream.first_seq
    )
    found = nsmallest(LOOKED_AT_MAX, older)
    firsts = {each.first for each in found}
    stays = min((body.first for *_, body in hive.bodies_needed() if body.first not in firsts), default=below)
    mean = stream.bytes / max(1, stream.last_seq + 1 - stream.first_seq)
    spare = stream.bytes - sum(engine.trajectories.queue.bytes for engine in hive.engines.values())
    room = (stream.max_bytes - stream.bytes) // 2
    copied = worth = 0
    for number, each in enumerate(found, start=1):
        copied += each.body.size
        if copied > room:
            break
        kept = min(below, stays, found[number].first if number < len(found) else below)
        if copied * WORTH <= min(spare, mean * (kept - stream.first_seq)):  # some may be released already
            worth = number
    sizes = accumulate(each.body.size for each in found[:worth])
    at_once = sum(size <= BYTES_MAX for size in sizes)
    return found[: min(worth, GROUPS_MAX, max(1, at_once))]


def _id() -> str:
    return f"bodies-{secrets.token_hex(16)}"
