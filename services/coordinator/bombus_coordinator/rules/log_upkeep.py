"""Put on the log what became of its compaction, so that every status shows it."""

from bombus.hive import events as ev
from bombus.hive.inbox import CompactionTried
from bombus.hive.state import Hive
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.live import Live


def tried(hive: Hive, live: Live, message: CompactionTried) -> Decisions:
    """Note that the log was compacted, or why it was not, unless that is known already."""
    if message.why:
        if message.why != hive.uncompacted:
            yield Decision(events=(ev.CompactionFailed(at_ns=live.now_ns, why=message.why),))
    elif message.below or hive.uncompacted:
        yield Decision(events=(ev.LogCompacted(at_ns=live.now_ns, below=message.below),))
