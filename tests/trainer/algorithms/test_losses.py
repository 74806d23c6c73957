"""Advantages and losses against numbers worked out on paper."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from bombus.config.algorithms import Correction, Estimator, KlEstimator, Loss
from bombus.datums.advantages import call_advantages, group_advantages
from bombus_trainer.algorithms.advantages import whitening
from bombus_trainer.algorithms.aggregation import constant_weights, episode_weights, token_weights
from bombus_trainer.algorithms.kl import KL_ESTIMATES, kl_k1, kl_k2, kl_k3, kl_k3_of_differences
from bombus_trainer.algorithms.losses import (
    LossInputs,
    PolicyLoss,
    RatioBounds,
    clipped_surrogate,
    icepop,
    policy_loss,
    reference_kl,
    sequence_ratio,
    token_ratio,
)
from tests.trainer.small_batches import tiny_settings


def loss_of(
    logprobs: torch.Tensor,
    old: list[float] | torch.Tensor,
    advantages: list[float],
    weights: list[float] | None = None,
    *,
    sampler: list[float] | torch.Tensor | None = None,
    sequences: list[int] | None = None,
    reference: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    **settings: object,
) -> PolicyLoss:
    """Compute the loss of tokens. By default they weigh 1, form one sequence, and the sampler is the old policy."""
    old_N = torch.as_tensor(old)
    sequences_N = torch.tensor(sequences or [0] * len(old_N))
    inputs = LossInputs(
        logprobs_N=logprobs,
        old_logprobs_N=old_N,
        sampler_logprobs_N=old_N if sampler is None else torch.as_tensor(sampler),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights or [1.0] * len(old_N)),
        sequences_N=sequences_N,
        sequences=int(sequences_N.max()) + 1,
        reference_logprobs_N=reference,
        entropy_N=entropy,
    )
    return policy_loss(inputs, tiny_settings(**settings))


def gradient(logprobs: torch.Tensor, result: PolicyLoss) -> list[float]:
    result.loss.backward()
    assert logprobs.grad is not None
    found: list[float] = logprobs.grad.tolist()
    return found


def clipped(result: PolicyLoss) -> list[bool]:
    assert result.clipped_N is not None
    return [bool(each) for each in result.clipped_N]


def test_grpo_is_the_distance_from_the_mean_in_standard_deviations() -> None:
    # mean 2, deviations -2, 0, 2, sample variance 8 / 2 = 4, deviation 2
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1]) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], normalise_std=False) == [-2.0, 0.0, 2.0]


def test_a_small_difference_of_rewards_counts_as_much_as_it_does_in_verl() -> None:
    # deviation d / sqrt(2), distances d / 2: 1 / sqrt(2) of each, less what the epsilon of 1e-6 takes
    low, high = group_advantages([0.0, 1e-4], [1, 1])
    assert high == pytest.approx(0.5e-4 / (1e-4 / sqrt(2.0) + 1e-6))
    assert low == -high
    assert group_advantages([0.0, 0.9e-6], [1, 1]) == [0.0, 0.0]


def test_dr_grpo_is_the_distance_from_the_mean_and_ignores_normalise_std() -> None:
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], Estimator.DR_GRPO) == [-2.0, 0.0, 2.0]


def test_reinforce_plus_plus_takes_rewards_as_they_are_or_without_their_groups_mean() -> None:
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], Estimator.REINFORCE_PLUS_PLUS) == [0.0, 2.0, 4.0]
    assert group_advantages([3.0], [1], Estimator.REINFORCE_PLUS_PLUS) == [3.0]
    baseline = Estimator.REINFORCE_PLUS_PLUS_BASELINE
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], baseline) == [-2.0, 0.0, 2.0]


def test_whitening_is_over_tokens_with_the_sample_variance() -> None:
    # tokens 0, 0, 0, 4: mean 1, variance (1 + 1 + 1 + 9) / 3 = 4
    mean, scale = whitening(np.array([0.0, 0.0, 0.0, 4.0], dtype=np.float32))
    assert mean == 1.0
    assert scale == pytest.approx(0.5, rel=1e-8)
    assert whitening(np.array([2.0, 2.0], dtype=np.float32)) == (0.0, 0.0)
    assert whitening(np.array([2.0], dtype=np.float32)) == (0.0, 0.0)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 0 - (2 + 4) / 2, 2 - (0 + 4) / 2, 4 - (0 + 2) / 2
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], Estimator.RLOO) == [-3.0, 0.0, 3.0]


def test_opo_weighs_its_baseline_by_length() -> None:
    # (3 x 0 + 1 x 4) / 4 = 1
    assert group_advantages([0.0, 4.0], [3, 1], Estimator.OPO) == [-1.0, 3.0]


@pytest.mark.parametrize("estimator", [each for each in Estimator if each != Estimator.REINFORCE_PLUS_PLUS])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1 + 0.2, 0.3, 0.3]])
def test_nothing_to_compare_gives_zeros(rewards: list[float], estimator: Estimator) -> None:
    assert group_advantages(rewards, [1] * len(rewards), estimator) == [0.0] * len(rewards)


def test_without_call_rewards_each_call_has_its_episodes_advantage() -> None:
    found = call_advantages([0.0, 2.0], [None, None], [[5, 5], [5]], normalise_std=False)
    assert found == [[-1.0, -1.0], [1.0]]


def test_a_calls_reward_is_compared_with_the_others_at_its_turn() -> None:
    # turn 1: 1 and (from the episode without call rewards) 5, mean 3; turn 2: only one reached it
    found = call_advantages([2.0, 5.0], [(1.0, 3.0), None], [[5, 5], [5]], normalise_std=False)
    assert found == [[-2.0, 0.0], [2.0]]


def test_an_easy_turn_is_not_rewarded_for_being_easy() -> None:
    found = call_advantages([0.5, 0.6], [(1.0, 0.0), (1.0, 0.2)], [[5, 5], [5, 5]], normalise_std=False)
    assert found == [[0.0, pytest.approx(-0.1)], [0.0, pytest.approx(0.1)]]


def test_a_calls_reward_takes_its_episodes_place_where_nothing_is_compared_in_groups() -> None:
    found = call_advantages([2.0, 5.0], [(1.0, 3.0), None], [[5, 5], [5]], Estimator.REINFORCE_PLUS_PLUS)
    assert found == [[1.0, 3.0], [5.0]]


def test_one_call_reward_for_each_call_or_none() -> None:
    with pytest.raises(ValueError, match="1 call rewards for 2 calls"):
        call_advantages([2.0], [(1.0,)], [[5, 5]])


def test_the_surrogate_is_clipped_only_where_that_makes_it_worse() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    # min(1.5, 1.3) = 1.3; min(-1.5, -1.3) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8; 2
    found = clipped_surrogate(ratio, advantages, RatioBounds(0.8, 1.3))
    assert found.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.0])


def test_a_bad_tokens_surrogate_stops_growing_at_the_third_clip() -> None:
    ratio = torch.tensor([9.0, 2.0, 9.0])
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    # 9 is cut to 3; 2 is below it; for an advantage above 0 only the first two bounds apply: -1.2
    found = clipped_surrogate(ratio, advantages, RatioBounds(0.8, 1.2), dual_clip=3.0)
    assert found.tolist() == pytest.approx([3.0, 2.0, -1.2])


def test_k3_is_zero_where_policies_agree() -> None:
    found = kl_k3(torch.tensor([log(0.5), log(0.5)]), torch.tensor([log(0.5), log(0.25)]))
    assert found.tolist() == pytest.approx([0.0, 0.5 - log(0.5) - 1.0])


def test_k3_is_at_most_10_and_has_no_gradient_there() -> None:
    # d = 2, 3, 21, -5, -29: exp(d) - d - 1 is e^2 - 3, 15.09, more than a billion, 4 + e^-5, 28
    other = torch.tensor([-1.0, -1.0, -1.0, -6.0, -30.0])
    policy = torch.tensor([-3.0, -4.0, -22.0, -1.0, -1.0], requires_grad=True)
    found = kl_k3(policy, other)
    assert found.tolist() == pytest.approx([exp(2) - 3, 10.0, 10.0, 4 + exp(-5), 10.0])
    found.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([1 - exp(2), 0.0, 0.0, 1 - exp(-5), 0.0])


def test_k1_is_the_difference_and_k2_half_its_square() -> None:
    policy, other = torch.tensor([log(0.5), log(0.2)]), torch.tensor([log(0.25), log(0.4)])
    assert kl_k1(policy, other).tolist() == pytest.approx([log(2.0), -log(2.0)])
    assert kl_k2(policy, other).tolist() == pytest.approx([log(2.0) ** 2 / 2] * 2)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (KlEstimator.K1, lambda p, q: (0.0 * p).sum()),
        (KlEstimator.K2, lambda p, q: (p * (p.log() - q.log())).sum()),
        (KlEstimator.K3, lambda p, q: (q * (q.log() - p.log())).sum()),
        (KlEstimator.K3_UNBIASED, lambda p, q: (p * (p.log() - q.log())).sum()),
    ],
)
def test_what_an_estimators_gradient_is_on_average(estimator: KlEstimator, expected: object) -> None:
    """Averaged over a vocabulary by the policy's probabilities, the gradient of k1 is 0."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    other = torch.softmax(torch.tensor([1.0, 0.0, -0.5, 0.2], dtype=torch.float64), dim=0)
    policy = torch.softmax(logits, dim=0)
    estimates = KL_ESTIMATES[estimator](policy.log(), other.log())
    (found,) = torch.autograd.grad((policy.detach() * estimates).sum(), logits)
    again = torch.softmax(logits, dim=0)
    assert callable(expected)
    (wanted,) = torch.autograd.grad(expected(again, other).sum(), logits)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("nats", [5.0, -5.0, 19.0])
