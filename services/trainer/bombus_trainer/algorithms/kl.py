"""Estimates of a KL divergence at sampled tokens: plain functions of one-dimensional tensors.

As a value, each estimates KL(policy || other) if the tokens are drawn from the policy. As loss terms, they differ in
their gradients (Tang and Munos 2025, arXiv:2506.09477). The expected gradient of k1 is zero, so in a loss k1 adds only
noise. The gradient of k2 and of k3_unbiased is the gradient of KL(policy || other). The gradient of k3 is the gradient
of KL(other || policy), which agrees with the others while the two policies are close to each other.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bombus.config.algorithms import KlEstimator

K3_MAX = 10.0
K3_BOUND = 10.0  # bound on |policy - other| in `kl_k3_of_differences`


def kl_k1(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute policy - other: unbiased, of either sign [N] (Schulman 2020, "Approximating KL Divergence")."""
    return logprobs_N - other_N


def kl_k2(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute (policy - other)^2 / 2: slightly biased, never negative [N] (Schulman 2020)."""
    return 0.5 * (logprobs_N - other_N).square()


def kl_k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute exp(d) - d - 1 with d = other - policy, at most 10 [N] (Schulman 2020; GRPO, equation 4).

    It is never negative, and it is unbiased where the bound does not apply: for d from -11.0 to 2.61. Outside this
    range there is no gradient. Without the bound, a single token that the policy now rarely samples could outweigh the
    rest of its batch. verl's k3 and low_var_kl are the same.
    """
    difference_N = (other_N - logprobs_N).clamp(-20.0, 20.0)
    return (torch.exp(difference_N) - difference_N - 1.0).clamp(max=K3_MAX)


def kl_k3_of_differences(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute exp(-d) + d - 1 with d = policy - other, clamped to +-`K3_BOUND` [N]: xorl's k3."""
    difference_N = (logprobs_N - other_N).clamp(-K3_BOUND, K3_BOUND)
    return torch.exp(-difference_N) + difference_N - 1.0


def kl_k3_unbiased(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Compute k3 with the gradient of an unbiased estimate: (policy - other) times the gradient of log policy [N].

    This is the gradient of r k3 at r = 1, with r = policy / sg(policy) and k3 without its bound (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1). It is written out because the two terms of exp(d) in that product cancel, which
    becomes inaccurate in float32 from 15 nats on. The gradient grows with the distance and has no bound. verl's k3+ is
    the same.
    """
    pulled_N = (logprobs_N - other_N).detach() * (logprobs_N - logprobs_N.detach())
    return kl_k3(logprobs_N, other_N).detach() + pulled_N


KL_ESTIMATES: dict[KlEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    KlEstimator.K1: kl_k1,
    KlEstimator.K2: kl_k2,
    KlEstimator.K3: kl_k3,
    KlEstimator.K3_UNBIASED: kl_k3_unbiased,
}
