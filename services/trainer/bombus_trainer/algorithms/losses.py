"""The losses and their parts: plain functions of one-dimensional tensors over N trained tokens.

Each formula returns every token's term [N]. The terms are weighted and normalized by other modules: `aggregation` for
batches, the optimizer step for training operations. `policy_loss` is the loss for batches; the losses that training
clients can name are in `operations.client_losses`. lp are the current logprobs, with gradient, r is a ratio, A the
advantages, and sg stops the gradient. The log of a ratio is clamped to +-`LOG_BOUND`.

A batch involves three policies, and two different ratios:

- the sampler (`sampler_logprobs_N`): what the inference engine recorded when it drew the tokens;
- the old policy (`old_logprobs_N`): the trainer's own model before the first update on this batch;
- the current policy (`logprobs_N`): the trainer's model now, with gradient.

current / old is the PPO ratio, which is clipped and carries the gradient. old / sampler measures the difference between
two implementations of the same weights: it is a constant weight, see `corrections`. With one update per batch, the old
policy is the current policy, detached: the PPO ratio is 1 and is never clipped. Only the loss importance_sampling uses
a single ratio, current / sampler, in place of both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bombus.config.algorithms import KlEstimator, Loss
from bombus_trainer.algorithms.corrections import (
    LOG_BOUND,
    CorrectionRule,
    off_policy_sequences,
    sampler_correction,
    sequence_sums,
)
from bombus_trainer.algorithms.kl import KL_ESTIMATES
from bombus_trainer.settings import TrainerSettings


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss: N tokens from S sequences.

    `weights_N` are the aggregation's weights (see `aggregation`), with which the losses and gradients of an update's
    micro-batches simply add up. `sequences_N` is the number (below `sequences`, S) of each token's sequence; all
    trained tokens of a sequence are included. The reference's logprobs are needed for a KL term, and the entropies
    (with gradient) for an entropy bonus.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    sequences: int
    reference_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """Each token's term [N] (with gradient), its ratio, and whether it was clipped."""

    terms_N: Tensor
    ratio_N: Tensor | None = None
    clipped_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RatioBounds:
    """The bounds to which a loss clips ratios: one number, or one per token [N]."""

    low: float | Tensor
    high: float | Tensor

    @classmethod
    def around_one(cls, below: float, above: float) -> "RatioBounds":
        """Return the bounds 1 - below and 1 + above."""
        return cls(1.0 - below, 1.0 + above)

    def of(self, ratio_N: Tensor) -> Tensor:
        """Return the ratios, clamped to the bounds. Outside the bounds there is no gradient."""
        if not isinstance(self.low, Tensor) and not isinstance(self.high, Tensor):
            return ratio_N.clamp(self.low, self.high)
        low_N, high_N = (torch.as_tensor(bound).to(ratio_N) for bound in (self.low, self.high))
        return ratio_N.clamp(low_N, high_N)


@dataclass(frozen=True)
class PolicyLoss:
    """A loss and what it did to each token. `loss` is a scalar with gradient; the rest is detached, with one entry per
    token.

    `capped_N` says whether the importance weight was bounded, and `masked_N` whether a mask left out the token's
    surrogate. `clipped_N` is None if the loss does not tell which tokens it clipped.
    """

    loss: Tensor
    clipped_N: Tensor | None
    importance_N: Tensor
    capped_N: Tensor
    masked_N: Tensor
    kl_reference_N: Tensor | None


# ---- formulas -------------------------------------------------------------------------------------------------------


