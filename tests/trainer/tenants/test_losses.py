"""Formulas of losses at their edges."""

import pytest
import torch

from bombus_trainer.tenants.losses import (
    RatioBounds,
    geometric_ratio,
    icepop,
    importance_sampling,
    kl_k3_of_differences,
    truncated_importance,
)


def test_a_ratio_is_held_within_twenty_nats_and_stays_finite() -> None:
    terms_N = importance_sampling(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), torch.ones(2))
    assert terms_N.tolist() == pytest.approx([-(2.718281828**20), -(2.718281828**-20)], rel=1e-4)


def test_the_mean_of_no_token_is_a_ratio_of_one() -> None:
    ratio_N = geometric_ratio(
        torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -3.0]), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1
    )
    assert ratio_N.tolist() == [1.0, 1.0]


def test_weights_of_the_mean_may_be_below_one() -> None:
    # (0.5 * 2 + 0.25 * 1) / 0.75 = 5 / 3
    ratio_N = geometric_ratio(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-3.0, -3.0]),
        torch.tensor([0.5, 0.25]),
        torch.zeros(2, dtype=torch.int64),
        1,
    )
    assert ratio_N.log().tolist() == pytest.approx([5 / 3, 5 / 3])


def test_what_icepop_leaves_out_has_no_gradient() -> None:
    logprobs_N = torch.tensor([0.0, 0.0], requires_grad=True)
    ratio_N = (logprobs_N - torch.tensor([1.0, 0.1])).exp()  # 0.37 and 0.90
    icepop(-ratio_N, ratio_N, 2.0).sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, -0.904837], abs=1e-5)


def test_the_importance_of_a_token_is_a_constant() -> None:
    old_N = torch.tensor([0.0, 0.0], requires_grad=True)
    weights_N = truncated_importance(old_N, torch.tensor([1.0, -9.0]), RatioBounds(0.5, 2.0))
    assert (weights_N.tolist(), weights_N.requires_grad) == ([0.5, 2.0], False)


def test_k3_is_bounded_where_its_exponent_would_overflow() -> None:
    # exp(10) - 10 - 1
    assert float(kl_k3_of_differences(torch.tensor([-200.0]), torch.tensor([0.0]))) == pytest.approx(22015.46, rel=1e-5)
