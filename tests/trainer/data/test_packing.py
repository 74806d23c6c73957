"""The trie is only a layout: the sequences can be recovered exactly from rows, positions and segments."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.config.algorithms import Correction, Loss
from bombus_trainer.algorithms.losses import LossInputs, policy_loss
from bombus_trainer.backends.torch.attention import plan
from bombus_trainer.backends.torch.transfer import join_arrays, split_buffer
from bombus_trainer.data.packing import Bin, Segment, TrainingItem, pack, shard_bins
from tests.trainer.small_batches import item, tiny_settings


def seen_by(packed: Bin, row: int) -> list[int]:
    """Return the tokens on the path that ends at `row`, as its attention sees them."""
    index = next(i for i, each in enumerate(packed.segments) if each.start <= row < each.start + each.length)
    segment = packed.segments[index]
    tokens: list[int] = packed.tokens_T[segment.start : row + 1].tolist()
    while segment.parent >= 0:
        segment = packed.segments[segment.parent]
        tokens = packed.tokens_T[segment.start : segment.start + segment.length].tolist() + tokens
    return tokens


def test_a_prompt_that_two_completions_share_is_stored_once() -> None:
    prompt = list(range(20))
    items = [item([*prompt, 30, 31, 32], [20, 21, 22]), item([*prompt, 40, 41], [20, 21], first_id=3)]
    (packed,) = pack(items, 100)
    assert packed.segments == (Segment(0, 20, 0, -1), Segment(20, 2, 20, 0), Segment(22, 1, 20, 0))
    assert packed.tokens_T.tolist() == [*prompt, 30, 31, 40]
    assert packed.positions_T.tolist() == [*range(20), 20, 21, 20]
    # row 19 predicts 30 and 40
    assert packed.head_rows_U.tolist() == [19, 20, 21, 22]
    assert packed.head_of_term_N.tolist() == [0, 0, 1, 2, 3]
    assert packed.terms.targets_N.tolist() == [30, 40, 31, 32, 41]
    assert packed.sequence_tokens == 22 + 21


def test_a_shared_prefix_below_the_minimum_is_computed_twice() -> None:
    lines = [[*range(15), 50, 51], [*range(15), 60, 61]]
    items = [item(line, [16], first_id=number) for number, line in enumerate(lines)]
    (packed,) = pack(items, 100)
    assert [each.parent for each in packed.segments] == [-1, -1]
    (packed,) = pack(items, 100, shared_tokens_min=15)
    assert [each.length for each in packed.segments] == [15, 1, 1]


def test_equal_sequences_are_computed_once_and_trained_twice() -> None:
    items = [item([1, 2, 3], [2], first_id=0), item([1, 2, 3], [2], first_id=1)]
    (packed,) = pack(items, 100)
    assert len(packed.tokens_T) == 2
    assert packed.terms.ids_N.tolist() == [0, 1]


def test_a_sequence_over_the_budget_gets_a_bin_of_its_own() -> None:
    items = [item(range(40), [39]), item([50, *range(39)], [39], first_id=1), item([60, 61], [1], first_id=2)]
    assert sorted(len(packed.tokens_T) for packed in pack(items, 20)) == [1, 39, 39]


def test_sequences_that_share_nothing_are_packed_in_their_order() -> None:
    items = [item([50 - first] * length, [1], first_id=first) for first, length in enumerate((5, 5, 4, 10, 2, 13, 3))]
    filled = [packed.terms.ids_N.tolist() for packed in pack(items, 10, share_prefixes=False)]
    assert filled == [[0, 1], [2], [3, 4], [5], [6]]
    assert [packed.terms.ids_N.tolist() for packed in pack(items, 1, share_prefixes=False)] == [[n] for n in range(7)]


def term_ids(shards: list[list[Bin]]) -> list[list[list[int]]]:
    return [[packed.terms.ids_N.tolist() for packed in of_rank] for of_rank in shards]


def test_bins_are_smaller_rather_than_leave_a_rank_without_any() -> None:
    items = [item([number] * 9, [1], first_id=number) for number in range(5)]  # 8 computed tokens each
    unshared = tiny_settings(bin_tokens=16, share_prefixes=False)
    assert term_ids(shard_bins(items, unshared, 1)) == [[[0, 1], [2, 3], [4]]]
    assert term_ids(shard_bins(items, unshared, 2)) == [[[0, 1], [4]], [[2, 3]]]
    assert term_ids(shard_bins(items, unshared, 4)) == [[[0], [4]], [[1]], [[2]], [[3]]]
    assert term_ids(shard_bins(items[:1], unshared, 2)) == [[[0]], []]
    assert shard_bins([], unshared, 2) == [[], []]


def test_without_packing_each_sequence_gets_its_own_bin() -> None:
    items = [item([7, 7], [1], first_id=number) for number in range(3)]
    assert term_ids(shard_bins(items, tiny_settings(), 1)) == [[[0, 1, 2]]]
    assert term_ids(shard_bins(items, tiny_settings(enable_packing=False), 2)) == [[[0], [2]], [[1]]]


lines = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


@given(lines, st.integers(1, 60), st.integers(1, 4), st.booleans())
@settings(max_examples=150)
def test_every_term_is_predicted_from_exactly_its_own_prefix(
    given_lines: list[list[int]], bin_tokens: int, shared_tokens_min: int, share: bool
) -> None:
    items: list[TrainingItem] = []
    prefix_of: dict[int, list[int]] = {}
    for line in given_lines:
        items.append(item(line, range(1, len(line)), first_id=len(prefix_of)))
        for at in range(1, len(line)):
            prefix_of[len(prefix_of)] = line[:at]
    bins = pack(items, bin_tokens, share, shared_tokens_min)
    found: dict[int, list[int]] = {}
    line_of = {term: number for number, each in enumerate(items) for term in each.terms.ids_N.tolist()}
    join_arrays: dict[int, set[tuple[int, int]]] = {}
    for number, packed in enumerate(bins):
        assert set(packed.sequences_N.tolist()) == set(range(packed.sequences))
        for term, line in zip(packed.terms.ids_N.tolist(), packed.sequences_N.tolist(), strict=True):
            join_arrays.setdefault(line_of[term], set()).add((number, line))
        assert len(packed.tokens_T) <= max(bin_tokens, max(map(len, given_lines)) - 1)
        assert np.all(np.diff(packed.head_of_term_N) >= 0)
        for term, head in zip(packed.terms.ids_N.tolist(), packed.head_of_term_N.tolist(), strict=True):
            row = int(packed.head_rows_U[head])
            found[term] = seen_by(packed, row)
            assert packed.positions_T[row] == len(found[term]) - 1
    assert found == prefix_of
    assert all(len(places) == 1 for places in join_arrays.values()), "a sequence lies in one bin, under one number"
    assert len(set.union(*join_arrays.values())) == len(items)


@given(lines, st.integers(1, 60), st.sampled_from(Loss), st.sampled_from(Correction), st.booleans(), st.integers(0, 99))
@settings(max_examples=100)
def test_a_shared_bins_loss_is_the_sum_of_its_sequences_losses(
    given_lines: list[list[int]], bin_tokens: int, loss: Loss, correction: Correction, opsm: bool, seed: int
) -> None:
    """Losses that depend on whole sequences get them whole, in whichever order a trie has their tokens."""
    items: list[TrainingItem] = []
    for line in given_lines:
        items.append(item(line, range(1, len(line)), first_id=sum(len(each.terms) for each in items)))
    random = torch.Generator().manual_seed(seed)
    policy, old, sampler, advantages = torch.randn(4, sum(len(each.terms) for each in items), generator=random) / 2
    policy.requires_grad_()
    rules = tiny_settings(
        loss=loss, correction=correction, tis_clip_low=0.3, use_opsm=opsm, opsm_delta=0.05, clip_low=0.1
    )

    def gradient(bins: list[Bin]) -> torch.Tensor:
        total = torch.zeros(())
        for packed in bins:
            ids = torch.from_numpy(packed.terms.ids_N)
            weights, sequences_N = torch.ones(len(ids)), torch.from_numpy(packed.sequences_N)
            chosen = (policy[ids], old[ids], sampler[ids], advantages[ids], weights, sequences_N, packed.sequences)
            total = total + policy_loss(LossInputs(*chosen), rules).loss
        return torch.cat([torch.autograd.grad(total, policy)[0], total.detach()[None]])

    shared = gradient(pack(items, bin_tokens, shared_tokens_min=1))
    alone = gradient([packed for each in items for packed in pack([each], 1, share_prefixes=False)])
    torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 5)), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 60)),
)
@settings(max_examples=100)
def test_each_query_row_sees_the_window_of_its_path_and_nothing_else(
    shapes: list[tuple[int, int]], window: int | None
) -> None:
    segments: list[Segment] = []
    for length, asked_for in shapes:
        parent = min(asked_for, len(segments) - 1)
        depth = 0 if parent < 0 else segments[parent].depth + segments[parent].length
        start = sum(each.length for each in segments)
        segments.append(Segment(start, length, depth, parent))
    layout = plan(segments)
    tree = layout.tree(split_buffer(join_arrays(layout.arrays), layout.arrays))
    laid: list[tuple[int, list[int]]] = []
    for block in tree.blocks:
        lines_, queries = block.queries_BQ.shape
        for line in range(lines_):
            for query in range(queries):
                keys = block.keys_BK[line].tolist()
                open_K = block.mask(window, 1, torch.float32)[line, query] == 0
                sees = [key for key, seen in zip(keys, open_K, strict=True) if seen]
                if block.is_plain(window):
                    assert sees == keys[: query + 1]
                laid.append((int(block.queries_BQ[line, query]), sees))
    for index, segment in enumerate(segments):
        path = list(range(segment.start, segment.start + segment.length))
        up = segments[index].parent
        while up >= 0:
            path = list(range(segments[up].start, segments[up].start + segments[up].length)) + path
            up = segments[up].parent
        for offset in range(segment.length):
            row = segment.start + offset
            end = segment.depth + offset + 1
            assert laid[int(tree.where_T[row])] == (row, path[max(0, end - (window or end)) : end])
