"""How an update's sequences are dealt out to ranks: whole, evenly, the same everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus_trainer.dealing import Row, deal, rows_of
from bombus_trainer.packing import Item
from tests.trainer_given import item


def items(lengths: list[int]) -> list[Item]:
    return [item(list(range(1, length + 1)), [length - 1], first_id=number) for number, length in enumerate(lengths)]


def ids(rows: list[Row]) -> list[int]:
    return [int(term) for row in rows for term in row.terms.ids_N]


@given(st.lists(st.integers(2, 40), max_size=30), st.integers(1, 5), st.integers(8, 80))
def test_every_term_is_dealt_once_and_every_rank_has_as_many_micro_batches(
    lengths: list[int], ranks: int, tokens_max: int
) -> None:
    dealt = deal(rows_of(items(lengths)), ranks, tokens_max)
    assert len(dealt) == ranks
    assert len({len(of_rank) for of_rank in dealt}) == 1
    micro_batches = [rows for of_rank in dealt for rows in of_rank]
    assert all(micro_batches)
    assert sorted(term for rows in micro_batches for term in ids(rows)) == list(range(len(lengths)))
    for rows in micro_batches:
        cost = len(rows) * max(len(row.tokens_T) for row in rows)
        assert cost <= tokens_max or len(rows) == 1
    again = deal(rows_of(items(lengths)), ranks, tokens_max)
    assert [[ids(rows) for rows in of_rank] for of_rank in again] == [
        [ids(rows) for rows in of_rank] for of_rank in dealt
    ]


def test_ranks_get_about_as_many_tokens() -> None:
    dealt = deal(rows_of(items([40, 20, 20, 10, 10, 10, 10])), 2, 40)
    loads = [sum(len(rows) * len(rows[0].tokens_T) for rows in of_rank) for of_rank in dealt]
    assert loads == [60, 60] or abs(loads[0] - loads[1]) <= 20


def test_a_rank_for_which_nothing_is_left_computes_a_row_without_terms() -> None:
    (only,), (filler,) = deal(rows_of(items([5])), 2, 100)
    assert ids(only) == [0]
    assert ids(filler) == []
    assert len(filler[0].tokens_T) == 1
    assert deal([], 2, 100) == [[], []]


def test_a_sequence_is_laid_down_once_for_each_of_its_temperatures_and_cut_behind_its_last_term() -> None:
    mixed = item([1, 2, 3, 4, 5, 6], [2, 3, 5])
    mixed.terms.temperatures_N[:] = [0.5, 1.0, 0.5]
    cold, warm = rows_of([mixed])
    assert (cold.temperature, warm.temperature) == (0.5, 1.0)
    assert (cold.positions_N.tolist(), warm.positions_N.tolist()) == ([2, 5], [3])
    assert (len(cold.tokens_T), len(warm.tokens_T)) == (6, 4)
    assert np.concatenate([cold.terms.ids_N, warm.terms.ids_N]).tolist() == [0, 2, 1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_bins_are_cut_up_before_a_rank_computes_nothing(ranks: int) -> None:
    dealt = deal(rows_of(items([6] * 7)), ranks, 1000)
    assert all(ids(rows) for of_rank in dealt for rows in of_rank)
