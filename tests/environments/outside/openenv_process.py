"""OpenEnv's server as a process of the tests."""

import asyncio
import sys
from pathlib import Path
from typing import Self

import httpx

from bombus.machine.process import free_port
from tests.patience import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs/openenv_server.py"


class OpenEnvProcess:
    def __init__(self, cap: int = 8, timeout_s: float = 0, kind: str = "counter") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = [str(self.port), str(cap), str(timeout_s), kind]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), *self._flags)
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as http:
            while True:
                try:
                    await http.get(f"{self.url}/health")
                except httpx.HTTPError:
                    assert self._process.returncode is None, "OpenEnv's server ended at its start"
                    await asyncio.sleep(0.05)
                else:
                    return self

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
