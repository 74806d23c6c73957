"""Steps of an ordinary run, as figures: a batch of 16 groups of 8, half of them right, and a little noise."""

from typing import Any

from bombus.replay.diagnosis.answers import AnswerFigures
from bombus.replay.diagnosis.statistics import Moments, Spread
from bombus.replay.diagnosis.steps import StepFigures

WAVE = (0.0, 0.6, -0.3, 1.0, -0.8, 0.4, -1.0, 0.2)  # noise that is the same in each test
FAULTY = 5  # the steps at the end that differ
STEPS = 25


def spread(mean: float, deviation: float = 0.5, count: int = 128) -> Spread:
    return Spread(mean * count, count, (mean * mean + deviation * deviation) * count)


def correlated(correlation: float, degrees: int = 112) -> Moments:
    return Moments(degrees, 1.0, correlation, 1.0)


def row(step: int, **changes: Any) -> StepFigures:
    """Return a step. `changes` are fields, or metrics of the trainer."""
    noise = WAVE[step % len(WAVE)]
    trainer = {
        "entropy": 0.5 * (1 + 0.04 * noise), "grad_norm": 0.4 * (1 + 0.2 * noise), "clip_fraction": 0.002,
        "kl_reference": 0.01, "kl_sampler": 0.001, "staleness_mean": 0.0, "importance_capped": 0.0, "lr": 1e-6,
        "episodes": 128.0, "episodes_cut": 3.0, "updates_left_out": 0.0,
    }  # fmt: skip
    figures: dict[str, Any] = {
        "rewards": spread(0.5 + 0.02 * noise), "lowest": 0.0, "highest": 1.0, "groups": 16,
        "silent": spread(0.5, count=4), "tokens": spread(400 + 10 * noise, 100), "ended": 128,
        "successes": spread(0.5 + 0.02 * noise), "lengths": correlated(0.1), "verdicts": correlated(0.9),
        "clients": {"a": spread(0.5, 0.3, 8), "b": spread(0.5, 0.3, 8)}, "data_sets": {"": spread(0.5, 0.3, 16)},
        "metrics": {
            "reward/answer": spread(0.5 + 0.02 * noise), "reward/form": spread(0.7 + 0.02 * noise),
            "tool_calls": spread(6.0), "tool_failures": spread(0.5 + 0.05 * noise),
        },
        "median_s": 30.0, "slowest_s": 90.0, "collecting_s": 100.0 + 5 * noise, "training_s": 60.0,
        "answers": AnswerFigures(rewards=[0.0, 1.0] * 16, tasks=4, duplicates=[0.0, 0.0], constant=1, best=12),
    }  # fmt: skip
    metrics = {name: changes.pop(name) for name in list(changes) if name not in figures and name not in OTHERS}
    return StepFigures(step=step, seq=10 * step, trainer=trainer | metrics, **(figures | changes))


OTHERS = {
    "groups_of_one", "repeated", "failed", "truncated", "aborted", "stale", "unusable", "evaluated", "evaluated_known",
    "played",
}  # fmt: skip


def run_of(fault: dict[str, Any], before: dict[str, Any] | None = None) -> list[StepFigures]:
    """Return a run in which the newest steps, and if given those before, differ from ordinary ones."""
    start = STEPS - FAULTY
    return [row(step, **(fault if step > start else before or {})) for step in range(1, STEPS + 1)]
