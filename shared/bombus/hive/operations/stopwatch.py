"""A stopwatch in the state of the fold, so that every leader and every replay reads the same time from it."""

import msgspec


class Stopwatch(msgspec.Struct, kw_only=True):
    """Measures the time between the events that start it and the events that stop it."""

    ran_ns: int = 0  # the total when the stopwatch was last stopped
    since_ns: int = 0  # when the stopwatch was started, or 0 while it is stopped

    def run(self, is_on: bool, at_ns: int) -> None:
        """Start or stop the stopwatch. Repeating either changes nothing."""
        if is_on and not self.since_ns:
            self.since_ns = at_ns
        elif not is_on:
            self.ran_ns, self.since_ns = self.shows(at_ns), 0

    def shows(self, now_ns: int) -> int:
        """Return how long the stopwatch has run in total."""
        return self.ran_ns + (max(0, now_ns - self.since_ns) if self.since_ns else 0)
