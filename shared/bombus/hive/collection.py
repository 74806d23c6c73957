"""When a batch is complete, and what goes into it: one small pure function for each collection method.

They depend only on the pool (ended training episodes), and on the time only for which clients count as active.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from bombus.hive.events import BatchEpisode, BatchGroup, Collection, Method
from bombus.hive.state import Completed, EngineState

ACTIVE_S = 600.0  # how long a client counts as active after it ended an episode, as in the swarm contract


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The fill of the pool, in the measures of all methods."""

    episodes: int
    tasks: int
    non_dummy_tasks: int
    agreed: int
    active: int


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, and the episodes without a signal that leave the pool with it."""

    groups: tuple[BatchGroup, ...]
    no_signal: tuple[Completed, ...] = ()


def _signature(completed: Completed) -> tuple[float, tuple[float, ...] | None]:
    return completed.reward, completed.call_rewards


def has_signal(group: list[Completed]) -> bool:
    """Return whether the rewards of a group differ: when all are equal, every advantage is zero."""
    return any(_signature(completed) != _signature(group[0]) for completed in group[1:])


def pick(group: list[Completed], size: int) -> list[Completed]:
    """Return the first `size` of a task's episodes in order of completion.

    When those are all equal and a later one differs, it takes the last place, so that the group keeps its signal.
    """
    chosen = group[:size]
    if len(group) > size and not has_signal(chosen):
        for later in group[size:]:
            if _signature(later) != _signature(chosen[0]):
                return [*chosen[:-1], later]
    return chosen


def tasks(engine: EngineState) -> Iterator[list[Completed]]:
    """Yield the pool's episodes by task, tasks in the order in which their first episode ended."""
    for episodes in engine.by_task.values():
        yield [engine.pool[episode] for episode in episodes]


def active_clients(engine: EngineState, now_ns: int) -> set[str]:
    since = now_ns - int(ACTIVE_S * 1e9)
    return {client for client, at_ns in engine.rewarded_ns.items() if at_ns >= since}


def progress(engine: EngineState, now_ns: int) -> Progress:
    size = engine.collection.num_repeat
    full = [group for group in tasks(engine) if len(group) >= size]
    active = active_clients(engine, now_ns)
    return Progress(
        episodes=len(engine.pool),
        tasks=len(full),
        non_dummy_tasks=sum(has_signal(pick(group, size)) for group in full),
        agreed=len(engine.agreed & active) if active else len(engine.agreed),
        active=len(active),
    )


def _enough_episodes(engine: EngineState, rules: Collection, now_ns: int) -> bool:
    return len(engine.pool) >= rules.episode_target


def _enough_tasks(engine: EngineState, rules: Collection, now_ns: int) -> bool:
    if len(engine.pool) < rules.episode_target:
        return False
    return sum(len(episodes) >= rules.num_repeat for episodes in engine.by_task.values()) >= rules.batch_size


def _enough_non_dummy_tasks(engine: EngineState, rules: Collection, now_ns: int) -> bool:
    return _enough_tasks(engine, rules, now_ns) and progress(engine, now_ns).non_dummy_tasks >= rules.batch_size


def _any_client_agrees(engine: EngineState, rules: Collection, now_ns: int) -> bool:
    return bool(engine.pool) and bool(engine.agreed)


def _all_clients_agree(engine: EngineState, rules: Collection, now_ns: int) -> bool:
    active = active_clients(engine, now_ns)
    return bool(engine.pool) and bool(engine.agreed) and active <= engine.agreed


_ENOUGH: dict[Method, Callable[[EngineState, Collection, int], bool]] = {
    Method.ENOUGH_EPISODES: _enough_episodes,
    Method.ENOUGH_TASKS: _enough_tasks,
    Method.ENOUGH_NON_DUMMY_TASKS: _enough_non_dummy_tasks,
    Method.ANY_CLIENT_AGREES: _any_client_agrees,
    Method.ALL_CLIENTS_AGREE: _all_clients_agree,
}


def enough(engine: EngineState, now_ns: int) -> bool:
    """Return whether the pool holds what the engine's method requires."""
    return _ENOUGH[engine.collection.method](engine, engine.collection, now_ns)


def completed_ns(engine: EngineState) -> int:
    """Return when the pool came to hold what the method requires. Call it only when `enough` holds.

    Methods by agreement have no such time.
    """
    rules = engine.collection
    if rules.method == Method.ENOUGH_EPISODES:
        return next(islice(engine.pool.values(), rules.episode_target - 1, None)).ended_ns
    size = rules.num_repeat
    groups = (group for group in tasks(engine) if len(group) >= size)
    if rules.method == Method.ENOUGH_NON_DUMMY_TASKS:
        groups = (group for group in groups if has_signal(pick(group, size)))
    return sorted(pick(group, size)[-1].ended_ns for group in groups)[rules.batch_size - 1]


def _group(episodes: list[Completed]) -> BatchGroup:
    return BatchGroup(
        task=episodes[0].task,
        episodes=tuple(
            BatchEpisode(
                episode=completed.episode,
                reward=completed.reward,
                calls=completed.calls,
                call_rewards=completed.call_rewards,
            )
            for completed in episodes
        ),
    )


def _by_task(episodes: list[Completed]) -> tuple[BatchGroup, ...]:
    groups: dict[str, list[Completed]] = {}
    for completed in episodes:
        groups.setdefault(completed.task, []).append(completed)
    return tuple(_group(group) for group in groups.values())


def _age_rank(rules: Collection, group: list[Completed]) -> int:
    return min(completed.oldest for completed in group) if rules.max_staleness > 0 else 0


def select(engine: EngineState) -> Selection:
    """Select exactly what the method requires; the rest stays in the pool for the next batch.

    Call it once `enough` has held; the pool only grows in between. What was complete first is taken first; in an
    asynchronous run, what has the oldest tokens, because it would be too old for a later batch.
    """
    rules = engine.collection
    match rules.method:
        case Method.ENOUGH_EPISODES:
            first = sorted(engine.pool.values(), key=lambda completed: _age_rank(rules, [completed]))
            return Selection(groups=_by_task(first[: rules.episode_target]))
        case Method.ANY_CLIENT_AGREES | Method.ALL_CLIENTS_AGREE:
            return Selection(groups=_by_task(list(engine.pool.values())))
    full = sorted(
        (group for group in tasks(engine) if len(group) >= rules.num_repeat),
        # Stable: ties keep the order of first completion.
        key=lambda group: (_age_rank(rules, group), group[rules.num_repeat - 1].ended_ns),
    )
    picked = [pick(group, rules.num_repeat) for group in full]
    if rules.method == Method.ENOUGH_TASKS:
        return Selection(groups=tuple(_group(group) for group in picked[: rules.batch_size]))
    with_signal = [group for group in picked if has_signal(group)]
    dummies = [completed for group, chosen in zip(full, picked) if not has_signal(chosen) for completed in group]
    return Selection(groups=tuple(_group(group) for group in with_signal[: rules.batch_size]), no_signal=tuple(dummies))
