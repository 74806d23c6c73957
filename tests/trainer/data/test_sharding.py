"""Sharding an update's sequences over ranks: whole, evenly, and the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus_trainer.data.packing import TrainingItem
from bombus_trainer.data.sharding import MicroBatch, computed_tokens, shard
from tests.trainer.small_batches import item


def items(lengths: list[int]) -> list[TrainingItem]:
    """Make sequences of so many tokens to compute; the last one is only predicted."""
    return [item(list(range(length + 1)), [length], first_id=number) for number, length in enumerate(lengths)]


def ids(micro_batch: MicroBatch) -> list[int]:
    return [int(term) for each in micro_batch for term in each.terms.ids_N]


def tokens(of_rank: list[MicroBatch]) -> int:
    return sum(len(each.tokens_T) - 1 for micro_batch in of_rank for each in micro_batch)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 5), st.integers(8, 80), st.booleans())
def test_every_sequence_is_assigned_once_and_all_ranks_have_the_same_number_of_micro_batches(
    lengths: list[int], ranks: int, tokens_max: int, packed: bool
) -> None:
    dealt = shard(items(lengths), ranks, tokens_max, packed)
    assert len(dealt) == ranks
    assert len({len(of_rank) for of_rank in dealt}) == 1
    micro_batches = [micro_batch for of_rank in dealt for micro_batch in of_rank]
    assert all(micro_batches)
    assert sorted(term for each in micro_batches for term in ids(each)) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        assert computed_tokens(micro_batch, packed) <= tokens_max or len(micro_batch) == 1
    again = shard(items(lengths), ranks, tokens_max, packed)
    assert [[ids(each) for each in of_rank] for of_rank in again] == [
        [ids(each) for each in of_rank] for of_rank in dealt
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_no_rank_has_more_than_one_sequence_over_its_share(lengths: list[int], ranks: int, packed: bool) -> None:
    loads = [tokens(of_rank) for of_rank in shard(items(lengths), ranks, 80, packed)]
    assert max(loads) <= sum(lengths) / ranks + max(lengths)


def test_packed_sequences_fill_what_padding_would_waste() -> None:
    lengths = [30, 10, 10, 10, 20, 20]
    (packed,) = shard(items(lengths), 1, 40, packed=True)
    assert sorted(sum(len(each.tokens_T) - 1 for each in row) for row in packed) == [20, 40, 40]
    (padded,) = shard(items(lengths), 1, 40, packed=False)
    assert sorted(len(row) for row in padded) == [1, 2, 3]


def test_a_long_sequence_counts_for_its_attention_too() -> None:
    lengths = [100, 60, 60, 40]
    assert [tokens(of_rank) for of_rank in shard(items(lengths), 2, 400, packed=True)] == [140, 120]
    assert [tokens(of_rank) for of_rank in shard(items(lengths), 2, 400, packed=True, attention=1.0)] == [100, 160]


def test_the_kth_micro_batches_of_all_ranks_are_of_about_the_same_size() -> None:
    dealt = shard(items([40, 35, 12, 8, 6, 3]), 2, 40, packed=True)
    assert [[computed_tokens(each, True) for each in of_rank] for of_rank in dealt] == [[40, 11], [35, 18]]


def test_a_rank_for_which_nothing_is_left_computes_a_sequence_without_terms() -> None:
    (only,), (filler,) = shard(items([5]), 2, 100, packed=True)
    assert ids(only) == [0]
    assert ids(filler) == []
    assert computed_tokens(filler, packed=True) == 1
    assert shard([], 2, 100, packed=True) == [[], []]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_micro_batches_are_split_before_a_rank_computes_nothing(packed: bool) -> None:
    """One rank has two micro-batches, of 90 and 12 tokens, and the other would have one."""
    dealt = shard(items([90, 20, 20, 20, 20, 15, 12]), 2, 100, packed)
    assert [len(of_rank) for of_rank in dealt] == [2, 2]
    assert all(ids(each) for of_rank in dealt for each in of_rank)
