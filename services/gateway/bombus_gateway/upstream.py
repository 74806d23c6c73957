"""Which replica answers a call: one with the right weights, and the one that knows the episode unless it is busy."""

import logging
import time
from collections import Counter
from hashlib import blake2b

from bombus.errors import Code, Refused
from bombus.follow import Follower
from bombus.generation import Generate
from bombus.state import EngineState, Hive, Replica
from bombus_gateway.replica_client import Generation, ReplicaClient, ReplicaGone

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
AVOID_S = 2.0  # a replica that could not be reached is not asked first for this long
BUSIER_BY = 8  # calls that the episode's own replica may have more than the least busy one


class Upstream:
    """Sends generations to replicas and counts those that run."""

    def __init__(self, follower: Follower, client: ReplicaClient, wait_s: float) -> None:
        self._follower = follower
        self._client = client
        self._wait_s = wait_s
        self._running: Counter[str] = Counter()
        self._avoid: dict[str, float] = {}

    async def start(self, request: Generate) -> tuple[Generation, str]:
        """Begin at the best replica; returns the answer that is coming and the replica's name.

        Whoever calls this says `finished(name)` later. Raises `Refused` NO_REPLICA when none can be had.
        """
        why = "no inference replica serves this engine's weights just now"
        for _ in range(ATTEMPTS_MAX):
            name, replica = await self._choose(request.engine, request.run, request.episode)
            self._running[name] += 1
            try:
                return await self._client.generate(replica.url, request), name
            except ReplicaGone as error:
                why = str(error)
                self.finished(name)
                self.failed(name, why)
        raise Refused(Code.NO_REPLICA, f"{why}; try again in a moment")

    def finished(self, name: str) -> None:
        self._running[name] -= 1
        if self._running[name] <= 0:
            del self._running[name]

    def failed(self, name: str, why: str) -> None:
        log.warning("a replica failed", extra={"replica": name, "why": why})
        self._avoid[name] = time.monotonic() + AVOID_S

    async def _choose(self, engine: str, run: int, episode: str) -> tuple[str, Replica]:
        def serves(hive: Hive) -> bool:
            state = hive.engine(engine)
            return state.run != run or bool(fitting(state))

        state = self._follower.hive.engine(engine)
        candidates = fitting(state)
        if not candidates:
            try:
                await self._follower.wait_for(serves, self._wait_s)
            except TimeoutError:
                pass
            state = self._follower.hive.engine(engine)
            candidates = fitting(state)
        if not candidates or state.run != run:
            raise Refused(
                Code.NO_REPLICA,
                f"No inference replica serves version {state.version} of engine {engine} just now; try again.",
            )
        now = time.monotonic()
        good = {name: found for name, found in candidates.items() if self._avoid.get(name, 0.0) < now}
        return best(good or candidates, self._running, episode)


def fitting(state: EngineState) -> dict[str, Replica]:
    """The replicas with weights of this run: the newest, or at most `max_staleness` older where a job allows that."""
    oldest = max(0, state.version - state.collection.max_staleness)
    return {
        name: replica
        for name, replica in state.replicas.items()
        if replica.run == state.run and replica.version >= oldest
    }


def best(candidates: dict[str, Replica], running: Counter[str], episode: str) -> tuple[str, Replica]:
    """The episode's own replica by rendezvous hashing; the least busy one when that is full or much busier."""
    home = max(candidates, key=lambda name: _affinity(name, episode))
    idlest = min(candidates, key=lambda name: running[name] / max(1, candidates[name].capacity))
    full = running[home] >= candidates[home].capacity
    name = idlest if full or running[home] > running[idlest] + BUSIER_BY else home
    return name, candidates[name]


def _affinity(name: str, episode: str) -> bytes:
    return blake2b(f"{name}/{episode}".encode(), digest_size=8).digest()
