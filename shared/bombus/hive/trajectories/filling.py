"""Selections of groups that have exactly a given number of sequences: whether there is one, and which.

Groups of one size are alike here, so a search is a subset sum over a few distinct sizes with a count for each. The
sums that can be reached are the bits of one integer, as in Pisinger's "Dynamic programming on the word RAM"
(Algorithmica 35, 2003); a size that occurs n times costs log2(n) shifts.
"""

from collections.abc import Iterator, Sequence

import msgspec

SEARCHES_MAX = 512  # of one fill; after that it is completed with the selection that was found last


class Pool(msgspec.Struct):
    """Groups that a fill does not tell apart but by size. At least `need` of its sequences are in the selection."""

    counts: dict[int, int]  # groups by their number of sequences
    need: int = 0


class ExactFill:
    """A selection of exactly `left` sequences, decided one group at a time.

    It always has a selection that completes it. A group that is in that selection is taken at once; for any other, one
    search looks for a selection that has it. A group that no selection has is refused for good, since taking others
    only leaves fewer selections.

    One search costs at most s * log2(n) shifts of `left` bits, for s sizes of n groups each, and as many more as a pool
    with a need has sums. There are at most `SEARCHES_MAX`. Then the last selection is completed: it is exact, and has
    what was taken, but not every group that could have been taken.
    """

    def __init__(self, pools: Sequence[Pool], total: int) -> None:
        self.left = total
        self._pools = [Pool(dict(pool.counts), pool.need) for pool in pools]
        self._searches = 0
        self._refused: set[tuple[int, int]] = set()
        self._selection = self._search()

    @property
    def exists(self) -> bool:
        """Return whether any selection has exactly the sequences that were requested, and those that pools need."""
        return self._selection is not None

    def take(self, pool: int, size: int) -> bool:
        """Take a group of a pool if some selection has one more of its size, and return whether that is so."""
        if self._selection is None or (pool, size) in self._refused:
            return False
        if not self._selection[pool].get(size) and not self._reselect(pool, size):
            return False
        self._selection[pool][size] -= 1
        self._remove(pool, size)
        return True

    def could_take(self, pool: int, size: int) -> bool:
        """Return whether some selection has one more group of this size, without taking it."""
        if self._selection is None or (pool, size) in self._refused:
            return False
        return bool(self._selection[pool].get(size)) or self._reselect(pool, size)

    def _reselect(self, pool: int, size: int) -> bool:
        """Look for a selection that has one more group of this size, and make it the one that completes the fill."""
        counts = self._pools[pool].counts
        if not counts.get(size) or size > self.left or self._searches >= SEARCHES_MAX:
            return False
        self._remove(pool, size)
        found = self._search()
        counts[size] += 1
        self._pools[pool].need += size
        self.left += size
        if found is None:
            self._refused.add((pool, size))
            return False
        found[pool][size] = found[pool].get(size, 0) + 1
        self._selection = found
        return True

    def _remove(self, pool: int, size: int) -> None:
        self._pools[pool].counts[size] -= 1
        self._pools[pool].need -= size
        self.left -= size

    def _search(self) -> list[dict[int, int]] | None:
        self._searches += 1
        return select(self._pools, self.left)


def select(pools: Sequence[Pool], total: int) -> list[dict[int, int]] | None:
    """Return how many groups of each size to take from each pool for exactly `total` sequences, None if none fit."""
    reached = 1  # bit n says that the pools before this one have a selection of n sequences
    before: list[int] = []
    own: list[list[int]] = []
    for pool in pools:
        sums = _sums(pool.counts, total)
        before.append(reached)
        own.append(sums)
        reached = _added(reached, _at_least(sums[-1], pool.need), total)
    if not reached >> total & 1:
        return None
    selection: list[dict[int, int]] = []
    for pool, reached, sums in zip(reversed(pools), reversed(before), reversed(own)):
        taken = total if reached == 1 else _share(reached, _at_least(sums[-1], pool.need), total)
        selection.append(_counted(pool.counts, sums, taken))
        total -= taken
    selection.reverse()
    return selection


def reachable(counts: dict[int, int], total: int) -> int:
    """Return the sums up to `total` of groups with these counts by size, as the bits of an integer."""
    return _sums(counts, total)[-1]


def _sums(counts: dict[int, int], total: int) -> list[int]:
    """Return the sums that can be reached with none of the sizes, with the first, with the first two, and so on."""
    mask = (1 << (total + 1)) - 1
    bits = 1
    sums = [bits]
    for size, count in counts.items():
        rest, step = min(count, total // size), 1
        while rest > 0:
            step = min(step, rest)
            bits |= bits << (size * step) & mask
            rest -= step
            step *= 2
        sums.append(bits)
    return sums


def _counted(counts: dict[int, int], sums: list[int], total: int) -> dict[int, int]:
    """Return how many groups of each size to take for a total that is among the last of `sums`."""
    taken: dict[int, int] = {}
    for (size, count), without in zip(reversed(counts.items()), reversed(sums[:-1])):
        least = total // size if without == 1 else 0
        number = next(n for n in range(least, count + 1) if without >> (total - n * size) & 1)
        if number:
            taken[size] = number
            total -= number * size
    return taken


def _at_least(bits: int, need: int) -> int:
    return bits >> need << need if need > 0 else bits


def _added(one: int, other: int, total: int) -> int:
    """Return every sum of a bit of one and a bit of the other."""
    if one.bit_count() > other.bit_count():
        one, other = other, one
    if one == 1:
        return other
    mask = (1 << (total + 1)) - 1
    added = 0
    for number in _bits(one):
        added |= other << number
    return added & mask


def _share(others: int, own: int, total: int) -> int:
    """Return the smallest sum of `own` for which `others` have the rest of the total."""
    return next(number for number in _bits(own) if number <= total and others >> (total - number) & 1)


def _bits(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
