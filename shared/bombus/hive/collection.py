"""Collection methods: when a batch is complete, which episodes it contains, and which progress is shown.

`BATCH_METHODS`, at the end, declares each method once; no other code distinguishes methods. The methods' functions
depend only on the pool (ended training episodes) and the open episodes. They use the time only to tell which clients
are active.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import msgspec

from bombus.hive.events import BatchEpisode, BatchGroup, Collection, Method
from bombus.hive.rewards import have_signal
from bombus.hive.state import ACTIVE_S, Completed, EngineState


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How full the pool is, by every method's measures."""

    episodes: int
    tasks: int
    non_dummy_tasks: int
    agreed: int
    active: int


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a batch. Methods that rely on the clients' agreement take the whole pool, but the swarm contract
    shows these sizes for them too."""

    episodes: int  # pacing counts only batches of at least this many
    tasks: int
    non_dummy_tasks: int


class Measure(msgspec.Struct, frozen=True):
    """One measure of how much has been collected for a batch, with its target (0 if the method sets none).

    `decides` marks the measure that the engine's method waits for.
    """

    name: str
    done: int
    target: int
    decides: bool


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that form a batch, and the episodes without a signal that leave the pool together with these
    groups."""

    groups: tuple[BatchGroup, ...]
    no_signal: tuple[Completed, ...] = ()


class BatchMethod(msgspec.Struct, frozen=True, kw_only=True):
    """A collection method: everything that distinguishes it from the other methods, as pure functions.

    `completed_ns` and `most_batches` are called only in asynchronous runs, which refuse methods that rely on the
    clients' agreement.
    """

    is_by_agreement: bool  # whether clients say when a batch is complete
    counts_tasks: bool  # whether a batch needs episodes of `batch_size` different tasks
    needs_signal: bool  # whether tasks count only if their rewards differ
    enough: Callable[[EngineState, Collection, int], bool]  # whether the pool has enough for a batch, at a time in ns
    completed_ns: Callable[[EngineState], int]  # when the pool's first batch became complete
    select: Callable[[EngineState], Selection]
    targets: Callable[[Collection], Targets]
    measures: Callable[[Targets, Progress], tuple[Measure, ...]]  # in display order
    # The most batches that the pool and the open episodes can form together. The open episodes are given as counts by
    # task, and as the number that fit any task.
    most_batches: Callable[[EngineState, Counter[str], int], int]


def has_signal(group: list[Completed]) -> bool:
    """Return whether the rewards of a group differ: if all are equal, every advantage is zero."""
    return have_signal(
        [completed.reward for completed in group],
        [completed.call_rewards for completed in group],
        [len(completed.calls) for completed in group],
    )


def pick(group: list[Completed], size: int) -> list[Completed]:
    """Return the first `size` of a task's episodes, in the order in which they completed.

    If their rewards are all equal and a later episode's differs, that episode replaces the last one, so the group has a
    signal.
    """
    chosen = group[:size]
    if len(group) > size and not has_signal(chosen):
        for later in group[size:]:
            if has_signal(other := [*chosen[:-1], later]):
                return other
    return chosen


def tasks(engine: EngineState) -> Iterator[list[Completed]]:
    """Yield the pool's episodes, task by task. Tasks are in the order in which their first episodes ended."""
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


# ---- when there is enough ----------------------------------------------------------------------------------


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


# ---- when it became complete -------------------------------------------------------------------------------


def _episodes_completed_ns(engine: EngineState) -> int:
    return next(islice(engine.pool.values(), engine.collection.episode_target - 1, None)).ended_ns


def _full(engine: EngineState) -> Iterator[list[Completed]]:
    """Yield the episodes of each task that has enough of them for a group."""
    size = engine.collection.num_repeat
    return (group for group in tasks(engine) if len(group) >= size)


def _groups_completed_ns(groups: Iterable[list[Completed]], rules: Collection) -> int:
    return sorted(pick(group, rules.num_repeat)[-1].ended_ns for group in groups)[rules.batch_size - 1]


def _tasks_completed_ns(engine: EngineState) -> int:
    return _groups_completed_ns(_full(engine), engine.collection)


def _non_dummy_tasks_completed_ns(engine: EngineState) -> int:
    rules = engine.collection
    return _groups_completed_ns((group for group in _full(engine) if has_signal(pick(group, rules.num_repeat))), rules)


# ---- what is selected --------------------------------------------------------------------------------------


