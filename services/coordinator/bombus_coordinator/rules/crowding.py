"""Make room in a stream of calls that is full: who pins more of it than their share gives up their oldest episodes."""

from bombus.hive.events import AbortReason, DropReason, Event
from bombus.hive.pins import why_no_share
from bombus.hive.shares import SHARED, has_share
from bombus.hive.state import CALLS, EngineState, Hive, Phase
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.episodes import aborted
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.transitions import dropped


def make_room(hive: Hive, live: Live) -> Decisions:
    """Take episodes away while the stream is full, until no more is pinned than is shared.

    It is each time the oldest one of the holder who pins most. What steps need stays, since training releases it, and
    so does the pool of a suspended run, and one from which a batch is about to be sealed.
    """
    while CALLS in hive.full and (events := _taken_away(hive, live)):
        yield Decision(events=events)


def _taken_away(hive: Hive, live: Live) -> tuple[Event, ...]:
    pinned, limit = hive.pinned_calls(), int(SHARED * hive.full[CALLS].size)
    for holder, _ in pinned.most_common():
        if has_share(pinned, holder, limit, more=0):
            break
        engine = max(hive.engines.values(), key=lambda each: _pinned_on(each, holder))
        oldest = next(iter(engine.calls.holders[holder].pins))
        if oldest in engine.open:
            why = why_no_share(pinned, holder, hive.full[CALLS].size)
            return aborted(engine, live, (oldest,), AbortReason.CROWDED, why)
        if oldest in engine.pool and not engine.suspended and engine.phase != Phase.ROLLING_POST:
            return dropped(engine, live, DropReason.OVERFLOW, (oldest,))
    return ()


def _pinned_on(engine: EngineState, holder: str) -> int:
    return engine.calls.holders[holder].pinned if holder in engine.calls.holders else 0
