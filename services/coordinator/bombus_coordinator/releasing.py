"""Purge bodies: the leader removes from `ops` and `trajectories` the bodies that, according to the log, are no longer
needed (R12).

A body is stored before the operation or group that names it is accepted, so nobody knows yet whether the newest
messages are needed. Messages of the last ten minutes are therefore left alone, or only those of the last minute if
rollout groups fill more than half of their stream. The core records on the log which of the older messages are
released. From then on it refuses operations and groups with an older body, and their senders store the body again. Only
then are the messages purged.

A queued group keeps all bodies after its own; in an overfull stream it keeps only the later bodies of its own holder,
since each holder has a separate subject. In an overfull stream, the few bodies that have waited for a long time are
also moved to the end (`moving`).

After a power cut on a single-replica bus, the stream may end earlier and reuse sequences (R6). Then the released range
is shortened to the stream's end.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bombus.bus import Bus, ServerRefused, StreamState
from bombus.bus.streams import limited_streams
from bombus.errors import BusUnavailable
from bombus.hive.inbox import Message, OperationsStored, TrajectoriesStored
from bombus.hive.state import Hive
from bombus.hive.subjects import Subjects
from bombus_coordinator.moving import BodyMover
from bombus_coordinator.rules.decision import Decisions
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.operations.serving import release
from bombus_coordinator.rules.trajectories import batches

log = logging.getLogger(__name__)

PERIOD_S = 10.0
GRACE_S = 600.0  # time allowed between storing a body and accepting its operation
OVERFULL_GRACE_S = 60.0  # for rollout groups, which may fill their stream in ten minutes and would then all be refused
OVERFULL = 0.5  # fill above which unneeded messages between needed ones are purged too


@dataclass(frozen=True)
class KeptBodies:
    """A stream of bodies, and the rule by which its messages are released."""

    name: str
    floors: Callable[[Hive, Subjects], dict[str, int]]  # first needed sequence by subject; "" is the whole stream
    stored: type[OperationsStored] | type[TrajectoriesStored]
    release: Callable[[Hive, Live, Any], Decisions]
    overfull_grace_s: float  # grace period while the stream is overfull


def _of_models(hive: Hive, subjects: Subjects) -> dict[str, int]:
    own = {
        subjects.operation(engine.name, model): below
        for engine in hive.engines.values()
        for model, below in engine.clients.released.items()
    }
    return {"": hive.released, **own}


def _of_holders(hive: Hive, subjects: Subjects) -> dict[str, int]:
    own = {subjects.trajectory(*each): below for each, below in hive.released_of_holders().items()}
    return {"": hive.trajectories_released, **own}


OPERATIONS = KeptBodies("ops", _of_models, OperationsStored, release, GRACE_S)
TRAJECTORIES = KeptBodies("trajectories", _of_holders, TrajectoriesStored, batches.release, OVERFULL_GRACE_S)


class Releaser:
    """Tells the core up to which sequence a stream's messages are old enough, and purges those that the core
    releases."""

    def __init__(
        self,
        bus: Bus,
        hive: Callable[[], Hive],
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        bodies: KeptBodies = OPERATIONS,
    ) -> None:
        self._bus = bus
        self._bodies = bodies
        self._stream = limited_streams(bus.subjects)[bodies.name]
        self._hive = hive
        self._grace_s = grace_s
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque()  # (time, end of the stream at that time)
        self._mover = BodyMover(bus, hive)
        self._purged: dict[str, int] = {}  # purged up to here, by subject
        self._count = 0

    async def report(self) -> None:
        """Tell the core which messages are old enough to release, if it would release any of them."""
        state = await self._bus.state(self._stream)
        message = self._stored(state)
        if message is not None and any(self._bodies.release(self._hive(), Live(), message)):
            self._count += 1
            await self._bus.inbox.send(message)
        if isinstance(message, TrajectoriesStored) and not message.shrunk and state.fill > OVERFULL:
            await self._mover.move(message.below, state)

    def _stored(self, state: StreamState) -> Message | None:
        end, now = state.last_seq + 1, self._clock()
        message_id = f"{self._bodies.name}-{self._bus.token}-{self._count}"
        if end < max(self.released().values()):
            self._ends.clear()
            return self._bodies.stored(id=message_id, below=end, shrunk=True)
        self._ends.append((now, end))
        overfull = state.fill > OVERFULL
        grace_s = min(self._grace_s, self._bodies.overfull_grace_s) if overfull else self._grace_s
        while len(self._ends) > 1 and self._ends[1][0] <= now - grace_s:
            self._ends.popleft()
        since, below = self._ends[0]
        if since > now - grace_s:
            return None
        return self._bodies.stored(id=message_id, below=below, overfull=overfull)

    def released(self) -> dict[str, int]:
        """Return, by subject, the sequence before which nothing is needed. The key "" is for the whole stream."""
        floors = self._bodies.floors(self._hive(), self._bus.subjects)
        return {subject: below for subject, below in floors.items() if not subject or below > floors[""]}

    async def purge(self, released: dict[str, int]) -> None:
        """Purge released messages. The log must already say that they are released."""
        for subject, below in released.items():
            if below > self._purged.get(subject, 1):
                await self._bus.purge_below(self._stream, below, subject or ">")
        self._purged = released


async def run(
    bus: Bus,
    hive: Callable[[], Hive],
    stored: Callable[[], int],
    period_s: float = PERIOD_S,
    bodies: KeptBodies = OPERATIONS,
) -> None:
    """Release and purge periodically until cancelled.

    `hive` may be ahead of the log. So the messages that it releases are purged a period later, and only if `stored` has
    increased, which is the inbox position up to which everything is decided and on the log.
    """
    releaser = Releaser(bus, hive, bodies=bodies)
    while True:
        released = releaser.released()
        position = stored()
        await asyncio.sleep(period_s)
        try:
            if stored() != position:
                await releaser.purge(released)
            await releaser.report()
        except (BusUnavailable, ServerRefused) as error:
            log.warning("stream %s could not be trimmed: %s", bodies.name, error)
