"""Pacing of claims if `max_staleness` is above 0, or if ended episodes become rollout groups (R14).

Step s trains version s - 1, so a token of version v has the age s - 1 - v when it is trained on. Two kinds of batches
come before an episode that is claimed now: those whose weights no call uses yet, and those that the pool and the open
episodes can still form. The number of batches of both kinds is the age that the episode's samples will have, unless the
episode takes longer than the others.

If ended episodes become rollout groups, the queued groups come before the episode too, and the limit is
`max_carry_staleness`.
"""

from collections import Counter

import msgspec

from bombus.hive.collection import BATCH_METHODS, completed_ns
from bombus.hive.events import EpisodeType
from bombus.hive.state import EngineState, Episode, Replica
from bombus.hive.trajectories.forming import may_form
from bombus.hive.trajectories.queue import OTHERS


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The number of batches that come before an episode that is claimed now, and why the claim must wait ("" if it need
    not)."""

    unfinished: int  # sealed batches whose weights replicas do not serve yet, or which an outside trainer does not have
    sealable: int  # the most batches that the pool, open episodes and queued rollout groups can still form
    max_staleness: int  # the limit: max_carry_staleness if episodes become rollout groups
    waits: str


def fitting(engine: EngineState, episode: str = "") -> dict[str, Replica]:
    """Return the replicas that may answer a call: not quarantined, and with sufficiently recent weights of this run.

    A replica's version may be at most `max_staleness` older than the newest. For a call of an open episode, it must
    also be no older than the version served when the episode was claimed.
    """
    oldest = max(0, engine.version - engine.collection.max_staleness)
    claimed = engine.open.get(episode)
    if claimed is not None:
        oldest = max(oldest, claimed.version)
    return {
        name: replica
        for name, replica in engine.usable.items()
        if replica.run == engine.run and replica.version >= oldest
    }


def served(engine: EngineState) -> int | None:
    """Return the oldest policy version that may answer a call of a new episode, or None if no replica can answer."""
    return min((replica.version for replica in fitting(engine).values()), default=None)


def oldest_usable(engine: EngineState) -> int:
    """Return the oldest policy version whose tokens are not too old for the next batch."""
    return engine.step - engine.collection.max_staleness


def last_chances(engine: EngineState) -> list[Episode]:
    """Return the open episodes that can be in the next batch but not in a later one: a complete batch waits for them.

    An episode without a recorded call is treated as having tokens of the version at its claim, because a call of that
    version may be in flight.
    """
    last = oldest_usable(engine)
    return [
        episode
        for episode in engine.open.values()
        if episode.type == EpisodeType.TRAIN
        and episode.version <= last
        and (episode.version if episode.oldest is None else episode.oldest) == last
    ]


def held_since_ns(engine: EngineState) -> int:
    """Return the time since which a complete batch has been waiting for its `last_chances`. The batch waits for at most
    `drain_s`."""
    return max(completed_ns(engine), 0 if engine.weights is None else engine.weights.at_ns)


def pace(engine: EngineState, count: int = 1, task_hint: str = "") -> Pace | None:
    """Return the pace for a claim of `count` training episodes, or None if training is synchronous.

    No claim waits forever. When no episode is open, every batch that the pool can form has already been sealed. Once
    those batches are trained on, the next claim is granted, whatever its size.
    """
    if engine.groups_episodes:
        return _pace_of_groups(engine, count, task_hint)
    bound = engine.collection.max_staleness
    if bound == 0:
        return None
    version = served(engine)
    unfinished = engine.step - (engine.version if version is None else version)
    sealable = most_batches(engine, count - 1, task_hint)
    waits = ""
    if version is None:
        waits = f"no inference replica serves version {engine.version} or one of the {bound} before it"
    elif unfinished + sealable > bound and not _is_idle(engine):
        waits = (
            f"unfinished batches ({unfinished}) and those under way ({sealable}) exceed collection.max_staleness "
            f"({bound}), so the episode's samples would be too old when they are trained on"
        )
    return Pace(unfinished=unfinished, sealable=sealable, max_staleness=bound, waits=waits)


def _is_idle(engine: EngineState) -> bool:
    """Return whether no step is being trained and no training episode is open."""
    return engine.version >= engine.step and not engine.open_tasks


# ---- runs that make rollout groups from episodes --------------------------------------------------------------------


def _pace_of_groups(engine: EngineState, count: int, task_hint: str) -> Pace:
    """Return the pace for a run in which ended episodes become rollout groups.

    No claim waits forever for groups that fit no batch: the queue counts in full only while it is going to get shorter.
    That is the case while a batch can be formed from the queue, is being trained on, or has not reached its outside
    trainer.
    """
    bound, handed = engine.collection.max_carry_staleness, engine.trajectories.batch
    unfinished = max(0, engine.step - engine.version) + (handed is not None and not handed.delivered)
    counts_queue = unfinished > 0 or may_form(engine.trajectories.queue)
    sealable = _most_grouped(engine, counts_queue, count - 1, task_hint)
    nothing_comes = not counts_queue and not engine.open_tasks and not _sequences_played(engine)
    waits = ""
    if unfinished + sealable > bound and not nothing_comes:
        waits = (
            f"batches that are under way ({unfinished}) and those that queued groups and running episodes can make "
            f"({sealable}) exceed collection.max_carry_staleness ({bound}), so the episode's group would be too old "
            "when it is trained on"
        )
        if _has_made_its_last_step(engine):
            waits = "the run has made its last step (num_steps), so queued groups are no longer trained on"
    return Pace(unfinished=unfinished, sealable=sealable, max_staleness=bound, waits=waits)


def _has_made_its_last_step(engine: EngineState) -> bool:
    trainer = engine.trajectories.trainer
    return engine.makes_steps and trainer is not None and engine.version >= trainer.num_steps


def _most_grouped(engine: EngineState, counts_queue: bool, more: int, task_hint: str) -> int:
    """Return how many batches of queued groups and running episodes come before an episode that is claimed now.

    Weights divide each batch between groups made from episodes and those environments that have groups in the queue. A
    queue that does not count in full counts as less than a batch.
    """
    queue = engine.trajectories.queue
    played = _sequences_played(engine, more, task_hint)
    if not counts_queue:
        return (min(queue.sequences, queue.batch_size - 1) + played) // queue.batch_size
    own = queue.others.sequences + played
    weights = 1.0 + sum(queue.weight_of(owner) for owner, _ in queue.shares() if owner != OTHERS)
    return min((queue.sequences + played) // queue.batch_size, int(own * weights / queue.batch_size))


def _sequences_played(engine: EngineState, more: int = 0, task_hint: str = "") -> int:
    """Estimate how many sequences the groups of the pool, the open training episodes and `more` episodes will have.

    Open episodes without a task count toward the groups that they can complete. An episode counts as the mean number of
    sequences of earlier episodes, or as one sequence if there are none.
    """
    size = engine.collection.num_repeat
    by_task = Counter({task: len(episodes) for task, episodes in engine.by_task.items()})
    by_task.update(engine.open_tasks)
    by_task[task_hint] += more
    unnamed = by_task.pop("", 0)
    groups = sum(episodes // size for episodes in by_task.values())
    for missing in sorted(size - episodes % size for episodes in by_task.values() if episodes % size):
        if missing > unnamed:
            break
        unnamed -= missing
        groups += 1
    episodes = (groups + unnamed // size) * size
    made = engine.trajectories
    return episodes * made.grouped_sequences // made.grouped if made.grouped else episodes


def most_batches(engine: EngineState, more: int = 0, task_hint: str = "") -> int:
    """Return the largest number of complete batches that the pool, the open training episodes and `more` episodes can
    form.

    An open episode counts for the task named in its claim or, if there is none, for the task where it helps most.
    Episodes that can never be used do not count: those with a token that is too old and, if the method requires a
    signal, those of full groups whose rewards are all equal.
    """
    rules = engine.collection
    method = BATCH_METHODS[rules.method]
    if len(engine.pool) + len(engine.open) + more < method.targets(rules).episodes:
        return 0
    named = _usable(engine)
    named[task_hint] += more
    unnamed = named.pop("", 0)
    return method.most_batches(engine, named, unnamed)


def _usable(engine: EngineState) -> Counter[str]:
    """Count the open training episodes that are not too old, by the task named in the claim."""
    usable, bound = Counter(engine.open_tasks), oldest_usable(engine)
    for oldest, tasks in engine.open_aged.items():
        if oldest < bound:
            usable -= Counter(tasks)
    return usable
