"""A replica on the bus: loads what `weights.ready` names, says so, and serves it over HTTP until it is cancelled."""

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import torch
import uvicorn

from bombus import telemetry
from bombus.bus import Bus
from bombus.errors import BusUnavailable, Code, EngineFault
from bombus.events import WeightsReady
from bombus.follow import Follower
from bombus.generation import Fault
from bombus.inbox import EngineBroke, Message, ReplicaAlive, ReplicaLeaves, WeightsLoadedFact
from bombus.process import listen
from bombus.run_config import RunConfig
from bombus.state import EngineState, Phase
from bombus_inference.fetching import Fetcher
from bombus_inference.patching import read_patches
from bombus_inference.server import App
from bombus_inference.settings import EngineSettings, InferenceSettings
from bombus_inference.weights import make_engine, read_state

log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 3
BACKLOG = 4096
# The engine's thread asks for the interpreter's lock thousands of times a second; at Python's 5 ms it would wait more
# than it computes whenever the HTTP side is busy.
SWITCH_INTERVAL_S = 0.0005

STOPPED = Fault(why="the engine was stopped", code=Code.WRONG_PHASE)


class Replica:
    """One replica of one engine. Everything that it knows it has from the log; it starts with nothing loaded."""

    def __init__(self, bus: Bus, settings: InferenceSettings, url: str) -> None:
        self.name = settings.replica or f"replica-{secrets.token_hex(4)}"
        self.app = App(settings.http, settings.engine, self.name)
        self._bus = bus
        self._settings = settings
        self._url = url
        self._follower = Follower(bus)
        self._fetcher = Fetcher(bus, settings.engine, settings.cache)
        self._said = 0
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
        await self.app.worker.failed

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
        app, wanted = self.app, self._wanted()
        over = self._engine.phase == Phase.OFFLINE or self._engine.run != app.run
        if wanted is None:
            return app.version >= 0 and over
        return (wanted.run, wanted.version) > (app.run, app.version)

    async def _keep_up(self) -> None:
        await self._follower.caught_up(None)
        while True:
            await self._follower.wait_for(lambda _: self._behind())
            wanted = self._wanted()
            if wanted is None:
                await self._unload()
            else:
                await self._load(wanted)

    # ---- weights ----------------------------------------------------------------------------------------------

    async def _load(self, ready: WeightsReady) -> None:
        """Load and say so. A version that is overtaken meanwhile may be gone from the folder, and is let be."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            try:
                await self._bring_in(ready)
                return
            except EngineFault as fault:
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
        await self._say(broke)
        await self._follower.wait_for(lambda _: self._wanted() is not ready)

    async def _bring_in(self, ready: WeightsReady) -> None:
        """A swap within a run, a fresh engine for a new one. Files are read in a thread, the old version serving."""
        app, run, version = self.app, ready.run, ready.version
        loop = asyncio.get_running_loop()
        started = loop.time()
        fetched = await self._fetcher.materialise(ready, lambda: self._engine.trainer_epoch)
        folder = fetched.folder
        if app.version >= 0 and app.run == run:
            if fetched.delta is not None and fetched.base == app.version:
                patches = await asyncio.to_thread(read_patches, fetched.delta, self._settings.compute)
                await app.worker.patch(patches, version, run)
            else:
                state = await asyncio.to_thread(read_state, folder, self._settings.compute)
                await app.worker.swap(state, version, run)
        else:
            await self._unload()
            settings = self._engine_settings()
            engine = await asyncio.to_thread(make_engine, folder, settings, run=run, version=version)
            await app.worker.install(engine, STOPPED)
        app.run, app.version = run, version
        seconds = round(loop.time() - started, 3)
        log.info("serving version %d after %.3f s", version, seconds, extra={"run": run, "version": version})
        loaded = WeightsLoadedFact(
            id=f"{self._life}-{run}-loaded-{version}",
            engine=self._settings.engine,
            run=run,
            version=version,
            replica=self.name,
        )
        await self._say(loaded)

    async def _unload(self) -> None:
        if self.app.version >= 0:
            log.info("nothing to serve: weights dropped", extra={"run": self.app.run})
        self.app.version = -1
        await self.app.worker.install(None, STOPPED)

    def _engine_settings(self) -> EngineSettings:
        """Ours, with no longer sequences than the job has."""
        active = self._engine.active
        if active is None:
            return self._settings.compute
        job = RunConfig.from_json(active.config)
        longest = min(self._settings.compute.max_model_len, job.rollout.max_model_len)
        return self._settings.compute.model_copy(update={"max_model_len": longest})

    # ---- what we say ------------------------------------------------------------------------------------------

    async def _say(self, fact: Message) -> None:
        """Put a fact into the inbox, however long the bus is away."""
        while True:
            try:
                await self._bus.send(fact)
                return
            except BusUnavailable as error:
                log.warning("a fact waits for the bus: %s", error)

    async def _stay_alive(self) -> None:
        """One sign of life a second; one that cannot be said is stale before the bus is back, and is dropped."""
        while True:
            self._said += 1
            alive = ReplicaAlive(
                id=f"{self._life}-alive-{self._said}",
                engine=self._settings.engine,
                replica=self.name,
                url=self._url,
                run=self.app.run,
                version=self.app.version,
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
async def http_server(app: App, bound: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on a bound socket while the block runs; then let open requests finish for `drain_s`."""
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(app.settings.drain_s)),
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
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    bound = listen(settings.http.host, settings.http.port)
    url = settings.advertise_url or url_of(bound)
    async with await Bus.connect(settings.bus_url, settings.hive, name=f"inference-{settings.engine}") as bus:
        await bus.ensure_streams()
        replica = Replica(bus, settings, url)
        try:
            async with http_server(replica.app, bound):  # on the way out it lets open requests finish
                log.info("listening at %s", url, extra={"replica": replica.name})
                await replica.run()
        finally:
            await replica.app.close()
