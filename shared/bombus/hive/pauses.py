"""The total time for which coordinators have led the hive. Deadlines count only this time (R5)."""

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

TICK_NS = 1_000_000_000  # the interval between a leader's ticks, and the time that each tick accounts for
LATE_NS = 2_000_000_000  # a longer interval between two ticks means that no coordinator led in between
PAUSES_KEPT = 1_000  # a deadline that began before the oldest of these counts only from the end of that pause


class Pause(msgspec.Struct, frozen=True, array_like=True):
    """A period without a leader, which ended at `until_ns`. By then, the hive had been led for `led_ns` in all."""

    until_ns: int = 0
    led_ns: int = 0


def led_ns(pauses: Sequence[Pause], at_ns: int) -> int:
    """Return how long in all the hive had been led by `at_ns`. Only differences between two results are meaningful."""
    after = bisect_right(pauses, at_ns, key=lambda pause: pause.until_ns)
    before = pauses[after - 1] if after else Pause()
    led = before.led_ns + at_ns - before.until_ns
    return min(led, pauses[after].led_ns) if after < len(pauses) else led


def note_pause(pauses: list[Pause], since_ns: int, until_ns: int) -> None:
    """Append a pause, and drop the oldest beyond `PAUSES_KEPT`."""
    pauses.append(Pause(until_ns, led_ns(pauses, since_ns)))
    del pauses[:-PAUSES_KEPT]
