"""Capacity for calls: how many are open, and whether their records will fit into the log (R9, R20)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bombus.bus import Bus
from bombus.errors import BombusError, Code, Refused
from bombus.hive.shares import has_share
from bombus.hive.state import Hive
from bombus.machine.hive_keys import KeyRing
from bombus_gateway.call.key_limits import KeyLimits
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

FILL_PERIOD_S = 2.0
SAMPLES = "samples/"
_BYTES_PER_SAMPLED_TOKEN = 8  # a token id and a logprob
_RECORD_BYTES = 2048  # all other fields, which have a fixed size


def record_bytes(body_bytes: int, new_tokens: int, sampled_tokens: int) -> int:
    """Return the maximum size of a call's record, given the number of bytes in its request and the numbers of new and
    sampled tokens."""
    return _RECORD_BYTES + 2 * body_bytes + 4 * new_tokens + (_BYTES_PER_SAMPLED_TOKEN + 8) * sampled_tokens


class CallCapacity:
    """Tracks how full the `calls` stream was when last checked, and how many bytes open calls may still add to it."""

    def __init__(
        self, bus: Bus, settings: GatewaySettings, hive: Callable[[], Hive], keys: KeyLimits | None = None
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._hive = hive
        self.keys = keys or KeyLimits(KeyRing(settings.keys))
        self._used = 0
        self._size = 0  # 0 if unknown or unlimited
        self.reserved = 0
        self._reserved: Counter[str] = Counter()  # the same bytes, by share
        self.open_calls = 0
        self._open: Counter[str] = Counter()  # the same calls, by share

    async def run(self) -> None:
        """Check how full the stream is from time to time, until cancelled."""
        while True:
            try:
                await self.refresh()
            except BombusError as error:  # a call that cannot be recorded is refused anyway
                log.warning("could not read how full the call log is", extra={"why": str(error)})
            await asyncio.sleep(FILL_PERIOD_S)

    async def refresh(self) -> None:
        state = await self._bus.state(self._bus.subjects.calls_stream)
        self._used, self._size = state.bytes, max(0, state.max_bytes)

    @contextmanager
    def open_sample(self, holder: str) -> Iterator[None]:
        """Count an open request for samples while the block runs. Raises `Refused`: OVERLOADED if too many requests are
        open, and QUOTA if the key has reached a limit.

        A key has separate shares for samples and for its episodes' calls, so that many samples do not block its calls.
        """
        share = f"{SAMPLES}{holder}"
        self._open_one(share, holder)
        try:
            yield
        finally:
            self._close_one(share, holder)

    def reserve(self, size: int, holder: str = "") -> None:
        """Reserve room for one call of `size` bytes until it is released. Raises `Refused`: OVERLOADED if there is no
        room, and QUOTA if the key has reached a limit.

        `holder` is the name of the share that the call's episode counts against.
        """
        self._check_room(size, holder)
        self._open_one(holder, holder)
        self._count(size, holder)

    def release(self, size: int, holder: str = "") -> None:
        """Release the room that was reserved for a call that has ended."""
        self._close_one(holder, holder)
        self._count(-size, holder)
        self._used += size  # until the stream is next checked

    @contextmanager
    def room(self, size: int, holder: str) -> Iterator[None]:
        """Reserve room for the record of samples while the block runs. Raises `Refused`: OVERLOADED if there is no
        room, and TOO_LARGE if the record might not fit into the log.

        A block that fails has stored nothing, so its room is not counted as used. Samples that wait for a replica
        reserve room anew at each of many attempts.
        """
        limit = self._bus.publisher.message_bytes_max
        if size > limit:
            why = f"The record of these samples could take {size} bytes, but the log accepts {limit}"
            raise Refused(Code.TOO_LARGE, f"{why}: ask for fewer samples, or fewer tokens.")
        self._check_room(size, holder)
        self._count(size, holder)
        try:
            yield
            self._used += size  # until the stream is next checked
        finally:
            self._count(-size, holder)

    def _check_room(self, size: int, holder: str) -> None:
        why = self._hive().why_no_calls(holder, size + self._reserved[holder])
        if why:
            raise Refused(Code.OVERLOADED, why)
        limit = self._settings.log_fill_max * self._size
        if self._size and self._used + self.reserved + size > limit:
            share = self._used / self._size
            raise Refused(
                Code.OVERLOADED,
                f"The log of calls is {share:.0%} full; calls are accepted again once the coordinator has trimmed it.",
            )

    def _count(self, size: int, holder: str) -> None:
        self.reserved += size
        self._reserved[holder] += size

    def _open_one(self, share: str, holder: str) -> None:
        limit = self._settings.open_calls_max
        if self.open_calls >= limit and not has_share(self._open, share, limit):
            raise Refused(
                Code.OVERLOADED,
                f"This gateway has {self.open_calls} calls open, and its limit is {limit}; try again in a moment.",
            )
        self.keys.enter(holder)
        self.open_calls += 1
        self._open[share] += 1

    def _close_one(self, share: str, holder: str) -> None:
        self.open_calls -= 1
        self._open[share] -= 1
        self.keys.leave(holder)
