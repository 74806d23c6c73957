"""`/metrics` of a coordinator."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Histogram, Metric

from bombus.bus import Bus, StreamState
from bombus.machine.metrics import SECONDS, exposition, family, of_bus


class CoordinatorMetrics:
    """What a coordinator counts, in all of its terms as leader."""

    def __init__(self) -> None:
        self.leading = False
        self.consumed = 0  # the inbox sequence up to which everything is decided
        self.messages = 0
        self.events = 0
        self.decisions = Histogram(
            "bombus_coordinator_decision_seconds",
            "From a group of messages to their events on the log.",
            registry=None,
            buckets=SECONDS,
        )

    async def exposed(self, bus: Bus, disk: Path | None) -> bytes:
        inbox = await of_bus(bus.state(bus.subjects.inbox_stream)) if self.leading else None
        return exposition(self.families(inbox, disk), self.decisions)

    def families(self, inbox: StreamState | None, disk: Path | None) -> Iterator[Metric]:
        size, _, free = shutil.disk_usage(disk) if disk else (None, None, None)
        lag = max(0, inbox.last_seq - self.consumed) if inbox else None
        for name, text, value in (
            ("coordinator_leading", "1 while this coordinator leads, 0 while it stands by.", self.leading),
            ("coordinator_messages_total", "Inbox messages that this coordinator has decided.", self.messages),
            ("coordinator_events_total", "Events that this coordinator has written.", self.events),
            ("coordinator_inbox_lag_messages", "Messages in the inbox that the leader has not decided.", lag),
            ("disk_size_bytes", "The size of the bus's disk, where `--watch-disk` names it.", size),
            ("disk_free_bytes", "What is free of it.", free),
        ):
            yield family(f"bombus_{name}", text, (), [] if value is None else [((), value)])
