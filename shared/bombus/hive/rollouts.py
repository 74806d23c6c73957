"""Sums over the training episodes that ended while the batch for one step was collected."""

import msgspec

from bombus.hive.events import Outcome

METRICS_MAX = 64  # number of names; further metrics that episodes report are not summed
STEPS_KEPT = 16
SILENT = "groups_without_signal"  # a metric that the trainer reports for a step


class MetricSum(msgspec.Struct, array_like=True):
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


class RolloutFigures(msgspec.Struct):
    """Sums of the figures that episodes report until a batch is sealed. `step` is the step of that batch, or 0 if the
    batch has not been sealed yet."""

    step: int = 0
    rewards: MetricSum = msgspec.field(default_factory=MetricSum)
    successes: MetricSum = msgspec.field(default_factory=MetricSum)  # over the episodes that report `is_success`
    completion_tokens: MetricSum = msgspec.field(default_factory=MetricSum)
    metrics: dict[str, MetricSum] = {}

    def add(self, outcome: Outcome) -> None:
        self.rewards.add(outcome.reward)
        self.completion_tokens.add(outcome.completion_tokens)
        if outcome.is_success is not None:
            self.successes.add(outcome.is_success)
        for name, value in outcome.log_metrics.items():
            if name in self.metrics or len(self.metrics) < METRICS_MAX:
                self.metrics.setdefault(name, MetricSum()).add(value)


def silent_after(before: int, groups: int, metrics: dict[str, float]) -> int:
    """Return how many steps in a row had no group with a signal. `before` is that number before the newest step, which
    had this many `groups` and these `metrics`."""
    return before + 1 if 0 < groups <= metrics.get(SILENT, 0.0) else 0
