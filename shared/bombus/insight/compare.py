"""Two runs side by side: what differs in their jobs, and by how much their figures differ, with confidence intervals.

Pure. An interval covers the chance with which tasks enter a batch and answers are sampled. It does not cover what
another seed would change: for that, compare several runs of each.
"""

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any

import msgspec

from bombus.config.job import RunConfig
from bombus.insight.metrics import step_metrics
from bombus.replay.diagnosis.statistics import Spread, noise, total
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

NORMAL_95 = 1.96
WINDOW = 10  # the newest steps that both runs have


class FigureDifference(msgspec.Struct, frozen=True):
    """How much larger a figure is in the second run, as a mean over steps `first` to `last`. `low` and `high` bound the
    95 % confidence interval. They are None for a figure whose noise is not known."""

    name: str
    first: int
    last: int
    means: tuple[float, float]
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float:
        return self.means[1] - self.means[0]

    @property
    def is_certain(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def job_differences(jobs: Sequence[RunConfig]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all jobs, such as `trainer.lr`, each with its value in each job."""
    flat = [job.settings() for job in jobs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = {name: [_text(each.get(name)) for each in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def figure_differences(
    before: RunSeries, after: RunSeries, window: int = WINDOW, until: float = inf
) -> list[FigureDifference]:
    """Return the differences over the newest `window` steps that both runs have completed by event `until` of the log,
    or none without such steps.

    The noise of a reward comes from the groups of its batches; other figures are one number for each step, and their
    noise is taken from their changes between consecutive steps, since a trend is not noise.
    """
    rows = [{row.step: row for row in series.steps if row.done_seq <= until} for series in (before, after)]
    steps = sorted(rows[0].keys() & rows[1].keys())[-window:]
    if not steps:
        return []
    chosen = [[of[step] for step in steps] for of in rows]
    figures = [[step_metrics(row) for row in of] for of in chosen]
    names = [name for name in figures[0][0] if all(name in each for of in figures for each in of)]
    return [_difference(name, steps, chosen, [[each[name] for each in of] for of in figures]) for name in names]


def _difference(
    name: str, steps: Sequence[int], rows: Sequence[Sequence[StepFigures]], values: Sequence[Sequence[float]]
) -> FigureDifference:
    means = (sum(values[0]) / len(steps), sum(values[1]) / len(steps))
    if name == "reward/mean":
        groups = [total([each for row in of for each in row.data_sets.values()], Spread) for of in rows]
        variances = [each.variance / (each.count - 1) for each in groups if each.count > 1]
    else:
        variances = [noise(of) ** 2 / len(of) for of in values if len(of) > 2]
    if len(variances) < 2:
        return FigureDifference(name, steps[0], steps[-1], means)
    margin = NORMAL_95 * sqrt(sum(variances))
    difference = means[1] - means[0]
    return FigureDifference(name, steps[0], steps[-1], means, difference - margin, difference + margin)
