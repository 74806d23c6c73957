"""Data as it arrives: what is refused, in which words, and what counts."""

from collections.abc import Mapping

import pytest

from bombus.errors import Refused
from bombus.operations import Array, Datum, DType, LossSpec
from bombus_trainer.operations.batches import DataLimits, TokenBatch, read_batch
from bombus_trainer.operations.client_losses import read_loss
from tests.trainer.operations.small_models import datum, floats, ints

LIMITS = DataLimits(vocabulary=64, context=8, tokens_max=20, targets_max=24)
POLICY = {"logprobs": floats(-1.0, -1.0), "advantages": floats(1.0, 0.0)}


def read(*data: Datum, loss: str = "cross_entropy", config: Mapping[str, float] = {}) -> TokenBatch:
    return read_batch(data, read_loss(LossSpec(loss, {**config})), LIMITS)


@pytest.mark.parametrize(
    ("loss", "wrong", "why"),
    [
        ("cross_entropy", datum([]), "datum 1 has 0 bytes of tokens: it needs at least one token"),
        ("cross_entropy", Datum(b"12345", {"target_tokens": ints(1)}), "datum 1 has 5 bytes of tokens"),
        ("cross_entropy", datum([1] * 9), "datum 1 has 9 tokens, but the limit is 8: shorten it"),
        ("cross_entropy", datum([1, 64]), "datum 1 has the token id 64 at 1: this model's ids are 0 to 63$"),
        ("cross_entropy", datum([-1, 2]), "datum 1 has the token id -1 at 0"),
        ("cross_entropy", datum([1, 2], [2, -100]), r"target_tokens id -100 at 1: .* the weight \(or mask\) 0"),
        ("cross_entropy", datum([1, 2], floats(2.0, 3.0)), "target_tokens in float32: they must be int64 or int32"),
        ("cross_entropy", datum([1, 2], [2]), r"shape \[1\]: with 2 tokens it must be \[2\] or \[2, K\]"),
        ("cross_entropy", datum([1, 2], ints(shape=(2, 0))), r"shape \[2, 0\]"),
        ("cross_entropy", datum([1], ints(1, shape=(1, 1, 1))), r"shape \[1, 1, 1\]"),
        (
            "ppo",
            datum([1, 2], ints(1, 2, shape=(2, 1)), **POLICY),
            r"shape \[2, 1\]: with 2 tokens it must be \[2\]$",
        ),
        ("cross_entropy", Datum(b"\1\0\0\0", {}), "datum 1 has no target_tokens: it has no inputs"),
        ("ppo", datum([1, 2], advantages=floats(1, 1)), "datum 1 has no logprobs: it has advantages, target_tokens"),
        ("gspo", datum([1, 2], **POLICY), "datum 1 has no sequence_ratio_mask"),
        ("policy_loss", datum([1, 2], **POLICY), "datum 1 has no rollout_logprobs"),
        ("drgrpo", datum([1, 2], **POLICY), "datum 1 has no ref_logprobs"),
        (
            "cross_entropy",
            datum([1, 2], advantages=floats(1, 1)),
            "an input 'advantages', which this loss does not use: it uses target_tokens, weights, mask",
        ),
        ("cross_entropy", datum([1, 2], weights=floats(1.0)), r"weights of shape \[1\]: .* it must be \[2\]"),
        ("cross_entropy", datum([1, 2], weights=floats(1.0, float("nan"))), "has nan in weights at 1"),
        ("ppo", datum([1, 2], **{**POLICY, "logprobs": floats(0.0, float("-inf"))}), "has -inf in logprobs at 1"),
        ("cross_entropy", datum([1, 2], mask=floats(1.0, -1.0)), "has -1.0 in mask at 1: it cannot be below 0"),
        (
            "gspo",
            datum([1, 2], sequence_ratio_mask=floats(0, 0), **POLICY),
            "only zeros in sequence_ratio_mask: mark the tokens",
        ),
    ],
)
def test_a_wrong_datum_is_refused_with_its_number(loss: str, wrong: Datum, why: str) -> None:
    rest = {"gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "policy_loss": {"use_tis": 1.0}}
    inputs = {
        "cross_entropy": {},
        "gspo": {"sequence_ratio_mask": floats(1, 1), **POLICY},
        "policy_loss": {"rollout_logprobs": floats(0, 0), **POLICY},
        "drgrpo": {"ref_logprobs": floats(0, 0), **POLICY},
        "ppo": POLICY,
    }
    with pytest.raises(Refused, match=why):
        read(datum([1, 2], **inputs[loss]), wrong, loss=loss, config=rest.get(loss, {}))


def test_an_operation_has_so_many_tokens_and_targets_at_most() -> None:
    with pytest.raises(Refused, match="one operation may have 20 tokens, but this one has 24: split it"):
        read(*[datum([1] * 8)] * 3)
    wide = datum([1] * 5, ints(*[1] * 25, shape=(5, 5)))
    with pytest.raises(Refused, match="one operation may have 24 targets, but this one has 25: split it"):
        read(wide)


def test_an_input_that_only_some_have_is_refused() -> None:
    with_bounds = datum([1, 2], clip_low_threshold=floats(0.1, 0.1), **POLICY)
    without = datum([1, 2], **POLICY)
    for data, lacking in (((with_bounds, without), 1), ((without, with_bounds), 0)):
        with pytest.raises(Refused, match=f"datum {lacking} has no clip_low_threshold, but others do"):
            read(*data, loss="ppo")


def test_weights_and_masks_that_are_missing_are_ones() -> None:
    batch = read(datum([1, 2], weights=floats(0.5, 0.0)), datum([3, 4, 5], mask=ints(1, 0, 2)))
    assert batch.inputs["weights"].tolist() == [0.5, 0.0, 1.0, 1.0, 1.0]
    assert batch.inputs["mask"].tolist() == [1.0, 1.0, 1.0, 0.0, 2.0]
    assert (batch.counted_M.tolist(), batch.tokens) == ([1.0, 0.0, 1.0, 0.0, 1.0], 3)


def test_in_a_datum_without_a_mask_tokens_with_an_advantage_count_whatever_the_others_have() -> None:
    one = datum([1, 2], **POLICY)
    assert read(one, loss="ppo").counted_M.tolist() == [1.0, 0.0]
    masked = datum([1, 2], mask=floats(0.0, 1.0), **POLICY)
    assert read(masked, loss="ppo").counted_M.tolist() == [0.0, 1.0]
    assert read(masked, one, loss="ppo").counted_M.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_token_with_several_targets_counts_once() -> None:
    targets = Array.of(DType.INT64, [2, 3, 4, 0, 5, 0], (3, 2))
    weights = Array.of(DType.FLOAT32, [0.0, 0.5, 1.0, 0.0, 0.0, 0.0], (3, 2))
    batch = read(datum([1, 2, 3], targets, weights=weights), datum([7]))
    assert batch.counted_M.tolist() == [0, 1, 1, 0, 0, 0, 1]
    assert batch.first_M.tolist() == [0, 1, 1, 0, 0, 0, 1]
    assert batch.tokens == 3
    assert (batch.rows_M.tolist(), batch.sequences_M.tolist()) == ([0, 0, 1, 1, 2, 2, 3], [0] * 6 + [1])


def test_values_are_cut_back_into_the_shapes_of_their_data() -> None:
    batch = read(datum([1, 2], ints(1, 2, 3, 4, shape=(2, 2))), datum([7]))
    values = batch.inputs["weights"] * 0 + [1, 2, 3, 4, 5]
    cut = batch.by_target(values.astype("float32"))
    assert [(each.shape, each.values()) for each in cut] == [((2, 2), [1, 2, 3, 4]), ((1,), [5])]
    sums = batch.by_token(values.astype("float32"))
    assert [(each.shape, each.values()) for each in sums] == [((2,), [3, 7]), ((1,), [5])]


def test_no_data_is_a_batch_of_nothing() -> None:
    batch = read()
    assert (batch.tokens, batch.items, batch.by_target(batch.first_M)) == (0, (), [])


def test_the_longest_sequence_is_the_limit() -> None:
    assert read(datum([1] * LIMITS.context)).tokens == LIMITS.context
