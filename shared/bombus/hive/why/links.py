"""What chains are built from: links, the newest events of a log, and a view of a hive at a given time."""

import msgspec

from bombus.figures import duration, seconds_between
from bombus.hive.events import AnyEvent, EpochOpened, Event, LeadingPaused
from bombus.hive.events.common import HIVE
from bombus.hive.fold.handlers import EventT
from bombus.hive.pauses import LATE_NS, TICK_NS, led_ns
from bombus.hive.state import Hive

SECOND = 1_000_000_000
OVERDUE_NS = LATE_NS + TICK_NS  # time within which a leader acts on a deadline
AWAY_NS = 4 * SECOND  # a longer pause means over 5 s between two ticks, of which one second is normal
OPERATOR, CLIENT, COORDINATOR, TIME, NOBODY = "the operator", "a client", "a coordinator", "time", "nobody"


class ChainLink(msgspec.Struct, frozen=True):
    """One sentence that says who or what waits, and for what. `who` names the party that can end the wait.

    The wait began at `since_ns`, and time alone ends it at `until_ns`. Either is 0 if the log does not say.
    """

    what: str
    who: str
    since_ns: int = 0
    until_ns: int = 0


class LastEvents(msgspec.Struct):
    """The newest event of each kind for each engine. It is kept because the state alone does not have all the times and
    reasons in these events.

    `anew_ns` is the last time at which silence began to be counted from zero (R5), because of a new leader or a long
    pause.
    """

    found: dict[tuple[str, str], AnyEvent] = {}
    anew_ns: int = 0

    def note(self, event: AnyEvent, stored_ns: int = 0) -> None:
        """Note an event that was stored at `stored_ns`. That time is needed for a new epoch, whose `at_ns` is the
        previous event's."""
        self.found[event.engine, type(event).__name__] = event
        if isinstance(event, EpochOpened) or (
            isinstance(event, LeadingPaused) and event.at_ns - event.since_ns > AWAY_NS
        ):
            self.anew_ns = max(event.at_ns, stored_ns)

    def of(self, kind: type[EventT], engine: str = HIVE) -> EventT | None:
        found = self.found.get((engine, kind.__name__))
        return found if isinstance(found, kind) else None

    def at_ns(self, kind: type[Event], engine: str = HIVE) -> int:
        """Return the time of the newest event of a kind, or 0 if the log has none."""
        found = self.of(kind, engine)
        return 0 if found is None else found.at_ns


class View(msgspec.Struct, frozen=True):
    """A hive at the time `now_ns`, the newest events of its log, and the time `led_ns` until which it was led."""

    hive: Hive
    now_ns: int
    last: LastEvents
    led_ns: int

    def ago(self, at_ns: int) -> str:
        return f"{duration(seconds_between(at_ns, self.now_ns))} ago"

    def lasting(self, since_ns: int) -> str:
        """Return ` for 14 m 02 s`, or "" if the starting time is unknown."""
        return f" for {duration(seconds_between(since_ns, self.now_ns))}" if since_ns else ""

    def left(self, until_ns: int) -> str:
        """Return the time until a deadline, such as `in 10 s`. If the deadline has passed, return `now`, since the next
        tick acts on it."""
        return f"in {duration(seconds_between(self.now_ns, until_ns))}" if until_ns > self.now_ns else "now"

    def deadline_ns(self, since_ns: int, limit_s: float) -> int:
        """Return when work that began at `since_ns` will have used up its limit. Only time with a leader counts
        (R5)."""
        pauses = self.hive.pauses
        used_ns = led_ns(pauses, self.led_ns) - led_ns(pauses, min(since_ns, self.led_ns))
        return self.now_ns + int(limit_s * SECOND) - used_ns
