"""Distributes whole documents over bins and ranks, by their lengths in tokens. Everything here is deterministic.

This is plain packing, for trainers whose attention tells documents apart by their positions. packing.py also shares
prefixes, and needs its own attention.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace


def greedy(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Fill bins in the order of the documents, starting a new bin whenever the next document does not fit. A document
    that is too long gets its own bin."""
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = tokens_max
        bins[-1].append(index)
        room -= length
    return bins


def best_fit(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Place documents in order of decreasing length, each into the fullest bin with room for it (best-fit decreasing).

    This uses at most 11/9 of the fewest possible bins, plus one (Johnson et al. 1974, doi:10.1137/0203025).
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = tokens_max, len(bins)
            bins.append([])
        bins[number].append(index)
        insort(rooms, (max(room - length, 0), number))
    return [sorted(each) for each in bins]


def padded(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Fill bins for rows that are padded to the longest row in their bin: longest documents first, one bin after
    another.

    Documents of about the same length thus share a bin, whose cost is its longest length times its number of documents.
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not bins or lengths[bins[-1][0]] * (len(bins[-1]) + 1) > tokens_max:
            bins.append([])
        bins[-1].append(index)
    return bins


def balanced(lengths: Sequence[int], ranks: int, attention: float = 0.0) -> list[list[int]]:
    """Distribute documents over ranks, heaviest first, each to the least loaded rank. Return each rank's indices,
    ascending.

    A document costs length + `attention` x length^2: 0 balances tokens; `flops.Cost.of_attention` balances the compute
    of a causal transformer. No rank gets more than 4/3 of the largest load in the best distribution (Graham 1969,
    doi:10.1137/0117039). If there are fewer documents than ranks, a rank may get none.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, but must be at least 1")
    costs = [length + attention * length * length for length in lengths]
    shards: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # between equal loads, the rank with fewer documents is next
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = loads[0]
        shards[rank].append(index)
        heapreplace(loads, (load + costs[index], count + 1, rank))
    return [sorted(each) for each in shards]
