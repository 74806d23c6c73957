"""What becomes of sampled tokens. Pure."""

from enum import StrEnum

import msgspec


class Fate(StrEnum):
    """The fate of a sampled token. In a batch, tokens that a rule masks do not contribute to the loss."""

    TRAINED = "trained"
    EVALUATION = "evaluation"
    OPEN = "open"  # its episode, or the step of its batch, has not ended yet
    QUEUED = "queued"  # in the pool, or in a rollout group that waits for a batch
    TAKEN = "taken"  # taken by a training client, which trains on it with operations

    MASKED_AUXILIARY = "masked: auxiliary call"
    MASKED_GREEDY = "masked: sampled at temperature 0"
    MASKED_CONSTRAINED = "masked: held to a form"
    MASKED_FIRST = "masked: first token without a prompt"
    MASKED_OVERLONG = "masked: overlong episode"
    MASKED_NO_SIGNAL = "masked: group without signal"
    MASKED_OFF_POLICY = "masked: off-policy"  # masked by the correction or OPSM, in every update

    DROPPED_CUT_OFF = "dropped: call cut off"
    DROPPED_LATE = "dropped: call after its episode"
    DROPPED_UNREADABLE = "dropped: calls unreadable"
    DROPPED_NOT_FINITE = "dropped: advantages not finite"
    DROPPED_UPDATE = "dropped: update not finite"
    DROPPED_STALE = "dropped: stale"
    DROPPED_RUN_OVER = "dropped: run over"

    @property
    def is_masked(self) -> bool:
        return self.startswith("masked")


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fates of the sampled tokens in a step's batch.

    `episodes` says, for each episode, how many of its tokens had each of the `fates`. `weights` gives, for each
    episode, the loss weight that each of its trained tokens had in the step's first epoch. `left_out` says why an
    episode was left out as a whole. `data` is the digest of what was trained on: tokens, masks, the sampler's logprobs,
    advantages and weights.
    """

    fates: tuple[Fate, ...] = ()
    episodes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, float] = {}
    left_out: dict[str, Fate] = {}
    data: bytes = b""
