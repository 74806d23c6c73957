"""An inference replica: loads the weights that `weights.ready` names, reports it, sends heartbeats, lapses."""

from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import ReplicaQuarantined, WeightsReady
from bombus.hive.state import EngineState, Phase
from tests.sim.fold import RETRY_S, Follower
from tests.sim.link import Link, Net
from tests.sim.loop import Process
from tests.sim.referee import ENGINE, Referee
from tests.sim.variants import Variant

ALIVE_S = 2.0
LOAD_ATTEMPTS = 3
LOAD_RETRY_MAX_S = 8.0


class Replica(Process):
    link: Link
    follower: Follower

    def __init__(self, name: str, net: Net, referee: Referee, keeps_name: bool, variant: Variant | None) -> None:
        super().__init__(net.loop, name)
        self._variant = variant
        self._net = net
        self._referee = referee
        self._keeps_name = keeps_name
        self.mounted = True  # whether it sees the trainers' folder

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self._replica = self.name if self._keeps_name else self.link.token
        self.follower = Follower(self.link)
        self._run, self._version = 0, -1  # what it serves
        self.spawn(self.follower.run())
        self.spawn(self._stay_alive())
        await self.follower.caught_up()
        while True:
            await self.follower.wait_for(self._behind)
            wanted = self._wanted()
            if wanted is None:
                self._version = -1
            else:
                await self._load(wanted)

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    def _wanted(self) -> WeightsReady | None:
        engine = self._engine
        return None if engine.phase == Phase.OFFLINE else engine.weights

    def _behind(self) -> bool:
        wanted = self._wanted()
        if wanted is None:
            return self._version >= 0 and (self._engine.phase == Phase.OFFLINE or self._engine.run != self._run)
        return (wanted.run, wanted.version) > (self._run, self._version)

    async def _load(self, ready: WeightsReady) -> None:
        """Load and report it, or report that it fails and go on trying, as in service.py.

        A version that was superseded meanwhile may be gone from the folder and is skipped.
        """
        failures = reports = 0
        while self._wanted() is ready:
            await self.sleep(self._net.pick.random() * 0.5)
            if self.mounted and ready.weights.where in self._referee.weights:
                self._run, self._version = ready.run, ready.version
                await self._report_loaded()
                return
            failures += 1
            if failures >= LOAD_ATTEMPTS and (self._quarantine is None or not reports):
                reports += 1
                await self._report_broken(ready, reports)
                if self._variant == Variant.GAVE_UP:
                    await self.follower.wait_for(lambda: self._wanted() is not ready)
            if await self._is_released(ready, RETRY_S * 2.0 ** max(failures - LOAD_ATTEMPTS, 0)):
                failures = 0

    @property
    def _quarantine(self) -> ReplicaQuarantined | None:
        replica = self._engine.replicas.get(self._replica)
        return None if replica is None else replica.quarantined

    async def _is_released(self, ready: WeightsReady, wait_s: float) -> bool:
        was_quarantined = self._quarantine is not None

        def is_released() -> bool:
            return was_quarantined and self._quarantine is None

        try:
            await self.follower.wait_for(
                lambda: self._wanted() is not ready or is_released(), min(wait_s, LOAD_RETRY_MAX_S)
            )
        except TimeoutError:
            pass
        return is_released()

    async def _report_broken(self, ready: WeightsReady, number: int) -> None:
        newest = self._referee.hive.engine(ENGINE).weights
        gone = (
            newest is not None and newest.weights == ready.weights and ready.weights.where not in self._referee.weights
        )
        assert not gone, f"the newest weights, {ready.weights.where}, are gone"
        await self._send(
            inbox.LoadBroke(
                id=f"{self.link.token}-{ready.run}-broke-{ready.version}-{number}",
                engine=ENGINE,
                run=ready.run,
                version=ready.version,
                replica=self._replica,
                reason="no such folder",
            )
        )

    async def _report_loaded(self) -> None:
        await self._send(
            inbox.WeightsLoadedFact(
                id=f"{self.link.token}-{self._run}-loaded-{self._version}",
                engine=ENGINE,
                run=self._run,
                version=self._version,
                replica=self._replica,
            )
        )

    async def _send(self, fact: inbox.AnyMessage) -> None:
        while True:
            try:
                await self.link.send(fact)
                return
            except BusUnavailable:
                pass  # it is tried again for as long as the bus is away

    async def _stay_alive(self) -> None:
        count = 0
        while True:
            count += 1
            alive = inbox.ReplicaAlive(
                id=f"{self.link.token}-alive-{count}",
                engine=ENGINE,
                replica=self._replica,
                url=f"http://{self._replica}",
                run=self._run,
                version=self._version,
            )
            try:
                await self.link.send(alive, ALIVE_S)
            except BusUnavailable:
                pass  # the next one will do
            await self.sleep(ALIVE_S)
