"""Ten thresholds on the figures of single steps, for comparison.

Eight are the red flags that miles lists for its metrics (docs/user-guide/monitoring.md in radixark/miles), and two the
bounds of its checks in CI (docs/developer/debug.md). Where a page has words and no number, such as "repeatedly" or
"too fast", the number here is ours.
"""

from collections.abc import Callable, Sequence

from bombus.replay.diagnosis.findings import FaultKind
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

Steps = Sequence[StepFigures]
IN_A_ROW = 5


def _series(steps: Steps, name: str) -> list[float]:
    return [row.trainer[name] for row in steps if name in row.trainer]


def _spike(values: list[float], times: float) -> bool:
    """Return whether the newest value is so many times the largest of those before."""
    return len(values) > IN_A_ROW and abs(values[-1]) > times * max(map(abs, values[:-1]))


def loss_spikes(steps: Steps, run: RunSeries) -> bool:
    return _spike(_series(steps, "loss"), 3.0)


def reward_is_one_value(steps: Steps, run: RunSeries) -> bool:
    return len(steps) >= IN_A_ROW and all(row.rewards.variance < 0.05**2 for row in steps[-IN_A_ROW:])


def kl_jumps(steps: Steps, run: RunSeries) -> bool:
    return _spike(_series(steps, "kl_reference"), 2.0)


def logprobs_drift_apart(steps: Steps, run: RunSeries) -> bool:
    newest = _series(steps, "kl_sampler_abs")[-IN_A_ROW:]
    return len(newest) == IN_A_ROW and newest == sorted(newest) and newest[-1] > 2 * newest[0]


def entropy_near_zero(steps: Steps, run: RunSeries) -> bool:
    return any(value < 0.05 for value in _series(steps, "entropy")[-1:])


def gradient_at_its_bound(steps: Steps, run: RunSeries) -> bool:
    newest = _series(steps, "grad_norm")[-IN_A_ROW:]
    return len(newest) == IN_A_ROW and min(newest) >= run.job.trainer.grad_clip


def one_side_is_slower(steps: Steps, run: RunSeries) -> bool:
    row = steps[-1]
    return max(row.collecting_s, row.training_s) > 5 * max(1e-9, min(row.collecting_s, row.training_s))


def half_is_clipped(steps: Steps, run: RunSeries) -> bool:
    return any(value > 0.5 for value in _series(steps, "clip_fraction")[-1:])


def logprobs_differ(steps: Steps, run: RunSeries) -> bool:
    return any(value > 0.03 for value in _series(steps, "kl_sampler_abs")[-1:])


def kl_above_one(steps: Steps, run: RunSeries) -> bool:
    return any(value > 1.0 for value in _series(steps, "kl_reference")[-1:])


# Each with the kinds of fault that it stands for.
THRESHOLDS: dict[Callable[[Steps, RunSeries], bool], set[FaultKind]] = {
    loss_spikes: {FaultKind.LR_TOO_HIGH, FaultKind.NOT_FINITE, FaultKind.REWARD_OUT_OF_RANGE},
    reward_is_one_value: {FaultKind.TOO_HARD, FaultKind.TOO_EASY, FaultKind.REWARD_JUMPS},
    kl_jumps: {FaultKind.KL_RUNAWAY},
    logprobs_drift_apart: {FaultKind.SAMPLER_MISMATCH, FaultKind.STALE},
    entropy_near_zero: {FaultKind.ENTROPY_COLLAPSE, FaultKind.DUPLICATE_ANSWERS, FaultKind.CONSTANT_ANSWER},
    gradient_at_its_bound: {FaultKind.GRADIENT_CLIPPED, FaultKind.LR_TOO_HIGH, FaultKind.REWARD_OUT_OF_RANGE},
    one_side_is_slower: {FaultKind.TRAINER_WAITS, FaultKind.SAMPLER_WAITS, FaultKind.STRAGGLERS},
    half_is_clipped: {FaultKind.LR_TOO_HIGH},
    logprobs_differ: {FaultKind.SAMPLER_MISMATCH, FaultKind.STALE},
    kl_above_one: {FaultKind.KL_RUNAWAY},
}


def alarms(run: RunSeries) -> dict[FaultKind, int]:
    """Return the first step at which a threshold stands for each kind."""
    found: dict[FaultKind, int] = {}
    for end in range(1, len(run.steps) + 1):
        for threshold, kinds in THRESHOLDS.items():
            if not kinds <= found.keys() and threshold(run.steps[:end], run):
                for kind in kinds:
                    found.setdefault(kind, run.steps[end - 1].step)
    return found
