"""`bombus up`: a nats-server and all services of a hive under one supervisor.

A service that dies is restarted after a pause, which doubles as long as the service keeps dying. The gateways are
stopped first and the bus last, so that work in progress still reaches the log. No process outlives the supervisor.
"""

import asyncio
import contextlib
import fcntl
import http.client
import logging
import os
import signal
import socket
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.follow import Follower
from bombus.bus_address import without_login
from bombus.cli import URL_FILE
from bombus.config.job import RunConfig
from bombus.config.parts import Part
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive import inbox
from bombus.hive.state import Hive
from bombus.host.layout import Layout, Service, services
from bombus.machine.certificates import scheme
from bombus.machine.process import kill, listen, operator_name
from bombus.machine.watchdog import Watchdog, watchdog
from bombus.private import private_folder, write_private
from bombus.terminal import say

log = logging.getLogger(__name__)

RESTART_S = 0.2
RESTART_S_MAX = 10.0
HEALTHY_S = 10.0  # after a run of this length, the pause is reset to the shortest
STOP_S = 20.0
READY_S = 180.0
SLOW_S = 2.0  # time after which a message says what is delaying the stop
STOP_ORDER = (("gateway", "web"), ("inference", "trainer"), ("track", "coordinator"))
LOCK = "up"
WAITS_FOR = {
    "gateway": "to end its open calls",
    "inference": "to end its answers",
    "trainer": "to reach a good stopping point",
    "coordinator": "to store a snapshot",
    "track": "to close its trackers",
    "web": "to end its answers",
}


