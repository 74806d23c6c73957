"""Runs the AWS command line's process in separate namespaces, if the kernel allows it.

The isolated process sees this machine's programs (read-only), a home in memory, no other processes, and one network
port, the simulator's: our own process accepts the connections to that port and forwards them.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from bombus.machine.process import die_with_this_process, kill
from bombus.tasks.isolation import CONFIG, HOME, isolated, why_no_isolation

LOOPBACK = Path(__file__).with_name("loopback.py")
START_S = 20.0
CHUNK_BYTES = 64 * 1024
LINE_BYTES_MAX = 16 << 20
WORKER = ("-P", "-s", "-m", "bombus.tasks.aws.worker")
PACKAGES = ("awscli", "botocore", "msgspec")

log = logging.getLogger("bombus")


class IsolatedWorker:
    """The isolated process, and the channel through which it reaches the simulator.

    `process` is None if it is not running.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._folder = folder
        self._host, self._port = urlsplit(address).hostname or "", urlsplit(address).port or 80
        self._channel: asyncio.Server | None = None

    async def start(self, config: Path, variables: Mapping[str, str]) -> bool:
        """Start the process, and return whether that succeeded. If not, the reason is logged once."""
        if why := why_no_isolation():
            _warn(why)
            return False
        root, errors = self._folder / "root", self._folder / "errors"
        root.mkdir(exist_ok=True)
        inside, outside = socket.socketpair()
        with outside:
            outside.settimeout(START_S)
            with inside, errors.open("wb") as said:
                loopback = ["-I", "-S", *map(str, (LOOPBACK, self._port, inside.fileno()))]
                self.process = await asyncio.create_subprocess_exec(
                    *isolated(root, config, WORKER, PACKAGES, before=loopback),
                    env={**variables, "HOME": HOME, "TMPDIR": HOME, "AWS_CONFIG_FILE": CONFIG},
                    cwd="/",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=said,
                    start_new_session=True,
                    preexec_fn=die_with_this_process(),
                    pass_fds=(inside.fileno(),),
                    limit=LINE_BYTES_MAX,
                )
            listening = await asyncio.to_thread(_received, outside)
        if listening is None:
            await self.close()
            _warn(" ".join(errors.read_text(errors="replace")[:300].split()) or "it did not start in time")
            return False
        self._channel = await asyncio.start_server(self._pass_on, sock=listening)
        return True

    async def close(self) -> None:
        """End the process, and close its channel. Closing again does nothing."""
        process, self.process = self.process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None and process.returncode is None:
            kill(process)
            await process.wait()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either side may be gone, and the other will notice that
            try:
                from_simulator, to_simulator = await asyncio.open_connection(self._host, self._port)
                try:
                    ways = [
                        asyncio.ensure_future(_copy(reader, to_simulator)),
                        asyncio.ensure_future(_copy(from_simulator, writer)),
                    ]
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
                finally:
                    to_simulator.close()
            finally:
                writer.close()


def _received(outside: socket.socket) -> socket.socket | None:
    """Return the socket that listens in the namespace, or None if it never arrives."""
    try:
        _, descriptors, _, _ = socket.recv_fds(outside, 1, 1)
    except OSError:
        return None
    return socket.socket(fileno=descriptors[0]) if descriptors else None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "the AWS command line runs without separate namespaces (%s): models may still call only a fixed list of "
        "commands, but nothing else confines it",
        why,
    )