def token_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Return pi / pi_old at each token [N]."""
    return torch.exp((logprobs_N - old_logprobs_N.detach()).clamp(-LOG_BOUND, LOG_BOUND))


def sequence_ratio(
    logprobs_N: Tensor, old_logprobs_N: Tensor, counted_N: Tensor, sequences_N: Tensor, sequences: int
) -> Tensor:
    """Return (pi(y) / pi_old(y))^(1/|y|) of each token's sequence [N], with its gradient spread over the sequence's
    tokens.

    GSPO (Zheng et al. 2025, arXiv:2507.18071), equation 14: s_t = sg(s) pi_t / sg(pi_t). If the tokens of a sequence
    share an advantage, this has the gradient of s itself. `counted_N` are the tokens' weights in the mean; if they are
    all 0, the ratio is 1.
    """
    difference_N = (logprobs_N - old_logprobs_N).detach()
    counts_S = sequence_sums(counted_N, sequences_N, sequences)
    mean_S = sequence_sums(counted_N * difference_N, sequences_N, sequences) / torch.where(
        counts_S > 0.0, counts_S, 1.0
    )
    return torch.exp((logprobs_N - logprobs_N.detach() + mean_S[sequences_N]).clamp(-LOG_BOUND, LOG_BOUND))


def unclipped_surrogate(ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Compute -r A for each token [N]: the off-policy policy gradient (Degris et al. 2012, arXiv:1205.4839)."""
    return -ratio_N * advantages_N


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, bounds: RatioBounds, dual_clip: float = 0.0) -> Tensor:
    """Compute -min(r A, clip(r, low, high) A) for each token [N], and at most -dual_clip A if A < 0.

    Schulman et al. 2017, arXiv:1707.06347, equation 7; the two bounds may differ (DAPO, arXiv:2503.14476). `dual_clip`
    is from Ye et al. 2020, arXiv:1912.09729; 0 disables it.
    """
    surrogate_N = -torch.minimum(ratio_N * advantages_N, bounds.of(ratio_N) * advantages_N)
    if dual_clip > 0.0:
        capped_N = torch.minimum(surrogate_N, -dual_clip * advantages_N)
        surrogate_N = torch.where(advantages_N < 0.0, capped_N, surrogate_N)
    return surrogate_N


def cispo_surrogate(logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, bounds: RatioBounds) -> Tensor:
    """Compute -sg(clip(r, low, high)) A lp for each token [N].

    CISPO (MiniMax 2025, arXiv:2506.13585), equation 4: the weight is clipped, and every token keeps its gradient.
    """
    return -bounds.of(ratio_N.detach()) * advantages_N * logprobs_N


