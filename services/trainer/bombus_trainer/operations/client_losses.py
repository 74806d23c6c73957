"""The losses that a caller can name, with their inputs and parameters. The formulas are in `algorithms.losses`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from bombus.errors import Code, Refused
from bombus.operations import LossSpec
from bombus_trainer.algorithms.corrections import token_ratios, truncated
from bombus_trainer.algorithms.kl import kl_k1, kl_k2, kl_k3, kl_k3_of_differences
from bombus_trainer.algorithms.losses import (
    RatioBounds,
    TokenTerms,
    changed,
    cispo_terms,
    clipped_surrogate,
    clipped_terms,
    cross_entropy,
    dro,
    icepop,
    sequence_ratio,
    token_ratio,
    unclipped_surrogate,
    z_loss,
)

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES, MASK = "target_tokens", "weights", "logprobs", "advantages", "mask"
ROLLOUT, REFERENCE, RATIO_MASK = "rollout_logprobs", "ref_logprobs", "sequence_ratio_mask"
CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"

NotNegative: TypeAlias = Annotated[float, Meta(ge=0.0)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Switch: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
OverOne: TypeAlias = Annotated[float, Meta(gt=1.0)]


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The N targets of some whole sequences: their current logprobs, and the caller's `inputs` [N] by name.

    `sequences_N` is the index of each target's sequence, below `sequences`. `counted_N` is 1 for targets that count,
    and 0 for all others. `first_N` is 1 for each token's first target that counts, else 0. `logsumexp_N` is None unless
    the loss wants it.
    """

    logprobs_N: Tensor
    inputs: Mapping[str, Tensor]
    sequences_N: Tensor
    sequences: int
    counted_N: Tensor
    first_N: Tensor
    logsumexp_N: Tensor | None = None


class ClientLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A loss whose parameters are the fields of its class. All losses take the inputs `target_tokens` and `mask`.

    `needs` names the other required inputs, and `takes` the optional ones. A target counts if its `mask` is not 0 or,
    in a datum without a mask, if its input named by `counted_by` is not 0. A target of weight 0 never counts. A token
    may have several targets only if `wide`.

    `compute_kl_stats`, which xorl's clients set, has no effect: the metrics of a loss with a ratio always include the
    KL.
    """

    needs: ClassVar[tuple[str, ...]] = (LOGPROBS, ADVANTAGES)
    takes: ClassVar[tuple[str, ...]] = ()
    counted_by: ClassVar[str] = ADVANTAGES
    wide: ClassVar[bool] = False

    @property
    def wants_logsumexp(self) -> bool:
        return False

    def check(self) -> str:
        """Return how the parameters contradict each other; "" if they do not."""
        return ""

    def missing(self, given: Mapping[str, object]) -> str:
        """Return the name of an input that these parameters need but that was not given; "" if none is missing."""
        return next((name for name in self.needs if name not in given), "")

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        """Compute each target's term, before `mask` is applied."""
        raise NotImplementedError


class PerTokenLoss(ClientLoss, frozen=True):
    """Cross-entropy without the z loss. `weights` default to 1."""

    needs: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    counted_by: ClassVar[str] = WEIGHTS
    wide: ClassVar[bool] = True

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        return TokenTerms(cross_entropy(tokens.logprobs_N, tokens.inputs[WEIGHTS]))


class CrossEntropyLoss(PerTokenLoss, frozen=True):
    """Cross-entropy plus a z loss, which is added to the term of each token's first target that counts."""

    z_loss_coef: NotNegative = 0.0

    @property
    def wants_logsumexp(self) -> bool:
        return self.z_loss_coef > 0.0

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        plain = super().of(tokens)
        if tokens.logsumexp_N is None:
            return plain
        return TokenTerms(plain.terms_N + tokens.first_N * z_loss(tokens.logsumexp_N, self.z_loss_coef))


class ImportanceSamplingLoss(ClientLoss, frozen=True):
    """-r A; with `eps_clip`, r is clipped to [1 - eps_clip, 1 + eps_clip_high] as in PPO."""

    eps_clip: Share | None = None
    eps_clip_high: NotNegative | None = None
    compute_kl_stats: Switch = 0.0

    def check(self) -> str:
        return "eps_clip_high needs eps_clip" if self.eps_clip is None and self.eps_clip_high is not None else ""

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        advantages_N, ratio_N = tokens.inputs[ADVANTAGES], ratio_of(tokens)
        if self.eps_clip is None:
            return TokenTerms(unclipped_surrogate(ratio_N, advantages_N), ratio_N)
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return clipped_terms(ratio_N, advantages_N, RatioBounds.around_one(self.eps_clip, high))