class Child:
    """A process that is kept running until `stop` is called."""

    def __init__(self, service: Service) -> None:
        self.kind = service.kind
        self._service = service
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def keep_running(self) -> None:
        """Start the process, and restart it whenever it ends, until `stop` is called."""
        pause_s = RESTART_S
        service = self._service
        while not self._stopping:
            began = time.monotonic()
            if service.silence_s:
                with watchdog(service.silence_s) as watching:
                    code = await self._run({**service.environment, **watching.environment}, watching)
            else:
                code = await self._run(service.environment)
            if self._stopping:
                return
            pause_s = RESTART_S if time.monotonic() - began > HEALTHY_S else min(2 * pause_s, RESTART_S_MAX)
            log.warning("%s ended with code %s; restarting it in %.1f s", service.name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, environment: Mapping[str, str], watching: Watchdog | None = None) -> int:
        """Run the process until it ends or has been silent for too long. Return its exit code."""
        # The process gets its own session: Ctrl-C reaches only the supervisor, which stops the services in order.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._service.command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        if watching is None:
            return await process.wait()
        async with asyncio.TaskGroup() as tasks:
            silence = tasks.create_task(self._kill_when_silent(process, watching))
            code = await process.wait()
            silence.cancel()
        return code

    async def _kill_when_silent(self, process: asyncio.subprocess.Process, watching: Watchdog) -> None:
        await watching.until_silent()
        log.error("%s has been silent for %.0f s: killing it", self._service.name, watching.limit_s)
        kill(process)

    def kill(self) -> None:
        """Kill the process immediately and do not restart it."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            kill(self._process)

    async def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._say_what_it_waits_for)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s; killing it", self._service.name, STOP_S)
            kill(process)
            await process.wait()
        finally:
            slow.cancel()

    def _say_what_it_waits_for(self) -> None:
        log.info("waiting for %s %s, for %.0f s at most", self._service.name, WAITS_FOR[self.kind], STOP_S - SLOW_S)


class Supervisor:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cluster = layout.cluster
        self._server: EmbeddedServer | None = None
        self._children: list[Child] = []

    @property
    def url(self) -> str:
        """The URL at which clients connect."""
        return f"{scheme()}://{self.cluster.gateway.host}:{self.cluster.gateway.port}"

    async def run(self) -> None:
        """Start everything, announce when it is ready, and keep it running. Stop everything when cancelled."""
        with hold_folder(self.layout.data_dir) as held, self._web_port():
            gateway = self.cluster.gateway
            if not gateway.count:
                await self._run()
                return
            with hold_port(gateway.host, gateway.port) as port:
                if port != gateway.port:
                    log.info("port 0 means any free port: clients connect to port %d", port)
                    self._listen_at(port)
                held.write(f"{self.url}\n")
                held.flush()
                await self._run()

    def _listen_at(self, port: int) -> None:
        """Set the gateways' port to the free port that was found."""
        self._set_cluster(gateway=self.cluster.gateway.model_copy(update={"port": port}))

    def _set_cluster(self, **parts: Part) -> None:
        self.cluster = self.cluster.model_copy(update=parts)
        self.layout = msgspec.structs.replace(self.layout, cluster=self.cluster)

    @contextlib.contextmanager
    def _web_port(self) -> Iterator[None]:
        """Reserve the port of the page, or a free one if another process has it."""
        if not self.layout.web:
            yield
            return
        web = self.cluster.web
        with contextlib.ExitStack() as held:
            try:
                port = held.enter_context(hold_port(web.host, web.port))
            except Refused:
                port = held.enter_context(hold_port(web.host, 0))
            self._set_cluster(web=web.model_copy(update={"port": port}))
            yield

    async def _run(self) -> None:
        nats = self.cluster.nats or await self._start_server()
        await self._make_streams(nats)
        self._children = [Child(service) for service in services(self.layout, nats)]
        url_file = self.layout.data_dir / URL_FILE.name
        write_private(url_file, nats + "\n")
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._server is not None:
                    tasks.create_task(self._keep_server(self._server))
                for child in self._children:
                    tasks.create_task(child.keep_running())
                tasks.create_task(self._announce(nats))
        finally:
            try:
                await self._stop_unless_told_twice()
            finally:
                url_file.unlink(missing_ok=True)

    async def _make_streams(self, nats: str) -> None:
        """Create or update the streams before any service uses them. Stop the server if that fails."""
        try:
            async with await Bus.connect(nats, self.cluster.hive, name="up") as bus:
                await bus.ensure_streams(self.cluster.streams)
        except BaseException:
            await asyncio.shield(self._stop())
            raise

    async def _start_server(self) -> str:
        power = self.cluster.durability == "power"
        self._server = EmbeddedServer(
            self.layout.data_dir / "nats", self.layout.nats_port, host_name=self.layout.nats_host, power=power
        )
        await asyncio.to_thread(self._server.start)
        return self._server.url

    async def _keep_server(self, server: EmbeddedServer) -> None:
        while True:
            # This polls, because a waiting thread cannot be cancelled.
            code = await asyncio.to_thread(server.wait, 0.5)
            if server.sync_failure:
                raise BusUnavailable(server.sync_failure)
            if code is None:
                if await asyncio.to_thread(server.needs_restart):
                    # A stream that failed to write stays silent until its server is restarted.
                    log.error("nats-server could not write but can now; restarting it: %s", server.broken)
                    await asyncio.to_thread(server.stop)
                continue
            log.error("nats-server ended with code %s; restarting it with the same data", code)
            try:
                await asyncio.to_thread(server.start)
            except BusUnavailable as error:
                log.error("nats-server did not start: %s", error)
                await asyncio.sleep(RESTART_S_MAX)

    async def _announce(self, nats: str) -> None:
        """Print `ready` once every service has joined and the gateway answers, then start the given jobs."""
        async with await Bus.connect(nats, self.cluster.hive, name="up") as bus:
            follower = Follower(bus)
            following = asyncio.create_task(follower.run())
            try:
                async with asyncio.timeout(READY_S):
                    await self._all_services_ready(follower)
                own = f" (NATS at {without_login(nats)})" if self._server is not None else ""
                say(
                    f"ready {self.url}{own}" if self.cluster.gateway.count else f"ready {without_login(nats)}",
                    flush=True,
                )
                for engine, job in self.layout.jobs.items():
                    try:
                        await start_job(bus, engine, job)
                    except BombusError as error:
                        why = f"the job of engine {engine} was not started: {error}"
                        log.warning("%s", why, extra={"engine": engine})
            except TimeoutError:
                log.error("not every service was ready after %.0f s: see the log above", READY_S)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _all_services_ready(self, follower: Follower) -> None:
        """Wait for the services of this machine. Replicas on other machines may join later."""

        def joined(hive: Hive) -> bool:
            engines = self.cluster.engines.items()
            return hive.epoch > 0 and all(len(hive.engine(name).replicas) >= part.replicas for name, part in engines)

        await follower.caught_up(None)
        await follower.wait_for(joined)
        gateway = self.cluster.gateway
        while gateway.count and not await asyncio.to_thread(_is_ready, gateway.host, gateway.port):
            await asyncio.sleep(0.05)

    async def _stop_unless_told_twice(self) -> None:
        """Stop everything in order. If cancelled again meanwhile, kill everything immediately."""
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            log.warning("killing all services")
            for child in self._children:
                child.kill()
            await stopping
            raise

    async def _stop(self) -> None:
        """Stop the gateways first, then replicas and trainers, then the coordinators, and finally the bus."""
        log.info("stopping the services in order; the log is kept. Press Ctrl-C again to kill them")
        for kinds in STOP_ORDER:
            await asyncio.gather(*(child.stop() for child in self._children if child.kind in kinds))
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[IO[str]]:
    """Keep other supervisors out of a data folder. Yields a file that tells the other supervisors the URL for clients.

    Raises `Refused` if another supervisor uses the folder, or if nothing can be written to it.
    """
    try:
        private_folder(folder)
        held = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        why = f"the data folder {folder} cannot be used: {error.strerror}; name another one with --data-dir"
        raise Refused(Code.BAD_CONFIG, why) from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at = f", at {url}" if (url := held.read().strip()) else ""
            why = (
                f"a hive is already running here{at}: use it, or start another one with --data-dir DIR and --port PORT"
            )
            raise Refused(Code.BAD_CONFIG, why) from None
        held.truncate(0)
        yield held


@contextlib.contextmanager
def hold_port(host: str, port: int) -> Iterator[int]:
    """Reserve the gateways' port while gateways restart, and yield it. 0 means any free port.

    Raises `Refused` if another process has the port.
    """
    with listen(host, port) as probe:
        family = probe.family
    with socket.socket(family, socket.SOCK_STREAM) as held:  # it never listens, so it gets no connections
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        yield held.getsockname()[1]


def _is_ready(host: str, port: int) -> bool:
    """Return whether a gateway answers that it is ready."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    if scheme() == "https":  # the certificate need not be for the address at which it listens
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=2, context=unchecked)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


async def start_job(bus: Bus, engine: str, job: RunConfig) -> None:
    """Configure and start an engine that is offline."""
    await bus.inbox.request(job.to_command(uuid.uuid4().hex, engine, operator_name()))
    await bus.inbox.request(inbox.Start(id=uuid.uuid4().hex, engine=engine, by=operator_name()))
    log.info("started the job of engine %s: %s", engine, job.model.path, extra={"engine": engine})
