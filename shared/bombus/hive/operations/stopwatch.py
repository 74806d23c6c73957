"""Time that counts only while something holds, as a fact of the fold: the same for each leader, and when replayed."""

import msgspec


class Stopwatch(msgspec.Struct, kw_only=True):
    """Runs from one event to another, and continues where it stopped."""

    ran_ns: int = 0  # what it showed when it was stopped last
    since_ns: int = 0  # when it was started, 0 while it stands still

    def run(self, is_on: bool, at_ns: int) -> None:
        """Start or stop it. Idempotent."""
        if is_on and not self.since_ns:
            self.since_ns = at_ns
        elif not is_on:
            self.ran_ns, self.since_ns = self.shows(at_ns), 0

    def shows(self, now_ns: int) -> int:
        """Return for how long it has run in all."""
        return self.ran_ns + (max(0, now_ns - self.since_ns) if self.since_ns else 0)
