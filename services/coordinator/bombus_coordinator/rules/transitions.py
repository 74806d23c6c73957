"""An engine's transitions that follow from its state and the time: boot, roll, seal, drain, sync."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice, takewhile

from bombus.hive import events as ev
from bombus.hive.bounded import portions
from bombus.hive.collection import BATCH_METHODS, enough, select
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.hive.loading import all_loaded
from bombus.hive.pacing import held_since_ns, last_chances, oldest_usable
from bombus.hive.state import BOOTED, Completed, EngineState, Phase
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, Decision, Decisions
from bombus_coordinator.rules.engines import suspend
from bombus_coordinator.rules.episodes import aborted
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.replicas import look_after
from bombus_coordinator.rules.trajectories.batches import give_up_old
from bombus_coordinator.rules.trajectories.batches import seal as seal_groups


def _booting(engine: EngineState, live: Live) -> Decisions:
    if engine.serves_operations:
        if engine.stage == BOOTED:
            yield _roll(engine, live)
            return
    elif all_loaded(engine):
        if engine.stage != BOOTED:
            yield Decision(events=(ev.EngineBooted(**live.at(engine)),))
        yield _roll(engine, live)
        return
    limit_s = engine.collection.boot_s
    if live.is_over(engine.phase_since_ns, limit_s):
        yield from suspend(engine, live, f"booting took longer than {limit_s:.0f} s; it was still {engine.stage!r}")


def _rolling(engine: EngineState, live: Live) -> Decisions:
    if engine.serves_operations:
        yield from _drop_untaken(engine, live)
    elif engine.queues_groups:
        yield from _rolling_with_a_queue(engine, live)
    elif engine.collection.max_staleness > 0:
        yield from _rolling_asynchronously(engine, live)
    elif enough(engine, live.now_ns):
        yield Decision(events=(ev.RollingClosed(**live.at(engine)),))
    else:
        yield from _clear_overflow(engine, live)


def _rolling_with_a_queue(engine: EngineState, live: Live) -> Decisions:
    """Make batches from queued groups for our own trainer. Drop groups and episodes that are too old or too many."""
    if engine.plays_episodes:
        yield from give_up_old(engine, live)
    if engine.makes_steps:
        yield from seal_groups(engine, live)
    if engine.plays_episodes:
        yield from _drop_incomplete(engine, live)
        yield from _clear_overflow(engine, live)


def _rolling_asynchronously(engine: EngineState, live: Live) -> Decisions:
    """Seal an asynchronous run's batches. Episodes continue while batches are trained on and weights are loaded."""
    bound = oldest_usable(engine)
    stale = [episode for episode, completed in engine.pool.items() if completed.oldest < bound]
    if stale:
        yield Decision(events=dropped(engine, live, DropReason.STALE, stale))
    elif engine.batch is None and engine.version == engine.step and enough(engine, live.now_ns):
        if not _is_held(engine, live):
            yield from _seal(engine, live)
    else:
        yield from _clear_overflow(engine, live)


def _is_held(engine: EngineState, live: Live) -> bool:
    """Return whether a complete batch has to wait for open episodes that would be too old for the next batch.

    As in a synchronous run, the batch waits at most `drain_s`.
    """
    return bool(last_chances(engine)) and not live.is_over(held_since_ns(engine), engine.collection.drain_s)


def _clear_overflow(engine: EngineState, live: Live) -> Decisions:
    """Clear a pool that exceeds its limit, as a safety valve."""
    rules = engine.collection
    if len(engine.pool) > rules.max_pool_episodes or engine.pool_bytes > rules.max_pool_bytes:
        cleared = ev.PoolCleared(
            **live.at(engine), reason=DropReason.OVERFLOW, episodes=len(engine.pool), bytes=engine.pool_bytes
        )
        yield Decision(events=(cleared,))


def _drop_untaken(engine: EngineState, live: Live) -> Decisions:
    """Drop an operations run's untaken episodes that have expired or exceed the pool's limits.

    The pool is ordered by completion.
    """
    limit_ns = live.now_ns - ns(engine.collection.operations.episodes_s)
    late = [each.episode for each in takewhile(lambda each: each.ended_ns <= limit_ns, engine.pool.values())]
    excess = _excess(engine, len(late))
    for reason, episodes in ((DropReason.UNTAKEN, late), (DropReason.OVERFLOW, excess)):
        if episodes:
            yield Decision(events=dropped(engine, live, reason, episodes))


def _excess(engine: EngineState, late: int) -> list[str]:
    """Return the episodes to drop so that a pool is within its limits, not counting its first `late` episodes.

    They are chosen one by one: each is the oldest episode of the holder who has the most at that point, so that no
    holder loses episodes to a holder who has more.
    """
    rules, first = engine.collection, islice(engine.pool.values(), late)
    over, size = (
        len(engine.pool) - late - rules.max_pool_episodes,
        engine.pool_bytes - sum(each.bytes for each in first),
    )
    if over <= 0 and size <= rules.max_pool_bytes:
        return []
    held: dict[str, deque[Completed]] = {}
    sizes: Counter[str] = Counter()
    for each in islice(engine.pool.values(), late, None):
        held.setdefault(each.holder, deque()).append(each)
        sizes[each.holder] += each.bytes
    excess: list[str] = []
    while over > 0 or size > rules.max_pool_bytes:
        most = max(held, key=lambda holder: len(held[holder]) if over > 0 else sizes[holder])
        dropped = held[most].popleft()
        excess.append(dropped.episode)
        sizes[most] -= dropped.bytes
        over, size = over - 1, size - dropped.bytes
    return excess


