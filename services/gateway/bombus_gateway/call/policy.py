"""Determines whether a client's sampling parameters are obeyed, overridden by the job's values, or refused. Pure.

In training episodes, tokens must be drawn from the policy being trained, so parameters that bias the draw are obeyed
only if the job allows it (`rollout.sampling`). In evaluation episodes, all parameters are obeyed.
"""

import re
from hashlib import blake2b
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from bombus.config.job import RolloutConfig
from bombus.errors import Code
from bombus.hive.events import EpisodeType
from bombus.hive.records import TEMPERATURE_MIN
from bombus_gateway import limits
from bombus_gateway.call.request import CompletionRequest, InvalidField, RequestedSampling

_NEUTRAL = RequestedSampling()
_BIASING = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
_biases_of = attrgetter(*_BIASING)
_NO_BIASES = _biases_of(_NEUTRAL)
_GREEDY_OR_MORE = "temperature is {}: use 0 for the most likely token, or at least {}."
_BIASED = (
    "{} is refused in a training episode: tokens would not be drawn from the policy that is trained, which biases the "
    "gradient. Leave it out, claim an eval episode, or set rollout.sampling in the job, to `override` for the job's "
    "own value or to `obey`."
)
_UNSUPPORTED = (
    "{} is not supported here: {}. Leave it out, or set rollout.unsupported to `relax` in the job, so that it is left "
    "out for you."
)
_NOT_SEEN = (
    "{} is refused in a training episode: {}, and the model would be trained on a conversation without it. Send it as "
    "text, claim an eval episode, or set rollout.unsupported to `relax` in the job, so that it is left out."
)
_FREE_IN_TRAINING = (
    "in a training episode tokens are drawn only from the policy; with rollout.sampling: obey, such constraints are "
    "enforced where the engine supports them, and the answers are not trained on"
)
_NO_ENGINE = (
    "no replica of this engine supports structured output, as vLLM replicas do; ask for the format in the prompt"
)


class SamplingDecision(NamedTuple):
    """The sampling parameters that apply, and the names of those that the client requested but does not get."""

    sampling: RequestedSampling
    overridden: tuple[str, ...] = ()


def decide(request: CompletionRequest, rollout: RolloutConfig, type: EpisodeType, episode: str) -> SamplingDecision:
    """Return the sampling parameters that apply to a request. Raises `InvalidField` for any parameter that the job
    refuses."""
    relaxed = _relaxed(request, rollout, type)
    sampling = request.sampling
    if type != EpisodeType.TRAIN:
        _check_temperature(sampling.temperature)
        return SamplingDecision(sampling, relaxed)
    biasing = () if rollout.sampling == "obey" else _biasing(sampling, rollout.temperature)
    if biasing and (rollout.sampling == "refuse" or rollout.temperature == 0):
        raise InvalidField(Code.UNSUPPORTED, biasing[0], _BIASED.format(biasing[0]))
    kept = (
        msgspec.structs.replace(sampling, **{name: getattr(_NEUTRAL, name) for name in biasing})
        if biasing
        else sampling
    )
    _check_temperature(kept.temperature)
    if kept.seed is None:
        return SamplingDecision(kept, (*relaxed, *biasing))
    # With the same random numbers, all answers of a group would be equal and there would be nothing to compare.
    mixed = msgspec.structs.replace(kept, seed=seed_of_episode(kept.seed, episode))
    return SamplingDecision(mixed, (*relaxed, *biasing, "seed"))


def why_unconstrained(rollout: RolloutConfig, type: EpisodeType, can_constrain: bool) -> str:
    """Return, as a clause, why the engine does not enforce a client's demands on an answer, or "" if it does.

    Like a biasing parameter, a constraint keeps tokens from being drawn from the policy's own distribution.
    """
    if type == EpisodeType.TRAIN and rollout.sampling != "obey":
        return _FREE_IN_TRAINING
    return "" if can_constrain else _NO_ENGINE


def seed_of_episode(seed: int, episode: str) -> int:
    """Return a 48-bit seed, derived from the given seed and the episode."""
    return int.from_bytes(blake2b(f"{seed}/{episode}".encode(), digest_size=6).digest())


def _relaxed(request: CompletionRequest, rollout: RolloutConfig, type: EpisodeType) -> tuple[str, ...]:
    """Return the names of a request's unsupported parts that are ignored, in characters that are safe in a header.

    Parts of the conversation come first. Raises `InvalidField` if the job refuses any of the unsupported parts.
    """
    if not request.unsupported:
        return ()
    found = sorted(request.unsupported, key=lambda each: not each.is_content)
    trains = type == EpisodeType.TRAIN and rollout.unsupported == "relax_parameters"
    if found and (rollout.unsupported == "refuse" or (trains and found[0].is_content)):
        field, why, is_content = found[0]
        sentence = _NOT_SEEN if trains and is_content else _UNSUPPORTED
        raise InvalidField(Code.UNSUPPORTED, field, sentence.format(field, why))
    first = islice(dict.fromkeys(each.field for each in found), limits.OVERRIDDEN)
    names = (re.sub(r"[^!-~]", "?", name[: limits.NAME_CHARACTERS]) for name in first)
    return tuple(dict.fromkeys(names))


def _biasing(sampling: RequestedSampling, job_temperature: float) -> tuple[str, ...]:
    """Return the names of the parameters that would draw tokens from a distribution other than the policy's.

    A temperature does not count, since logprobs are computed at that temperature, unless it is too small for them to
    be.
    """
    temperature = job_temperature if sampling.temperature is None else sampling.temperature
    if _biases_of(sampling) == _NO_BIASES:
        return ("temperature",) if temperature < TEMPERATURE_MIN else ()
    named = [name for name in _BIASING if getattr(sampling, name) != getattr(_NEUTRAL, name)]
    return tuple(["temperature", *named] if temperature < TEMPERATURE_MIN else named)


def _check_temperature(temperature: float | None) -> None:
    if temperature is not None and 0 < temperature < TEMPERATURE_MIN:
        why = _GREEDY_OR_MORE.format(temperature, TEMPERATURE_MIN)
        raise InvalidField(Code.MALFORMED, "temperature", why)
