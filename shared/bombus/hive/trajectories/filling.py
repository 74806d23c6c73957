"""Find selections of groups that have exactly a given number of sequences.

Groups of the same size are interchangeable here, so a search is a subset sum over a few distinct sizes, each with a
count. The reachable sums are the bits of one integer, as in Pisinger's "Dynamic programming on the word RAM"
(Algorithmica 35, 2003); a size that occurs n times costs log2(n) shifts.
"""

from collections.abc import Iterator, Sequence
from math import gcd

import msgspec

SEARCHES_MAX = 256  # the most searches for one fill; after that, the selection found by the last search completes it
SEARCHED_MAX = 1 << 24  # limit on the sum of pools x sequences over all searches of one fill
SIZES_LOOKED_AT_MAX = 1 << 16  # limit on sizes in all pools over all searches of one fill: about a tenth of a second


class Pool(msgspec.Struct):
    """Groups that a fill distinguishes only by size. The selection must contain at least `need` sequences from the
    pool."""

    counts: dict[int, int]  # number of groups by their number of sequences
    need: int = 0


class ExactFill:
    """A selection of exactly `left` sequences, decided one group at a time.

    There is always a selection that completes the fill. A group in that selection is taken immediately; for any other
    group, one search looks for a selection that contains it. If no selection contains it, groups of that size in that
    pool are refused from then on, because taking other groups only leaves fewer selections.

    One search costs s * log2(n) shifts of `left` bits for each pool, with s sizes of n groups each. For every pool but
    the first, it costs about r * log2(n) more, for r runs of consecutive sums, of which there are few. Searches are
    limited by `SEARCHES_MAX`, `SEARCHED_MAX` and `SIZES_LOOKED_AT_MAX`. After the last search, the selection that it
    found completes the fill. The fill is then exact and contains every group that was taken, but may lack groups that
    further searches could fit in.
    """

    def __init__(self, pools: Sequence[Pool], total: int) -> None:
        self.left = total
        self._pools = [Pool(dict(pool.counts), pool.need) for pool in pools]
        looked_at = max(1, len(pools) * total)  # number of sequences in one search
        sizes = max(1, sum(len(pool.counts) for pool in pools))
        self._searches_left = max(1, min(SEARCHES_MAX, SEARCHED_MAX // looked_at, SIZES_LOOKED_AT_MAX // sizes))
        self._refused: set[tuple[int, int]] = set()
        self._selection = self._search()

    @property
    def exists(self) -> bool:
        """Return whether any selection has exactly the requested number of sequences and meets each pool's need."""
        return self._selection is not None

    def take(self, pool: int, size: int) -> bool:
        """Take a group of this size from this pool if some selection contains one more. Return whether a group was
        taken."""
        if self._selection is None or (pool, size) in self._refused:
            return False
        if not self._selection[pool].get(size) and not self._reselect(pool, size):
            return False
        self._selection[pool][size] -= 1
        self._remove(pool, size)
        return True

    def could_take(self, pool: int, size: int) -> bool:
        """Return whether some selection contains one more group of this size from this pool, without taking such a
        group."""
        if self._selection is None or (pool, size) in self._refused:
            return False
        return bool(self._selection[pool].get(size)) or self._reselect(pool, size)

    def _reselect(self, pool: int, size: int) -> bool:
        """Search for a selection with one more group of this size. If there is one, it becomes the selection that
        completes the fill."""
        counts = self._pools[pool].counts
        if not counts.get(size) or size > self.left or not self._searches_left:
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
        self._searches_left -= 1
        return select(self._pools, self.left)


def select(pools: Sequence[Pool], total: int) -> list[dict[int, int]] | None:
    """Return how many groups of each size to take from each pool for exactly `total` sequences, or None if that is
    impossible."""
    reached = 1  # bit n is set if the pools before this one have a selection of n sequences
    before: list[int] = []
    own: list[list[int]] = []
    for pool in pools:
        sums = _sums(pool.counts, total)
        before.append(reached)
        own.append(sums)
        reached = _added(reached, _at_least(sums[-1], pool.need), gcd(*pool.counts) or 1, total)
    if not reached >> total & 1:
        return None
    selection: list[dict[int, int]] = []
    has = [_sequences(pool.counts, total) for pool in pools]
    of_all = sum(has)
    for number, pool in reversed(list(enumerate(pools))):
        sums = own[number]
        # The pool's proportional part of the total, or the pool's need if that is more.
        wanted = min(total, max(pool.need, total * has[number] // max(of_all, 1)))
        of_all -= has[number]
        taken = _share(before[number], _at_least(sums[-1], pool.need), total, wanted) if number else total
        selection.append(_counted(pool.counts, sums, taken))
        total -= taken
    selection.reverse()
    return selection


def reachable(counts: dict[int, int], total: int) -> int:
    """Return the sums up to `total` that groups with these counts by size can add up to, as the bits of an integer."""
    return _sums(counts, total)[-1]


def _sums(counts: dict[int, int], total: int) -> list[int]:
    """Return the sums that can be reached with no sizes, with the first size, with the first two sizes, and so on."""
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
    """Return how many groups of each size to take for `total`, which must be one of the sums that all sizes together
    reach.

    The counts include all sizes if possible, so that most groups taken next are already in the selection.
    """
    taken: dict[int, int] = {}
    left, usable = total, _sequences(counts, total)
    for (size, count), without in zip(reversed(counts.items()), reversed(sums[:-1])):
        if not left:
            break
        of_size, most = size * min(count, total // size), min(count, left // size)
        wanted = most if without == 1 else min(most, left * of_size // max(usable, 1) // size)
        usable -= of_size
        number = next(n for n in _outward(wanted, most) if without >> (left - n * size) & 1)
        if number:
            taken[size] = number
            left -= number * size
    return taken


def _sequences(counts: dict[int, int], total: int) -> int:
    """Return how many sequences the groups have, counting at most `total` sequences for each size."""
    return sum(size * min(count, total // size) for size, count in counts.items())


def _outward(middle: int, last: int) -> Iterator[int]:
    """Yield the numbers from 0 to `last`, those nearest to `middle` first."""
    yield middle
    for away in range(1, last + 1):
        if middle - away >= 0:
            yield middle - away
        if middle + away <= last:
            yield middle + away


def _at_least(bits: int, need: int) -> int:
    return bits >> need << need if need > 0 else bits


def _added(reached: int, own: int, stride: int, total: int) -> int:
    """Return the set of all sums of one number from the set `reached` and one from the set `own`. Sets are bit masks.

    The numbers mostly lie in runs spaced by their common divisor `stride`, so even a large set has only a few runs.
    """
    if reached == 1:
        return own
    mask = (1 << (total + 1)) - 1
    added = 0
    for start, length in _runs(own, stride):
        repeated, done = reached, 1
        while done < length:
            step = min(done, length - done)
            repeated |= repeated << (step * stride) & mask
            done += step
        added |= repeated << start & mask
    return added


def _runs(bits: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of each run of bits that are `stride` apart."""
    ends: dict[int, list[int]] = {}
    for end in _bits(bits & ~(bits >> stride)):
        ends.setdefault(end % stride, []).append(end)
    ordered = {rest: iter(each) for rest, each in ends.items()}
    for start in _bits(bits & ~(bits << stride)):
        yield start, (next(ordered[start % stride]) - start) // stride + 1


def _share(others: int, own: int, total: int, wanted: int) -> int:
    """Return the sum in `own` that is nearest to `wanted`. Only sums that together with a sum in `others` make up
    `total` are considered."""
    return next(n for n in _outward(wanted, total) if own >> n & 1 and others >> (total - n) & 1)


def _bits(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
