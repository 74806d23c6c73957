"""Faults that show in a share of episodes, groups or answers."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from bombus.config.algorithms import Estimator, named
from bombus.hive.failures import FAILURES, FailureKind
from bombus.replay.diagnosis.findings import NEAR_BEST, FaultKind, RunFinding, Seen, reward_bounds
from bombus.replay.diagnosis.statistics import Spread, median, share_at_least, total
from bombus.replay.diagnosis.steps import RECENT, StepFigures

WORTH = 0.2  # share of answers that could be better: below this, the model has learned nearly all tasks
RARE = 0.05  # share of successes below which a high reward is not for them
SILENT = 0.6  # share of groups: above this, most of the work is wasted. Half is usual in healthy runs


class ShareRule(msgspec.Struct, frozen=True):
    """Finds a share that is almost certainly above `least` and, with `compared`, also above twice the share in earlier
    steps.

    `of` returns a step's hits and their total. The texts can name `hits`, `count`, `share`, `before` (the earlier
    share) and `job`.
    """

    kind: FaultKind
    of: Callable[[StepFigures], tuple[float, float]]
    least: float
    figure: str
    advice: str
    compared: bool = False
    count_min: int = 1

    def __call__(self, seen: Seen) -> RunFinding | None:
        hits, count = self._total(seen.recent)
        hits_before, count_before = self._total(seen.before)
        before = hits_before / count_before if count_before else 0.0
        limit = max(self.least, 2 * before) if self.compared else self.least
        if count < self.count_min or share_at_least(hits, count) < limit or (self.compared and not seen.comparable):
            return None
        words = {"hits": hits, "count": count, "share": hits / count, "before": before, "job": seen.job}
        return seen.found(self.kind, self.figure.format(**words), self.advice.format(**words), self._shows)

    def _total(self, rows: Sequence[StepFigures]) -> tuple[float, float]:
        both = [self.of(row) for row in rows]
        return sum(hits for hits, _ in both), sum(count for _, count in both)

    def _shows(self, row: StepFigures) -> bool | None:
        hits, count = self.of(row)
        return hits > self.least * count if count else None


def _tools(row: StepFigures) -> tuple[float, float]:
    calls, failures = row.metrics.get("tool_calls"), row.metrics.get("tool_failures")
    return (failures.total, calls.total) if calls is not None and failures is not None else (0, 0)


def _cut(row: StepFigures) -> tuple[float, float]:
    return row.trainer.get("episodes_cut", 0), row.trainer.get("episodes", 0)


def _same_prompt(row: StepFigures) -> tuple[float, float]:
    return (row.answers.same_prompt, row.answers.tasks) if row.answers.same_prompt > 1 else (0, row.answers.tasks)


def _constant(row: StepFigures) -> tuple[float, float]:
    return (row.answers.constant, row.answers.tasks) if row.answers.tasks > 1 else (0, 0)


def _silent(row: StepFigures) -> tuple[float, float]:
    return row.silent.count, row.groups - row.groups_of_one


def _repeated(row: StepFigures) -> tuple[float, float]:
    return (0, 0) if row.repeated is None else (row.repeated, row.groups)


def _aborted(row: StepFigures) -> tuple[float, float]:
    return row.aborted.total(), row.aborted.total() + row.ended


_STALE = "set collection.max_staleness (now {job.collection.max_staleness}) to 1, or make the trainer faster"
SHARES = (
    ShareRule(FaultKind.FAILURES_REWARDED, lambda row: (row.failed, row.tokens.count), 0.02,  # usually lower
        "{share:.0%} of the episodes made no call, or their agent failed, and were ended with a reward",
        "abort such episodes (abort_episode, or raise InfraError) instead of ending them with a reward"),
    ShareRule(FaultKind.TOOLS_FAIL, _tools, 0.2,
        "{share:.0%} of the tool calls fail, compared with {before:.0%} before",
        "read an episode (`bombus replay episode ID`): the tool is down, or the model calls it in the wrong format",
        compared=True),
    ShareRule(FaultKind.TRUNCATED, _cut, 0.15,  # usually below 0.1 if answers have enough room
        "{share:.0%} of the episodes have an answer that was cut at a limit of the job or the model",
        "raise the limit that is reached, rollout.max_response_length_in_one_turn (now "
        "{job.rollout.max_response_length_in_one_turn}) or max_response_length (now "
        "{job.rollout.max_response_length}), or set trainer.overlong to mask"),
    ShareRule(FaultKind.TRUNCATED, lambda row: (row.truncated, row.tokens.count), 0.15,
        "{share:.0%} of the episodes ran out of turns, tokens or time, compared with {before:.0%} before",
        "raise the budget of turns, tokens or time of the environment, or the limit of the reward's program",
        compared=True),
    ShareRule(FaultKind.STALE, lambda row: (row.stale, row.ended), 0.1,
        "{share:.0%} of the episodes are dropped as too old", _STALE),
    ShareRule(FaultKind.TASKS_REPEAT, _repeated, 0.5,
        f"{{share:.0%}} of the groups have a task of the previous {RECENT} steps, compared with {{before:.0%}} before",
        "find out why tasks come again so soon: the data loader may start over, or a curriculum may have narrowed",
        compared=True),
    ShareRule(FaultKind.EVALUATED_ON_TRAINED, lambda row: (row.evaluated_known, row.evaluated.count), 0.1,
        "{share:.0%} of {count} evaluation episodes have a task that was trained on",
        "evaluate on tasks that are held out: their ids must not occur in training"),
    ShareRule(FaultKind.CONSTANT_PROMPT, _same_prompt, 0.6,
        "{hits} of {count} tasks that were read have the same prompt as another",
        "read the prompts of two tasks (`bombus replay episode ID --prompt`): the template may drop the task, a cache "
        "may mix them up, or rows of the data set may be equal",
        count_min=10),
    ShareRule(FaultKind.CONSTANT_ANSWER, _constant, 0.6,
        "the same answer is given to {hits} of {count} tasks that were read",
        "read one episode: what is rewarded does not depend on the task. Balance the tasks, or change the reward",
        count_min=10),
    ShareRule(FaultKind.LEAKED_ANSWER, lambda row: (row.answers.leaked, row.answers.best), 0.35,
        "{share:.0%} of the best answers appear word for word in their prompt, compared with {before:.0%} before",
        "read one with `bombus replay episode ID --prompt`: a tool, a hint or an earlier turn shows the solution",
        compared=True, count_min=20),
)  # fmt: skip
ALONE = ShareRule(FaultKind.GROUPS_OF_ONE, lambda row: (row.groups_of_one, row.groups), 0.4,
    "{hits} of {count} groups have only one episode, which cannot be compared with another",
    "end all episodes of a task with the same task id, and claim num_repeat of them; or set trainer.adv_estimator to "
    "reinforce_plus_plus")  # fmt: skip
TOO_EASY = ShareRule(FaultKind.TOO_EASY, _silent, SILENT,
    "in {hits} of {count} groups all episodes have the same reward",
    "end the run if the tasks are learned; otherwise use harder ones, or set collection.method to "
    "rollout_until_finish_enough_non_dummy_tasks")  # fmt: skip
TOO_HARD = ShareRule(FaultKind.TOO_HARD, _silent, SILENT, TOO_EASY.figure,
    "use easier tasks first (a curriculum), give partial reward, or raise rollout.num_repeat (now "
    "{job.rollout.num_repeat})")  # fmt: skip
FAILING = msgspec.structs.replace(TOO_HARD,
    advice="check the sign of the reward, and what it is for answers that fail: they get the highest; if both are "
    f"right, {TOO_HARD.advice}")  # fmt: skip
ABORTED = ShareRule(FaultKind.EPISODES_ABORTED, _aborted, 0.2,
    "{share:.0%} of the episodes were aborted",
    "read the reasons with `bombus replay timeline --kind episode.aborted`")  # fmt: skip
LEFT_OUT = ShareRule(FaultKind.EPISODES_ABORTED, lambda row: (row.unusable, row.tokens.count), 0.1,
    "{share:.0%} of the episodes in batches were left out, because their calls cannot be read or trained on",
    "read the trainer's log: perhaps a logprob is not finite, or calls do not fit together")  # fmt: skip


def groups_of_one(seen: Seen) -> RunFinding | None:
    estimator = named(Estimator, seen.job.trainer.adv_estimator)
    return None if estimator is not None and estimator.over_batch else ALONE(seen)


def duplicate_answers(seen: Seen) -> RunFinding | None:
    """Find identical answers among those that could be better. A model that has learned a task also repeats its
    answers."""
    least, most = reward_bounds(seen.rows)
    limit = least + NEAR_BEST * (most - least) if most > least else 0.0

    def of(row: StepFigures) -> tuple[float, float]:
        duplicates, every = row.answers.duplicates, row.answers.rewards
        return sum(reward <= limit for reward in duplicates), sum(reward <= limit for reward in every)

    worse = sum(of(row)[1] for row in seen.recent)
    is_much = worse >= WORTH * sum(row.answers.count for row in seen.recent)
    if not is_much:
        return None
    return ShareRule(FaultKind.DUPLICATE_ANSWERS, of, 0.6,
        "{share:.0%} of {count} answers that could be better are equal to another one of their group",
        "sample with temperature 1 and no fixed seed; if the entropy is low, set trainer.clip_high to 0.28",
        count_min=20)(seen)  # fmt: skip


def no_signal(seen: Seen) -> RunFinding | None:
    """Find groups whose episodes all have the same reward, where that reward is mostly low or mostly high.

    The highest reward of all is not a high one if hardly any episode succeeds.
    """
    if len(seen.recent) < 3:
        return None
    level = median([row.silent.mean for row in seen.recent if row.silent.count])
    least, most = reward_bounds(seen.rows)
    successes = total([row.successes for row in seen.recent], Spread)
    is_high = level > ((least + most) / 2 if most > least else 0.0)
    if is_high and successes.count and successes.mean < RARE:
        found, words = FAILING(seen), f", and {successes.mean:.0%} of the episodes succeed"
    else:
        found, words = (TOO_EASY if is_high else TOO_HARD)(seen), ""
    return found and msgspec.structs.replace(found, figure=f"{found.figure}, usually about {level:.3g}{words}")


def episodes_aborted(seen: Seen) -> RunFinding | None:
    """Find episodes that were aborted or left out of their batches. One finding names both, so neither hides the
    other."""
    aborted, left_out = ABORTED(seen), LEFT_OUT(seen)
    if aborted is None:
        return left_out
    ((reason, count),) = sum((row.aborted for row in seen.recent), Counter()).most_common(1)
    meaning = FAILURES[FailureKind(reason)].meaning if reason else "their clients reported no failure"
    figure, advice = f"{aborted.figure}, {count} of them: {meaning}", aborted.advice
    if left_out is not None:
        figure, advice = f"{figure}; {left_out.figure}", f"{advice}; {left_out.advice}"
    return msgspec.structs.replace(aborted, figure=figure, advice=advice)


RULES = (*SHARES, groups_of_one, duplicate_answers, no_signal, episodes_aborted)
