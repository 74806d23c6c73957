"""`bombus up`: a nats-server and all services of a hive under one supervisor.

A service that dies is started again, sooner at first and later when it keeps dying. Stopping goes from the doors
inwards, so that what is under way lands on the log. Nothing is left behind.
"""

import asyncio
import contextlib
import http.client
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from bombus import inbox
from bombus.bus import Bus, EmbeddedServer
from bombus.cli import URL_FILE
from bombus.errors import BombusError, BusUnavailable
from bombus.follow import Follower
from bombus.hive_keys import KEY_VARIABLES, HiveKeys
from bombus.job import parse_job
from bombus.process import PARENT_VARIABLE, listen
from bombus.state import Hive

log = logging.getLogger(__name__)

RESTART_S = 0.2
RESTART_S_MAX = 10.0
HEALTHY_S = 10.0  # who ran for so long starts again at once
STOP_S = 20.0
READY_S = 180.0
# A training step frees and takes the same large blocks over and over. glibc would give each of them back to the kernel
# and have it cleared again: 6 to 10 % of a step on a CPU.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What `bombus up` was asked for. `nats` names an external server or cluster; empty starts our own."""

    host: str = "127.0.0.1"
    port: int = 10086
    data_dir: Path = Path(".bombus")
    nats: str = ""
    nats_port: int = 0
    hive: str = "main"
    engines: tuple[str, ...] = ("main",)
    gateways: int = 1  # they share the port
    coordinators: int = 1  # one leads, the others stand by
    replicas: int = 1  # of each engine
    config: Path | None = None
    device: str = "cpu"
    debug_root: Path | None = None  # where jobs may have trainers write samples
    threads: int = 0  # of torch, for each process; 0: its default
    log_level: str = "info"
    keys: HiveKeys = HiveKeys()
    trusted_network: bool = False  # gateways may listen anywhere without keys


class Child:
    """One service process, kept running until `stop`."""

    def __init__(self, service: str, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.service = service
        self.name = name
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def keep(self) -> None:
        """Start it, and start it again whenever it ends, until `stop`."""
        pause_s = RESTART_S
        while not self._stopping:
            began = time.monotonic()
            # A session of its own: Ctrl-C reaches the supervisor alone, which stops everybody in order.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=dict(self._environment), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            code = await self._process.wait()
            if self._stopping:
                return
            pause_s = RESTART_S if time.monotonic() - began > HEALTHY_S else min(2 * pause_s, RESTART_S_MAX)
            log.warning("%s ended with code %s; it is started again in %.1f s", self.name, code, pause_s)
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
            log.warning("%s did not stop within %.0f s and is killed", self.name, STOP_S)
            process.kill()
            await process.wait()


def children(layout: Layout, nats: str) -> list[Child]:
    """The services of a hive, in the order in which they start."""
    environment = {
        # Threads of torch that wait for each other must not burn the cores that trainer and replica take turns on.
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }

    def child(name: str, service: str, *arguments: str, environment: Mapping[str, str] = environment) -> Child:
        command = [sys.executable, "-m", "bombus", service, "--nats", nats, "--hive", layout.hive]
        command += ["--log-level", layout.log_level, *arguments]
        return Child(service, name, command, environment)

    torch = ["--device", layout.device, "--threads", str(layout.threads)]
    # One that is started again has its predecessor's name, and therefore its lease.
    stem = f"{socket.gethostname()}-{os.getpid()}"
    watching = [] if layout.nats else ["--watch-disk", str((layout.data_dir / "nats").absolute())]
    services = [
        child(f"coordinator{which}", "coordinator", "--name", f"{stem}{which or ' 1'}".replace(" ", "-"), *watching)
        for which in _numbered(layout.coordinators)
    ]
    for engine in layout.engines:
        folder = str((layout.data_dir / "engines").absolute())
        keeping = {**KEEP_FREED_MEMORY, **environment}
        trainer = ["--engine", engine, "--folder", folder, *torch]
        trainer += ["--debug-root", str(layout.debug_root)] if layout.debug_root is not None else []
        services.append(child(f"trainer {engine}", "trainer", *trainer, environment=keeping))
        services += [
            child(f"inference {engine}{which}", "inference", "--engine", engine, *torch)
            for which in _numbered(layout.replicas)
        ]
    engines = [argument for engine in layout.engines for argument in ("--engine", engine)]
    door = ["--host", layout.host, "--port", str(layout.port), "--reuse-port", *engines]
    door += ["--trusted-network"] if layout.trusted_network else []
    keyed = {**environment, **layout.keys.environment()}  # the others run models, and need no keys
    services += [child(f"gateway{which}", "gateway", *door, environment=keyed) for which in _numbered(layout.gateways)]
    return services


def _numbered(count: int) -> list[str]:
    """What tells one of several from the others; nothing where there is but one."""
    return [""] if count == 1 else [f" {number}" for number in range(1, count + 1)]


class Supervisor:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.url = f"http://{layout.host}:{layout.port}"
        self._server: EmbeddedServer | None = None
        self._children: list[Child] = []

    async def run(self) -> None:
        """Start everything, say when it is ready, keep it running; stop it all when cancelled."""
        self.layout.data_dir.mkdir(parents=True, exist_ok=True)
        with hold_port(self.layout.host, self.layout.port):
            await self._run()

    async def _run(self) -> None:
        nats = self.layout.nats or await self._start_server()
        self._children = children(self.layout, nats)
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
        """Print `ready` once every door answers; then start the job that was given."""
        async with await Bus.connect(nats, self.layout.hive, name="up") as bus:
            await bus.ensure_streams()
            follower = Follower(bus)
            following = asyncio.create_task(follower.run())
            try:
                async with asyncio.timeout(READY_S):
                    await self._everybody_there(follower)
                print(f"ready {self.url}", flush=True)
                for engine in self.layout.engines:
                    if self.layout.config is not None:
                        await _start_job(bus, engine, self.layout.config)
            except TimeoutError:
                log.error("not everything was up after %.0f s: see the log above", READY_S)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _everybody_there(self, follower: Follower) -> None:
        def joined(hive: Hive) -> bool:
            engines = [hive.engine(engine) for engine in self.layout.engines]
            return hive.epoch > 0 and all(len(engine.replicas) >= self.layout.replicas for engine in engines)

        await follower.caught_up(None)
        await follower.wait_for(joined)
        while not await asyncio.to_thread(_answers, self.layout.host, self.layout.port):
            await asyncio.sleep(0.05)

    async def _stop(self) -> None:
        """Doors first, then those who work behind them, the coordinator last, then the bus."""
        for service in ("gateway", "inference", "trainer", "coordinator"):
            await asyncio.gather(*(child.stop() for child in self._children if child.service == service))
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


async def _start_job(bus: Bus, engine: str, config: Path) -> None:
    """Configure and start an engine that is offline with the job in a file."""
    job = parse_job(config.read_text())
    try:
        await bus.ask(
            inbox.Configure(
                id=uuid.uuid4().hex,
                engine=engine,
                config=job.to_json(),
                config_digest=job.digest,
                collection=job.to_collection(),
                model=job.model.path,
            )
        )
        await bus.ask(inbox.Start(id=uuid.uuid4().hex, engine=engine))
    except BombusError as error:
        log.warning("the job in %s was not started: %s", config, error, extra={"engine": engine})
        return
    log.info("started the job in %s: %s", config, job.model.path, extra={"engine": engine})
