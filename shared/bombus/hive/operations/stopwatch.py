"""A stopwatch in the state of the fold, so that every leader and every replay read the same time from it."""

import msgspec


class Stopwatch(msgspec.Struct, kw_only=True):
    """Counts the time between events that start it and events that stop it."""

    ran_ns: int = 0  # the total when it was last stopped
    since_ns: int = 0  # when it was started, 0 while it is stopped

    def run(self, is_on: bool, at_ns: int) -> None:
        """Start or stop it. Idempotent."""
        if is_on and not self.since_ns:
            self.since_ns = at_ns
        elif not is_on:
            self.ran_ns, self.since_ns = self.shows(at_ns), 0

    def shows(self, now_ns: int) -> int:
        """Return how long it has run in total."""
        return self.ran_ns + (max(0, now_ns - self.since_ns) if self.since_ns else 0)
