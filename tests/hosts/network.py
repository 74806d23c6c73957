"""Hosts as network namespaces, and the switch between them, which delays, loses and cuts what they send.

The switch is a thread of this process that carries the frames of one TAP device for each host, so that each direction
between two hosts has faults of its own. It needs root, /dev/net/tun and `ip` (Debian's iproute2).
"""

import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MTU = 16_000
_NET = "10.77.0"
_EVERYBODY = b"\xff" * 6
OURS = "here"  # the host of this process


class Network:
    """Connects `hosts` and this process while the block runs."""

    def __init__(self, hosts: Sequence[str], seed: int) -> None:
        self.hosts = (*hosts, OURS)
        self.delay_s = 0.0  # between any two hosts, one way
        self.loss = 0.0  # the share of frames that are lost
        self._cut: set[tuple[str, str]] = set()
        self._random = random.Random(seed)
        self._taps: dict[str, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []  # by time: frames, and the tap that gets each
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._switch = threading.Thread(target=self._carry, name="switch")

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self._remove()
            raise
        self._switch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._switch.join()
        self._remove()

    def address(self, host: str) -> str:
        return f"{_NET}.{self.hosts.index(host) + 1}"

    def inside(self, host: str) -> list[str]:
        """Return the words before a command that run it on a host."""
        return ["ip", "netns", "exec", _namespace(host)]

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Lose from now on all that any of `senders` sends to any of `receivers`."""
        self._cut |= set(itertools.product(senders, receivers))

    def heal(self) -> None:
        self._cut, self.delay_s, self.loss = set(), 0.0, 0.0

    # ---- hosts ----

    def _add(self, host: str) -> None:
        device = f"bb{os.getpid() % 100_000}-{self.hosts.index(host)}"
        self._taps[host] = tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
        place: list[str] = []
        if host != OURS:
            _ip("netns", "add", _namespace(host))
            _ip("link", "set", device, "netns", _namespace(host))
            place = ["-n", _namespace(host)]
            _ip(*place, "link", "set", "lo", "up")
        # The last byte of a host's hardware address is its number, by which the switch knows the receiver of a frame.
        hardware = f"02:00:00:00:00:{self.hosts.index(host):02x}"
        _ip(*place, "link", "set", device, "address", hardware, "mtu", str(_MTU), "up")
        _ip(*place, "address", "add", f"{self.address(host)}/24", "dev", device)

    def _remove(self) -> None:
        for host, tap in self._taps.items():
            os.close(tap)  # and with it the device
            if host != OURS:
                _ip("netns", "delete", _namespace(host), check=False)

    # ---- the switch, in its thread ----

    def _carry(self) -> None:
        with selectors.DefaultSelector() as ready:
            for host, tap in self._taps.items():
                ready.register(tap, selectors.EVENT_READ, host)
            while not self._stopping.is_set():
                wait_s = self._late[0][0] - time.monotonic() if self._late else 0.1
                for key, _ in ready.select(max(0.0, min(0.1, wait_s))):
                    self._read(key.data, key.fd)
                while self._late and self._late[0][0] <= time.monotonic():
                    self._deliver(*heapq.heappop(self._late)[2:])

    def _read(self, sender: str, tap: int) -> None:
        with suppress(BlockingIOError):
            while frame := os.read(tap, _MTU + 64):
                everybody = frame[0] & 1  # broadcast and multicast
                for receiver in self.hosts if everybody else self.hosts[frame[5] : frame[5] + 1]:
                    if receiver != sender and (sender, receiver) not in self._cut:
                        self._send(self._taps[receiver], frame)

    def _send(self, tap: int, frame: bytes) -> None:
        if self.loss and self._random.random() < self.loss:
            return
        if self.delay_s:
            heapq.heappush(self._late, (time.monotonic() + self.delay_s, next(self._numbers), tap, frame))
        else:
            self._deliver(tap, frame)

    def _deliver(self, tap: int, frame: bytes) -> None:
        with suppress(OSError):  # a full queue loses frames, as a real switch does
            os.write(tap, frame)


def _namespace(host: str) -> str:
    return f"bombus-{os.getpid()}-{host}"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)
