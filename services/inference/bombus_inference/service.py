"""A replica on the bus: loads the weights that `weights.ready` names, reports them, and serves them over HTTP."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Coroutine

from bombus import telemetry
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.errors import BusUnavailable, Code, EngineFault, Refused
from bombus.hive.events import CanaryCheck, ReplicaQuarantined, WeightsReady
from bombus.hive.inbox import LoadBroke, ReplicaAlive, ReplicaLeaves, StageReached, WeightsLoadedFact
from bombus.hive.state import EngineState, Phase
from bombus.machine.advertising import url_for_others, url_of
from bombus.machine.certificates import scheme
from bombus.machine.host_names import OwnHostsOnly, host_of
from bombus.machine.http_limits import HttpLimits
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus.weights.canary import CanaryFailed, Expected
from bombus_inference.backends.protocol import Deliver, InferenceBackend, Policy
from bombus_inference.fetching import Fetcher
from bombus_inference.server import App, GatewaysOnly
from bombus_inference.settings import InferenceSettings

log = logging.getLogger(__name__)

CONNECTIONS_FOR_A_REQUEST = 2  # gateways keep some connections open between requests
LOAD_ATTEMPTS = 3  # failures before the replica reports that it cannot load a version
LOAD_RETRY_MAX_S = 60.0


def make_backend(settings: InferenceSettings, deliver: Deliver) -> InferenceBackend:
    """Create the backend that the settings name. No other backend is imported: torch takes seconds and half a
    gigabyte."""
    match settings.backend:
        case "torch":
            from bombus_inference.backends.torch.backend import TorchBackend

            return TorchBackend(settings.compute, deliver)
        case "vllm":
            from bombus_inference.backends.vllm.backend import VllmBackend

            return VllmBackend(settings.compute, settings.vllm, deliver)
        case "openai":
            from bombus_inference.backends.openai.backend import OpenAIBackend

            return OpenAIBackend(settings.compute, settings.openai, deliver)


class ReplicaService:
    """One replica of one engine. It follows the log and starts with nothing loaded."""

    def __init__(self, bus: Bus, settings: InferenceSettings, url: str) -> None:
        self.name = settings.replica or f"replica-{secrets.token_hex(4)}"
        self.app = App(settings.http, settings.engine, self.name, lambda deliver: make_backend(settings, deliver))
        self._bus = bus
        self._settings = settings
        self._url = url
        self._follower = Follower(bus)
        self._fetcher = Fetcher(bus, settings.engine, settings.cache, self.app.backend.loads_adapters)
        self._alives = 0
        self._loads = 0
        self._losses = 0
        self._canary: CanaryCheck | None = None  # for the version being served
        self._warned_run = 0  # the run whose length limit has been warned about
        # Makes our message ids unique: otherwise a replica with a fixed name would send the id "alive, 1" after every
        # start.
        self._instance = f"{self.name}-{secrets.token_hex(4)}"

    async def run(self) -> None:
        """Follow the log and serve until cancelled. Raises the exception that broke the backend."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follower.run())
                tasks.create_task(self._stay_alive())
                tasks.create_task(self._keep_up())
                tasks.create_task(self._until_broken())
        finally:
            self._fetcher.close()
            await self._leave()

    async def _until_broken(self) -> None:
        await self.app.backend.failed

    async def _leave(self) -> None:
        leaves = ReplicaLeaves(id=f"{self._instance}-leaves", engine=self._settings.engine, replica=self.name)
        with contextlib.suppress(BusUnavailable):  # if this message is lost, the hive removes the replica later
            await self._bus.inbox.send(leaves, timeout_s=2.0)

    # ---- what to serve ----------------------------------------------------------------------------------------

    @property
    def _engine(self) -> EngineState:
        return self._follower.hive.engine(self._settings.engine)

    def _wanted(self) -> WeightsReady | None:
        """Return the newest weights of the current run; None while there is nothing to serve."""
        engine = self._engine
        return None if engine.phase == Phase.OFFLINE else engine.weights

    def _behind(self) -> bool:
        """Return whether newer weights must be loaded, or the current weights must be dropped."""
        serves, wanted = self.app.backend, self._wanted()
        over = self._engine.phase == Phase.OFFLINE or self._engine.run != serves.run
        if wanted is None:
            return serves.version >= 0 and over
        return (wanted.run, wanted.version) > (serves.run, serves.version)

    async def _keep_up(self) -> None:
        await self._follower.caught_up(None)
        while True:
            await self._until_behind()
            if self.app.backend.lost.is_set():
                self.app.backend.lost.clear()
                await self._leave_without_weights()
            wanted = self._wanted()
            if not self._behind():
                continue
            if wanted is None:
                log.info("nothing to serve: weights dropped", extra={"run": self.app.backend.run})
                await self.app.backend.unload()
            else:
                await self._load(wanted)

    async def _leave_without_weights(self) -> None:
        """Leave the hive, so that gateways stop sending requests. The next alive message rejoins it without weights."""
        self._losses += 1
        await self._bus.inbox.send_when_back(
            ReplicaLeaves(id=f"{self._instance}-lost-{self._losses}", engine=self._settings.engine, replica=self.name)
        )

    async def _until_behind(self) -> None:
        """Wait until other weights must be served, or the backend has lost its weights."""
        lost = asyncio.create_task(self.app.backend.lost.wait())
        behind = asyncio.create_task(self._follower.wait_for(lambda _: self._behind()))
        try:
            await asyncio.wait({lost, behind}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            behind.cancel()

    # ---- weights ----------------------------------------------------------------------------------------------

    async def _load(self, ready: WeightsReady) -> None:
        """Load weights and report that they are loaded. If loading fails, report why and keep trying, since a mount may
        come back.

        A version that is superseded in the meantime is abandoned, since its files may be gone.
        """
        failures = reports = 0
        while self._wanted() is ready:
            served = self.app.backend.version >= 0
            try:
                await self._while_run_lasts(ready.run, self._load_version(ready))
                return
            except EngineFault as fault:
                failures += 1
                computes_wrongly = isinstance(fault, CanaryFailed)
                # A replica that computes wrongly stays in the hive so that it can be quarantined, which stops its calls
                # too.
                emptied = served and self.app.backend.version < 0 and not computes_wrongly
                if self.app.backend.lost.is_set() or emptied:
                    self.app.backend.lost.clear()
                    await self._leave_without_weights()
                log.warning("version %d, attempt %d: %s", ready.version, failures, fault, extra={"run": ready.run})
                if (computes_wrongly or failures >= LOAD_ATTEMPTS) and (self._quarantine is None or not reports):
                    reports += 1
                    await self._report_broken(ready, str(fault), reports)
            if await self._is_released(ready, self._retry_s(failures)):
                failures = 0

    def _retry_s(self, failures: int) -> float:
        """Return how long to wait after `failures` failures: the configured delay, doubled for each one after
        `LOAD_ATTEMPTS`."""
        doubled = 2.0 ** min(max(failures - LOAD_ATTEMPTS, 0), 16)
        return min(self._settings.load_retry_s * doubled, LOAD_RETRY_MAX_S)

    @property
    def _quarantine(self) -> ReplicaQuarantined | None:
        replica = self._engine.replicas.get(self.name)
        return None if replica is None else replica.quarantined

    async def _is_released(self, ready: WeightsReady, wait_s: float) -> bool:
        """Wait for the next attempt, other weights, or the end of a quarantine. Return whether a quarantine ended."""
        was_quarantined = self._quarantine is not None

        def is_released() -> bool:
            return was_quarantined and self._quarantine is None

        with contextlib.suppress(TimeoutError):
            await self._follower.wait_for(lambda _: self._wanted() is not ready or is_released(), wait_s)
        return is_released()

    async def _report_broken(self, ready: WeightsReady, why: str, number: int) -> None:
        broke = LoadBroke(
            id=f"{self._instance}-{ready.run}-broke-{ready.version}-{number}",
            engine=self._settings.engine,
            run=ready.run,
            version=ready.version,
            replica=self.name,
            reason=why,
        )
        await self._bus.inbox.send_when_back(broke)

    async def _while_run_lasts(self, run: int, loading: Coroutine[None, None, None]) -> None:
        """Run `loading`, but cancel it when its run ends, since a backend may take minutes to start."""
        over = asyncio.create_task(
            self._follower.wait_for(lambda _: (wanted := self._wanted()) is None or wanted.run != run)
        )
        task = asyncio.create_task(loading)
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            over.cancel()
            task.cancel()
            await asyncio.wait({task})

    async def _load_version(self, ready: WeightsReady) -> None:
        run, version = ready.run, ready.version
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            fetched = await self._fetcher.materialise(ready, lambda: self._engine.trainer_epoch)
        except OSError as error:
            raise EngineFault(f"the weights cannot be fetched: {error}") from error
        job = self._job(run)
        limit, dtype = job.rollout.max_model_len, job.model.dtype
        beside = self._engine.serves_operations
        policy = Policy(
            *(fetched.folder, run, version, limit, fetched.delta, fetched.base, fetched.adapter, dtype),
            beside=beside,
            expected=self._expected(ready),
        )
        self._canary = await self.app.backend.load(policy, self._report_stage)
        seconds = round(loop.time() - started, 3)
        log.info("serving version %d after %.3f s", version, seconds, extra={"run": run, "version": version})
        self._loads += 1  # a version reloaded after a loss needs its own message id
        loaded = WeightsLoadedFact(
            id=f"{self._instance}-{run}-loaded-{version}-{self._loads}",
            engine=self._settings.engine,
            run=run,
            version=version,
            replica=self.name,
            sequence_tokens=self.app.backend.sequence_tokens,
            constrains=self.app.backend.constrains,
            canary=self._canary,
        )
        await self._bus.inbox.send_when_back(loaded)

    def _expected(self, ready: WeightsReady) -> Expected | None:
        """Return what the version must compute, or None if its trainer does not say."""
        if ready.canary is None:
            return None
        before = self._engine.weights_before
        follows = before is not None and before.run == ready.run and before.version < ready.version
        return Expected(ready.version, ready.canary, before.canary if before is not None and follows else None)

    def _job(self, run: int) -> RunConfig:
        """Return the engine's job. Warn, once per run, if our length limit is below the job's."""
        active = self._engine.active
        job = RunConfig() if active is None else RunConfig.from_json(active.config)
        own, wanted = self._settings.compute.max_model_len, job.rollout.max_model_len
        if own is not None and own < wanted and self._warned_run != run:
            log.warning(
                "sequences end at %d tokens, not at the job's %d: this replica was started with --max-model-len %d",
                *(own, wanted, own),
                extra={"run": run},
            )
            self._warned_run = run
        return job

    # ---- messages ---------------------------------------------------------------------------------------------

    async def _report_stage(self, stage: str) -> None:
        """Report a boot stage, to be shown in `engine_status_detail`. The report is dropped if the bus is
        unavailable."""
        reached = StageReached(id=secrets.token_hex(8), engine=self._settings.engine, run=self._engine.run, stage=stage)
        with contextlib.suppress(BusUnavailable):
            await self._bus.inbox.send(reached, timeout_s=1.0)

    async def _stay_alive(self) -> None:
        """Send alive messages regularly. They are dropped if the bus is unavailable, as they would be stale later."""
        while True:
            self._alives += 1
            alive = ReplicaAlive(
                id=f"{self._instance}-alive-{self._alives}",
                engine=self._settings.engine,
                replica=self.name,
                url=self._url,
                run=self.app.backend.run,
                version=self.app.backend.version,
                capacity=self._settings.compute.max_running,
                sequence_tokens=self.app.backend.sequence_tokens,
                constrains=self.app.backend.constrains,
                canary=self._canary,
            )
            try:
                await self._bus.inbox.send(alive, timeout_s=self._settings.alive_every_s)
            except BusUnavailable as error:
                log.warning("an alive message was lost: %s", error)
            await asyncio.sleep(self._settings.alive_every_s)


async def advertised_url(bus: Bus, settings: InferenceSettings, bound: socket.socket) -> str:
    """Return the address at which gateways reach this replica. Raises `Refused` if it cannot be determined."""
    url = settings.advertise_url or url_of(bound)
    own = await bus.own_address()
    reached = url_for_others(url, own)
    if not reached:
        raise Refused(
            Code.BAD_CONFIG,
            f"{url} stands for every address of this machine, and the connection to the bus, which comes from {own}, "
            "does not show at which of them gateways reach this replica: pass --advertise-url "
            f"{scheme()}://HOST:{bound.getsockname()[1]}, or listen at one address with --host",
        )
    return reached


async def run(settings: InferenceSettings) -> None:
    """Serve an engine of a hive until cancelled. Raises `BusUnavailable` if there is no bus, or the backend's
    exception."""
    telemetry.configure("inference")
    bound = listen(settings.http.host, settings.http.port)
    async with await Bus.connect(settings.bus_url, settings.hive, name=f"inference-{settings.engine}") as bus:
        await bus.until_streams_exist()
        url = await advertised_url(bus, settings, bound)
        key = await bus.replica_key()
        replica = ReplicaService(bus, settings, url)
        try:
            limits = HttpLimits(connections=CONNECTIONS_FOR_A_REQUEST * settings.http.requests_max)
            # On exit, the server lets open requests finish.
            named = (settings.http.host, host_of(url), *settings.http.host_names)
            app = OwnHostsOnly(GatewaysOnly(replica.app, key), bound, named)
            async with http_server(app, bound, settings.http.drain_s, limits=limits):
                log.info("listening at %s", url, extra={"replica": replica.name})
                await replica.run()
        finally:
            await replica.app.close()
