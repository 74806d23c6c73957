"""The process of the AWS command line in namespaces of its own, where the kernel allows it.

It sees the programs of this machine, read-only, a home in memory, no other process, and of the network one port, which
is the simulator's: this process accepts what connects to it there, and passes it on.
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from bombus.environments.backends.shell import NAMESPACES
from bombus.host.process import die_with_this_process, kill

SETUP = Path(__file__).with_name("isolation.sh")
LOOPBACK = Path(__file__).with_name("loopback.py")
START_S = 20.0
CHUNK_BYTES = 64 * 1024
LINE_BYTES_MAX = 16 << 20
WORKER = ("-P", "-s", "-m", "bombus.tasks.aws.worker")
HOME, CONFIG = "/bombus/home", "/bombus/config"  # inside

log = logging.getLogger("bombus")


class IsolatedWorker:
    """The process, and the door through which it reaches the simulator. `process` is None where it is not made."""

    def __init__(self, folder: Path, address: str) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._folder = folder
        self._host, self._port = urlsplit(address).hostname or "", urlsplit(address).port or 80
        self._door: asyncio.Server | None = None

    async def start(self, config: Path, variables: Mapping[str, str]) -> bool:
        """Start the process. Return whether that worked; a line in the log says why it did not, once."""
        if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("setpriv") is None:
            _warn("that needs Linux, with `unshare` and `setpriv` (package util-linux)")
            return False
        root, errors = self._folder / "root", self._folder / "errors"
        root.mkdir(exist_ok=True)
        inside, outside = socket.socketpair()
        with outside:
            outside.settimeout(START_S)
            with inside, errors.open("wb") as said:
                self.process = await asyncio.create_subprocess_exec(
                    "unshare",
                    *NAMESPACES,
                    "/bin/sh",
                    "-c",
                    SETUP.read_text(),
                    "isolation",
                    *map(str, (root, config, sys.executable, LOOPBACK, self._port, inside.fileno())),
                    *_folders(),
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
        self._door = await asyncio.start_server(self._pass_on, sock=listening)
        return True

    async def close(self) -> None:
        """End the process, and close its door. Closing again does nothing."""
        process, self.process = self.process, None
        door, self._door = self._door, None
        if door is not None:
            door.close()
        if process is not None and process.returncode is None:
            kill(process)
            await process.wait()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either side may be gone, which the other one sees
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


def import_path() -> str:
    """Return where the process finds what it imports."""
    return ":".join(map(str, _sites()))


def _sites() -> list[Path]:
    """Return the folder that holds our package, and those of what it needs, whichever way they were installed."""
    found = [find_spec(name) for name in ("awscli", "botocore", "msgspec")]
    sites = [Path(spec.origin).parent.parent for spec in found if spec is not None and spec.origin is not None]
    return list(dict.fromkeys([Path(__file__).parents[3], *sites]))


def _folders() -> list[str]:
    """Return the folders that the process reads, parents before what is in them. Of our own tree only the package."""
    shown = {str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix, *map(str, _sites()[1:])}
    return sorted(shown)


def _received(outside: socket.socket) -> socket.socket | None:
    """Wait for the socket that listens in the namespace. None when it does not come."""
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
        "the AWS command line runs without namespaces of its own (%s): what models may call is still a fixed list, but "
        "nothing else holds it",
        why,
    )
