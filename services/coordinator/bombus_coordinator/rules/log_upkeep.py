"""Record on the log how its compaction went, whether the log has lost its end, and how long the hive had no leader."""

from bombus.hive import events as ev
from bombus.hive.inbox import CompactionTried, Tick
from bombus.hive.pauses import LATE_NS, TICK_NS
from bombus.hive.state import Hive
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.live import Live


def tried(hive: Hive, live: Live, message: CompactionTried) -> Decisions:
    """Note that the log was compacted, or why it was not, unless the log already says so."""
    if message.why:
        if message.why != hive.uncompacted:
            yield Decision(events=(ev.CompactionFailed(at_ns=live.now_ns, why=message.why),))
    elif message.below or hive.uncompacted:
        yield Decision(events=(ev.LogCompacted(at_ns=live.now_ns, below=message.below),))


def paused(hive: Hive, live: Live, tick: Tick) -> Decisions:
    """Note that there was no leader for a while before this tick, if the previous tick was long ago (R5)."""
    if live.stamp_ns is None or not tick.after_ns:
        return
    passed_ns = live.stamp_ns - tick.after_ns
    if passed_ns <= LATE_NS:
        return
    before_ns = hive.pauses[-1].until_ns if hive.pauses else 0
    since_ns = max(before_ns, live.now_ns - passed_ns + TICK_NS)
    if since_ns < live.now_ns:
        yield Decision(events=(ev.LeadingPaused(at_ns=live.now_ns, since_ns=since_ns),))


def ticked(hive: Hive, live: Live, tick: Tick) -> Decisions:
    """Note that the log has lost its end, if a tick from an earlier leader names an event beyond the log's end (R6)."""
    if live.seq > live.inherited or tick.log_end <= live.began_after:
        return
    said = hive.went_back.get("events")
    if said is None or said.kept != live.began_after or said.known < tick.log_end:
        lost = ev.StreamWentBack(at_ns=live.now_ns, what="events", known=tick.log_end, kept=live.began_after)
        yield Decision(events=(lost,))
