"""Deals the sequences of an update out to ranks and micro-batches, evenly, the same on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bombus_trainer.packing import Item, Terms
from bombus_trainer.sequences import Ints


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence as an engine without our packing wants it: tokens [T], one temperature, and where its N terms are."""

    tokens_T: Ints
    positions_N: Ints
    temperature: float
    terms: Terms


MicroBatch = list[Row]


def rows_of(items: Iterable[Item]) -> list[Row]:
    """One row for each sequence and each of its temperatures, cut behind its last term: no term is in two rows.

    To losses and masks that look at sequences, each of these rows is one.
    """
    rows: list[Row] = []
    for item in items:
        for temperature in np.unique(item.terms.temperatures_N):
            chosen_N = np.flatnonzero(item.terms.temperatures_N == temperature)
            positions_N = item.positions_N[chosen_N]
            tokens_T = item.tokens_T[: int(positions_N[-1]) + 1]
            rows.append(Row(tokens_T, positions_N, float(temperature), item.terms.take(chosen_N)))
    return rows


def deal(rows: Sequence[Row], ranks: int, tokens_max: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank: as many for one as for another, and about as many tokens.

    Where the rows are padded to the longest of their micro-batch, that costs at most `tokens_max`; a longer row has
    a micro-batch of its own. A rank for which nothing is left computes a row without terms, because all take part
    in each exchange of weights and gradients.
    """
    if not rows:
        return [[] for _ in range(ranks)]
    # Rows of about the same length come together, so that little is padded.
    ordered = sorted(rows, key=lambda row: (-len(row.tokens_T), row.tokens_T.tobytes(), int(row.terms.ids_N[0])))
    bins: list[MicroBatch] = []
    for row in ordered:
        if not bins or len(bins[-1][0].tokens_T) * (len(bins[-1]) + 1) > tokens_max:
            bins.append([])
        bins[-1].append(row)
    while len(bins) % ranks and any(len(each) > 1 for each in bins):
        bins.sort(key=lambda each: -len(each) * len(each[0].tokens_T))
        largest = next(index for index, each in enumerate(bins) if len(each) > 1)
        whole = bins.pop(largest)
        bins += [whole[::2], whole[1::2]]
    bins += [[_filler(ordered[-1])] for _ in range(-len(bins) % ranks)]
    return _even(bins, ranks)


def _even(bins: list[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """The largest first, each to the rank that has least to do and still takes one."""
    share = len(bins) // ranks
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for each in sorted(bins, key=_cost, reverse=True):
        rank = min((rank for rank in range(ranks) if len(dealt[rank]) < share), key=lambda rank: loads[rank])
        dealt[rank].append(each)
        loads[rank] += _cost(each)
    return dealt


def _cost(rows: MicroBatch) -> int:
    return len(rows) * max(len(row.tokens_T) for row in rows)


def _filler(row: Row) -> Row:
    nothing = np.zeros(0, dtype=np.int64)
    return Row(row.tokens_T[:1], nothing, 1.0, row.terms.take(nothing))
