"""`bombus up`: a nats-server and all services of a hive under one supervisor.

A service that dies is started again, sooner at first and later when it keeps dying. Stopping goes from the doors
inwards, so that what is under way lands on the log. Nothing is left behind.
"""

import asyncio
import contextlib
import http.client
import logging
import signal
import socket
import time
import uuid
from collections.abc import Iterator

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.follow import Follower
from bombus.cli import URL_FILE
from bombus.config.job import RunConfig
from bombus.errors import BombusError, BusUnavailable
from bombus.hive import inbox
from bombus.hive.state import Hive
from bombus.host.layout import Layout, Service, services
from bombus.host.process import listen

log = logging.getLogger(__name__)

RESTART_S = 0.2
RESTART_S_MAX = 10.0
HEALTHY_S = 10.0  # who ran for so long starts again at once
STOP_S = 20.0
READY_S = 180.0


class Child:
    """One process, kept running until `stop`."""

    def __init__(self, service: Service) -> None:
        self.kind = service.kind
        self._service = service
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def keep(self) -> None:
        """Start it, and start it again whenever it ends, until `stop`."""
        pause_s = RESTART_S
        service = self._service
        while not self._stopping:
            began = time.monotonic()
            # A session of its own: Ctrl-C reaches the supervisor alone, which stops everybody in order.
            self._process = await asyncio.create_subprocess_exec(
                *service.command,
                env=dict(service.environment),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            code = await self._process.wait()
            if self._stopping:
                return
            pause_s = RESTART_S if time.monotonic() - began > HEALTHY_S else min(2 * pause_s, RESTART_S_MAX)
            log.warning("%s ended with code %s; it is started again in %.1f s", service.name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s and is killed", self._service.name, STOP_S)
            process.kill()
            await process.wait()


class Supervisor:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cluster = layout.cluster
        self.url = f"http://{layout.cluster.gateway.host}:{layout.cluster.gateway.port}"
        self._server: EmbeddedServer | None = None
        self._children: list[Child] = []

    async def run(self) -> None:
        """Start everything, say when it is ready, keep it running; stop it all when cancelled."""
        self.layout.data_dir.mkdir(parents=True, exist_ok=True)
        door = self.cluster.gateway
        with hold_port(door.host, door.port) if door.count else contextlib.nullcontext():
            await self._run()

    async def _run(self) -> None:
        nats = self.cluster.nats or await self._start_server()
        self._children = [Child(service) for service in services(self.layout, nats)]
        url_file = self.layout.data_dir / URL_FILE.name
        url_file.write_text(nats + "\n")
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._server is not None:
                    tasks.create_task(self._keep_server(self._server))
                for child in self._children:
                    tasks.create_task(child.keep())
                tasks.create_task(self._announce(nats))
        finally:
            await asyncio.shield(self._stop())
            url_file.unlink(missing_ok=True)

    async def _start_server(self) -> str:
        self._server = EmbeddedServer(self.layout.data_dir / "nats", self.layout.nats_port)
        await asyncio.to_thread(self._server.start)
        return self._server.url

    async def _keep_server(self, server: EmbeddedServer) -> None:
        while True:
            # Polled, because a thread that waits cannot be cancelled.
            code = await asyncio.to_thread(server.wait, 0.5)
            if code is None:
                if await asyncio.to_thread(server.needs_restart):
                    # A stream that could not write stays silent until its server starts anew.
                    log.error("the disk was full and has room again: nats-server is started anew")
                    await asyncio.to_thread(server.stop)
                continue
            log.error("nats-server ended with code %s; it is started again with the same data", code)
            try:
                await asyncio.to_thread(server.start)
            except BusUnavailable as error:
                log.error("nats-server does not start: %s", error)
                await asyncio.sleep(RESTART_S_MAX)

    async def _announce(self, nats: str) -> None:
        """Print `ready` once every door answers; then start the jobs that were given."""
        async with await Bus.connect(nats, self.cluster.hive, name="up") as bus:
            await bus.ensure_streams()
            follower = Follower(bus)
            following = asyncio.create_task(follower.run())
            try:
                async with asyncio.timeout(READY_S):
                    await self._everybody_there(follower)
                own = f" (NATS at {nats})" if self._server is not None else ""
                print(f"ready {self.url}{own}" if self.cluster.gateway.count else f"ready {nats}", flush=True)
                for engine, job in self.layout.jobs.items():
                    await _start_job(bus, engine, job)
            except TimeoutError:
                log.error("not everything was up after %.0f s: see the log above", READY_S)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _everybody_there(self, follower: Follower) -> None:
        """Everybody of this machine: an engine's replicas elsewhere come when they come."""

        def joined(hive: Hive) -> bool:
            here = self.cluster.engines.items()
            return hive.epoch > 0 and all(len(hive.engine(name).replicas) >= part.replicas for name, part in here)

        await follower.caught_up(None)
        await follower.wait_for(joined)
        door = self.cluster.gateway
        while door.count and not await asyncio.to_thread(_answers, door.host, door.port):
            await asyncio.sleep(0.05)

    async def _stop(self) -> None:
        """Doors first, then those who work behind them, the coordinator last, then the bus."""
        for kind in ("gateway", "inference", "trainer", "coordinator"):
            await asyncio.gather(*(child.stop() for child in self._children if child.kind == kind))
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


@contextlib.contextmanager
def hold_port(host: str, port: int) -> Iterator[None]:
    """Keep the gateways' port ours while they come and go. Raises `Refused` when somebody else has it."""
    with listen(host, port) as probe:
        family = probe.family
    with socket.socket(family, socket.SOCK_STREAM) as held:  # it never listens, so no connection comes to it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        yield


def _answers(host: str, port: int) -> bool:
    """Whether the gateway says that it is ready."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


async def _start_job(bus: Bus, engine: str, job: RunConfig) -> None:
    """Configure and start an engine that is offline."""
    try:
        await bus.inbox.request(
            inbox.Configure(
                id=uuid.uuid4().hex,
                engine=engine,
                config=job.to_json(),
                config_digest=job.digest,
                collection=job.to_collection(),
                model=job.model.path,
            )
        )
        await bus.inbox.request(inbox.Start(id=uuid.uuid4().hex, engine=engine))
    except BombusError as error:
        log.warning("the job of engine %s was not started: %s", engine, error, extra={"engine": engine})
        return
    log.info("started the job of engine %s: %s", engine, job.model.path, extra={"engine": engine})
