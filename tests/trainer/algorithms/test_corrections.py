"""Corrections for the difference between sampler and trainer: weights and masks worked out on paper."""

import pytest
import torch

from bombus.config.algorithms import Correction
from bombus_trainer.algorithms.corrections import (
    CorrectionRule,
    CorrectionWeights,
    off_policy_sequences,
    sampler_correction,
    sequence_means,
)
from bombus_trainer.algorithms.losses import LossInputs, policy_loss
from tests.trainer.small_batches import tiny_settings

OLD = torch.log(torch.tensor([0.5, 0.8, 0.1, 0.3]))
SAMPLER = torch.log(torch.tensor([0.4, 0.2, 0.25, 0.3]))  # ratios 1.25, 4, 0.4, 1
LINES = torch.tensor([0, 1, 0, 1])  # products 0.5 and 4: tokens of a sequence need not be adjacent


def corrected(correction: Correction, low: float = 0.0, high: float = 2.0) -> CorrectionWeights:
    return sampler_correction(OLD, SAMPLER, LINES, 2, CorrectionRule(correction, low, high))


@pytest.mark.parametrize(
    ("correction", "low", "high", "weights", "capped", "masked"),
    [
        ("none", 0.0, 2.0, [1.0, 1.0, 1.0, 1.0], "....", "...."),
        ("token_tis", 0.0, 2.0, [1.25, 2.0, 0.4, 1.0], ".x..", "...."),
        ("token_tis", 0.5, 2.0, [1.25, 2.0, 0.5, 1.0], ".xx.", "...."),
        ("sequence_tis", 0.0, 2.0, [0.5, 2.0, 0.5, 2.0], ".x.x", "...."),
        ("icepop", 0.5, 5.0, [1.25, 4.0, 0.0, 1.0], "....", "..x."),
        ("token_mask", 0.0, 2.0, [1.25, 0.0, 0.4, 1.0], "....", ".x.."),
        ("sequence_mask", 0.0, 2.0, [0.5, 0.0, 0.5, 0.0], "....", ".x.x"),
        ("sequence_mask", 0.6, 5.0, [0.0, 4.0, 0.0, 4.0], "....", "x.x."),
        ("token_tis", 0.0, 0.0, [1.0, 1.0, 1.0, 1.0], "....", "...."),
        ("sequence_mask", 0.0, 0.0, [1.0, 1.0, 1.0, 1.0], "....", "...."),
    ],
)
def test_each_correction_by_hand(
    correction: Correction, low: float, high: float, weights: list[float], capped: str, masked: str
) -> None:
    found = corrected(correction, low, high)
    assert found.importance_N.tolist() == pytest.approx(weights)
    assert found.capped_N.tolist() == [mark == "x" for mark in capped]
    assert found.masked_N.tolist() == [mark == "x" for mark in masked]


def test_a_long_sequences_product_stays_finite() -> None:
    far = torch.full((200,), -3.0)
    rule = CorrectionRule(Correction.SEQUENCE_TIS, 0.0, 2.0)
    found = sampler_correction(far, 2 * far, torch.zeros(200, dtype=torch.long), 1, rule)
    assert found.importance_N.tolist() == [2.0] * 200


def test_a_sequence_without_tokens_has_a_mean_of_0() -> None:
    assert sequence_means(torch.tensor([2.0, 4.0]), torch.tensor([0, 0]), 2).tolist() == [3.0, 0.0]


def test_only_tokens_with_a_negative_advantage_in_sequences_far_from_the_sampler_are_left_out() -> None:
    # mean of log(sampler / policy): (1 + 0 + 0) / 3 in the first sequence, -1 in the second
    policy, sampler = torch.tensor([-2.0, -3.0, -1.0, -1.0]), torch.tensor([-1.0, -4.0, -1.0, -1.0])
    lines = torch.tensor([0, 1, 0, 0])
    assert off_policy_sequences(policy, sampler, lines, 2, delta=0.3).tolist() == [True, False, True, True]
    assert not off_policy_sequences(policy, sampler, lines, 2, delta=0.34).any()
    inputs = LossInputs(
        logprobs_N=policy,
        old_logprobs_N=policy,
        sampler_logprobs_N=sampler,
        advantages_N=torch.tensor([-1.0, -1.0, 1.0, -1.0]),
        weights_N=torch.ones(4),
        sequences_N=lines,
        sequences=2,
    )
    for delta, masked in ((0.3, [True, False, False, True]), (0.34, [False] * 4)):
        assert policy_loss(inputs, tiny_settings(use_opsm=True, opsm_delta=delta)).masked_N.tolist() == masked


def test_off_policy_masking_compares_the_policy_that_is_trained_with_the_sampler_and_not_the_old_one() -> None:
    # the old policy is the sampler; the current one has gone on 0.5 nats in the first sequence and back in the second
    inputs = LossInputs(
        logprobs_N=torch.tensor([-2.5, -1.5]),
        old_logprobs_N=torch.tensor([-2.0, -2.0]),
        sampler_logprobs_N=torch.tensor([-2.0, -2.0]),
        advantages_N=torch.tensor([-1.0, -1.0]),
        weights_N=torch.ones(2),
        sequences_N=torch.tensor([0, 1]),
        sequences=2,
    )
    assert policy_loss(inputs, tiny_settings(use_opsm=True, opsm_delta=0.4)).masked_N.tolist() == [True, False]


def test_off_policy_masking_combines_with_a_correction() -> None:
    inputs = LossInputs(
        logprobs_N=torch.tensor([-2.0, -1.0]),
        old_logprobs_N=torch.tensor([-2.0, -1.0]),
        sampler_logprobs_N=torch.tensor([-1.5, -1.0]),
        advantages_N=torch.tensor([-1.0, -1.0]),
        weights_N=torch.ones(2),
        sequences_N=torch.tensor([0, 1]),
        sequences=2,
    )
    result = policy_loss(inputs, tiny_settings(use_opsm=True, opsm_delta=0.4))
    assert result.importance_N.tolist() == [0.0, 1.0]
    assert result.masked_N.tolist() == [True, False]
    assert float(result.loss) == 1.0
    assert float(policy_loss(inputs, tiny_settings(use_opsm=True, opsm_delta=0.6)).loss) == pytest.approx(1.60653066)