def _group(episodes: list[Completed]) -> BatchGroup:
    return BatchGroup(
        task=episodes[0].task,
        episodes=tuple(BatchEpisode(episode=completed.episode, reward=completed.reward) for completed in episodes),
    )


def _by_task(episodes: Iterable[Completed]) -> tuple[BatchGroup, ...]:
    groups: dict[str, list[Completed]] = {}
    for completed in episodes:
        groups.setdefault(completed.task, []).append(completed)
    return tuple(_group(group) for group in groups.values())


def _age_rank(rules: Collection, group: list[Completed]) -> int:
    return min(completed.oldest for completed in group) if rules.max_staleness > 0 else 0


def _select_episodes(engine: EngineState) -> Selection:
    rules = engine.collection
    first = sorted(engine.pool.values(), key=lambda completed: _age_rank(rules, [completed]))
    return Selection(groups=_by_task(first[: rules.episode_target]))


def _full_in_order(engine: EngineState) -> list[list[Completed]]:
    rules = engine.collection
    return sorted(
        _full(engine),
        # The sort is stable: ties keep the order of first completion.
        key=lambda group: (_age_rank(rules, group), group[rules.num_repeat - 1].ended_ns),
    )


def _select_tasks(engine: EngineState) -> Selection:
    rules = engine.collection
    first = _full_in_order(engine)[: rules.batch_size]
    return Selection(groups=tuple(_group(pick(group, rules.num_repeat)) for group in first))


def _select_non_dummy_tasks(engine: EngineState) -> Selection:
    rules = engine.collection
    full = _full_in_order(engine)
    picked = [pick(group, rules.num_repeat) for group in full]
    with_signal = [group for group in picked if has_signal(group)]
    dummies = [completed for group, chosen in zip(full, picked) if not has_signal(chosen) for completed in group]
    return Selection(groups=tuple(_group(group) for group in with_signal[: rules.batch_size]), no_signal=tuple(dummies))


def _select_all(engine: EngineState) -> Selection:
    return Selection(groups=_by_task(engine.pool.values()))


# ---- progress shown to users -------------------------------------------------------------------------------


def _targets(rules: Collection) -> Targets:
    return Targets(episodes=rules.episode_target, tasks=rules.batch_size, non_dummy_tasks=rules.batch_size)


def _measures_of_size(targets: Targets, now: Progress, decides: str) -> tuple[Measure, ...]:
    counts = (
        ("episodes", now.episodes, targets.episodes),
        ("tasks", now.tasks, targets.tasks),
        ("non-dummy tasks", now.non_dummy_tasks, targets.non_dummy_tasks),
    )
    return tuple(Measure(name, done, target, name == decides) for name, done, target in counts)


def _measures_of_agreement(now: Progress, wanted: int) -> tuple[Measure, ...]:
    return (
        Measure("clients agreed", now.agreed, wanted, True),
        Measure("episodes", now.episodes, 0, False),
        Measure("tasks", now.tasks, 0, False),
        Measure("non-dummy tasks", now.non_dummy_tasks, 0, False),
    )


def _measures_of_any_client(targets: Targets, now: Progress) -> tuple[Measure, ...]:
    return _measures_of_agreement(now, 1)


def _measures_of_all_clients(targets: Targets, now: Progress) -> tuple[Measure, ...]:
    return _measures_of_agreement(now, max(1, now.active))


# ---- batches that the pool and open episodes can form (pacing) ---------------------------------------------


def _most_of_episodes(engine: EngineState, named: Counter[str], unnamed: int) -> int:
    return (len(engine.pool) + named.total() + unnamed) // engine.collection.episode_target


def _most_of_tasks(engine: EngineState, named: Counter[str], unnamed: int) -> int:
    pooled = Counter({task: len(episodes) for task, episodes in engine.by_task.items()})
    pooled.update(named)
    return _most_groups(pooled, unnamed, engine.collection)


def _most_of_non_dummy_tasks(engine: EngineState, named: Counter[str], unnamed: int) -> int:
    """Return the largest number of batches that can be formed. Full groups whose rewards are all equal do not count,
    since no batch takes such groups."""
    size = engine.collection.num_repeat
    groups = (group for group in tasks(engine) if len(group) < size or has_signal(pick(group, size)))
    pooled = Counter({group[0].task: len(group) for group in groups})
    pooled.update(named)
    return _most_groups(pooled, unnamed, engine.collection)


def _most_groups(named: Counter[str], unnamed: int, rules: Collection) -> int:
    most = (named.total() + unnamed) // rules.episode_target
    sizes = Counter(named.values())
    return next((made for made in range(most) if not _can_make(made + 1, sizes, unnamed, rules)), most)


