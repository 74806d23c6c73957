"""Form the next batch from the queue, as a pure function of the queue.

A batch has exactly `batch_size` sequences, in whole groups, and gives each environment the minimum that it requests.
Among all such selections, one is chosen by taking one group after another: first the oldest group that is in any
selection, then repeatedly the oldest group of the environment whose turn it is by weighted fair queueing, if a
remaining selection contains that group. So a batch is found whenever one exists, and sequences are divided in the ratio
of the weights as far as the sizes of groups allow. The oldest group counts towards its environment's share, but is
taken regardless of the environment's weight, so weights have less effect in batches of few groups. No environment waits
forever, unless the minimums of others add up to the whole batch: while those minimums can be met, batches contain no
groups of environments without a minimum.

Searches are bounded. A search considers at most `SIZES_MAX` sizes for each environment with a minimum, and as many for
all others together, so it can miss a batch that needs more sizes. `filling` limits the number of searches; after the
last one, the rest of the batch is filled without regard to turns or the age of groups. The cost grows with the batch,
with the number of environments and with the number of distinct sizes, not with the length of the queue.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from bombus.hive.trajectories.filling import ExactFill, Pool
from bombus.hive.trajectories.queue import EnvironmentShare, GroupLine, TrajectoryQueue, virtual_time

SIZES_MAX = 64  # distinct sizes that one search considers: those whose oldest groups have waited longest


class _Turn:
    """The groups that a batch can take from one share: the oldest of each size, and the share's pool in the fill."""

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
        """Return the number and size of the oldest group of each size, sorted from oldest to newest."""
        return sorted((number, size) for size, number in self._first.items())

    def take(self, fill: ExactFill, size: int) -> int | None:
        """Take the oldest group of a size and return its number, or None if the fill cannot take it."""
        number = self._first[size]
        if not fill.take(self._pool, size):
            return None
        self._advance(size)
        return number


def form(queue: TrajectoryQueue) -> tuple[int, ...] | None:
    """Return the numbers of the groups of the next batch, in ascending order, or None if none can be formed now."""
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
    """Return whether some selection of queued groups has exactly `batch_size` sequences.

    This takes a single search and ignores minimums: even if it returns True, the batch may have to wait until an
    environment pushes its minimum or leaves.
    """
    return 0 < queue.batch_size <= queue.sequences and _fill(queue, {})[0].exists


def _choose(queue: TrajectoryQueue, fill: ExactFill, turns: dict[int, _Turn]) -> Iterator[int]:
    """Yield the groups that a batch takes: first the oldest group that fits, then, as the environments take turns, the
    oldest group that fits from the environment whose turn it is."""
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
    """Yield the lines of a share in which the groups are small enough for a batch, each with its group size.

    Groups that were pushed before the trainer registered may be larger than a batch.
    """
    return ((size, line) for size, line in share.lines.items() if 0 < size <= queue.batch_size)


# ---- minimums -----------------------------------------------------------------------------------------------


def minimums(queue: TrajectoryQueue) -> dict[int, int]:
    """Return, as a number of sequences in a batch, the minimum of each connected environment that requests one.

    If the minimums add up to more than a batch, they are scaled down to fit, but none below the size of its
    environment's smallest group.
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
    """Return the environments with fewer queued sequences than their minimum. A batch must wait for them."""
    return [each for each, sequences in asked.items() if queue.environments[each].share.sequences < sequences]


def fit(queue: TrajectoryQueue, asked: dict[int, int]) -> tuple[ExactFill, dict[int, int]]:
    """Return a fill of the batch that meets every minimum, and the pools of the environments that have a minimum.

    All other environments are in pool 0. If the sizes of groups allow no such fill, minimums are dropped until there is
    one, beginning with the environment that has been served most. So groups that do not fit together never block a
    batch, and the environment whose minimum was dropped is served next.
    """
    fill, pools = _fill(queue, asked)
    if fill.exists or not asked:
        return fill, pools
    without = _fill(queue, {})
    if not without[0].exists:
        return without
    order = sorted(asked, key=lambda each: (virtual_time(queue, each), each))
    best, met, unmet = without, 0, len(order)  # dropping minimums never removes a fill, so bisect
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
