"""A version's canary: fixed sequences whose logprobs the trainer puts on the log, and the comparison with a replica's.

See docs/weights.md. Pure, and without torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from bombus.errors import EngineFault
from bombus.hive.events import Canary, CanaryCheck

SEQUENCES, TOKENS = 4, 16
SCORED = TOKENS - 1  # the first token of a sequence has no logprob
# Rounding may route a token to another expert of nearly the same weight, which changes only the sequence that contains
# the token. Wrong weights affect all sequences.
AGREEING_MIN = 3
STEP_SHARE = 0.5  # from this share on, the change since the previous version counts as missing or applied twice
STEP_SIZE = 8.0  # how many times larger than rounding a sequence's change must be for STEP_SHARE to apply


def canary_sequences(vocabulary: int) -> list[list[int]]:
    """Return the fixed sequences of token ids of a model with this vocabulary."""
    state, ids = 1, []
    for _ in range(SEQUENCES * TOKENS):
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64  # Knuth's MMIX generator
        ids.append((state >> 33) % vocabulary)
    return [ids[start : start + TOKENS] for start in range(0, len(ids), TOKENS)]


class CanaryFailed(EngineFault):
    """Raised if a replica's results for the version that it has loaded differ from the trainer's."""


@dataclass(frozen=True)
class Expected:
    """The canary that a replica must reproduce with a version. `before` is the previous version's canary, or None if
    that is unknown."""

    version: int
    canary: Canary
    before: Canary | None = None


@dataclass(frozen=True)
class Numerics:
    """The differences, in nats, that can be explained by a way of computing: the largest in a sequence, and the root
    mean square.

    Both grow with the effect of the version's adapter: `limit_share` and `rms_share` say by what fraction of that
    effect.
    """

    way: str
    limit: float
    rms: float
    limit_share: float = 0.0
    rms_share: float = 0.0

    def with_adapter_rounded(self) -> "Numerics":
        """Return the numerics of the same way of computing if the adapter's factors are rounded to half precision."""
        return Numerics(f"{self.way}, adapter rounded", self.limit, self.rms, 0.1, 0.01)


# These limits exceed the measured differences in docs/weights.md.
IN_FLOAT64 = Numerics("in float64", 1e-4, 1.5e-5)
CONSTANTS_ROUNDED = Numerics("in float64, constants in half precision", 3e-3, 5e-4)  # such as Gemma's scale
SERVED = {
    "float32": Numerics("as served in float32", 1e-3, 1e-4),
    "bfloat16": Numerics("as served in bfloat16", 3.0, 0.15),
    "float16": Numerics("as served in float16", 0.5, 0.03),
}
# A server elsewhere does not report its precision, and most of an adapter that is merged in half precision is rounded
# away.
ELSEWHERE = Numerics("as served elsewhere", 4.0, 0.5, 5.0, 1.0)


def compare(expected: Expected, found: Sequence[float], numerics: Numerics, bits: str = "") -> CanaryCheck | None:
    """Return how far a replica's logprobs `found` are from the trainer's, or None if they cannot be compared.

    `bits` is the sum of the bits of the replica's weights, or "" if the replica does not hold the weights as published.
    Raises `CanaryFailed` if the logprobs or the bits show that the weights are not the trainer's.
    """
    canary = expected.canary
    if len(canary.logprobs) != len(found) or len(found) != SEQUENCES * SCORED:
        return None
    if not all(map(isfinite, found)):
        raise CanaryFailed(f"version {expected.version} gives it logprobs of the canary that are not finite numbers")
    limit = numerics.limit + numerics.limit_share * canary.effect
    apart = sorted(
        max(abs(one - other) for one, other in zip(ours, theirs))
        for ours, theirs in zip(_lines(canary.logprobs), _lines(found))
    )
    check = CanaryCheck(difference=apart[SEQUENCES - AGREEING_MIN], limit=limit, way=numerics.way)
    if bits and canary.bits and bits != canary.bits:
        raise CanaryFailed(
            f"the bits of the weights that it holds of version {expected.version} sum up to {bits}, but the trainer's "
            f"to {canary.bits}: {_figures(canary, found, check)}"
        )
    if not check.difference <= limit:
        raise CanaryFailed(
            f"its weights are not those of version {expected.version} at the trainer: {_figures(canary, found, check)}"
        )
    if what := _step_fault(expected, found, numerics.rms + numerics.rms_share * canary.effect):
        raise CanaryFailed(f"at version {expected.version} it computes as if {what}: {_figures(canary, found, check)}")
    return check


def _lines(logprobs: Sequence[float]) -> Iterator[Sequence[float]]:
    for start in range(0, len(logprobs), SCORED):
        yield logprobs[start : start + SCORED]


def _figures(canary: Canary, found: Sequence[float], check: CanaryCheck) -> str:
    """Return both logprobs of the token for which they differ most."""
    apart = [abs(one - other) for one, other in zip(canary.logprobs, found)]
    worst = max(range(len(apart)), key=apart.__getitem__)
    sequence, token = worst // SCORED + 1, worst % SCORED + 2
    return (
        f"the logprob of token {token} in sequence {sequence} of the canary is {found[worst]:.8g} here and "
        f"{canary.logprobs[worst]:.8g} at the trainer ({apart[worst]:.2g} apart; rounding explains {check.limit:.2g} "
        f"{check.way})"
    )


def _step_fault(expected: Expected, found: Sequence[float], rms: float) -> str:
    """Return what is wrong with the change since the previous version, or "" if nothing is wrong or rounding would hide
    the fault.

    The difference from the trainer is projected onto that change, which averages out the rounding.
    """
    if expected.before is None or len(expected.before.logprobs) != len(found):
        return ""
    slopes = []
    for now, old, here in zip(*map(_lines, (expected.canary.logprobs, expected.before.logprobs, found))):
        change = [one - other for one, other in zip(now, old)]
        square = sum(each * each for each in change)
        if sqrt(square) >= STEP_SIZE * rms:
            slopes.append(sum(each * (ours - theirs) for each, ours, theirs in zip(change, here, now)) / square)
    if sum(slope <= -STEP_SHARE for slope in slopes) >= AGREEING_MIN:
        return f"the change since the version before were missing ({sorted(slopes)[1]:+.2f} of it)"
    if sum(slope >= STEP_SHARE for slope in slopes) >= AGREEING_MIN:
        return f"the change since the version before were made more than once ({sorted(slopes)[-2]:+.2f} of it)"
    return ""