class ThresholdLoss(ClientLoss, frozen=True):
    """A loss with thresholds for the ratio itself. Inputs with the same names override them for each token."""

    takes: ClassVar[tuple[str, ...]] = (CLIP_LOW, CLIP_HIGH)
    clip_low_threshold: NotNegative = 0.8
    clip_high_threshold: NotNegative = 1.2

    def check(self) -> str:
        above = self.clip_low_threshold > self.clip_high_threshold
        return "clip_low_threshold is above clip_high_threshold" if above else ""

    def bounds(self, tokens: ScoredTokens) -> RatioBounds:
        return RatioBounds(
            tokens.inputs.get(CLIP_LOW, self.clip_low_threshold), tokens.inputs.get(CLIP_HIGH, self.clip_high_threshold)
        )


class PpoLoss(ThresholdLoss, frozen=True):
    """PPO, with absolute ratios as bounds."""

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        return clipped_terms(ratio_of(tokens), tokens.inputs[ADVANTAGES], self.bounds(tokens))


class CispoLoss(ThresholdLoss, frozen=True):
    """CISPO."""

    clip_low_threshold: NotNegative = 0.0
    clip_high_threshold: NotNegative = 4.0
    compute_kl_stats: Switch = 0.0

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        return cispo_terms(tokens.logprobs_N, ratio_of(tokens), tokens.inputs[ADVANTAGES], self.bounds(tokens))


class GspoLoss(ThresholdLoss, frozen=True, kw_only=True):
    """GSPO. Its thresholds have no defaults; the paper uses 1 - 3e-4 and 1 + 4e-4."""

    needs: ClassVar[tuple[str, ...]] = (LOGPROBS, ADVANTAGES, RATIO_MASK)
    clip_low_threshold: NotNegative
    clip_high_threshold: NotNegative

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        given = tokens.inputs
        ratio_N = sequence_ratio(
            tokens.logprobs_N, given[LOGPROBS], given[RATIO_MASK], tokens.sequences_N, tokens.sequences
        )
        return clipped_terms(ratio_N, given[ADVANTAGES], self.bounds(tokens))


class DroLoss(ClientLoss, frozen=True):
    """DRO."""

    beta: NotNegative = 0.05

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        given = tokens.inputs
        terms_N = dro(tokens.logprobs_N, given[LOGPROBS], given[ADVANTAGES], self.beta)
        return TokenTerms(terms_N, ratio_of(tokens))


class ClippedPolicyLoss(ClientLoss, frozen=True):
    """PPO with relative bounds and later additions: a dual-clip bound, IcePop, and truncated importance sampling.

    `use_tis` multiplies the terms, and so the gradient, by clamp(old / rollout, tis_clip_low, tis_clip_high).
    """

    takes: ClassVar[tuple[str, ...]] = (ROLLOUT,)
    eps_clip: Share = 0.2
    eps_clip_high: NotNegative = 0.2
    eps_clip_c: OverOne | None = None
    icepop_beta: OverOne | None = None
    use_tis: Switch = 0.0
    tis_clip_low: NotNegative = 0.1
    tis_clip_high: NotNegative = 2.0
    compute_kl_stats: Switch = 0.0

    def check(self) -> str:
        return "tis_clip_low is above tis_clip_high" if self.tis_clip_low > self.tis_clip_high else ""

    def missing(self, given: Mapping[str, object]) -> str:
        return super().missing(given) or (ROLLOUT if self.use_tis and ROLLOUT not in given else "")

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        advantages_N, ratio_N = tokens.inputs[ADVANTAGES], ratio_of(tokens)
        bounds = RatioBounds.around_one(self.eps_clip, self.eps_clip_high)
        terms_N = clipped_surrogate(ratio_N, advantages_N, bounds, self.eps_clip_c or 0.0)
        if self.icepop_beta is not None:
            terms_N = icepop(terms_N, ratio_N, self.icepop_beta)
        clipped_N = changed(terms_N, ratio_N, advantages_N)
        if self.use_tis:
            ratios_N = token_ratios(tokens.inputs[LOGPROBS], tokens.inputs[ROLLOUT])
            terms_N = truncated(ratios_N, self.tis_clip_low, self.tis_clip_high).importance_N * terms_N
        return TokenTerms(terms_N, ratio_N, clipped_N)


