"""The names of the algorithms that a job may choose, and their names in other projects (docs/algorithms.md)."""

from enum import StrEnum
from typing import TypeVar, assert_never


class Estimator(StrEnum):
    """How advantages are estimated."""

    GRPO = "grpo"
    RLOO = "rloo"
    OPO = "opo"
    DR_GRPO = "dr_grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"

    @property
    def over_batch(self) -> bool:
        """Whether advantages are normalized over all tokens of a batch, so that a single group is not enough."""
        match self:
            case Estimator.REINFORCE_PLUS_PLUS | Estimator.REINFORCE_PLUS_PLUS_BASELINE:
                return True
            case Estimator.GRPO | Estimator.RLOO | Estimator.OPO | Estimator.DR_GRPO:
                return False
            case _:
                assert_never(self)


class Loss(StrEnum):
    CLIPPED = "clipped"
    GSPO = "gspo"
    CISPO = "cispo"
    IMPORTANCE_SAMPLING = "importance_sampling"

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped by default. docs/algorithms.md has the sources.

        Since a ratio is above 0, a distance of 1 below means that there is no lower bound.
        """
        match self:
            case Loss.CLIPPED | Loss.IMPORTANCE_SAMPLING:  # the latter is never clipped
                return 0.2, 0.2
            case Loss.GSPO:
                return 3e-4, 4e-4
            case Loss.CISPO:
                return 1.0, 3.0
            case _:
                assert_never(self)


class Aggregation(StrEnum):
    """How the terms of an update are reduced to a scalar."""

    EPISODE = "episode"
    TOKEN = "token"
    CONSTANT = "constant"
    EPISODE_SUM = "episode_sum"
    TOKEN_SUM = "token_sum"


class KlEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"

    @property
    def importance_weighted(self) -> bool:
        """Whether tokens are weighted by current / old, so that the estimate is for the policy in training."""
        match self:
            case KlEstimator.K3_UNBIASED:
                return True
            case KlEstimator.K1 | KlEstimator.K2 | KlEstimator.K3:
                return False
            case _:
                assert_never(self)


class Correction(StrEnum):
    """How to correct for the difference between the sampler's logprobs and the trainer's."""

    NONE = "none"
    TOKEN_TIS = "token_tis"
    SEQUENCE_TIS = "sequence_tis"
    ICEPOP = "icepop"
    TOKEN_MASK = "token_mask"
    SEQUENCE_MASK = "sequence_mask"


class Overlong(StrEnum):
    """How to treat an episode with a call that was cut off at one of the job's limits."""

    KEEP = "keep"
    MASK = "mask"
    PENALTY = "penalty"


ALIASES: dict[type[StrEnum], dict[str, str]] = {
    Loss: {"vanilla": "clipped"},
    Aggregation: {
        "token_mean": "token",
        "seq_mean_token_mean": "episode",
        "seq_mean_token_sum_norm": "constant",
        "seq_mean_token_sum": "episode_sum",
    },
    KlEstimator: {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3+": "k3_unbiased", "low_var_kl+": "k3_unbiased"},
}
CRITIC_ESTIMATORS = ("gae", "ppo")  # verl's and slime's names

Algorithm = TypeVar("Algorithm", bound=StrEnum)


def named(kind: type[Algorithm], text: str) -> Algorithm | None:
    """Return the algorithm that `text` names, by our name or an alias, or None if there is none.

    Variants in spelling such as `dr-grpo` and `reinforce++` are accepted.
    """
    plain = text.lower().replace("-", "_").replace("++", "_plus_plus")
    plain = ALIASES.get(kind, {}).get(plain, plain)
    return next((name for name in kind if name == plain), None)
