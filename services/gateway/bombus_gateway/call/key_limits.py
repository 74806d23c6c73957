"""The limits of client keys on their model calls: how many a second, how many at a time, and their tokens and bytes.

Each gateway counts for itself. Tokens and bytes are counted once a call is over, so one call may exceed what is left,
and the calls after it wait until that is made up for.
"""

import math
import time
from collections.abc import Callable

from bombus.machine.hive_keys import KeyRing, NamedKey
from bombus_gateway.refusals import RateLimited

RETRY_S_MAX = 60.0  # clients of OpenAI take no longer time from a refusal
_MINUTE_S = 60.0


class _Bucket:
    """A token bucket. `level` may be below zero."""

    __slots__ = ("filled_at", "level")

    def __init__(self, size: float, now: float) -> None:
        self.level = size
        self.filled_at = now

    def fill(self, per_s: float, size: float, now: float) -> float:
        """Return the level at `now`."""
        self.level = min(size, self.level + (now - self.filled_at) * per_s)
        self.filled_at = now
        return self.level


class KeyUse:
    """What one key uses of its limits."""

    def __init__(self, name: str, limits: NamedKey, now: float) -> None:
        self.limits = limits
        self._name = name
        self._open = 0
        self._calls = _Bucket(_burst(limits), now)
        self._tokens = _Bucket(limits.tokens_per_minute_max, now)
        self._bytes = _Bucket(limits.bytes_per_minute_max, now)
        self._next_free = 0.0  # the first time at which no refused call was told to try again

    def enter(self, now: float) -> None:
        """Count a call until `leave`. Raises `RateLimited` if a limit is reached."""
        limits = self.limits
        if limits.calls_open_max and self._open >= limits.calls_open_max:
            raise self._refusal(f"{self._open} calls open, and may have {limits.calls_open_max}", 1.0)
        for what, most, bucket in (
            ("tokens", limits.tokens_per_minute_max, self._tokens),
            ("bytes", limits.bytes_per_minute_max, self._bytes),
        ):
            if most and (level := bucket.fill(most / _MINUTE_S, most, now)) <= 0:
                raise self._refusal(f"used up its {most} {what} a minute", (1 - level) * _MINUTE_S / most)
        if limits.calls_per_s_max:
            if self._calls.fill(limits.calls_per_s_max, _burst(limits), now) < 1:
                why = f"made more than {limits.calls_per_s_max:g} calls a second"
                raise self._refusal(why, self._next_turn(now))
            self._calls.level -= 1
        self._open += 1

    def leave(self) -> None:
        self._open = max(0, self._open - 1)  # a call that was already open when the key got its limits was not counted

    def charge(self, tokens: int, size: int, now: float) -> None:
        # They are filled first, since what does not fit into a full bucket is lost.
        for bucket, most, used in (
            (self._tokens, self.limits.tokens_per_minute_max, tokens),
            (self._bytes, self.limits.bytes_per_minute_max, size),
        ):
            bucket.fill(most / _MINUTE_S, most, now)
            bucket.level -= used

    def _next_turn(self, now: float) -> float:
        """Return in how many seconds a refused call should be sent again. Each gets a time of its own, so that not all
        of them come back at once and most are refused again."""
        per_s = self.limits.calls_per_s_max
        turn = max(self._next_free, now + (1 - self._calls.level) / per_s)
        self._next_free = min(turn + 1 / per_s, now + RETRY_S_MAX)
        return turn - now

    def _refusal(self, why: str, wait_s: float) -> RateLimited:
        wait = max(1, math.ceil(min(wait_s, RETRY_S_MAX)))
        return RateLimited(f"Key {self._name} has {why} at this gateway: try again in {wait} s.", wait)


class KeyLimits:
    """The use of all keys that have limits on their calls."""

    def __init__(self, ring: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._used: dict[str, KeyUse] = {}

    def enter(self, holder: str) -> None:
        """Count a call of a key's holder until `leave`. Raises `RateLimited` if the key has reached a limit."""
        use = self._use_of(holder)
        if use is not None:
            use.enter(self._clock())

    def leave(self, holder: str) -> None:
        use = self._use_of(holder)
        if use is not None:
            use.leave()

    def charge(self, holder: str, tokens: Callable[[], int], size: int) -> None:
        """Count the tokens and bytes of a call that is over."""
        use = self._use_of(holder)
        if use is not None:
            use.charge(tokens(), size, self._clock())

    def _use_of(self, holder: str) -> KeyUse | None:
        limits = self._ring.keys.clients.get(holder)
        if limits is None or not limits.limits_calls:
            if self._used:
                self._used.pop(holder, None)
            return None
        use = self._used.get(holder)
        if use is None:
            use = self._used[holder] = KeyUse(holder, limits, self._clock())
        use.limits = limits  # which may have been read again
        return use


def _burst(limits: NamedKey) -> float:
    """Return how many calls a key may make at once, after it made none for a while."""
    return max(1.0, limits.calls_per_s_max)
