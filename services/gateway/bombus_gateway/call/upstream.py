"""Chooses a replica for each call: one that has the right weights, and preferably the one that has cached the
episode."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from contextlib import suppress
from hashlib import blake2b

from bombus.bus.follow import Follower
from bombus.bus.inbox_client import InboxClient
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.bounded import trim
from bombus.hive.generation import Generate
from bombus.hive.inbox import AnswersBroke
from bombus.hive.pacing import fitting
from bombus.hive.state import EngineState, Hive, Replica
from bombus_gateway.call.answers import AnswerCheck, WrongAnswer
from bombus_gateway.call.replica_client import Generation, ReplicaClient, ReplicaGone

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
LOADS_MAX = 8  # loads of an adapter per request, in case replicas keep dropping it for other adapters
REPLICA_WAIT_S = 5.0  # how long to wait for a replica with the right weights
AVOID_S = 2.0  # for this long, a replica that failed is used only if there is no other
LEFT_S = 20.0  # by then, a replica that left the hive in an orderly way has finished its calls
CHECK_S = 1.0
WRONG_MAX = 3  # wrong answers by a replica at one version before it is quarantined
WRONG_KEPT = 1024  # maximum number of replicas whose wrong answers are counted
BUSIER_BY = 8  # how many more calls an episode's home may have than the least busy replica


class AdapterMissing(BombusError):
    """Raised when a replica does not have the requested adapter."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class Upstream:
    """Sends generation requests to replicas, and counts how many are running on each."""

    def __init__(self, follower: Follower, client: ReplicaClient, inbox: InboxClient) -> None:
        self._follower = follower
        self._client = client
        self._inbox = inbox
        self._running: Counter[str] = Counter()
        self._avoid: dict[str, float] = {}
        self._wrong: Counter[tuple[str, int, int, str]] = Counter()  # wrong answers by engine, run, version, replica
        self._reports: dict[tuple[str, str], AnswersBroke] = {}  # to quarantine replicas, by engine and replica
        self._open: dict[Generation, tuple[str, str]] = {}  # the (engine, replica) that each generation runs on
        self._missing_since: dict[tuple[str, str], float] = {}  # when a replica with open calls left the hive
        self._loads: dict[tuple[str, str], asyncio.Lock] = {}  # by replica's URL and adapter: one call loads it for all

    async def run(self) -> None:
        """Abort the calls on replicas that have left the hive, and report replicas that answer wrongly, until
        cancelled.

        A connection alone does not show that a replica has left: if the process hangs or its machine is unreachable,
        the connection stays open.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            self.abort_orphans(time.monotonic())
            await self._report()

    async def _report(self) -> None:
        """Report the replicas that have answered wrongly. If the bus does not accept a report, it is resent next
        time."""
        for place, report in list(self._reports.items()):
            with suppress(BusUnavailable):
                await self._inbox.send(report)
                self._reports.pop(place, None)

    def abort_orphans(self, now: float) -> None:
        """Abort calls on replicas that have been missing for `LEFT_S`. `now` is the time in seconds."""
        places = set(self._open.values())
        gone = {place for place in places if place[1] not in self._follower.hive.engine(place[0]).replicas}
        self._missing_since = {place: self._missing_since.get(place, now) for place in gone}
        for generation, place in list(self._open.items()):
            if now - self._missing_since.get(place, now) > LEFT_S:
                generation.abort(f"replica {place[1]} has left the hive")

    async def start(self, request: Generate, vocabulary: int) -> tuple[Generation, str]:
        """Start generating on the best replica. Return the generation and the replica's name.

        The answer's frames are checked; for example, token ids must be below `vocabulary`. The caller must call
        `finished(generation)` later. Raises `Refused` NO_REPLICA if no replica can be reached.
        """
        why = "no inference replica serves this engine's weights right now"
        engine = request.engine
        for _ in range(ATTEMPTS_MAX):
            name, replica = await self._choose(request)
            self._running[name] += 1
            try:
                check = AnswerCheck(request, vocabulary, lambda: self._follower.hive.engine(engine).version)
                generation = await self._client.generate(replica.url, request, check)
            except ReplicaGone as error:
                why = str(error)
                self._discount(name)
                self.failed(engine, name, error)
                continue
            except BaseException:
                self._discount(name)
                raise
            self._open[generation] = (engine, name)
            return generation, name
        raise Refused(Code.NO_REPLICA, f"{why}; try again in a moment")

    async def load_adapter(self, engine: str, replica: str, address: str, folder: str) -> None:
        """Load an adapter on a replica that has reported the adapter missing.

        Raises `Refused` with the replica's reason, or `ReplicaGone` if the replica cannot be reached.
        """
        found = self._follower.hive.engine(engine).replicas.get(replica)
        if found is None:
            raise ReplicaGone(f"replica {replica} has left the hive")
        key = found.url, address
        lock = self._loads.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                await self._client.load_adapter(found.url, address, folder)
        finally:
            if not lock.locked():
                self._loads.pop(key, None)

    def finished(self, generation: Generation) -> None:
        self._discount(self._open.pop(generation)[1])

    def _discount(self, name: str) -> None:
        self._running[name] -= 1
        if self._running[name] <= 0:
            self._running.pop(name)

    def failed(self, engine: str, name: str, error: ReplicaGone) -> None:
        """Avoid a replica for `AVOID_S`, and report it once it has answered wrongly `WRONG_MAX` times at one version.

        A wrong answer that may be due to the request's adapter does not count against the replica.
        """
        log.warning("a replica failed", extra={"replica": name, "why": str(error)})
        if isinstance(error, WrongAnswer):
            if not error.of_replica:
                return
            state = self._follower.hive.engine(engine)
            place = engine, state.run, state.version, name
            self._wrong[place] += 1
            trim(self._wrong, WRONG_KEPT)
            if self._wrong[place] >= WRONG_MAX:
                del self._wrong[place]
                self._reports[engine, name] = AnswersBroke(
                    id=uuid.uuid4().hex,
                    engine=engine,
                    run=state.run,
                    version=state.version,
                    replica=name,
                    reason=str(error),
                )
        self._avoid[name] = time.monotonic() + AVOID_S

    async def _choose(self, request: Generate) -> tuple[str, Replica]:
        engine, run, episode = request.engine, request.run, request.episode

        state = self._follower.hive.engine(engine)
        candidates = able(state, request)
        if not candidates:

            def serves(hive: Hive) -> bool:
                state = hive.engine(engine)
                return state.run != run or bool(able(state, request))

            try:
                await self._follower.wait_for(serves, REPLICA_WAIT_S)
            except TimeoutError:
                pass
            state = self._follower.hive.engine(engine)
            candidates = able(state, request)
        if not candidates or state.run != run:
            why = f" The run is suspended: {state.suspended}" if state.suspended else ""
            form = " with support for structured output" if request.constraint is not None else ""
            raise Refused(
                Code.NO_REPLICA,
                f"No inference replica serves version {state.version} of engine {engine}{form} right now; try again."
                f"{why}",
            )
        if self._avoid and len(candidates) > 1:
            now = time.monotonic()
            reachable = {name: found for name, found in candidates.items() if self._avoid.get(name, 0.0) < now}
            candidates = reachable or candidates
        return best(candidates, self._running, episode)


def dropped_too_often(adapter: str) -> Refused:
    return Refused(
        Code.OVERLOADED,
        f"Replicas dropped adapter {adapter} {LOADS_MAX} times to make room for others: raise --adapters-mb, or "
        "sample from fewer adapters at the same time.",
    )


def able(engine: EngineState, request: Generate) -> dict[str, Replica]:
    """Return the replicas that may answer a request and that can enforce its constraint, if it has one."""
    found = fitting(engine, request.episode)
    if request.constraint is None:
        return found
    return {name: replica for name, replica in found.items() if replica.constrains}


def best(candidates: dict[str, Replica], running: Counter[str], episode: str) -> tuple[str, Replica]:
    """Return the episode's home (found by rendezvous hashing), or the least busy replica if the home is full or much
    busier."""
    if len(candidates) == 1:
        return next(iter(candidates.items()))
    home = max(candidates, key=lambda name: _affinity(name, episode))
    least_busy = min(candidates, key=lambda name: running[name] / max(1, candidates[name].capacity))
    full = running[home] >= candidates[home].capacity
    name = least_busy if full or running[home] > running[least_busy] + BUSIER_BY else home
    return name, candidates[name]


def _affinity(name: str, episode: str) -> bytes:
    return blake2b(f"{name}/{episode}".encode(), digest_size=8).digest()
