"""A backend that is a process with its own HTTP port, such as a simulator of a cloud."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping

import httpx

from bombus.environments.backends.folders import BackendFolder
from bombus.environments.backends.listening import listens
from bombus.environments.kinds import SandboxLost
from bombus.errors import in_one_line
from bombus.machine.certificates import certificates
from bombus.machine.process import die_with_this_process, free_port, kill

START_S = 30.0
POLL_S = 0.02
CALL_S = 10.0
HOST = "127.0.0.1"


class SimulatorProcess:
    """A child process that serves HTTP on one port.

    It is healthy while a GET of `health` succeeds, and a POST to `reset` resets it. `port` 0 means any free port. The
    process has its own folder for the files that it writes, and is killed when this process ends, for whatever reason.
    """

    def __init__(self, command: list[str], *, health: str, reset: str, port: int, port_variable: str) -> None:
        self.address = ""
        self._command = command
        self._health = health
        self._reset = reset
        self._port = port
        self._port_variable = port_variable
        self._process: asyncio.subprocess.Process | None = None
        self._folder: BackendFolder | None = None
        self._http: httpx.AsyncClient | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process, and wait until it is healthy. Raises `SandboxLost`."""
        port = self._port or free_port()
        self.address = f"http://{HOST}:{port}"
        if self._port and not is_free(port):
            raise SandboxLost(f"port {port} is in use: stop the program that uses it, or choose another base port")
        self._folder = BackendFolder("simulator")
        checks = certificates(False)
        self._http = httpx.AsyncClient(base_url=self.address, timeout=CALL_S, trust_env=False, verify=checks)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._variables(port, self._folder.path),
            cwd=self._folder.path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_this_process(),
        )
        try:
            async with asyncio.timeout(START_S):
                # By now, another program may have bound the port, and may answer the health check as well.
                while not (await self.is_healthy() and listens(self._process.pid, port)):
                    if self._process.returncode is not None:
                        raise SandboxLost(f"{self._named()} exited with code {self._process.returncode} while starting")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise SandboxLost(f"{self._named()} was not healthy after {START_S:.0f} s") from error

    async def is_healthy(self) -> bool:
        if self._http is None or self._process is None or self._process.returncode is not None:
            return False
        try:
            return (await self._http.get(self._health)).is_success
        except httpx.HTTPError:
            return False

    async def scrub(self) -> None:
        """Make the process discard all its state. Raises `SandboxLost`."""
        if self._http is None:
            raise SandboxLost(f"{self._named()} is not running")
        try:
            (await self._http.post(self._reset)).raise_for_status()
        except httpx.HTTPError as error:
            raise SandboxLost(f"{self._named()} could not be reset: {in_one_line(error)}") from error

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            kill(process)
            await process.wait()
        if self._http is not None:
            await self._http.aclose()
        if self._folder is not None:
            await self._folder.remove()
        self._http, self._folder = None, None

    def _named(self) -> str:
        return f"the simulator {' '.join(self._command[-2:])} at {self.address}"

    def _variables(self, port: int, folder: str) -> Mapping[str, str]:
        return {**os.environ, self._port_variable: str(port), "BIND_HOST": HOST, "TMPDIR": folder, "S3_PERSIST": "0"}


def ministack(number: int, base_port: int, python: str = sys.executable) -> SimulatorProcess:
    """Return MiniStack, an AWS simulator, at port `base_port + number`, or at any free port if `base_port` is 0."""
    return SimulatorProcess(
        [python, "-m", "ministack"],
        health="/_ministack/health",
        reset="/_ministack/reset",
        port=base_port + number if base_port else 0,
        port_variable="GATEWAY_PORT",
    )


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return True
    return False
