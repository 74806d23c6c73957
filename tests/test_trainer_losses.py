"""Advantages and losses against numbers worked out on paper."""

from math import exp, log

import pytest
import torch

from bombus_trainer.advantages import call_advantages, group_advantages
from bombus_trainer.losses import (
    clipped_surrogate,
    episode_weights,
    importance_weights,
    kl_k3,
    policy_loss,
    token_weights,
)
from bombus_trainer.settings import Estimator


def test_grpo_is_the_distance_from_the_mean_in_standard_deviations() -> None:
    # mean 2, deviations -2, 0, 2, sample variance 8 / 2 = 4, deviation 2
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1]) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], normalise_std=False) == [-2.0, 0.0, 2.0]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 0 - (2 + 4) / 2, 2 - (0 + 4) / 2, 4 - (0 + 2) / 2
    assert group_advantages([0.0, 2.0, 4.0], [1, 1, 1], Estimator.RLOO) == [-3.0, 0.0, 3.0]


def test_opo_weighs_its_baseline_by_length() -> None:
    # (3 x 0 + 1 x 4) / 4 = 1
    assert group_advantages([0.0, 4.0], [3, 1], Estimator.OPO) == [-1.0, 3.0]


@pytest.mark.parametrize("estimator", list(Estimator))
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1 + 0.2, 0.3, 0.3]])
def test_nothing_to_compare_gives_zeros(rewards: list[float], estimator: Estimator) -> None:
    assert group_advantages(rewards, [1] * len(rewards), estimator) == [0.0] * len(rewards)


def test_without_call_rewards_each_call_has_its_episodes_advantage() -> None:
    found = call_advantages([0.0, 2.0], [None, None], [[5, 5], [5]], normalise_std=False)
    assert found == [[-1.0, -1.0], [1.0]]


def test_a_calls_reward_is_compared_with_the_others_at_its_turn() -> None:
    # turn 1: 1 and (of the episode without call rewards) 5, mean 3; turn 2: only one got there
    found = call_advantages([2.0, 5.0], [(1.0, 3.0), None], [[5, 5], [5]], normalise_std=False)
    assert found == [[-2.0, 0.0], [2.0]]


def test_an_easy_turn_is_not_rewarded_for_being_easy() -> None:
    found = call_advantages([0.5, 0.6], [(1.0, 0.0), (1.0, 0.2)], [[5, 5], [5, 5]], normalise_std=False)
    assert found == [[0.0, pytest.approx(-0.1)], [0.0, pytest.approx(0.1)]]


def test_one_call_reward_for_each_call_or_none() -> None:
    with pytest.raises(ValueError, match="1 call rewards for 2 calls"):
        call_advantages([2.0], [(1.0,)], [[5, 5]])


def test_the_surrogate_is_clipped_only_where_that_makes_it_worse() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    # min(1.5, 1.3) = 1.3; min(-1.5, -1.3) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8; 2
    found = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.3)
    assert found.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.0])


def test_the_importance_weight_is_old_over_sampler_and_truncated() -> None:
    old = torch.log(torch.tensor([0.5, 0.8, 0.1]))
    sampler = torch.log(torch.tensor([0.4, 0.2, 0.2]))
    assert importance_weights(old, sampler, cap=2.0).tolist() == pytest.approx([1.25, 2.0, 0.5])
    assert importance_weights(old, sampler, cap=0.0).tolist() == [1.0, 1.0, 1.0]


def test_k3_is_zero_where_policies_agree() -> None:
    found = kl_k3(torch.tensor([log(0.5), log(0.5)]), torch.tensor([log(0.5), log(0.25)]))
    assert found.tolist() == pytest.approx([0.0, 0.5 - log(0.5) - 1.0])


def test_the_whole_loss_worked_out_by_hand() -> None:
    logprobs = torch.log(torch.tensor([0.5, 0.2])).requires_grad_()
    old = torch.log(torch.tensor([0.4, 0.4]))  # ratios 1.25, clipped to 1.2, and 0.5
    sampler = torch.log(torch.tensor([0.2, 0.5]))  # importance 2 and 0.8
    reference = torch.log(torch.tensor([0.5, 0.4]))  # k3: 0 and 2 - log 2 - 1
    result = policy_loss(
        logprobs,
        old,
        sampler,
        torch.tensor([1.0, 3.0]),
        torch.tensor([0.25, 0.5]),
        clip_low=0.2,
        clip_high=0.2,
        importance_cap=4.0,
        reference_logprobs_N=reference,
        kl_coef=0.1,
    )
    first = 0.25 * (2.0 * -1.2)
    second = 0.5 * (0.8 * -(0.5 * 3.0) + 0.1 * (1.0 - log(2.0)))
    assert float(result.loss.detach()) == pytest.approx(first + second)
    assert result.clipped_N.tolist() == [True, False]
    result.loss.backward()
    # the first is clipped: no gradient. d(-0.8 x 3 r)/dlogp = -2.4 x 0.5; d k3/dlogp = 1 - 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.5 * (-1.2 - 0.1)])


def test_with_one_update_the_gradient_is_the_corrected_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0]).requires_grad_()
    result = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([-1.0, -2.5]),
        torch.tensor([1.0, -1.0]),
        torch.tensor([0.5, 0.5]),
        clip_low=0.2,
        clip_high=0.2,
        importance_cap=2.0,
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.5 * exp(0.5)])


def test_episodes_have_equal_places_and_tokens_share_theirs() -> None:
    assert episode_weights({"a": 2, "b": 8, "none": 0}) == {"a": 0.25, "b": 0.0625}
    assert token_weights({"a": 2, "b": 8, "none": 0}) == {"a": 0.1, "b": 0.1}
