"""What is made of the difference between the sampler's logprobs and the trainer's own: weights and masks.

The sampler and the old policy are two implementations of nearly the same weights (other kernels, other precision,
staleness). All of this is constant: no gradient flows through it. A sequence is one line of an episode; its tokens
here are its trained ones. It lies in one bin, so a bin's terms are all that its sums need.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bombus.config.algorithms import Correction

LOG_BOUND = 20.0  # no ratio is taken to be further from 1 than exp(20)


@dataclass(frozen=True)
class CorrectionWeights:
    """For each token [N]: what its surrogate is multiplied by, and whether a bound changed or removed it."""

    importance_N: Tensor
    capped_N: Tensor
    masked_N: Tensor


def line_sums(values_N: Tensor, lines_N: Tensor, lines: int) -> Tensor:
    """The sum of each sequence's tokens [S]; `lines_N` says to which of the S sequences a token belongs."""
    return values_N.new_zeros(lines).index_add_(0, lines_N, values_N)


def line_means(values_N: Tensor, lines_N: Tensor, lines: int) -> Tensor:
    """The mean over each sequence's tokens [S]; 0 where a sequence has none."""
    counts_S = line_sums(torch.ones_like(values_N), lines_N, lines)
    return line_sums(values_N, lines_N, lines) / counts_S.clamp(min=1.0)


def token_ratios(old_N: Tensor, sampler_N: Tensor) -> Tensor:
    """pi_old / pi_sampler at each token [N]."""
    return torch.exp((old_N - sampler_N).detach().clamp(max=LOG_BOUND))


def sequence_ratios(old_N: Tensor, sampler_N: Tensor, lines_N: Tensor, lines: int) -> Tensor:
    """The product of a sequence's token ratios, at each of its tokens [N]."""
    sums_S = line_sums((old_N - sampler_N).detach(), lines_N, lines)
    return torch.exp(sums_S.clamp(-LOG_BOUND, LOG_BOUND))[lines_N]


def truncated(ratios_N: Tensor, low: float, high: float) -> CorrectionWeights:
    """Truncated importance sampling: each ratio, kept within [low, high].

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", for tokens. On whole
    sequences the estimate is unbiased but for the bound, and of a variance that grows with their length.
    """
    none_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    return CorrectionWeights(ratios_N.clamp(low, high), (ratios_N >= high) | (ratios_N < low), none_N)


def masked(ratios_N: Tensor, low: float, high: float) -> CorrectionWeights:
    """Masked importance sampling: a ratio within [low, high] as it is, 0 for one outside of it.

    On tokens with both bounds: IcePop (Ling Team 2025, arXiv:2510.18855), M(k) = k if alpha <= k <= beta, else 0.
    With `low` 0, on tokens and on sequences: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse
    from the Training-Inference Mismatch".
    """
    outside_N = (ratios_N < low) | (ratios_N > high)
    return CorrectionWeights(torch.where(outside_N, 0.0, ratios_N), torch.zeros_like(outside_N), outside_N)


def sampler_correction(
    old_N: Tensor, sampler_N: Tensor, lines_N: Tensor, lines: int, correction: Correction, low: float, high: float
) -> CorrectionWeights:
    """The correction of that name. A `high` of 0 switches it off: all ones."""
    if correction == Correction.NONE or high <= 0.0:
        none_N = torch.zeros_like(old_N, dtype=torch.bool)
        return CorrectionWeights(torch.ones_like(old_N), none_N, none_N)
    if correction in (Correction.SEQUENCE_TIS, Correction.SEQUENCE_MASK):
        ratios_N = sequence_ratios(old_N, sampler_N, lines_N, lines)
    else:
        ratios_N = token_ratios(old_N, sampler_N)
    if correction in (Correction.TOKEN_TIS, Correction.SEQUENCE_TIS):
        return truncated(ratios_N, low, high)
    return masked(ratios_N, low, high)


def off_policy_sequences(
    logprobs_N: Tensor, sampler_N: Tensor, advantages_N: Tensor, lines_N: Tensor, lines: int, delta: float
) -> Tensor:
    """Which tokens [N] off-policy sequence masking leaves out: of a negative advantage, in a sequence far from home.

    Far is a mean of log(pi_sampler / pi_policy) over the sequence of more than `delta`. DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1; slime's OPSM.
    """
    divergence_S = line_means((sampler_N - logprobs_N).detach(), lines_N, lines)
    return (advantages_N < 0.0) & (divergence_S > delta)[lines_N]
