"""`/metrics` of a coordinator."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from bombus.bus import Bus
from bombus.machine.metrics import Declared, Histogram, Metric, MetricValue, of_bus

DECLARED: Declared = {
    "bombus_coordinator_leading": Metric("1 while this coordinator leads, 0 while it stands by."),
    "bombus_coordinator_messages_total": Metric("Inbox messages that this coordinator has decided."),
    "bombus_coordinator_events_total": Metric("Events that this coordinator has written."),
    "bombus_coordinator_decision_seconds": Metric("From a group of messages to their events on the log.", (), True),
    "bombus_coordinator_inbox_lag_messages": Metric("Messages in the inbox that the leader has not decided."),
    "bombus_disk_size_bytes": Metric("The size of the bus's disk, where `--watch-disk` names it."),
    "bombus_disk_free_bytes": Metric("What is free of it."),
}


class CoordinatorMetrics:
    """What a coordinator counts, in all of its terms as leader."""

    def __init__(self) -> None:
        self.leading = False
        self.consumed = 0  # the inbox sequence up to which everything is decided
        self.messages = 0
        self.events = 0
        self.decisions = Histogram()

    async def values(self, bus: Bus, disk: Path | None) -> list[MetricValue]:
        found: list[MetricValue] = [
            ("bombus_coordinator_leading", (), float(self.leading)),
            ("bombus_coordinator_messages_total", (), self.messages),
            ("bombus_coordinator_events_total", (), self.events),
            ("bombus_coordinator_decision_seconds", (), self.decisions),
        ]
        if disk is not None:
            usage = shutil.disk_usage(disk)
            found.append(("bombus_disk_size_bytes", (), usage.total))
            found.append(("bombus_disk_free_bytes", (), usage.free))
        return [*found, *(await of_bus(self._lag(bus)) if self.leading else ())]

    async def _lag(self, bus: Bus) -> Iterable[MetricValue]:
        last = (await bus.state(bus.subjects.inbox_stream)).last_seq
        return [("bombus_coordinator_inbox_lag_messages", (), max(0, last - self.consumed))]