def test_a_token_far_from_the_reference_is_pulled_back_by_its_distance(nats: float) -> None:
    logprobs = torch.tensor([-20.0]).requires_grad_()
    result = loss_of(logprobs, logprobs.detach(), [0.0], reference=torch.tensor([-20.0 + nats]), kl_coef=0.1)
    assert gradient(logprobs, result) == pytest.approx([-0.1 * nats])


def test_the_default_kl_has_the_gradient_of_the_kl_from_tokens_of_an_older_policy() -> None:
    """Averaged over a vocabulary by the old policy's probabilities, with the policy 1 to 6 nats from the reference."""
    old, other = (
        torch.tensor(logits, dtype=torch.float64).log_softmax(0) for logits in ([0.3, -1, 0.7, 0], [5, 0, 0, -3])
    )
    logits = torch.tensor([0.1, -0.5, 0.9, 0.4], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    estimates = reference_kl(tiny_settings().config.kl_estimator, policy, other, old)
    (found,) = torch.autograd.grad((old.exp() * estimates).sum(), logits)
    again = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((again.exp() * (again - other)).sum(), logits)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_the_whole_loss_worked_out_by_hand() -> None:
    logprobs = torch.log(torch.tensor([0.5, 0.2])).requires_grad_()
    result = loss_of(
        logprobs,
        torch.log(torch.tensor([0.4, 0.4])),  # ratios 1.25, clipped to 1.2, and 0.5
        [1.0, 3.0],
        [0.25, 0.5],
        sampler=torch.log(torch.tensor([0.2, 0.5])),  # importance 2 and 0.8
        reference=torch.log(torch.tensor([0.5, 0.4])),  # k3: 0 and 2 - log 2 - 1
        tis_clip=4.0,
        kl_coef=0.1,
        kl_estimator="k3",
    )
    first = 0.25 * (2.0 * -1.2)
    second = 0.5 * (0.8 * -(0.5 * 3.0) + 0.1 * (1.0 - log(2.0)))
    assert float(result.loss.detach()) == pytest.approx(first + second)
    assert clipped(result) == [True, False]
    # the first is clipped: no gradient. d(-0.8 x 3 r)/dlogp = -2.4 x 0.5; d k3/dlogp = 1 - 2
    assert gradient(logprobs, result) == pytest.approx([0.0, 0.5 * (-1.2 - 0.1)])


@pytest.mark.parametrize("loss", list(Loss))
def test_with_one_update_the_gradient_is_the_corrected_policy_gradient(loss: Loss) -> None:
    logprobs = torch.tensor([-1.0, -2.0]).requires_grad_()
    result = loss_of(
        logprobs, logprobs.detach(), [1.0, -1.0], [0.5, 0.5], sampler=[-1.0, -2.5], tis_clip=2.0, loss=loss
    )
    assert gradient(logprobs, result) == pytest.approx([-0.5, 0.5 * exp(0.5)])


def test_without_a_bound_a_token_counts_by_its_ratio() -> None:
    logprobs = torch.log(torch.tensor([0.8, 0.1])).requires_grad_()
    result = loss_of(logprobs, torch.log(torch.tensor([0.2, 0.4])), [1.0, -2.0], loss="importance_sampling")
    assert float(result.loss.detach()) == pytest.approx(-4.0 * 1.0 - 0.25 * -2.0)
    assert gradient(logprobs, result) == pytest.approx([-4.0, 0.5])
    assert not any(clipped(result))


@pytest.mark.parametrize(
    ("correction", "floor", "weights"),
    [
        # r = current / sampler: e^2 x 1.5 and e^-1 x 0.5
        ("none", 0.0, [1.5 * exp(2.0), 0.5 * exp(-1.0)]),
        # a correction bounds old / sampler, e^2 and e^-1, and leaves current / old, 1.5 and 0.5, as it is
        ("token_tis", 0.0, [1.5 * 2.0, 0.5 * exp(-1.0)]),
        ("token_tis", 0.6, [1.5 * 2.0, 0.5 * 0.6]),
        ("sequence_tis", 0.0, [1.5 * 2.0, 0.5 * 2.0]),  # the product is e
        ("token_mask", 0.0, [0.0, 0.5 * exp(-1.0)]),
    ],
)
def test_the_ratio_of_importance_sampling_is_to_the_sampler_and_bounded_only_by_a_correction(
    correction: str, floor: float, weights: list[float]
) -> None:
    old = torch.tensor([-2.0, -1.0])
    logprobs = (old + torch.tensor([log(1.5), log(0.5)])).requires_grad_()
    sampler = [-4.0, 0.0]
    result = loss_of(
        logprobs,
        old,
        [1.0, -2.0],
        sampler=sampler,
        loss="importance_sampling",
        correction=correction,
        tis_clip_low=floor,
    )
    expected = [-weights[0] * 1.0, -weights[1] * -2.0]
    assert float(result.loss.detach()) == pytest.approx(sum(expected))
    assert gradient(logprobs, result) == pytest.approx(expected)  # dr / dlogp = r


def test_at_the_first_update_importance_sampling_equals_tinkers() -> None:
    # current and old are the same, e^2 times the sampler: -p / q A = -e^2, where a capped weight would give -2
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = loss_of(logprobs, logprobs.detach(), [1.0], sampler=[-3.0], loss="importance_sampling", correction="none")
    assert float(result.loss.detach()) == pytest.approx(-exp(2.0))
    assert result.importance_N.tolist() == [1.0]


@pytest.mark.parametrize("correction", list(Correction))
@pytest.mark.parametrize("loss", list(Loss))
def test_only_the_current_policy_has_a_gradient(loss: Loss, correction: Correction) -> None:
    """It goes through log pi alone: the ratio or its bound, the weight and the masks are its coefficient."""
    current, old, sampler = (
        torch.tensor(values, dtype=torch.float64, requires_grad=True)
        for values in ([-1.0, -1.3, -2.0, -0.4], [-1.1, -1.2, -2.1, -0.7], [-1.2, -1.0, -2.0, -0.5])
    )
    advantages, lines = torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    settings = tiny_settings(
        loss=loss, correction=correction, tis_clip_low=0.95, clip_low=0.15, use_opsm=True, opsm_delta=0.02
    )
    inputs = LossInputs(current, old, sampler, advantages, torch.ones(4, dtype=torch.float64), lines, 2)
    result = policy_loss(inputs, settings)
    found = torch.autograd.grad(result.loss, (current, old, sampler), allow_unused=True)
    assert all(each is None for each in found[1:])
    weight = result.importance_N.detach()
    ratio = (current - (sampler if loss == "importance_sampling" and correction == "none" else old)).exp().detach()
    if loss == Loss.GSPO:
        ratio = ratio.log().view(2, 2).mean(1).exp().repeat_interleave(2)
    passes = torch.ones(4, dtype=torch.bool)
    if loss in (Loss.CLIPPED, Loss.GSPO):
        passes = torch.where(advantages > 0, ratio <= 1.2, ratio >= 0.85)
    coefficient = ratio.clamp(0.85, 1.2) if loss == Loss.CISPO else ratio
    torch.testing.assert_close(found[0], -weight * advantages * coefficient * passes)
    assert not weight.requires_grad


def test_cispo_clips_a_tokens_weight_and_keeps_its_gradient() -> None:
    logprobs = torch.log(torch.tensor([0.8, 0.1, 0.5])).requires_grad_()
    old = torch.log(torch.tensor([0.2, 0.4, 0.5]))  # ratios 4, 0.25, 1
    result = loss_of(logprobs, old, [1.0, -2.0, 1.0], loss="cispo", clip_low=0.2, clip_high=1.0)
    # weights clipped to [0.8, 2]: 2, 0.8, 1
    expected = -2.0 * 1.0 * log(0.8) - 0.8 * -2.0 * log(0.1) - log(0.5)
    assert float(result.loss.detach()) == pytest.approx(expected)
    assert clipped(result) == [True, True, False]
    assert gradient(logprobs, result) == pytest.approx([-2.0, 1.6, -1.0])


def test_gspos_ratio_is_the_geometric_mean_of_its_sequence() -> None:
    logprobs = torch.log(torch.tensor([0.8, 0.3, 0.5])).requires_grad_()
    old = torch.log(torch.tensor([0.2, 0.3, 0.4]))
    # the first two tokens: sqrt(4 x 1) = 2; the third alone: 1.25
    ratio = sequence_ratio(logprobs, old, torch.ones(3), torch.tensor([0, 0, 1]), 2)
    assert ratio.tolist() == pytest.approx([2.0, 2.0, 1.25])


def test_gspo_clips_whole_sequences_and_spreads_the_gradient_over_their_tokens() -> None:
    logprobs = torch.log(torch.tensor([0.8, 0.3, 0.5, 0.1])).requires_grad_()
    old = torch.log(torch.tensor([0.2, 0.3, 0.4, 0.1]))
    # ratios 2 and sqrt(1.25); only the first is over 1.2
    result = loss_of(
        logprobs, old, [1.0, 1.0, 1.0, 1.0], [0.25] * 4, sequences=[0, 0, 1, 1], loss="gspo", clip_high=0.2
    )
    assert float(result.loss.detach()) == pytest.approx(-0.5 * 1.2 - 0.5 * sqrt(1.25))
    assert clipped(result) == [True, True, False, False]
    # d/dlogp of -(1/2) s with s = exp(mean): -(1/2) s / 2 for each of the two tokens
    assert gradient(logprobs, result) == pytest.approx([0.0, 0.0, -sqrt(1.25) / 4, -sqrt(1.25) / 4])


def test_an_entropy_bonus_is_taken_from_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    entropy = torch.tensor([0.5, 2.0], requires_grad=True)
    result = loss_of(logprobs, logprobs, [1.0, 1.0], [0.25, 0.5], entropy=entropy, entropy_coef=0.1)
    assert float(result.loss.detach()) == pytest.approx(-0.75 - 0.1 * (0.125 + 1.0))
    result.loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.05])


