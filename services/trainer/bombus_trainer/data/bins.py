"""Whole documents into rows: which goes where, how a row is laid out, and which part of it each rank of a ring gets.

This is the plain packing, for trainers whose attention takes `cu_seqlens`. packing.py shares prefixes as well, and
needs an attention of its own. Everything here is deterministic, and lengths are in tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np

from bombus_trainer.data.sequences import Ints

PADDING = -1


# ---- which document goes where ------------------------------------------------------------------------------------


def greedy(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Documents in their order, each bin filled until the next does not fit. A longer one has a bin of its own."""
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
    """The longest document first, each into the fullest bin that has room for it (best-fit decreasing).

    At most 11/9 of the fewest bins possible, and one (Johnson et al. 1974, doi:10.1137/0203025).
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
    """For rows that are padded to the longest of their bin: the longest document first, each bin filled in turn.

    So documents of about the same length come together. A bin costs its longest times its documents.
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not bins or lengths[bins[-1][0]] * (len(bins[-1]) + 1) > tokens_max:
            bins.append([])
        bins[-1].append(index)
    return bins


def balanced(lengths: Sequence[int], ranks: int, attention: float = 0.0) -> list[list[int]]:
    """Deal documents to ranks, the heaviest first, each to the least loaded: for each rank its documents, ascending.

    A document costs length + `attention` x length^2: 0 balances tokens; with `flops.Cost.of_attention` it is a
    causal transformer's compute. No rank has over 4/3 of what the best deal gives the most loaded (Graham 1969,
    doi:10.1137/0117039). A rank may get none when there are fewer documents than ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: at least 1")
    costs = [length + attention * length * length for length in lengths]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # among equals the one with fewer documents is next
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = loads[0]
        dealt[rank].append(index)
        heapreplace(loads, (load + costs[index], count + 1, rank))
    return [sorted(each) for each in dealt]


# ---- how a row is laid out ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowLayout:
    """D documents end to end, T tokens with their padding.

    `cu_seqlens_D` [D + 1] is where documents begin, int32 as flash attention wants it. `position_ids_T` begin again
    with each. `source_T` is each token's place in the documents without padding, `PADDING` for what was filled up.
    """

    cu_seqlens_D: Ints
    position_ids_T: Ints
    source_T: Ints


def lay_out(lengths: Sequence[int], multiple: int = 1) -> RowLayout:
    """Documents one after the other, each padded at its end to a multiple of `multiple` tokens.

    Without a ring nothing is padded. For ring attention `multiple` is 2 x the size of the ring: see `zigzag`.
    """
    padded = [-(-length // multiple) * multiple for length in lengths]
    positions = [np.arange(length) for length in padded]
    starts = np.cumsum([0, *lengths])
    sources = [
        np.where(position < length, start + position, PADDING)
        for position, length, start in zip(positions, lengths, starts.tolist(), strict=False)
    ]
    nothing = np.zeros(0, dtype=np.int64)
    return RowLayout(
        cu_seqlens_D=np.cumsum([0, *padded]).astype(np.int32),
        position_ids_T=np.concatenate([nothing, *positions]),
        source_T=np.concatenate([nothing, *sources]),
    )


def zigzag(cu_seqlens_D: Ints, ranks: int) -> Ints:
    """The rows [R, T / R] of each rank of a ring: of 2R chunks of a document rank r has chunks r and 2R - 1 - r.

    So each has an early and a late part of every document, and with causal attention all have the same work. A
    rank's own `cu_seqlens` are the whole's divided by `ranks`. Raises `ValueError` unless each document's length is
    a multiple of 2R. No backend trains with ring attention yet: this is the sharding that one needs, and tested.
    """
    shards: list[list[Ints]] = [[np.zeros(0, dtype=np.int64)] for _ in range(ranks)]
    for start, end in zip(cu_seqlens_D[:-1].tolist(), cu_seqlens_D[1:].tolist(), strict=True):
        if (end - start) % (2 * ranks):
            raise ValueError(f"a document of {end - start} tokens for a ring of {ranks}: pad it to 2 x {ranks}")
        chunks = np.arange(start, end).reshape(2 * ranks, -1)
        for rank in range(ranks):
            shards[rank] += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return np.stack([np.concatenate(shard) for shard in shards])