def changed(terms_N: Tensor, ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return whether each term [N] was changed by the bounds, that is, differs from -r A."""
    return terms_N.detach() != unclipped_surrogate(ratio_N, advantages_N).detach()


def clipped_terms(ratio_N: Tensor, advantages_N: Tensor, bounds: RatioBounds, dual_clip: float = 0.0) -> TokenTerms:
    """Return `clipped_surrogate` with its ratio, and which tokens' terms the bounds changed."""
    terms_N = clipped_surrogate(ratio_N, advantages_N, bounds, dual_clip)
    return TokenTerms(terms_N, ratio_N, changed(terms_N, ratio_N, advantages_N))


def cispo_terms(logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, bounds: RatioBounds) -> TokenTerms:
    """Return `cispo_surrogate` with its ratio, and which tokens' ratios are out of bounds."""
    terms_N = cispo_surrogate(logprobs_N, ratio_N, advantages_N, bounds)
    return TokenTerms(terms_N, ratio_N, bounds.of(ratio_N.detach()) != ratio_N.detach())


def icepop(terms_N: Tensor, ratio_N: Tensor, beta: float) -> Tensor:
    """Leave out the tokens whose ratio is outside [1 / beta, beta], so that they have neither a term nor a gradient.

    This is xorl's version, which uses current / old. See `corrections.masked` for the original (arXiv:2510.18855),
    which uses old / sampler.
    """
    outside_N = (ratio_N.detach() < 1.0 / beta) | (ratio_N.detach() > beta)
    return torch.where(outside_N, torch.zeros_like(terms_N), terms_N)


def dro(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, beta: float) -> Tensor:
    """Compute -(lp A - beta / 2 (lp - q)^2), with q the sampler's logprobs.

    DRO (Richemond et al. 2024, arXiv:2405.19107), applied to each token.
    """
    return -(logprobs_N * advantages_N - 0.5 * beta * (logprobs_N - sampled_N).square())


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Compute -w lp. The weights may be negative."""
    return -weights_N * logprobs_N


def z_loss(logsumexp_N: Tensor, coefficient: float) -> Tensor:
    """Compute coefficient log(Z)^2, which keeps the logits' normalizer Z near 1 (PaLM, arXiv:2204.02311, section 5)."""
    return coefficient * logsumexp_N.square()


# ---- losses for batches ---------------------------------------------------------------------------------------------


def clipped(inputs: LossInputs, settings: TrainerSettings) -> TokenTerms:
    """Compute PPO's terms: `clipped_surrogate` of each token's ratio."""
    ratio_N = token_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    return clipped_terms(ratio_N, inputs.advantages_N, _bounds(settings), settings.config.dual_clip)


def gspo(inputs: LossInputs, settings: TrainerSettings) -> TokenTerms:
    """Compute GSPO's terms: `clipped_surrogate` of the `sequence_ratio`."""
    all_N = torch.ones_like(inputs.logprobs_N)
    ratio_N = sequence_ratio(inputs.logprobs_N, inputs.old_logprobs_N, all_N, inputs.sequences_N, inputs.sequences)
    return clipped_terms(ratio_N, inputs.advantages_N, _bounds(settings), settings.config.dual_clip)


def cispo(inputs: LossInputs, settings: TrainerSettings) -> TokenTerms:
    """Compute CISPO's terms: `cispo_surrogate` of each token's ratio."""
    ratio_N = token_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    return cispo_terms(inputs.logprobs_N, ratio_N, inputs.advantages_N, _bounds(settings))


def importance_sampling(inputs: LossInputs, settings: TrainerSettings) -> TokenTerms:
    """Compute `unclipped_surrogate` of r = current / sampler, like Tinker's loss of the same name.

    If a correction is configured, r is current / old, and the correction applies the factor old / sampler within its
    bounds.
    """
    old_N = inputs.old_logprobs_N if settings.corrects else inputs.sampler_logprobs_N
    ratio_N = token_ratio(inputs.logprobs_N, old_N)
    terms_N = unclipped_surrogate(ratio_N, inputs.advantages_N)
    return TokenTerms(terms_N, ratio_N, torch.zeros_like(terms_N, dtype=torch.bool))


def _bounds(settings: TrainerSettings) -> RatioBounds:
    return RatioBounds.around_one(settings.config.clip_low, settings.config.clip_high)


SURROGATES: dict[Loss, Callable[[LossInputs, TrainerSettings], TokenTerms]] = {
    Loss.CLIPPED: clipped,
    Loss.GSPO: gspo,
    Loss.CISPO: cispo,
    Loss.IMPORTANCE_SAMPLING: importance_sampling,
}


def reference_kl(estimator: KlEstimator, logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """Estimate the KL to the reference at each token [N], weighted by current / old if the estimator needs that
    weight."""
    estimates_N = KL_ESTIMATES[estimator](logprobs_N, reference_N)
    if not estimator.importance_weighted:
        return estimates_N
    return token_ratio(logprobs_N.detach(), old_N) * estimates_N


def policy_loss(inputs: LossInputs, settings: TrainerSettings) -> PolicyLoss:
    """Compute sum_n w_n (i_n s_n + kl_coef k_n - entropy_coef h_n).

    For each token, s is the surrogate, i the importance weight (0 if a mask leaves the token out), k the KL to the
    reference, and h the entropy.
    """
    surrogate = SURROGATES[settings.loss](inputs, settings)
    old_N, sampler_N = inputs.old_logprobs_N, inputs.sampler_logprobs_N
    sequences_N, sequences = inputs.sequences_N, inputs.sequences
    config = settings.config
    rule = CorrectionRule(config.correction, config.tis_clip_low, config.tis_clip)
    weights = sampler_correction(old_N, sampler_N, sequences_N, sequences, rule)
    importance_N, masked_N = weights.importance_N, weights.masked_N
    if config.use_opsm:
        far_N = off_policy_sequences(inputs.logprobs_N, sampler_N, sequences_N, sequences, config.opsm_delta)
        far_N &= inputs.advantages_N < 0.0
        importance_N, masked_N = torch.where(far_N, 0.0, importance_N), masked_N | far_N
    terms_N = importance_N * surrogate.terms_N
    kl_N = None
    if inputs.reference_logprobs_N is not None and config.kl_coef > 0.0:
        kl_N = reference_kl(config.kl_estimator, inputs.logprobs_N, inputs.reference_logprobs_N, old_N)
        terms_N = terms_N + config.kl_coef * kl_N
    if inputs.entropy_N is not None and config.entropy_coef > 0.0:
        terms_N = terms_N - config.entropy_coef * inputs.entropy_N
    return PolicyLoss(
        loss=(inputs.weights_N * terms_N).sum(),
        clipped_N=surrogate.clipped_N,
        importance_N=importance_N,
        capped_N=weights.capped_N,
        masked_N=masked_N,
        kl_reference_N=None if kl_N is None else kl_N.detach(),
    )
