"""A replica on the bus: loads what `weights.ready` names, says so, and serves it over HTTP until it is cancelled."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator

import uvicorn

from bombus import telemetry
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.errors import BusUnavailable, EngineFault
from bombus.hive.events import WeightsReady
from bombus.hive.inbox import EngineBroke, ReplicaAlive, ReplicaLeaves, StageReached, WeightsLoadedFact
from bombus.hive.state import EngineState, Phase
from bombus.host.process import listen
from bombus_inference.backends.protocol import Backend, Deliver, Policy
from bombus_inference.fetching import Fetcher
from bombus_inference.server import App, Asgi
from bombus_inference.settings import InferenceSettings

log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 3
BACKLOG = 4096


def make_backend(settings: InferenceSettings, deliver: Deliver) -> Backend:
    """What the settings name. Imports that alone: torch takes seconds and half a gigabyte."""
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


class Replica:
    """One replica of one engine. Everything that it knows it has from the log; it starts with nothing loaded."""

    def __init__(self, bus: Bus, settings: InferenceSettings, url: str) -> None:
        self.name = settings.replica or f"replica-{secrets.token_hex(4)}"
        self.app = App(settings.http, settings.engine, self.name, lambda deliver: make_backend(settings, deliver))
        self._bus = bus
        self._settings = settings
        self._url = url
        self._follower = Follower(bus)
        self._fetcher = Fetcher(bus, settings.engine, settings.cache, self.app.backend.loads_adapters)
        self._said = 0
        self._loads = 0
        self._losses = 0
        self._told_run = 0  # whose limit was told to be beyond ours
        # In the ids of what we say: a replica of a fixed name says "alive, 1" in each of its lives.
        self._life = f"{self.name}-{secrets.token_hex(4)}"

    async def run(self) -> None:
        """Follow the log and serve. Ends when cancelled; raises what breaks the engine."""
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
        with contextlib.suppress(BusUnavailable):  # who cannot say goodbye lapses instead
            await self._bus.send(
                ReplicaLeaves(id=f"{self._life}-leaves", engine=self._settings.engine, replica=self.name), timeout_s=2.0
            )

    # ---- what the log says ------------------------------------------------------------------------------------

    @property
    def _engine(self) -> EngineState:
        return self._follower.hive.engine(self._settings.engine)

    def _wanted(self) -> WeightsReady | None:
        """The newest weights of the run that is on; None while nothing is to be served."""
        engine = self._engine
        return None if engine.phase == Phase.OFFLINE else engine.weights

    def _behind(self) -> bool:
        """Whether something newer is to be served than is served, or nothing any more."""
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
                await self._leave_for_now()
            wanted = self._wanted()
            if not self._behind():
                continue
            if wanted is None:
                log.info("nothing to serve: weights dropped", extra={"run": self.app.backend.run})
                await self.app.backend.unload()
            else:
                await self._load(wanted)

    async def _leave_for_now(self) -> None:
        """Nobody shall ask a replica that has lost its weights: it joins anew by being alive, with nothing loaded."""
        self._losses += 1
        await self._bus.send_when_back(
            ReplicaLeaves(id=f"{self._life}-lost-{self._losses}", engine=self._settings.engine, replica=self.name)
        )

    async def _until_behind(self) -> None:
        """The log says something new, or the backend has lost what it had."""
        lost = asyncio.create_task(self.app.backend.lost.wait())
        behind = asyncio.create_task(self._follower.wait_for(lambda _: self._behind()))
        try:
            await asyncio.wait({lost, behind}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            behind.cancel()

    # ---- weights ----------------------------------------------------------------------------------------------

    async def _load(self, ready: WeightsReady) -> None:
        """Load and say so. A version that is overtaken meanwhile may be gone from the folder, and is let be."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            served = self.app.backend.version >= 0
            try:
                await self._unless_over(ready.run, self._bring_in(ready))
                return
            except EngineFault as fault:
                if served and self.app.backend.version < 0:
                    await self._leave_for_now()
                log.warning("version %d, attempt %d: %s", ready.version, attempt, fault, extra={"run": ready.run})
                why = str(fault)
            try:
                await self._follower.wait_for(lambda _: self._wanted() is not ready, self._settings.load_retry_s)
                return
            except TimeoutError:
                pass
        broke = EngineBroke(
            id=f"{self._life}-{ready.run}-broke-{ready.version}",
            engine=self._settings.engine,
            run=ready.run,
            reason=f"replica {self.name} cannot load version {ready.version}: {why}",
        )
        await self._bus.send_when_back(broke)
        await self._follower.wait_for(lambda _: self._wanted() is not ready)

    async def _unless_over(self, run: int, loading: Coroutine[None, None, None]) -> None:
        """Give loading up when its run ends: an engine that takes minutes to start would start for nobody."""
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

    async def _bring_in(self, ready: WeightsReady) -> None:
        run, version = ready.run, ready.version
        loop = asyncio.get_running_loop()
        started = loop.time()
        fetched = await self._fetcher.materialise(ready, lambda: self._engine.trainer_epoch)
        job = self._job(run)
        limit, dtype = job.rollout.max_model_len, job.model.dtype
        policy = Policy(fetched.folder, run, version, limit, fetched.delta, fetched.base, fetched.adapter, dtype)
        await self.app.backend.bring_in(policy, self._tell)
        seconds = round(loop.time() - started, 3)
        log.info("serving version %d after %.3f s", version, seconds, extra={"run": run, "version": version})
        self._loads += 1  # what was lost is loaded again, and that is no repeat
        loaded = WeightsLoadedFact(
            id=f"{self._life}-{run}-loaded-{version}-{self._loads}",
            engine=self._settings.engine,
            run=run,
            version=version,
            replica=self.name,
        )
        await self._bus.send_when_back(loaded)

    def _job(self, run: int) -> RunConfig:
        """What the engine runs with. A limit of ours below the job's is told once for each run."""
        active = self._engine.active
        job = RunConfig() if active is None else RunConfig.from_json(active.config)
        ours, asked = self._settings.compute.max_model_len, job.rollout.max_model_len
        if ours is not None and ours < asked and self._told_run != run:
            log.warning(
                "sequences end at %d tokens and not at the job's %d: this replica was started with --max-model-len %d",
                *(ours, asked, ours),
                extra={"run": run},
            )
            self._told_run = run
        return job

    # ---- what we say ------------------------------------------------------------------------------------------

    async def _tell(self, stage: str) -> None:
        """For `engine_status_detail` while the engine boots; what cannot be said at once is dropped."""
        reached = StageReached(id=secrets.token_hex(8), engine=self._settings.engine, run=self._engine.run, stage=stage)
        with contextlib.suppress(BusUnavailable):
            await self._bus.send(reached, timeout_s=1.0)

    async def _stay_alive(self) -> None:
        """One sign of life a second; one that cannot be said is stale before the bus is back, and is dropped."""
        while True:
            self._said += 1
            alive = ReplicaAlive(
                id=f"{self._life}-alive-{self._said}",
                engine=self._settings.engine,
                replica=self.name,
                url=self._url,
                run=self.app.backend.run,
                version=self.app.backend.version,
                capacity=self._settings.compute.max_running,
            )
            try:
                await self._bus.send(alive, timeout_s=self._settings.alive_every_s)
            except BusUnavailable as error:
                log.warning("a sign of life was lost: %s", error)
            await asyncio.sleep(self._settings.alive_every_s)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: who cancels us stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def http_server(app: Asgi, bound: socket.socket, drain_s: float) -> AsyncIterator[None]:
    """Serve `app` on a bound socket while the block runs; then let open requests finish for `drain_s`."""
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def run(settings: InferenceSettings) -> None:
    """Serve an engine of a hive until cancelled. Raises `BusUnavailable` without a bus, or what broke the engine."""
    telemetry.configure("inference")
    bound = listen(settings.http.host, settings.http.port)
    url = settings.advertise_url or url_of(bound)
    async with await Bus.connect(settings.bus_url, settings.hive, name=f"inference-{settings.engine}") as bus:
        await bus.ensure_streams()
        replica = Replica(bus, settings, url)
        try:
            async with http_server(
                replica.app, bound, settings.http.drain_s
            ):  # on the way out it lets open requests finish
                log.info("listening at %s", url, extra={"replica": replica.name})
                await replica.run()
        finally:
            await replica.app.close()
