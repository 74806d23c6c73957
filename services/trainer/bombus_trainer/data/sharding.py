"""Deals the sequences of an update out to ranks and micro-batches, evenly, the same on every rank."""

from collections.abc import Sequence

import numpy as np

from bombus_trainer.data.bins import balanced, best_fit, padded
from bombus_trainer.data.packing import TrainingItem

MicroBatch = list[TrainingItem]


def shard(
    items: Sequence[TrainingItem], ranks: int, tokens_max: int, packed: bool, attention: float = 0.0
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank: as many for one as for another, and about as much work.

    A micro-batch costs at most `tokens_max` computed tokens, where it is not `packed` with all its sequences padded
    to its longest; a longer sequence has one of its own. For `attention` see `bins.balanced`. A rank for which
    nothing is left computes a sequence without terms, because all take part in each exchange of weights and
    gradients; each of these waits for the slowest, so the k-th largest of all ranks are computed together.
    """
    if not items:
        return [[] for _ in range(ranks)]
    lengths = [len(item.tokens_T) - 1 for item in items]
    fill = best_fit if packed else padded
    dealt: list[list[MicroBatch]] = []
    for mine in balanced(lengths, ranks, attention):
        bins = fill([lengths[index] for index in mine], tokens_max)
        dealt.append([[items[mine[place]] for place in each] for each in bins])
    count = max(len(bins) for bins in dealt)
    shortest = items[int(np.argmin(lengths))]
    return [_as_many(bins, count, shortest, packed) for bins in dealt]


def computed_tokens(micro_batch: MicroBatch, packed: bool) -> int:
    lengths = [len(item.tokens_T) - 1 for item in micro_batch]
    return sum(lengths) if packed else len(lengths) * max(lengths)


def _as_many(bins: list[MicroBatch], count: int, shortest: TrainingItem, packed: bool) -> list[MicroBatch]:
    """`count` micro-batches: the largest are cut in two, and fillers are only where nothing is left to cut."""

    def cost(micro_batch: MicroBatch) -> int:
        return computed_tokens(micro_batch, packed)

    bins = [*bins]
    while len(bins) < count and any(len(each) > 1 for each in bins):
        whole = max((each for each in bins if len(each) > 1), key=cost)
        bins.remove(whole)
        ordered = sorted(whole, key=lambda item: len(item.tokens_T))
        halves = balanced([len(item.tokens_T) for item in ordered], 2) if packed else _middle(len(ordered))
        bins += [[ordered[index] for index in half] for half in halves]
    bins += [[_filler(shortest)] for _ in range(count - len(bins))]
    return sorted(bins, key=cost, reverse=True)


def _middle(count: int) -> list[list[int]]:
    """Padded sequences stay beside those of about their length."""
    return [[*range(count // 2)], [*range(count // 2, count)]]


def _filler(item: TrainingItem) -> TrainingItem:
    nothing = np.zeros(0, dtype=np.int64)
    return TrainingItem(item.tokens_T[:2], nothing, item.terms.take(nothing))
