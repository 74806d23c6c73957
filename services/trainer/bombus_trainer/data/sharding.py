"""Distributes an update's sequences evenly over ranks and micro-batches, with the same result on every rank.

All ranks take part in every exchange, so all of them need the same number of micro-batches.
"""

from collections.abc import Sequence

import numpy as np

from bombus_trainer.data.bins import balanced, best_fit, padded
from bombus_trainer.data.packing import TrainingItem

MicroBatch = list[TrainingItem]


def shard(
    items: Sequence[TrainingItem], ranks: int, tokens_max: int, packed: bool, attention: float = 0.0
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches. All ranks get the same number of micro-batches, with about the same work.

    A micro-batch has at most `tokens_max` computed tokens, counting all its sequences as padded to the longest unless
    `packed`; a longer sequence gets its own micro-batch. See `bins.balanced` for `attention`. A rank with too few
    micro-batches also computes a sequence without terms, because all ranks take part in each exchange of weights and
    gradients. Each exchange waits for the slowest rank, so all ranks compute their k-th largest micro-batch at the same
    time.
    """
    if not items:
        return [[] for _ in range(ranks)]
    lengths = [len(item.tokens_T) - 1 for item in items]
    fill = best_fit if packed else padded
    shards: list[list[MicroBatch]] = []
    for indices in balanced(lengths, ranks, attention):
        bins = fill([lengths[index] for index in indices], tokens_max)
        shards.append([[items[indices[place]] for place in each] for each in bins])
    count = max(len(bins) for bins in shards)
    shortest = items[int(np.argmin(lengths))]
    return [_as_many(bins, count, shortest, packed) for bins in shards]


def computed_tokens(micro_batch: MicroBatch, packed: bool) -> int:
    lengths = [len(item.tokens_T) - 1 for item in micro_batch]
    return sum(lengths) if packed else len(lengths) * max(lengths)


def _as_many(bins: list[MicroBatch], count: int, shortest: TrainingItem, packed: bool) -> list[MicroBatch]:
    """Make `count` micro-batches by repeatedly splitting the largest in two. Add fillers only once nothing is left to
    split."""

    def cost(micro_batch: MicroBatch) -> int:
        return computed_tokens(micro_batch, packed)

    bins = [*bins]
    while len(bins) < count and any(len(each) > 1 for each in bins):
        largest = max((each for each in bins if len(each) > 1), key=cost)
        bins.remove(largest)
        ordered = sorted(largest, key=lambda item: len(item.tokens_T))
        halves = balanced([len(item.tokens_T) for item in ordered], 2) if packed else _middle(len(ordered))
        bins += [[ordered[index] for index in half] for half in halves]
    bins += [[_filler(shortest)] for _ in range(count - len(bins))]
    return sorted(bins, key=cost, reverse=True)


def _middle(count: int) -> list[list[int]]:
    """Split in the middle, so that padded sequences stay together with sequences of about the same length."""
    return [[*range(count // 2)], [*range(count // 2, count)]]


def _filler(item: TrainingItem) -> TrainingItem:
    nothing = np.zeros(0, dtype=np.int64)
    return TrainingItem(item.tokens_T[:2], nothing, item.terms.take(nothing))
