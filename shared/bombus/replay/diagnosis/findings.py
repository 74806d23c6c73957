"""What a diagnosis can find, and the part of a run that a rule examines."""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from bombus.config.job import RunConfig
from bombus.replay.diagnosis.statistics import VISIBLE, change, mean, rises, surprise
from bombus.replay.diagnosis.steps import StepFigures

WINDOW = 5  # newest steps, compared with those before; half of the ten steps within which faults should be found
BEFORE = 20  # steps before the window, with which the window is compared
BEFORE_MIN = 8  # with fewer steps, rules about changes find nothing

NEAR_BEST = 0.9  # fraction of the way from the lowest to the highest reward
MUCH_LEFT = 0.8  # the same: a reward that no longer rises below it has stopped early, above it learning slows down

Value = Callable[[StepFigures], float | None]


class FaultKind(StrEnum):
    """What can be wrong with the learning."""

    TOO_HARD = "too_hard"
    TOO_EASY = "too_easy"
    GROUPS_OF_ONE = "groups_of_one"
    REWARD_OUT_OF_RANGE = "reward_out_of_range"
    REWARD_INVERTED = "reward_inverted"
    REWARD_DISAGREES = "reward_disagrees"
    FAILURES_REWARDED = "failures_rewarded"
    EPISODES_ABORTED = "episodes_aborted"
    CLIENT_FAILS = "client_fails"
    SOURCE_DOMINATES = "source_dominates"
    TOOLS_FAIL = "tools_fail"
    TRUNCATED = "truncated"
    TASKS_REPEAT = "tasks_repeat"
    EVALUATED_ON_TRAINED = "evaluated_on_trained"
    LR_TOO_HIGH = "lr_too_high"
    LR_TOO_LOW = "lr_too_low"
    NOT_FINITE = "not_finite"
    GRADIENT_CLIPPED = "gradient_clipped"
    KL_RUNAWAY = "kl_runaway"
    ENTROPY_COLLAPSE = "entropy_collapse"
    ENTROPY_RISES = "entropy_rises"
    SAMPLER_MISMATCH = "sampler_mismatch"
    STALE = "stale"
    FOLLOWS_LENGTH = "follows_length"
    ANSWERS_SHRINK = "answers_shrink"
    ANSWERS_GROW = "answers_grow"
    ONE_PART_RISES = "one_part_rises"
    ALWAYS_YES = "always_yes"
    EVALUATION_FALLS = "evaluation_falls"
    REWARD_FALLS = "reward_falls"
    REWARD_JUMPS = "reward_jumps"
    DUPLICATE_ANSWERS = "duplicate_answers"
    CONSTANT_PROMPT = "constant_prompt"
    CONSTANT_ANSWER = "constant_answer"
    LEAKED_ANSWER = "leaked_answer"
    REWARDED_PHRASE = "rewarded_phrase"
    TRAINER_WAITS = "trainer_waits"
    SAMPLER_WAITS = "sampler_waits"
    STRAGGLERS = "stragglers"

    @property
    def in_words(self) -> str:
        return self.replace("_", " ")


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with the learning: a `figure` in words, where the fault began and was last seen, and what to try.

    `seq` is the event that sealed the batch of `step`. `consequences` are the findings that this one explains.
    """

    kind: FaultKind
    figure: str
    advice: str
    step: int
    seq: int
    until: int = 0
    consequences: tuple["RunFinding", ...] = ()


class Seen(msgspec.Struct, frozen=True):
    """What a rule examines: the newest steps and those before them, oldest first, and the job."""

    before: Sequence[StepFigures]
    recent: Sequence[StepFigures]
    job: RunConfig

    @property
    def comparable(self) -> bool:
        """Return whether there are enough steps to detect a change."""
        return len(self.before) >= BEFORE_MIN and len(self.recent) == WINDOW

    @property
    def rows(self) -> list[StepFigures]:
        return [*self.before, *self.recent]

    @property
    def splits(self) -> list[tuple[Sequence[StepFigures], Sequence[StepFigures]]]:
        """Return the steps cut into earlier and recent ones, at one window from the end and at two. Where each step has
        few episodes, only the longer one may show a change."""
        rows = self.rows
        lengths = [WINDOW, 2 * WINDOW] if len(self.recent) == WINDOW else []
        return [(rows[:-each], rows[-each:]) for each in lengths if len(rows) - each >= BEFORE_MIN]

    @property
    def better(self) -> bool:
        """Return whether the model has visibly improved: by its successes or, if none are reported, by its reward."""
        successes = self.both(success_of)
        return rises(*(successes if all(successes) else self.both(reward_of)))

    @property
    def stalls(self) -> bool:
        """Return whether the reward has stopped rising although much is left to gain. A falling reward does not."""
        before, recent = self.both(reward_of)
        least, most = reward_bounds(self.rows)
        flat = surprise(before, recent) < -VISIBLE < change(before[-WINDOW:], recent)
        return flat and mean(recent) <= least + MUCH_LEFT * (most - least)

    def both(self, of: Value) -> tuple[list[float], list[float]]:
        """Return a figure's values in the earlier steps and in the recent steps, leaving out steps without the
        figure."""
        before = [value for row in self.before if (value := of(row)) is not None]
        return before, [value for row in self.recent if (value := of(row)) is not None]

    def newest(self, name: str, count: int) -> list[float]:
        """Return a trainer's metric for the newest `count` steps, or an empty list if fewer steps have the metric."""
        values = [row.trainer[name] for row in self.rows if name in row.trainer]
        return values[-count:] if len(values) >= count else []

    def found(
        self, kind: FaultKind, figure: str, advice: str, shows: Callable[[StepFigures], bool | None] | None = None
    ) -> RunFinding:
        """Return a finding. It begins at the first step of the latest unbroken run of steps that show it.

        Steps for which `shows` returns None do not break the run.
        """
        start = self.recent[-1]
        for row in reversed(self.recent if shows is None else self.rows):
            shown = True if shows is None else shows(row)
            if shown is False:
                break
            start = row if shown else start
        return RunFinding(kind=kind, figure=figure, advice=advice, step=start.step, seq=start.seq)


Rule = Callable[[Seen], RunFinding | None]


def reward_of(row: StepFigures) -> float | None:
    return row.rewards.mean if row.rewards.count else None


def tokens_of(row: StepFigures) -> float | None:
    return row.tokens.mean if row.tokens.count else None


def success_of(row: StepFigures) -> float | None:
    return row.successes.mean if row.successes.count else None


def metric_of(name: str) -> Value:
    """Return the function that gives the mean of a metric that episodes report."""
    return lambda row: row.metrics[name].mean if name in row.metrics else None


def trainer_metric(name: str) -> Value:
    return lambda row: row.trainer.get(name)


def reward_bounds(rows: Sequence[StepFigures]) -> tuple[float, float]:
    """Return the lowest and the highest reward of some steps."""
    return min((row.lowest for row in rows), default=0.0), max((row.highest for row in rows), default=0.0)
