"""Make room in a full stream: holders whose data takes more than their share of the stream lose their oldest data.

In the stream of calls, this data is episodes; in the stream of rollout groups, it is groups that fit into no batch.
"""

from collections.abc import Iterator

from bombus.hive.events import AbortReason, DropReason, Event, GroupsGivenUp
from bombus.hive.pins import why_no_share
from bombus.hive.shares import SHARED, has_share_of_stream
from bombus.hive.state import CALLS, ROLLOUT_GROUPS, EngineState, Hive, Phase
from bombus.hive.trajectories.forming import form
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.episodes import aborted
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.trajectories.batches import GROUPS_MAX
from bombus_coordinator.rules.transitions import dropped

WHY_GIVEN_UP = (
    "the stream of rollout groups was full, no batch could be made from the queued groups, and "
    "this key's groups took more than their share"
)


def make_room(hive: Hive, live: Live) -> Decisions:
    """While a stream is full, repeatedly remove the oldest data of the holder who keeps the most, until no holder
    exceeds their share.

    Data that steps need is kept, since training releases it. Also kept are the pool of a suspended run, a pool from
    which a batch is about to be sealed, and rollout groups that can make a batch or that still wait for a trainer to
    register.
    """
    while CALLS in hive.full and (events := _episodes_taken(hive, live)):
        yield Decision(events=events)
    while ROLLOUT_GROUPS in hive.full and (events := _groups_given_up(hive, live)):
        yield Decision(events=events)


def _episodes_taken(hive: Hive, live: Live) -> tuple[Event, ...]:
    pinned, size = hive.pinned_calls(), hive.full[CALLS].size
    for holder, _ in pinned.most_common():
        if has_share_of_stream(pinned, holder, size, more=0):
            break
        engine = max(hive.engines.values(), key=lambda each: _pinned_on(each, holder))
        oldest = next(iter(engine.calls.holders[holder].pins))
        if oldest in engine.open:
            return aborted(engine, live, (oldest,), AbortReason.CROWDED, why_no_share(pinned, holder, size))
        if oldest in engine.pool and not engine.suspended and engine.phase != Phase.ROLLING_POST:
            return dropped(engine, live, DropReason.OVERFLOW, (oldest,))
    return ()


def _pinned_on(engine: EngineState, holder: str) -> int:
    return engine.calls.holders[holder].pinned if holder in engine.calls.holders else 0


def _groups_given_up(hive: Hive, live: Live) -> tuple[Event, ...]:
    queued, size = hive.queued_groups(), hive.full[ROLLOUT_GROUPS].size
    for holder, _ in queued.most_common():
        if has_share_of_stream(queued, holder, size, more=0):
            break
        for engine in filter(_is_stuck, hive.engines.values()):
            oldest = tuple(_oldest_groups(engine, holder, queued.total() - int(SHARED * size)))
            if oldest:
                given_up = GroupsGivenUp(**live.at(engine), number=0, groups=oldest, why=WHY_GIVEN_UP)
                return (given_up,)
    return ()


def _is_stuck(engine: EngineState) -> bool:
    """Return whether a trainer waits for groups but no batch can be made from those that are queued."""
    queue = engine.trajectories.queue
    return queue.batch_size > 0 and form(queue) is None


def _oldest_groups(engine: EngineState, holder: str, size: int) -> Iterator[int]:
    """Yield a holder's oldest groups until they total `size` bytes, but no more groups than fit into a single event."""
    count = 0
    for number, group in engine.trajectories.queue.groups.items():
        if size <= 0 or count == GROUPS_MAX:
            return
        if group.holder == holder and group.body is not None:
            yield number
            size, count = size - group.body.size, count + 1