@pytest.mark.parametrize("correction", list(Correction))
def test_no_correction_touches_the_kl_term(correction: Correction) -> None:
    logprobs = torch.log(torch.tensor([0.5, 0.2]))
    result = loss_of(
        logprobs,
        logprobs,
        [0.0, 0.0],
        sampler=[-9.0, -9.0],
        reference=torch.log(torch.tensor([0.5, 0.4])),
        kl_coef=0.1,
        correction=correction,
        tis_clip_low=0.5,
    )
    assert float(result.loss) == pytest.approx(0.1 * (1.0 - log(2.0)))


def test_episodes_weigh_the_same_and_their_tokens_share_the_weight() -> None:
    assert episode_weights({"a": 2, "b": 8, "none": 0}) == {"a": 0.25, "b": 0.0625}
    assert token_weights({"a": 2, "b": 8, "none": 0}) == {"a": 0.1, "b": 0.1}


def test_an_episode_is_divided_by_a_constant_length() -> None:
    # two episodes with tokens, a length of 20
    assert constant_weights({"a": 2, "b": 8, "none": 0}, 20) == {"a": 0.025, "b": 0.025}


# ---- formulas at their edges ----------------------------------------------------------------------------------------


def test_a_ratio_is_held_within_twenty_nats_and_stays_finite() -> None:
    ratio = token_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert ratio.tolist() == pytest.approx([exp(20.0), exp(-20.0)], rel=1e-4)


