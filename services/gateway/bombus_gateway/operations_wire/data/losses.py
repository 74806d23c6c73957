"""The losses that clients may name, and their settings."""

import math
from collections.abc import Mapping

from bombus.errors import Code, Refused
from bombus.operations import LossSpec
from bombus_gateway import limits

# Maps the clients' names for losses to our own.
LOSSES = {
    "cross_entropy": "cross_entropy",
    "causallm_loss": "cross_entropy",
    "importance_sampling": "importance_sampling",
    "ppo": "ppo",
    "cispo": "cispo",
    "dro": "dro",
    "gspo": "gspo",
    "policy_loss": "policy_loss",
    "drgrpo": "drgrpo",
    "per_token_ce": "per_token_ce",
}
CROSS_ENTROPIES = ("cross_entropy", "per_token_ce")
_REFUSED = {
    "custom": "custom losses do not run on the server; pass your function to forward_backward_custom",
    "stable_reinforce": "it needs data about each sample that is not recorded here; try importance_sampling or ppo",
    "opd_loss": "this server has no teacher model; cross_entropy takes the teacher's tokens and weights as [N, K]",
}


def loss_spec(name: str, settings: Mapping[str, float | str]) -> LossSpec:
    """Return the loss that a client names. Raises `Refused` if there is no such loss, or if its settings are wrong."""
    if name in _REFUSED:
        raise Refused(Code.UNSUPPORTED, f"The loss {name!r} is not offered: {_REFUSED[name]}.")
    if name not in LOSSES:
        raise Refused(Code.UNSUPPORTED, f"There is no loss {name!r}; use one of {', '.join(LOSSES)}.")
    if len(settings) > limits.LOSS_SETTINGS:
        raise Refused(Code.TOO_LARGE, f"A loss may have up to {limits.LOSS_SETTINGS} settings, not {len(settings)}.")
    for key, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(Code.MALFORMED, f"The setting {key!r} of the loss is {value}, which is not a finite number.")
        if max(len(key), len(value) if isinstance(value, str) else 0) > limits.LOSS_TEXT_CHARACTERS:
            why = f"Names and values of a loss's settings may have up to {limits.LOSS_TEXT_CHARACTERS} characters."
            raise Refused(Code.TOO_LARGE, why)
    return LossSpec(LOSSES[name], dict(settings))
