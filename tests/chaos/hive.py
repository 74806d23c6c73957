"""A hive of real processes on one data folder: started, killed as a whole, started again, and stopped in order."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from bombus.machine.process import PARENT_VARIABLE, free_port
from tests.chaos.engines import cluster
from tests.chaos.releases import Releases

READY_S = 240.0
GONE_S = 20.0
STOP_S = 90.0


class RunningHive:
    """`bombus up`, whose data is below `folder` and whose log is `log`. Its address stays the same when it restarts.

    With `releases`, its processes run two releases of bombus.
    """

    def __init__(self, folder: Path, broken_replica: bool, releases: Releases | None = None) -> None:
        self.releases = releases
        self.data = folder / "data"
        self.log = folder / "up.log"
        self._file = folder / "cluster.yaml"
        self._cache = folder / "cache"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._file.write_text(json.dumps(cluster(port, self.data, broken_replica), indent=2))
        self._process: asyncio.subprocess.Process | None = None
        released = {} if releases is None else releases.environment
        self._environment = {**os.environ, **released, "BOMBUS_CACHE": str(self._cache)}

    @property
    def bus(self) -> str:
        return (self.data / "nats-url").read_text().strip()

    def children(self) -> list[psutil.Process]:
        """Return the processes that the supervisor has started."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children()

    async def start(self) -> None:
        """Start all processes. Returns once the hive is ready, or raises `AssertionError`."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bombus", "up", "--config", str(self._file),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
            )  # fmt: skip
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"ready "):
                        return
        raise AssertionError(f"the hive did not come up:\n{self.log.read_text()[-4000:]}")

    async def kill(self) -> int:
        """Kill the supervisor and everything below it at once, and return how many processes that were."""
        assert self._process is not None
        supervisor = psutil.Process(self._process.pid)
        everything = [supervisor, *supervisor.children(recursive=True)]
        for process in everything:  # the supervisor first: it must not restart any of the others
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        async with asyncio.timeout(GONE_S):
            while any(map(_runs, everything)):
                await asyncio.sleep(0.05)
        return len(everything)

    async def stop(self) -> None:
        """Stop the hive in order; kill what is left of it."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def bombus(self, *arguments: str) -> tuple[int, str]:
        """Run a `bombus` command on the hive's data. Returns its exit code and what it has printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bombus", *arguments, "--data", str(self.data),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self._environment,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
