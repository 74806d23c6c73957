"""The losses that a caller can name: plain functions of tensors over N tokens, which return each token's term [N].

The sum of the terms is the loss, with no mean of any kind: what it is divided by is said at the step. lp are the
logprobs of the targets now, with gradient; q those that the caller sent, r = exp(lp - q), and A the advantages. The log
of a ratio is held within `LOG_BOUND`. sg stops the gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bombus_trainer.algorithms.corrections import LOG_BOUND, line_sums
from bombus_trainer.algorithms.losses import token_ratio

K3_BOUND = 10.0  # how far lp - reference may be in the exponent of k3


@dataclass(frozen=True, eq=False)
class RatioBounds:
    """The ratios between which a loss follows a token: numbers, or one for each token [N]."""

    low: float | Tensor
    high: float | Tensor

    def of(self, ratio_N: Tensor) -> Tensor:
        """Return the ratios held within the bounds. Outside there is no gradient."""
        low_N, high_N = (torch.as_tensor(bound, device=ratio_N.device) for bound in (self.low, self.high))
        return torch.clamp(ratio_N, low_N.to(ratio_N.dtype), high_N.to(ratio_N.dtype))


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Compute -w lp. The weights are real numbers of any sign."""
    return -weights_N * logprobs_N


def z_loss(logsumexp_N: Tensor, coefficient: float) -> Tensor:
    """Compute coefficient log(Z)^2, which holds the logits' normalizer Z near 1 (PaLM, arXiv:2204.02311, section 5)."""
    return coefficient * logsumexp_N.square()


def importance_sampling(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Compute -r A (Degris et al. 2012, arXiv:1205.4839, for each token)."""
    return -token_ratio(logprobs_N, sampled_N) * advantages_N


def bounded(ratio_N: Tensor, advantages_N: Tensor, bounds: RatioBounds) -> Tensor:
    """Compute -min(r A, clamp(r, low, high) A) (PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
    return -torch.minimum(ratio_N * advantages_N, bounds.of(ratio_N) * advantages_N)


def cispo(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, bounds: RatioBounds) -> Tensor:
    """Compute -sg(clamp(r, low, high)) A lp (CISPO: MiniMax 2025, arXiv:2506.13585, equation 4)."""
    return -bounds.of(token_ratio(logprobs_N, sampled_N).detach()) * advantages_N * logprobs_N


def dro(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, beta: float) -> Tensor:
    """Compute -(lp A - beta / 2 (lp - q)^2) (DRO: Richemond et al. 2024, arXiv:2405.19107, for each token)."""
    return -(logprobs_N * advantages_N - 0.5 * beta * (logprobs_N - sampled_N).square())


def geometric_ratio(logprobs_N: Tensor, sampled_N: Tensor, counted_N: Tensor, lines_N: Tensor, lines: int) -> Tensor:
    """Return each sequence's geometric mean of r over its `counted_N`, at its tokens [N], as s sg(r) / r would be.

    GSPO (Zheng et al. 2025, arXiv:2507.18071), equation 14: s_t = sg(s) exp(lp - sg(lp)). `counted_N` weighs the
    tokens of the mean, and the mean of none is 1.
    """
    difference_N = (logprobs_N - sampled_N).detach()
    counts_S = line_sums(counted_N, lines_N, lines)
    mean_S = line_sums(counted_N * difference_N, lines_N, lines) / torch.where(counts_S > 0.0, counts_S, 1.0)
    return torch.exp((logprobs_N - logprobs_N.detach() + mean_S[lines_N]).clamp(-LOG_BOUND, LOG_BOUND))


def dual_clipped(terms_N: Tensor, advantages_N: Tensor, cap: float) -> Tensor:
    """Hold the terms of negative advantages at most at -cap A (Ye et al. 2020, arXiv:1912.09729)."""
    return torch.where(advantages_N < 0.0, torch.minimum(terms_N, -cap * advantages_N), terms_N)


def icepop(terms_N: Tensor, ratio_N: Tensor, beta: float) -> Tensor:
    """Leave out the tokens whose ratio is outside of [1 / beta, beta]: they have neither a term nor a gradient."""
    outside_N = (ratio_N.detach() < 1.0 / beta) | (ratio_N.detach() > beta)
    return torch.where(outside_N, torch.zeros_like(terms_N), terms_N)


def truncated_importance(old_N: Tensor, rollout_N: Tensor, bounds: RatioBounds) -> Tensor:
    """Return the constant clamp(old / rollout, low, high) that a term is multiplied by, and so its gradient too.

    It corrects for a sampler that computes other logprobs than the trainer did for the same weights (Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    """
    return bounds.of(token_ratio(old_N, rollout_N).detach())


def kl_k3_of_differences(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Compute exp(-d) + d - 1, with d = lp - reference held within `K3_BOUND`: xorl's k3.

    `algorithms.kl.kl_k3`, which is verl's, bounds the estimate itself.
    """
    difference_N = (logprobs_N - reference_N).clamp(-K3_BOUND, K3_BOUND)
    return torch.exp(-difference_N) + difference_N - 1.0
