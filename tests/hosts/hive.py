"""The services of a hive, each on a host of its own, and what keeps them running there."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bombus.bus.server import find_server
from bombus.machine.process import PARENT_VARIABLE
from tests.chaos.engines import ChaosEngine
from tests.hosts.network import Network

ENGINE = ChaosEngine("main", replicas=2, max_staleness=1, trainer={"weights_by": "objects"})
BUSES = ("nats-1", "nats-2", "nats-3")
SERVICES = ("coordinator", "gateway", "trainer", "replica-1", "replica-2", "environments")
PORT = 10086
RESTART_S = 1.0
EXAMPLES = Path(__file__).parents[2] / "examples"
STOP_S = 20.0
SMALL = [f"--{stream}-bytes-max=1GiB" for stream in ("calls", "trajectories", "blobs", "ops", "events")]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class SpreadHive:
    """Three NATS servers and the services of a hive on the hosts of `network`. `clocks` are seconds by host, by which
    its clock is wrong."""

    def __init__(self, folder: Path, network: Network, clocks: Mapping[str, int]) -> None:
        self.folder = folder
        self.url = f"http://{network.address('gateway')}:{PORT}"
        self.environments = f"http://{network.address('environments')}:8000"
        self.bus = ",".join(f"nats://{network.address(each)}:4222" for each in BUSES)
        self.restarts = 0
        self._network = network
        self._clocks = clocks
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        commands = {each: self._bus_command(each) for each in BUSES} | dict(self._services())
        self._keeping = [asyncio.create_task(self._keep(host, command)) for host, command in commands.items()]

    @contextlib.contextmanager
    def frozen(self, host: str) -> Iterator[None]:
        """Stop all of a host's processes for the block."""
        self._signal(host, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(host, signal.SIGCONT)

    async def stop(self) -> None:
        """Stop the services and then the bus, and kill what does not end."""
        self._stopping = True
        for hosts in (SERVICES, BUSES):
            for host in hosts:
                self._signal(host, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.gather(*(self._processes[host].wait() for host in hosts if host in self._processes))
        for host in (*SERVICES, *BUSES):
            self._signal(host, signal.SIGKILL)
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def bombus(self, *arguments: str) -> tuple[int, str]:
        """Run a `bombus` command on the hive's bus. Returns its exit code and what it has printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bombus", *arguments, "--nats", self.bus,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    def _signal(self, host: str, number: signal.Signals) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError):
            self._processes[host].send_signal(number)

    async def _keep(self, host: str, command: list[str]) -> None:
        clock = self._clocks.get(host, 0)
        wrong = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{clock:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **(wrong if clock else {})}
        with (self.folder / f"{host}.log").open("ab") as log:
            while not self._stopping:
                process = self._processes[host] = await asyncio.create_subprocess_exec(
                    *self._network.inside(host), *command, env=environment, cwd=EXAMPLES,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
                await process.wait()
                self.restarts += not self._stopping
                await asyncio.sleep(0 if self._stopping else RESTART_S)

    def _bus_command(self, host: str) -> list[str]:
        address = self._network.address(host)
        routes = ", ".join(f"nats-route://{self._network.address(each)}:6222" for each in BUSES)
        config = self.folder / f"{host}.conf"
        config.write_text(
            f"server_name: {host}\nlisten: {address}:4222\nmax_payload: 8MB\n"
            f'jetstream {{store_dir: "{self.folder / host}", max_file_store: 8GB}}\n'
            f"cluster {{name: hive, listen: {address}:6222, routes: [{routes}]}}\n"
        )
        return ["setpriv", "--pdeathsig", "KILL", str(find_server()), "--config", str(config)]

    def _services(self) -> Iterator[tuple[str, list[str]]]:
        def command(host: str, kind: str, *words: str) -> tuple[str, list[str]]:
            return host, [sys.executable, "-m", "bombus", kind, "--nats", self.bus, *words]

        yield command("coordinator", "coordinator", "--stream-replicas", "3", *SMALL)
        yield command("gateway", "gateway", "--host", "0.0.0.0", "--port", str(PORT), "--trusted-network")
        trainer = ("--threads", "1", "--weights-by", "objects", "--folder", str(self.folder / "engines"))
        yield command("trainer", "trainer", *trainer)
        for host in ("replica-1", "replica-2"):
            cache = ("--cache", str(self.folder / f"{host}-cache"))
            yield command(host, "inference", "--host", "0.0.0.0", "--threads", "1", "--replica", host, *cache)
        serve = ("serve", "guess_number:GuessNumber", "--host", "0.0.0.0", "--port", "8000", "--trusted-network")
        yield "environments", [sys.executable, "-m", "bombus", "env", *serve, "--nats", self.bus]
