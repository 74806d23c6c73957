"""A watchdog that speaks systemd's protocol: it ends a process that stops reporting that its event loop runs.

`bombus up` keeps a watchdog for each trainer, and systemd keeps one for any service with `WatchdogSec=`. A process that
is stopped or hangs as a whole cannot end itself.
"""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

log = logging.getLogger(__name__)

SOCKET, PERIOD, PROCESS = VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
ALIVE = b"WATCHDOG=1"
BEAT_S = 5.0
LOOK_S = 1.0
START_S = 600.0  # time until the first report: a process imports its packages first


async def keep_alive() -> None:
    """Report that this event loop runs, until cancelled. Does nothing unless a supervisor has asked for reports."""
    address, period_us = os.environ.get(SOCKET, ""), os.environ.get(PERIOD, "")
    if not address or not period_us.isdecimal():
        return
    place = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            try:
                sender.sendto(ALIVE, place)
            except OSError as error:  # the supervisor's buffer is full, or it has died: then this process ends soon
                log.debug("the supervisor could not be notified: %s", error)
            await asyncio.sleep(min(BEAT_S, int(period_us) / 1e6 / 4))


class Watchdog:
    """Monitors one process. Only time in which our own event loop ran counts, since this process may have been stopped
    too."""

    def __init__(self, listener: socket.socket, limit_s: float, start_s: float) -> None:
        self.limit_s = limit_s
        self._listener = listener
        self._silent_s = 0.0
        self._left_s = max(limit_s, start_s)

    @property
    def environment(self) -> Mapping[str, str]:
        return {SOCKET: self._listener.getsockname(), PERIOD: str(int(self.limit_s * 1e6))}

    async def until_silent(self) -> None:
        """Return once the process has been silent for too long."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._heard)
        pause_s = min(LOOK_S, self.limit_s / 4)
        try:
            while self._silent_s < self._left_s:
                before_s = monotonic()
                await asyncio.sleep(pause_s)
                self._silent_s += min(monotonic() - before_s, 2 * pause_s)
        finally:
            loop.remove_reader(self._listener)

    def _heard(self) -> None:
        self._listener.recv(1024)
        self._silent_s, self._left_s = 0.0, self.limit_s


@contextmanager
def watchdog(limit_s: float, start_s: float = START_S) -> Iterator[Watchdog]:
    """Yield a watchdog whose socket only this user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="bombus-"))  # a socket's path may have at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.setblocking(False)
            listener.bind(str(folder / "alive"))
            yield Watchdog(listener, limit_s, start_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