def dropped(
    engine: EngineState, live: Live, reason: DropReason, episodes: Sequence[str]
) -> tuple[ev.GroupDropped, ...]:
    """Return the events that drop episodes. A very large number of episodes is split into several events, so that each
    event fits into a message."""
    return tuple(
        ev.GroupDropped(
            **live.at(engine),
            reason=reason,
            tasks=tuple(dict.fromkeys(engine.pool[episode].task for episode in some)),
            episodes=some,
        )
        for some in portions(episodes, NAMES_PER_EVENT)
    )


def _draining(engine: EngineState, live: Live) -> Decisions:
    """Seal the batch once no episodes are open. Abort the episodes that are still open when their time is up."""
    if engine.open:
        if live.is_over(engine.phase_since_ns, engine.collection.drain_s):
            yield Decision(events=aborted(engine, live, tuple(engine.open), AbortReason.SUPERSEDED))
        return
    if engine.batch is not None:
        yield Decision(events=(ev.SyncingStarted(**live.at(engine)),))
        return
    yield from _seal(engine, live)


def _seal(engine: EngineState, live: Live) -> Decisions:
    selection = select(engine)
    if selection.no_signal:
        silent = [completed.episode for completed in selection.no_signal]
        yield Decision(events=dropped(engine, live, DropReason.NO_SIGNAL, silent))
    assert engine.active is not None
    ready = ev.BatchReady(
        **live.at(engine), step=engine.step + 1, groups=selection.groups, config_digest=engine.active.config_digest
    )
    yield Decision(events=(ready,))


def _roll(engine: EngineState, live: Live) -> Decision:
    return Decision(events=(ev.RollingStarted(**live.at(engine), version=engine.version),))


def _syncing(engine: EngineState, live: Live) -> Decisions:
    if engine.version < engine.step or not all_loaded(engine):
        return
    rules = engine.collection
    is_by_agreement = BATCH_METHODS[rules.method].is_by_agreement
    if is_by_agreement and not live.is_over(engine.phase_since_ns, rules.agreed_sync_s):
        return
    yield from _drop_stale(engine, live)
    yield _roll(engine, live)


def _drop_stale(engine: EngineState, live: Live) -> Decisions:
    """Drop pooled episodes that are too old to be kept for the next batch."""
    bound = engine.version - engine.collection.max_carry_staleness
    stale = [episode for episode, completed in engine.pool.items() if completed.oldest < bound]
    if stale:
        yield Decision(events=dropped(engine, live, DropReason.STALE, stale))


def _drop_incomplete(engine: EngineState, live: Live) -> Decisions:
    """Drop ended episodes that are too old to wait for other episodes of their task.

    Episodes of a complete task are kept: they wait only for the leader to make a group from them, once there is room.
    Those of an incomplete task are kept while an open episode may complete it, if that open episode was claimed before
    they ended.
    """
    bound = engine.version - engine.collection.max_carry_staleness
    stale = [
        completed
        for completed in engine.pool.values()
        if completed.oldest < bound and len(engine.by_task[completed.task]) < engine.collection.num_repeat
    ]
    if not stale:
        return
    claimed_ns: dict[str, int] = {}  # when the oldest open episode of each task was claimed; "" for any task
    for episode in engine.open.values():
        if episode.type == EpisodeType.TRAIN:
            first_ns = claimed_ns.get(episode.task_hint, episode.claimed_ns)
            claimed_ns[episode.task_hint] = min(first_ns, episode.claimed_ns)
    old = [
        each.episode
        for each in stale
        if not any(claimed_ns.get(task, each.ended_ns + 1) <= each.ended_ns for task in ("", each.task))
    ]
    if old:
        yield Decision(events=dropped(engine, live, DropReason.STALE, old))


_SETTLE = {
    Phase.BOOTING: _booting,
    Phase.ROLLING: _rolling,
    Phase.ROLLING_POST: _draining,
    Phase.WEIGHT_SYNCING: _syncing,
}


def settle(engine: EngineState, live: Live) -> Decisions:
    """Make the transitions that are due, one after another, until none is left. A suspended run makes none.

    Each transition is one event and can be derived again from the fold, so if a crash prevents a transition, the next
    leader makes it. No transition therefore needs an atomic batch, which would cost the server a disk sync.
    """
    yield from look_after(engine, live)
    while (rule := _SETTLE.get(engine.phase)) is not None and not engine.suspended:
        moved = False
        for decision in rule(engine, live):
            moved = True
            yield decision
        if not moved:
            return
