"""Plain packing: every document once, bins within their limit, ranks even."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus_trainer.data.bins import balanced, best_fit, greedy, padded

LENGTHS = st.lists(st.integers(1, 200), max_size=40)


def flat(bins: list[list[int]]) -> list[int]:
    return [index for each in bins for index in each]


def test_greedy_keeps_the_order_and_closes_a_bin_when_the_next_does_not_fit() -> None:
    assert greedy([4, 4, 3, 9, 1, 12, 2], 10) == [[0, 1], [2], [3, 4], [5], [6]]


def test_best_fit_puts_a_document_where_the_least_room_is_left_over() -> None:
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([30, 1], 10) == [[0], [1]]


def test_documents_that_are_padded_lie_beside_those_of_their_length() -> None:
    assert padded([1, 6, 2, 5, 30], 12) == [[4], [1, 3], [2, 0]]


@given(LENGTHS, st.integers(1, 300))
def test_each_padded_document_is_in_one_bin_and_only_a_long_one_is_over_the_limit(
    lengths: list[int], limit: int
) -> None:
    bins = padded(lengths, limit)
    assert sorted(flat(bins)) == list(range(len(lengths)))
    for each in bins:
        assert max(lengths[index] for index in each) * len(each) <= limit or len(each) == 1


@given(LENGTHS, st.integers(1, 300))
def test_each_document_is_in_one_bin_and_only_a_long_one_is_over_the_limit(lengths: list[int], limit: int) -> None:
    for bins in (greedy(lengths, limit), best_fit(lengths, limit)):
        assert sorted(flat(bins)) == list(range(len(lengths)))
        for each in bins:
            assert sum(lengths[index] for index in each) <= limit or len(each) == 1
    assert flat(greedy(lengths, limit)) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(200, 600))
def test_best_fit_is_within_its_bound(lengths: list[int], limit: int) -> None:
    """Greedy needs at least the fewest bins possible, and best fit at most 11/9 of these, plus one."""
    assert len(best_fit(lengths, limit)) <= 11 / 9 * len(greedy(lengths, limit)) + 1


def test_balanced_places_the_heaviest_first() -> None:
    assert balanced([7, 5, 4, 4, 3, 1], 2) == [[0, 3, 5], [1, 2, 4]]  # 12 and 12
    assert balanced([], 2) == [[], []]
    assert balanced([3], 2) == [[0], []]
    assert balanced([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]


def test_balanced_by_attention_sets_one_long_document_against_many_short_ones() -> None:
    lengths = [100, 50, 50]
    assert balanced(lengths, 2) == [[0], [1, 2]]
    assert balanced([100, 60, 60, 40], 2, attention=1.0) == [[0], [1, 2, 3]]  # 10,100 against 3,660 + 3,660 + 1,640


def test_balanced_for_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0"):
        balanced([1], 0)


@given(LENGTHS, st.integers(1, 9), st.sampled_from((0.0, 0.01, 1.0)))
def test_each_document_goes_to_one_rank_and_always_the_same(lengths: list[int], ranks: int, attention: float) -> None:
    dealt = balanced(lengths, ranks, attention)
    assert len(dealt) == ranks
    assert sorted(flat(dealt)) == list(range(len(lengths)))
    assert dealt == balanced(lengths, ranks, attention)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3), st.sampled_from((0.0, 0.02)))
def test_no_rank_has_over_four_thirds_of_the_best_distribution(
    lengths: list[int], ranks: int, attention: float
) -> None:
    costs = [length + attention * length**2 for length in lengths]

    def most(ranks_of: Sequence[int]) -> float:
        return max(sum(cost for cost, at in zip(costs, ranks_of, strict=True) if at == rank) for rank in range(ranks))

    best = min(most(deal) for deal in itertools.product(range(ranks), repeat=len(lengths)))
    found = max(sum(costs[index] for index in each) for each in balanced(lengths, ranks, attention))
    assert found <= 4 / 3 * best * (1 + 1e-9)
