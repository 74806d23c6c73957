"""Which groups of the queue are the next batch: a pure function of it.

A batch has exactly `batch_size` sequences, in whole groups. Of all selections that have, and that give each environment
the minimum that it asks for, the batch is found by taking groups one after the other: first the oldest that is in any
such selection, then each time the oldest of the environment whose turn it is by weighted fair order, if a selection has
it as well. So a batch is found whenever there is one, and sequences are shared out in the ratio of the weights as far
as the sizes of groups allow. The oldest group counts for its environment, and is in the batch whatever the weight of
that is: in batches of few groups weights show less. No environment waits forever, unless the minimums of others are
the whole batch: then what has no minimum is in none for as long as they are met.

What is bounded: a search looks at `SIZES_MAX` sizes of each environment with a minimum and of all others together, so a
batch that needs more of them can be missed; and `filling` limits the searches, after which turns, and which group is
the oldest, no longer count in what is left of the batch. The cost grows with the batch, with the number of environments
and with that of distinct sizes, not with the queue.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from bombus.hive.trajectories.filling import ExactFill, Pool
from bombus.hive.trajectories.queue import EnvironmentShare, GroupLine, TrajectoryQueue, virtual_time

SIZES_MAX = 64  # distinct sizes that one search looks at: those whose groups have waited longest


class _Turn:
    """What a batch can take of one share: the oldest group of each size, and the pool of the fill that it is in."""

    def __init__(self, queue: TrajectoryQueue, share: EnvironmentShare, pool: int) -> None:
        self._pool = pool
        self._lines = {size: queue.waiting(line) for size, line in usable(queue, share)}
        self._first: dict[int, int] = {}
        for size in list(self._lines):
            self._advance(size)

    def _advance(self, size: int) -> None:
        number = next(self._lines[size], None)
        if number is None:
            self._first.pop(size, None)
        else:
            self._first[size] = number

    def oldest(self) -> list[tuple[int, int]]:
        """Return the number and the size of the oldest group of each size, the oldest of them first."""
        return sorted((number, size) for size, number in self._first.items())

    def take(self, fill: ExactFill, size: int) -> int | None:
        """Take the oldest group of a size if the fill can have it, and return its number."""
        number = self._first[size]
        if not fill.take(self._pool, size):
            return None
        self._advance(size)
        return number


def form(queue: TrajectoryQueue) -> tuple[int, ...] | None:
    """Return the numbers of the groups of the next batch, in ascending order, or None if there is none now."""
    asked = minimums(queue)
    if queue.batch_size < 1 or queue.sequences < queue.batch_size or lacking(queue, asked):
        return None
    fill, pools = fit(queue, asked)
    if not fill.exists:
        return None
    turns = {owner: _Turn(queue, share, pools.get(owner, 0)) for owner, share in queue.shares()}
    chosen = [number for each in _choose(queue, fill, turns) for number in queue.members(each)]
    return tuple(sorted(chosen))


def may_form(queue: TrajectoryQueue) -> bool:
    """Return whether some groups of the queue have exactly the sequences of a batch.

    It is one search. A batch may be formed only after an environment has pushed the minimum that it asks for, or left.
    """
    return 0 < queue.batch_size <= queue.sequences and _fill(queue, {})[0].exists


def _choose(queue: TrajectoryQueue, fill: ExactFill, turns: dict[int, _Turn]) -> Iterator[int]:
    """Yield what a batch takes: the oldest group that fits, and then the oldest of each environment in its turn."""
    oldest = sorted((number, size, owner) for owner, turn in turns.items() for number, size in turn.oldest())
    served = {owner: virtual_time(queue, owner) for owner in turns}
    for _, size, owner in oldest:
        number = turns[owner].take(fill, size)
        if number is not None:
            served[owner] += size / queue.weight_of(owner)
            yield number
            break
    order = [(served[owner], first[0][0], owner) for owner, turn in turns.items() if (first := turn.oldest())]
    heapify(order)
    while fill.left:
        at, _, owner = heappop(order)
        turn = turns[owner]
        for _, size in turn.oldest():
            number = turn.take(fill, size)
            if number is not None:
                yield number
                if first := turn.oldest():
                    heappush(order, (at + size / queue.weight_of(owner), first[0][0], owner))
                break


def usable(queue: TrajectoryQueue, share: EnvironmentShare) -> Iterator[tuple[int, GroupLine]]:
    """Yield the lines of a share that are not larger than a batch, as those of early groups can be, by their size."""
    return ((size, line) for size, line in share.lines.items() if 0 < size <= queue.batch_size)


# ---- minimums -----------------------------------------------------------------------------------------------


def minimums(queue: TrajectoryQueue) -> dict[int, int]:
    """Return the sequences that each connected environment with a minimum has in a batch, if it asks for any.

    Minimums that are more than a batch together are scaled down to it, but not below the environment's smallest group.
    """
    asked: dict[int, int] = {}
    for environment in queue.environments.values():
        if environment.connected and environment.minimum is not None:
            sequences = int(queue.batch_size * environment.minimum)
            if sequences > 0:
                asked[environment.id] = sequences
    total = sum(asked.values())
    if total > queue.batch_size:
        for each, sequences in asked.items():
            environment = queue.environments[each]
            smallest = min((size for size, _ in usable(queue, environment.share)), default=environment.group_size)
            asked[each] = max(smallest, sequences * queue.batch_size // total)
    return asked


def lacking(queue: TrajectoryQueue, asked: dict[int, int]) -> list[int]:
    """Return the environments that have less queued than what they ask for: there is no batch without it."""
    return [each for each, sequences in asked.items() if queue.environments[each].share.sequences < sequences]


def fit(queue: TrajectoryQueue, asked: dict[int, int]) -> tuple[ExactFill, dict[int, int]]:
    """Return a fill of the batch in which every minimum is met, and the pools of the environments that have one.

    All others are in pool 0. Where the sizes of groups allow no such fill, the minimum of the environment that has been
    served most is left out, until there is one: groups that do not fit together block nobody, and the one that was left
    out is the next to be served.
    """
    fill, pools = _fill(queue, asked)
    if fill.exists or not asked:
        return fill, pools
    without = _fill(queue, {})
    if not without[0].exists:
        return without
    order = sorted(asked, key=lambda each: (virtual_time(queue, each), each))
    best, met, unmet = without, 0, len(order)  # leaving out more minimums only makes more fills: so halve
    while unmet - met > 1:
        middle = (met + unmet) // 2
        found = _fill(queue, {each: asked[each] for each in order[:middle]})
        if found[0].exists:
            best, met = found, middle
        else:
            unmet = middle
    return best


def _fill(queue: TrajectoryQueue, asked: dict[int, int]) -> tuple[ExactFill, dict[int, int]]:
    pools: dict[int, int] = {each: 1 + index for index, each in enumerate(asked)}
    lines: list[dict[int, list[GroupLine]]] = [{} for _ in range(1 + len(asked))]
    for owner, share in queue.shares():
        by_size = lines[pools.get(owner, 0)]
        for size, line in usable(queue, share):
            by_size.setdefault(size, []).append(line)
    counted = [
        Pool({size: sum(line.count for line in each[size]) for size in _oldest_sizes(queue, each)}) for each in lines
    ]
    for each, sequences in asked.items():
        counted[pools[each]].need = sequences
    return ExactFill(counted, queue.batch_size), pools


def _oldest_sizes(queue: TrajectoryQueue, lines: dict[int, list[GroupLine]]) -> list[int]:
    if len(lines) <= SIZES_MAX:
        return list(lines)
    oldest = {size: min(next(queue.waiting(line)) for line in each) for size, each in lines.items()}
    return sorted(lines, key=lambda size: oldest[size])[:SIZES_MAX]
