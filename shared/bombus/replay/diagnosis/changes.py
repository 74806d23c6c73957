"""Faults that show as a change of one figure between the newest steps and those before them."""

import msgspec

from bombus.replay.diagnosis.findings import FaultKind, RunFinding, Seen, Value, tokens_of, trainer_metric
from bombus.replay.diagnosis.statistics import CERTAIN, change, median, ratio, surprise
from bombus.replay.diagnosis.steps import StepFigures

WORTH_S = 1.0  # shorter waits do not matter


class ChangeRule(msgspec.Struct, frozen=True):
    """Finds a figure that has grown to at least `times` its earlier value or, if `times` is below 1, has fallen to at
    most that.

    The figure's median must be at least `level`, and no step may be below half of `level`; if `level` is 0, the change
    must be significant given the figure's noise instead. With `is_bought`, a change is not a fault if the model has
    become better. With `may_drift`, a change is not a fault if it follows the figure's trend, unless the reward has
    stopped following its own trend.

    The texts can name `before` and `recent` (medians), `newest` (the step) and `job`.
    """

    kind: FaultKind
    of: Value
    times: float
    figure: str
    advice: str
    level: float = 0.0
    is_bought: bool = False
    may_drift: bool = False

    def __call__(self, seen: Seen) -> RunFinding | None:
        before, recent = seen.both(self.of)
        if not seen.comparable or not before or len(recent) < len(seen.recent):
            return None
        sign, grown = 1 if self.times > 1 else -1, ratio(before, recent)
        errors = (surprise if self.may_drift and not seen.stalls else change)(before, recent)
        moved = sign * grown >= sign * self.times and (self.level > 0 or sign * errors >= CERTAIN)
        if not moved or median(recent) < self.level or min(recent) < self.level / 2 or (self.is_bought and seen.better):
            return None
        limit = median(before) * (1 + self.times) / 2
        words = {"before": median(before), "recent": median(recent), "job": seen.job}
        figure, advice = (text.format(**words, newest=seen.recent[-1]) for text in (self.figure, self.advice))

        def shows(row: StepFigures) -> bool | None:
            value = self.of(row)
            return None if value is None else sign * value > sign * limit

        return seen.found(self.kind, figure, advice, shows)


def _times_longer(one_s: float, other_s: float) -> float:
    """Return how many times as long one side takes as the other, or 1 if both times are too short to matter."""
    return one_s / max(other_s, 1e-3) if max(one_s, other_s) >= WORTH_S else 1.0


def _straggling(row: StepFigures) -> float:
    """Return the ratio of the slowest episode's time to the median, or 1 if the batch does not wait for that
    episode."""
    return row.slowest_s / row.median_s if row.median_s > 0 and 2 * row.slowest_s > row.collecting_s else 1.0


_ENTROPY = "the entropy went from {before:.2g} to {recent:.2g}, and the model did not improve"
_LENGTH = "answers went from {before:.0f} to {recent:.0f} tokens, and the model did not improve"
_TIMES = "a batch is collected in {newest.collecting_s:.1f} s and trained in {newest.training_s:.1f} s: the "
# If one side takes ten times as long as the other, the faster side's machine is idle for 90 % of the time. A job may be
# lopsided from its start, but then its owner knows.
RULES = (
    ChangeRule(FaultKind.ENTROPY_COLLAPSE, trainer_metric("entropy"), 0.35, _ENTROPY,
        "set trainer.clip_high to 0.28, or trainer.entropy_coef to 0.001; keep the temperature at 1",
        is_bought=True, may_drift=True),
    ChangeRule(FaultKind.ENTROPY_RISES, trainer_metric("entropy"), 1.5, _ENTROPY,
        "set trainer.entropy_coef (now {job.trainer.entropy_coef:g}) to 0, or trainer.lr (now {job.trainer.lr:.2g}) to "
        "a third, and read an episode: the policy is drifting towards noise", is_bought=True),
    # At this KL per token, the policy has left the reference behind; healthy runs stay below it for hundreds of steps.
    ChangeRule(FaultKind.KL_RUNAWAY, trainer_metric("kl_reference"), 3.0,
        "the KL to the reference is {recent:.2g} per token, up from {before:.2g}",
        "set trainer.kl_coef (now {job.trainer.kl_coef:g}) to 0.01 or five times its value, or lower trainer.lr",
        level=0.1),
    ChangeRule(FaultKind.ANSWERS_GROW, tokens_of, 1.7, _LENGTH,
        "set trainer.overlong to penalty with an overlong_buffer, or trainer.loss_aggregation to token",
        is_bought=True),
    ChangeRule(FaultKind.ANSWERS_SHRINK, tokens_of, 0.4, _LENGTH,
        "read the best episodes (`bombus replay episodes --sort reward --reverse`): giving up early may pay off",
        is_bought=True),
    ChangeRule(FaultKind.TRAINER_WAITS, lambda row: _times_longer(row.collecting_s, row.training_s), 3.0,
        f"{_TIMES}trainer is waiting",
        "add replicas or clients, or raise collection.max_staleness (now {job.collection.max_staleness}) by 1",
        level=10.0),
    ChangeRule(FaultKind.SAMPLER_WAITS, lambda row: _times_longer(row.training_s, row.collecting_s), 3.0,
        f"{_TIMES}replicas are waiting",
        "look at seconds_forward_backward and seconds_read; add trainer.processes, or raise max_tokens_per_bin",
        level=10.0),
    # The largest of 250 log-normal values with a (log) standard deviation of 0.5 is about four times their median.
    ChangeRule(FaultKind.STRAGGLERS, _straggling, 2.0,
        "the slowest episode of a batch takes {newest.slowest_s:.1f} s, {recent:.0f} times as long as half of them",
        "limit the time of episodes in the environment, or set collection.max_staleness to 1, so others continue",
        level=8.0),
)  # fmt: skip
