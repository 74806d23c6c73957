"""Plain packing: every document once, bins within their limit, ranks even; and a ring that computes full attention."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bombus_trainer.data.bins import PADDING, balanced, best_fit, greedy, lay_out, padded, zigzag

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
    """Greedy's bins are no fewer than the fewest possible, of which best fit needs at most 11/9, and one."""
    assert len(best_fit(lengths, limit)) <= 11 / 9 * len(greedy(lengths, limit)) + 1


def test_balanced_deals_the_heaviest_first() -> None:
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
def test_each_document_is_dealt_to_one_rank_and_always_the_same(
    lengths: list[int], ranks: int, attention: float
) -> None:
    dealt = balanced(lengths, ranks, attention)
    assert len(dealt) == ranks
    assert sorted(flat(dealt)) == list(range(len(lengths)))
    assert dealt == balanced(lengths, ranks, attention)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3), st.sampled_from((0.0, 0.02)))
def test_no_rank_has_over_four_thirds_of_the_best_deal(lengths: list[int], ranks: int, attention: float) -> None:
    costs = [length + attention * length**2 for length in lengths]

    def most(ranks_of: Sequence[int]) -> float:
        return max(sum(cost for cost, at in zip(costs, ranks_of, strict=True) if at == rank) for rank in range(ranks))

    best = min(most(deal) for deal in itertools.product(range(ranks), repeat=len(lengths)))
    found = max(sum(costs[index] for index in each) for each in balanced(lengths, ranks, attention))
    assert found <= 4 / 3 * best * (1 + 1e-9)


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_positions_begin_again_and_padding_is_at_each_documents_end() -> None:
    row = lay_out([3, 4, 1], multiple=4)
    assert row.cu_seqlens_D.tolist() == [0, 4, 8, 12]
    assert row.cu_seqlens_D.dtype == np.int32
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert row.source_T.tolist() == [0, 1, 2, PADDING, 3, 4, 5, 6, 7, PADDING, PADDING, PADDING]


def test_zigzag_gives_the_first_rank_the_first_and_the_last_chunk() -> None:
    assert zigzag(lay_out([8], 4).cu_seqlens_D, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match="a document of 6 tokens for a ring of 2"):
        zigzag(lay_out([6]).cu_seqlens_D, 2)


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 5))
def test_the_shards_of_all_ranks_are_the_documents_and_have_the_same_causal_work(
    lengths: list[int], ranks: int
) -> None:
    row = lay_out(lengths, 2 * ranks)
    shards_RT = zigzag(row.cu_seqlens_D, ranks)
    together = np.sort(shards_RT.reshape(-1))
    assert together.tolist() == list(range(len(row.source_T)))
    assert row.source_T[together][row.source_T != PADDING].tolist() == list(range(sum(lengths)))
    work = (row.position_ids_T[shards_RT] + 1).sum(axis=1)  # a query sees itself and what is before it
    assert len(set(work.tolist())) == 1
    own = row.cu_seqlens_D // ranks
    for shard in shards_RT:  # a rank's own cu_seqlens: each of its documents lies together, in order
        for document, (start, end) in enumerate(itertools.pairwise(own)):
            first, last = row.cu_seqlens_D[document : document + 2]
            assert ((shard[start:end] >= first) & (shard[start:end] < last)).all()


def attend(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one step, and the log of its normaliser; both are -inf and 0 where nothing is seen."""
    scores = (query @ key.T / math.sqrt(query.shape[1])).masked_fill(~sees, -math.inf)
    total = scores.logsumexp(dim=1)
    weights = torch.where(sees, (scores - total[:, None]).exp(), 0.0)
    return torch.nan_to_num(weights) @ value, total


def by_ring(query: Tensor, key: Tensor, value: Tensor, shards: Sequence[Tensor], document: Tensor) -> Tensor:
    """Each rank keeps its queries, keys and values go round: what is seen in R steps is merged by online softmax."""
    result = torch.zeros_like(value)
    for rank, mine in enumerate(shards):
        out = torch.zeros(len(mine), value.shape[1], dtype=value.dtype)
        seen = torch.full((len(mine),), -math.inf, dtype=value.dtype)
        for step in range(len(shards)):
            theirs = shards[(rank - step) % len(shards)]
            sees = (theirs[None, :] <= mine[:, None]) & (document[theirs][None, :] == document[mine][:, None])
            part, total = attend(query[mine], key[theirs], value[theirs], sees)
            both = torch.logaddexp(seen, total)
            out = out * torch.nan_to_num((seen - both).exp())[:, None]
            out = out + part * torch.nan_to_num((total - both).exp())[:, None]
            seen = both
        result[mine] = out
    return result


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 1000))
def test_attention_round_a_ring_is_full_attention_within_each_document(
    lengths: list[int], ranks: int, seed: int
) -> None:
    row = lay_out(lengths, 2 * ranks)
    count = len(row.source_T)
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(count, 8, generator=random, dtype=torch.float64) for _ in range(3))
    bounds = torch.from_numpy(row.cu_seqlens_D[1:].astype(np.int64))
    document = torch.searchsorted(bounds, torch.arange(count), right=True)
    shards = [torch.from_numpy(shard) for shard in zigzag(row.cu_seqlens_D, ranks)]
    found = by_ring(query, key, value, shards, document)
    for start, end in zip(row.cu_seqlens_D[:-1], row.cu_seqlens_D[1:], strict=True):
        rows = slice(int(start), int(end))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query[None, rows], key[None, rows], value[None, rows], is_causal=True
        )[0]
        torch.testing.assert_close(found[rows], wanted)
