"""The policy loss and its parts: plain functions of one-dimensional tensors over N trained tokens.

Three policies meet here, and two different ratios:

- the sampler (`sampler_logprobs_N`): what the inference engine recorded when it drew the tokens;
- the old policy (`old_logprobs_N`): the trainer's own model before the first update on this batch;
- the current policy (`logprobs_N`): the trainer's model now, with gradient.

current / old is the PPO ratio, which is clipped and carries the gradient. old / sampler is what is left between two
implementations of the same weights (other kernels, other precision, staleness): a constant weight, truncated. With
one update for each batch the old policy is the current one, detached: the PPO ratio is 1 and never clips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is a scalar with gradient; the others are detached, one entry for each token."""

    loss: Tensor
    ratio_N: Tensor
    clipped_N: Tensor
    importance_N: Tensor
    kl_reference_N: Tensor | None


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token [N].

    Schulman et al. 2017, arXiv:1707.06347, equation 7; the two bounds may differ (DAPO, arXiv:2503.14476).
    """
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)


def importance_weights(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(pi_old / pi_sampler, cap) for each token [N], without gradient.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". pi_old is the
    trainer's, not the current policy's. A cap of 0 switches the correction off (all ones).
    """
    if cap <= 0.0:
        return torch.ones_like(old_logprobs_N)
    return torch.exp((old_logprobs_N - sampler_logprobs_N).detach().clamp(max=20.0)).clamp(max=cap)


def kl_k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """An unbiased, never negative estimate of KL(policy || other) at tokens drawn from the policy [N].

    exp(d) - d - 1 with d = other - policy (Schulman 2020, "Approximating KL Divergence"; GRPO, equation 4).
    """
    difference_N = (other_N - logprobs_N).clamp(-20.0, 20.0)
    return torch.exp(difference_N) - difference_N - 1.0


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    reference_logprobs_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """sum_n w_n (i_n s_n + kl_coef k_n): the surrogate s, importance weight i and reference KL k of each token.

    `weights_N` is the aggregation: see `episode_weights` and `token_weights`. They sum to one over all the tokens of
    an update, so the losses (and gradients) of its micro-batches are simply added.
    """
    ratio_N = torch.exp((logprobs_N - old_logprobs_N.detach()).clamp(-20.0, 20.0))
    surrogate_N = clipped_surrogate(ratio_N, advantages_N, clip_low, clip_high)
    importance_N = importance_weights(old_logprobs_N, sampler_logprobs_N, importance_cap)
    terms_N = importance_N * surrogate_N
    kl_N = None
    if reference_logprobs_N is not None and kl_coef > 0.0:
        kl_N = kl_k3(logprobs_N, reference_logprobs_N)
        terms_N = terms_N + kl_coef * kl_N
    clipped_N = surrogate_N.detach() > (-ratio_N * advantages_N).detach()
    return PolicyLoss(
        loss=(weights_N * terms_N).sum(),
        ratio_N=ratio_N.detach(),
        clipped_N=clipped_N,
        importance_N=importance_N,
        kl_reference_N=None if kl_N is None else kl_N.detach(),
    )


def episode_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """What one token of each episode counts: 1 / (episodes x its trained tokens).

    Every episode has the same place in the loss, however many turns or branches it took; the branches of an episode
    share that place. Episodes without trained tokens take none.
    """
    episodes = sum(1 for tokens in tokens_of_episode.values() if tokens)
    return {name: 1.0 / (episodes * tokens) for name, tokens in tokens_of_episode.items() if tokens}


def token_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """What one token counts when all tokens count alike: 1 / (all trained tokens). Long episodes weigh more."""
    total = sum(tokens_of_episode.values())
    return {name: 1.0 / total for name, tokens in tokens_of_episode.items() if tokens}