def _can_make(batches: int, sizes: Counter[int], unnamed: int, rules: Collection) -> bool:
    """Return whether `batches` batches can be formed.

    `sizes` maps a number of episodes to the number of tasks that have that many; `unnamed` episodes fit any task. A
    batch has at most one group for each task. Groups that lack the fewest episodes are filled first, then new groups
    are begun.
    """
    repeat = rules.num_repeat
    complete = sum(count * min(batches, size // repeat) for size, count in sizes.items())
    lacking = max(0, batches * rules.batch_size - complete)
    incomplete = Counter[int]()
    for size, count in sizes.items():
        if size % repeat and size // repeat < batches:
            incomplete[repeat - size % repeat] += count
    for missing, groups in [*sorted(incomplete.items()), (repeat, lacking)]:
        filled = min(lacking, groups)
        lacking -= filled
        unnamed -= filled * missing
    return unnamed >= 0


# ---- the methods -------------------------------------------------------------------------------------------

BATCH_METHODS: dict[Method, BatchMethod] = {
    Method.ENOUGH_EPISODES: BatchMethod(
        is_by_agreement=False,
        counts_tasks=False,
        needs_signal=False,
        enough=_enough_episodes,
        completed_ns=_episodes_completed_ns,
        select=_select_episodes,
        targets=_targets,
        measures=partial(_measures_of_size, decides="episodes"),
        most_batches=_most_of_episodes,
    ),
    Method.ENOUGH_TASKS: BatchMethod(
        is_by_agreement=False,
        counts_tasks=True,
        needs_signal=False,
        enough=_enough_tasks,
        completed_ns=_tasks_completed_ns,
        select=_select_tasks,
        targets=_targets,
        measures=partial(_measures_of_size, decides="tasks"),
        most_batches=_most_of_tasks,
    ),
    Method.ENOUGH_NON_DUMMY_TASKS: BatchMethod(
        is_by_agreement=False,
        counts_tasks=True,
        needs_signal=True,
        enough=_enough_non_dummy_tasks,
        completed_ns=_non_dummy_tasks_completed_ns,
        select=_select_non_dummy_tasks,
        targets=_targets,
        measures=partial(_measures_of_size, decides="non-dummy tasks"),
        most_batches=_most_of_non_dummy_tasks,
    ),
    Method.ANY_CLIENT_AGREES: BatchMethod(
        is_by_agreement=True,
        counts_tasks=False,
        needs_signal=False,
        enough=_any_client_agrees,
        completed_ns=_tasks_completed_ns,  # never called, like `most_batches`: see `BatchMethod`
        select=_select_all,
        targets=_targets,
        measures=_measures_of_any_client,
        most_batches=_most_of_tasks,
    ),
    Method.ALL_CLIENTS_AGREE: BatchMethod(
        is_by_agreement=True,
        counts_tasks=False,
        needs_signal=False,
        enough=_all_clients_agree,
        completed_ns=_tasks_completed_ns,  # never called, like `most_batches`: see `BatchMethod`
        select=_select_all,
        targets=_targets,
        measures=_measures_of_all_clients,
        most_batches=_most_of_tasks,
    ),
}


def enough(engine: EngineState, now_ns: int) -> bool:
    """Return whether the pool, which `fold/episodes.py` fills, holds what the engine's method requires."""
    rules = engine.collection
    return BATCH_METHODS[rules.method].enough(engine, rules, now_ns)


def completed_ns(engine: EngineState) -> int:
    """Return when the pool first held what the method requires. Call this only if `enough` returns true.

    Methods that rely on the clients' agreement have no such time.
    """
    return BATCH_METHODS[engine.collection.method].completed_ns(engine)


def select(engine: EngineState) -> Selection:
    """Select exactly what the method requires; the rest stays in the pool for the next batch.

    Call this only once `enough` has returned true; until then the pool only grows. The episodes or groups that were
    completed first are selected first. In an asynchronous run, the ones with the oldest tokens are selected first,
    because they would be too old for a later batch.
    """
    return BATCH_METHODS[engine.collection.method].select(engine)


def measures(engine: EngineState, now_ns: int) -> tuple[Measure, ...]:
    """Return how close the pool is to holding the next batch, by the measures of the engine's method."""
    rules = engine.collection
    method = BATCH_METHODS[rules.method]
    return method.measures(method.targets(rules), progress(engine, now_ns))
