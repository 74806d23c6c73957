"""Environment servers for tests: in this process, and as a process that can be killed and stopped."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import httpx

from bombus.environments.backends.kinds import RealBackend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.serving.server import EnvironmentServer, environment_server
from bombus.environments.serving.settings import ServingSettings
from bombus.environments.serving.sources import ClassSource
from bombus.machine.host_names import OwnHostNames
from bombus.machine.process import listen
from tests.environments.serving.small_served import Counter
from tests.patience import PATIENCE_S


@contextlib.asynccontextmanager
async def served(
    make: Callable[..., Any] = Counter, backends: BackendPool | RealBackend | None = None, **settings: Any
) -> AsyncIterator[tuple[EnvironmentServer, str]]:
    """Serve a class in this process. Yields the server and its URL."""
    bound = listen("127.0.0.1", 0)
    names = OwnHostNames("127.0.0.1")
    server = EnvironmentServer(ServingSettings(**settings), ClassSource(make, backends), names)
    async with environment_server(server, bound):
        yield server, f"http://127.0.0.1:{bound.getsockname()[1]}"


class ServerProcess:
    """`bombus env serve` in a process of its own."""

    def __init__(self, *flags: str, path: str = "tests.environments.serving.small_served:Counter") -> None:
        self._command = [sys.executable, "-m", "bombus", "env", "serve", path, *flags]
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, port: int = 0) -> Self:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, "--port", str(port), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("ready "), line
        self.url = line.split()[1]
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal that ends it, and return the exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
            if number != signal.SIGKILL:
                self._process.send_signal(signal.SIGCONT)
        return await self._process.wait()

    async def counts(self) -> dict[str, int]:
        async with httpx.AsyncClient(base_url=self.url) as http:
            found = (await http.get("/health")).json()
        return {name: found[name] for name in ("slots", "leased", "waiting")}

    async def until_leased(self, leased: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.counts())["leased"] != leased:
                await asyncio.sleep(0.02)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.end()


class CutLine:
    """A line to a server that can be cut: then bytes go nowhere, and no connection is closed."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self.url = ""

    def cut(self) -> None:
        self._whole.clear()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, to_them), (theirs, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, target)))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(4096):
                await self._whole.wait()
                target.write(chunk)
        await self._whole.wait()
        target.close()
