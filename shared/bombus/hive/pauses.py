"""The time in which a leader was at work, which is what deadlines of work count (R5)."""

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

TICK_NS = 1_000_000_000  # a leader sends a tick so often, and each shows that it leads for so long
LATE_NS = 2_000_000_000  # a tick that comes so long after the one before was late: no coordinator led in between
PAUSES_KEPT = 1_000  # deadlines that began before these count from the end of the first of them


class Pause(msgspec.Struct, frozen=True, array_like=True):
    """A time without a leader, which ended at `until_ns`. The hive had been led for `led_ns` by then."""

    until_ns: int = 0
    led_ns: int = 0


def led_ns(pauses: Sequence[Pause], at_ns: int) -> int:
    """Return for how long the hive had been led at `at_ns`. Only differences of it mean something."""
    after = bisect_right(pauses, at_ns, key=lambda pause: pause.until_ns)
    before = pauses[after - 1] if after else Pause()
    led = before.led_ns + at_ns - before.until_ns
    return min(led, pauses[after].led_ns) if after < len(pauses) else led


def note_pause(pauses: list[Pause], since_ns: int, until_ns: int) -> None:
    """Add a pause to those before it. The oldest are forgotten beyond `PAUSES_KEPT`."""
    pauses.append(Pause(until_ns, led_ns(pauses, since_ns)))
    del pauses[:-PAUSES_KEPT]