def test_a_ratio_is_held_within_numbers_or_the_bounds_of_each_token() -> None:
    ratio = torch.tensor([0.5, 0.5, 2.0])
    assert RatioBounds(0.8, 1.25).of(ratio).tolist() == pytest.approx([0.8, 0.8, 1.25])
    assert RatioBounds(torch.tensor([0.8, 0.4, 0.8]), 1.25).of(ratio).tolist() == pytest.approx([0.8, 0.5, 1.25])


def test_the_mean_of_no_token_is_a_ratio_of_one() -> None:
    one_line = torch.zeros(2, dtype=torch.int64)
    ratio = sequence_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -3.0]), torch.zeros(2), one_line, 1)
    assert ratio.tolist() == [1.0, 1.0]


def test_weights_of_the_mean_may_be_below_one() -> None:
    one_line, weights = torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 0.25])
    ratio = sequence_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -3.0]), weights, one_line, 1)
    # (0.5 * 2 + 0.25 * 1) / 0.75 = 5 / 3
    assert ratio.log().tolist() == pytest.approx([5 / 3, 5 / 3])


def test_what_icepop_leaves_out_has_no_gradient() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    ratio = (logprobs - torch.tensor([1.0, 0.1])).exp()  # 0.37 and 0.90
    icepop(-ratio, ratio, 2.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.904837], abs=1e-5)


def test_k3_is_bounded_where_its_exponent_would_overflow() -> None:
    # exp(10) - 10 - 1
    assert float(kl_k3_of_differences(torch.tensor([-200.0]), torch.tensor([0.0]))) == pytest.approx(22015.46, rel=1e-5)
