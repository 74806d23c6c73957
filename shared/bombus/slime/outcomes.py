"""Turns the samples of an attempt into the outcome of its episode, with a reward for each call if they differ."""

import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.hive.episodes import reward_number
from bombus.hive.failures import FailureKind
from bombus.sdk.types import WorkflowOutput
from bombus.slime.relay import SampledCall

STATUSES = ("pending", "completed", "truncated", "aborted", "failed")


def output_of(samples: Sequence[Any], calls: Sequence[SampledCall], args: Namespace) -> WorkflowOutput:
    """Return the outcome of an episode. Raises `ValueError` for rewards that no episode can have.

    If a hook made several samples with different rewards from one attempt, each call gets the reward of the sample
    whose tokens begin with the call's tokens. If several calls are equal, and equally many samples match them, the
    calls get those samples' rewards in order. Any other call that matches several samples, or has several answers, gets
    the mean of their rewards.
    """
    rewards = [reward_of(sample, args) for sample in samples]
    elsewhere = sum(all(not _has(sample, call) for sample in samples) for call in calls)
    masked = sum(_is_masked(sample, call) for call in calls for sample in samples if _has(sample, call))
    is_truncated = any(_status(sample) == "truncated" for sample in samples)
    return WorkflowOutput(
        reward=rewards[0] if len(set(rewards)) == 1 else _by_call(samples, rewards, calls),
        metadata={"slime_status": [_status(sample) for sample in samples]},
        log_metrics={
            "response_length": float(sum(sample.response_length for sample in samples)),
            "truncated": float(is_truncated),
            "calls_not_in_samples": float(elsewhere),
            "sampled_tokens_masked": float(masked),
        },
        failure=FailureKind.TOKENS if is_truncated else None,
    )


def reward_of(sample: Any, args: Namespace) -> float:
    """Return the reward of a sample. Raises `ValueError` if it is not a finite number."""
    value = sample.get_reward_value(args)
    try:
        number = reward_number(value)
    except ValueError as error:
        hint = "; choose one of several with --reward-key NAME" if isinstance(value, Mapping) else ""
        raise ValueError(f"the reward of a sample cannot be used: {error}{hint}") from error
    if not math.isfinite(number):
        raise ValueError(f"the reward of a sample is {number}, not a finite number")
    return number


def is_aborted(sample: Any) -> bool:
    """Return whether a hook aborted a sample. The sample may belong to slime's own class, which has the same status
    values as ours."""
    return _status(sample) == "aborted"


def _status(sample: Any) -> str:
    """Return the name of a status, which a hook may also give as a string. Raises `ValueError` if it is unknown."""
    status = str(getattr(sample.status, "value", sample.status))
    if status not in STATUSES:
        raise ValueError(f"the status of a sample is {status!r}, which is not one of {', '.join(STATUSES)}")
    return status


def _by_call(samples: Sequence[Any], rewards: Sequence[float], calls: Sequence[SampledCall]) -> dict[str, float]:
    equal: dict[tuple[int, ...], list[SampledCall]] = defaultdict(list)
    for call in calls:
        equal[(len(call.prompt), *call.prompt, *call.sampled)].append(call)
    found: dict[str, list[float]] = defaultdict(list)  # call id -> rewards of the call's answers
    for same in equal.values():
        fitting = [reward for sample, reward in zip(samples, rewards, strict=True) if _has(sample, same[0])]
        if not fitting:
            raise ValueError(
                "a call is in none of the samples, but their rewards differ: give each sample the tokens of its own "
                "calls, or all samples of an attempt the same reward"
            )
        if len(fitting) != len(same):
            fitting = [math.fsum(fitting) / len(fitting)] * len(same)
        for call, reward in zip(same, fitting, strict=True):
            found[call.id].append(reward)
    return {call: math.fsum(given) / len(given) for call, given in found.items()}


def _has(sample: Any, call: SampledCall) -> bool:
    tokens = call.prompt + call.sampled
    return list(sample.tokens[: len(tokens)]) == tokens


def _is_masked(sample: Any, call: SampledCall) -> int:
    """Return how many of a call's sampled tokens a sample masks. These tokens are trained on anyway, because episodes
    have no masks."""
    if sample.loss_mask is None:
        return 0
    start = len(call.prompt) - (len(sample.tokens) - sample.response_length)
    return sum(not kept for kept in sample.loss_mask[max(start, 0) : max(start + len(call.sampled), 0)])
