"""Estimates of a KL divergence at sampled tokens: plain functions of one-dimensional tensors.

As a number each is an estimate of KL(policy || other) where tokens are drawn from the policy. As terms of a loss they
differ in their gradients (Tang and Munos 2025, arXiv:2506.09477): the expected gradient of k1 is zero, so in a loss k1
adds only noise; that of k2 is the gradient of KL(policy || other); that of k3 is the gradient of KL(other || policy),
which agrees with k2's while the two are close to each other.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bombus.config.algorithms import KlEstimator

K3_MAX = 10.0


def kl_k1(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute policy - other: unbiased, of either sign [N] (Schulman 2020, "Approximating KL Divergence")."""
    return logprobs_N - other_N


def kl_k2(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute (policy - other)^2 / 2: slightly biased, never negative [N] (Schulman 2020)."""
    return 0.5 * (logprobs_N - other_N).square()


def kl_k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute exp(d) - d - 1 with d = other - policy, at most 10 [N] (Schulman 2020; GRPO, equation 4).

    It is never negative, and unbiased within the bound: for d from -11.0 to 2.61. Beyond, there is no gradient. verl's
    k3 and low_var_kl are the same: without a bound one token that the policy has almost given up outweighs its batch.
    """
    difference_N = (other_N - logprobs_N).clamp(-20.0, 20.0)
    return (torch.exp(difference_N) - difference_N - 1.0).clamp(max=K3_MAX)


KL_ESTIMATES: dict[KlEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    KlEstimator.K1: kl_k1,
    KlEstimator.K2: kl_k2,
    KlEstimator.K3: kl_k3,
}