KL_TYPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3_of_differences}


class DrGrpoLoss(ClientLoss, frozen=True):
    """PPO with relative bounds on the token's or the sequence's ratio, plus beta times a KL to a reference.

    Like Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), this does not divide by a length: the terms are summed.
    """

    takes: ClassVar[tuple[str, ...]] = (REFERENCE,)
    clip_low: Share = 0.2
    clip_high: NotNegative = 0.28
    beta: NotNegative = 0.1
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    ratio_type: Literal["token", "sequence"] = "token"

    def missing(self, given: Mapping[str, object]) -> str:
        return super().missing(given) or (REFERENCE if self.beta > 0.0 and REFERENCE not in given else "")

    def of(self, tokens: ScoredTokens) -> TokenTerms:
        given, ratio_N = tokens.inputs, ratio_of(tokens)
        if self.ratio_type == "sequence":
            ratio_N = sequence_ratio(
                tokens.logprobs_N, given[LOGPROBS], tokens.counted_N, tokens.sequences_N, tokens.sequences
            )
        found = clipped_terms(ratio_N, given[ADVANTAGES], RatioBounds.around_one(self.clip_low, self.clip_high))
        if self.beta == 0.0:
            return found
        kl_N = KL_TYPES[self.kl_type](tokens.logprobs_N, given[REFERENCE])
        return TokenTerms(found.terms_N + self.beta * kl_N, ratio_N, found.clipped_N)


CLIENT_LOSSES: dict[str, type[ClientLoss]] = {
    "cross_entropy": CrossEntropyLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "ppo": PpoLoss,
    "cispo": CispoLoss,
    "dro": DroLoss,
    "gspo": GspoLoss,
    "policy_loss": ClippedPolicyLoss,
    "drgrpo": DrGrpoLoss,
    "per_token_ce": PerTokenLoss,
}


def ratio_of(tokens: ScoredTokens) -> Tensor:
    """Return r = exp(lp - q) of each target [N]."""
    return token_ratio(tokens.logprobs_N, tokens.inputs[LOGPROBS])


def read_loss(spec: LossSpec) -> ClientLoss:
    """Return the loss that `spec` names, with its parameters. Raises `Refused` if the name or a parameter is wrong."""
    kind = CLIENT_LOSSES.get(spec.name)
    if kind is None:
        raise Refused(
            Code.UNSUPPORTED, f"there is no loss {spec.name[:64]!r}: the losses are {', '.join(sorted(CLIENT_LOSSES))}"
        )
    known = kind.__struct_fields__
    if unknown := sorted(spec.config.keys() - set(known)):
        listed = f"its parameters are {', '.join(known)}" if known else "it has none"
        raise Refused(Code.UNKNOWN_FIELD, f"the loss {spec.name} has no parameter {unknown[0][:64]!r}: {listed}")
    try:
        loss = msgspec.convert(spec.config, kind)
    except msgspec.ValidationError as error:
        raise Refused(Code.BAD_CONFIG, f"a parameter of the loss {spec.name} is wrong or missing: {error}") from error
    if why := loss.check():
        raise Refused(Code.BAD_CONFIG, f"the parameters of the loss {spec.name} contradict each other: {why}")
    return loss


def term_metrics(found: TokenTerms, tokens: ScoredTokens) -> dict[str, float]:
    """Return metrics over the targets that count. A name `name:reduction` says how the values from micro-batches are
    combined."""
    counted_N = tokens.counted_N > 0.0
    if found.ratio_N is None or not bool(counted_N.any()):
        return {}
    with torch.no_grad():
        now_N, sent_N = tokens.logprobs_N.detach()[counted_N], tokens.inputs[LOGPROBS][counted_N]
        ratio_N = found.ratio_N.detach()[counted_N]
        metrics = {
            "ratio:min": float(ratio_N.min()),
            "ratio:max": float(ratio_N.max()),
            "kl_sampled_k3:sum": float(kl_k3(sent_N, now_N).sum()),  # sampled with the logprobs that the client sent
            "entropy_sampled:sum": float(-sent_N.sum()),
        }
        if found.clipped_N is not None:
            metrics["clipped:sum"] = float(found.clipped_N[counted_N].sum())
    return metrics
