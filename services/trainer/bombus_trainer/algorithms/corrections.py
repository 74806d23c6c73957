"""Corrects for the difference between the sampler's logprobs and the trainer's own, with weights and masks.

The sampler and the old policy are two implementations of nearly the same weights (different kernels, different
precision, staleness). All of these corrections are constants: no gradient flows through them. A sequence is one branch
of an episode; only its trained tokens count here. A sequence is never split across bins, so sums over a sequence need
the terms of only one bin.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from bombus.config.algorithms import Correction

LOG_BOUND = 20.0  # how far the log of a ratio may be from 0


@dataclass(frozen=True)
class CorrectionRule:
    """A correction and its bounds on the importance weight. A `high` of 0 disables the correction."""

    kind: Correction
    low: float
    high: float


@dataclass(frozen=True)
class CorrectionWeights:
    """For each token [N]: the factor of its surrogate, and whether a bound changed the factor or masked the token."""

    importance_N: Tensor
    capped_N: Tensor
    masked_N: Tensor


def sequence_sums(values_N: Tensor, sequences_N: Tensor, sequences: int) -> Tensor:
    """Sum values by sequence [S]. `sequences_N` is the sequence number of each token, below `sequences` (S)."""
    return values_N.new_zeros(sequences).index_add_(0, sequences_N, values_N)


def sequence_means(values_N: Tensor, sequences_N: Tensor, sequences: int) -> Tensor:
    """Average values by sequence [S]; 0 for a sequence without tokens."""
    counts_S = sequence_sums(torch.ones_like(values_N), sequences_N, sequences)
    return sequence_sums(values_N, sequences_N, sequences) / counts_S.clamp(min=1.0)


def token_ratios(old_N: Tensor, sampler_N: Tensor) -> Tensor:
    """Return pi_old / pi_sampler at each token [N], at most exp(LOG_BOUND)."""
    return torch.exp((old_N - sampler_N).detach().clamp(max=LOG_BOUND))


def sequence_ratios(old_N: Tensor, sampler_N: Tensor, sequences_N: Tensor, sequences: int) -> Tensor:
    """Return, at each token [N], the product of the token ratios of its sequence."""
    sums_S = sequence_sums((old_N - sampler_N).detach(), sequences_N, sequences)
    return torch.exp(sums_S.clamp(-LOG_BOUND, LOG_BOUND))[sequences_N]


def unweighted(old_N: Tensor) -> CorrectionWeights:
    """Correct nothing: every weight is 1."""
    none_N = torch.zeros_like(old_N, dtype=torch.bool)
    return CorrectionWeights(torch.ones_like(old_N), none_N, none_N)


def truncated(ratios_N: Tensor, low: float, high: float) -> CorrectionWeights:
    """Compute truncated importance sampling: clamp each ratio to [low, high].

    On tokens, this is Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". On
    whole sequences, the estimate is unbiased except for the clamping, and its variance grows with the sequence length.
    """
    none_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    return CorrectionWeights(ratios_N.clamp(low, high), (ratios_N >= high) | (ratios_N < low), none_N)


def masked(ratios_N: Tensor, low: float, high: float) -> CorrectionWeights:
    """Compute masked importance sampling: keep a ratio that is within [low, high], and replace any other by 0.

    On tokens with both bounds, this is IcePop (Ling Team 2025, arXiv:2510.18855): M(k) = k if alpha <= k <= beta, else
    0. With `low` 0, on tokens or sequences, it is from Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch".
    """
    outside_N = (ratios_N < low) | (ratios_N > high)
    return CorrectionWeights(torch.where(outside_N, 0.0, ratios_N), torch.zeros_like(outside_N), outside_N)


def sampler_correction(
    old_N: Tensor, sampler_N: Tensor, sequences_N: Tensor, sequences: int, rule: CorrectionRule
) -> CorrectionWeights:
    """Compute the weights of a correction; all ones if it is disabled."""
    if rule.high <= 0.0:
        return unweighted(old_N)
    match rule.kind:
        case Correction.NONE:
            return unweighted(old_N)
        case Correction.TOKEN_TIS:
            return truncated(token_ratios(old_N, sampler_N), rule.low, rule.high)
        case Correction.SEQUENCE_TIS:
            return truncated(sequence_ratios(old_N, sampler_N, sequences_N, sequences), rule.low, rule.high)
        case Correction.ICEPOP | Correction.TOKEN_MASK:
            return masked(token_ratios(old_N, sampler_N), rule.low, rule.high)
        case Correction.SEQUENCE_MASK:
            return masked(sequence_ratios(old_N, sampler_N, sequences_N, sequences), rule.low, rule.high)
        case _:
            assert_never(rule.kind)


def off_policy_sequences(
    logprobs_N: Tensor, sampler_N: Tensor, sequences_N: Tensor, sequences: int, delta: float
) -> Tensor:
    """Find the tokens [N] of sequences whose mean of log(pi_sampler / pi_policy) exceeds `delta`.

    Off-policy sequence masking leaves out those tokens if their advantage is negative: DeepSeek-V3.2, arXiv:2512.02556,
    section 3.1; slime's OPSM.
    """
    divergence_S = sequence_means((sampler_N - logprobs_N).detach(), sequences_N, sequences)
    return (divergence_S > delta)[sequences_N]
