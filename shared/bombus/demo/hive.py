"""A hive that runs for the duration of a demo: `bombus up` as a child process."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.errors import BombusError
from bombus.machine.process import free_port, kill
from bombus.private import private_folder
from bombus.terminal import say

READY_S = 180.0
STOP_S = 60.0


class HiveFailed(BombusError):
    """The hive did not start. The message includes the end of its log."""


@asynccontextmanager
async def running(
    folder: Path, threads: int = 0, durability: str = "process", more: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Start a hive with its data under `folder` and `more` options of `bombus up`, and yield its URL. Then stop it and
    wait until it has exited.

    Raises `HiveFailed` if the hive is not ready in time. Its log is `folder/hive.log`.
    """
    private_folder(folder)
    port = free_port()
    command = [sys.executable, "-m", "bombus", "up", "--port", str(port), "--data-dir", str(folder / "hive")]
    command += ["--threads", str(threads), "--durability", durability, *more]
    log_path = folder / "hive.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "BOMBUS_PARENT": str(os.getpid())},
            start_new_session=True,
        )
    try:
        yield await _url(process, log_path)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                kill(process)
                await process.wait()


async def _url(process: asyncio.subprocess.Process, log_path: Path) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            while line := await process.stdout.readline():
                if line.startswith(b"the page is at "):
                    say(line.decode().strip())
                if line.startswith(b"ready "):
                    return line.split()[1].decode()
    except TimeoutError:
        pass
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
    raise HiveFailed(f"the hive did not start; {log_path} ends with:\n{tail}")
