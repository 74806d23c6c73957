"""Reports about the queue: how much an environment should generate, and which groups fit into no batch."""

from collections import Counter

import msgspec

from bombus.hive.trajectories.filling import reachable
from bombus.hive.trajectories.forming import fit, lacking, minimums, usable
from bombus.hive.trajectories.queue import Environment, TrajectoryQueue

WEIGHT_MIN = 0.01  # the lowest weight that is reported to an environment, so that it keeps generating
SIZES_SHOWN = 6


class EnvironmentQueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's share of the queue, as `/status-env` reports it, in groups of the environment's own size."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


def environment_status(queue: TrajectoryQueue, environment: Environment, step: int) -> EnvironmentQueueStatus:
    """Return an environment's share of the queue, without changing the queue.

    `queue_size` tells an environment when to stop generating. It counts the environment's own sequences and, if any
    queued group has more than one sequence, the sequences of other environments beyond their guaranteed minimums. The
    total is given as a number of groups of the environment's own size.
    """
    own = environment.share
    group_size = max(1, environment.group_size, *own.lines)
    largest = max((max(share.lines) for _, share in queue.shares()), default=1)
    available = own.sequences
    if largest > 1:
        for owner, share in queue.shares():
            if owner != environment.id:
                packed = -(-share.sequences // largest) * largest
                available += max(0, packed - _reserved(queue, owner))
    minimums = sum(each.minimum for each in queue.environments.values() if each.connected and each.minimum is not None)
    return EnvironmentQueueStatus(
        current_step=step,
        queue_size=available // group_size,
        unallocated_fraction=1.0 - min(minimums, 1.0),
        self_queue_size=own.sequences // group_size,
        max_group_size=largest,
        env_weight=max(WEIGHT_MIN, _portion(queue, environment)),
    )


def _reserved(queue: TrajectoryQueue, owner: int) -> int:
    known = queue.environments.get(owner)
    return int(queue.batch_size * known.minimum) if known is not None and known.connected and known.minimum else 0


def _portion(queue: TrajectoryQueue, environment: Environment) -> float:
    """Return the fraction of all generation that falls to this environment, in proportion to its weight times its
    maximum length."""
    total = sum(each.max_tokens * max(0.0, each.weight) for each in queue.environments.values() if each.connected)
    return environment.max_tokens * environment.weight / total if total > 0 else 0.0


# ---- groups that fit no batch ---------------------------------------------------------------------------------


def stranded(queue: TrajectoryQueue) -> list[str]:
    """Return one sentence for each reason why some queued groups fit into no batch that could be formed now."""
    return [*_too_large(queue), *_without_a_fill(queue), *_held(queue)]


def _too_large(queue: TrajectoryQueue) -> list[str]:
    sizes = Counter[int]()
    for _, share in queue.shares():
        sizes.update({size: line.count for size, line in share.lines.items() if size > queue.batch_size})
    if not sizes or not queue.batch_size:
        return []
    return [
        f"{_groups(sizes)} came before the trainer, whose batches have {queue.batch_size} sequences: no batch can take "
        f"{'it' if sizes.total() == 1 else 'them'}. Register the trainer with a larger batch_size, or reset the data."
    ]


def _without_a_fill(queue: TrajectoryQueue) -> list[str]:
    """Return why no batch can be formed although there are enough sequences or, if one can be formed, which sizes of
    groups fit into no batch."""
    sizes = Counter[int]()
    for _, share in queue.shares():
        sizes.update({size: line.count for size, line in usable(queue, share)})
    if sum(size * count for size, count in sizes.items()) < queue.batch_size or not sizes:
        return []
    asked = minimums(queue)
    waits = lacking(queue, asked)
    if waits:
        return [_waits(queue, queue.environments[each], asked[each]) for each in waits]
    fill, pools = fit(queue, asked)
    if not fill.exists:
        sums = reachable(dict(sizes), queue.batch_size)
        helpful = [size for size in range(1, queue.batch_size + 1) if sums >> (queue.batch_size - size) & 1]
        return [
            f"{_groups(sizes)} are queued, but no selection of them has exactly {queue.batch_size} sequences. One more "
            f"group of {_either(helpful)} would complete a batch."
        ]
    unused, left_out = Counter[int](), Counter[int]()
    minimums_are_all = sum(asked.values()) >= queue.batch_size
    for owner, share in queue.shares():
        for size, line in usable(queue, share):
            if not fill.could_take(pools.get(owner, 0), size):
                (left_out if minimums_are_all and owner not in asked else unused)[size] += line.count
    sentences: list[str] = []
    if left_out:
        sentences.append(
            f"No batch has room for {_groups(left_out)} of environments without a minimum: the minimums of others add "
            "up to the whole batch. Register one of the others again with a smaller min_batch_allocation."
        )
    if not unused:
        return sentences
    fit_and_stay = ("fits", "It stays") if unused.total() == 1 else ("fit", "They stay")
    return [
        *sentences,
        f"{_groups(unused)} {fit_and_stay[0]} in no batch of {queue.batch_size} sequences with the groups queued now. "
        f"{fit_and_stay[1]} until groups arrive that complete one.",
    ]


def _waits(queue: TrajectoryQueue, environment: Environment, asked: int) -> str:
    return (
        f"Environment {environment.id} ({environment.name}) asks for {asked} of the {queue.batch_size} sequences of "
        f"each batch but has {environment.share.sequences} queued: no batch is formed until it has more, or has left."
    )


def _held(queue: TrajectoryQueue) -> list[str]:
    return [
        f"Environment {each.id} ({each.name}) has {_groups({size: line.count for size, line in each.held.items()})} "
        f"that are waiting for others to make up its group_size of {each.group_size}."
        for each in queue.environments.values()
        if each.held_groups
    ]


def _groups(sizes: dict[int, int]) -> str:
    """Describe in words how many groups there are of each size, smallest first."""
    listed = [f"{count} of {size}" for size, count in sorted(sizes.items())]
    shown = ", ".join(listed[:SIZES_SHOWN]) + " sequences" + (", and others" if len(listed) > SIZES_SHOWN else "")
    total = sum(sizes.values())
    return f"{total} {'group' if total == 1 else 'groups'} ({shown})"


def _either(sizes: list[int]) -> str:
    *first, last = map(str, sizes[:SIZES_SHOWN])
    return f"{', '.join(first)} or {last} sequences" if first else f"{last} sequences"
