"""Decides which events follow from a result: tasks graduate, are reviewed or return, and tiers are reached. The
functions here are pure.

The events are recorded, so a later change of the rules does not change what has already happened.
"""

import math

import msgspec

from bombus.curriculum.events import (
    AnyCurriculumEvent,
    ResultRecorded,
    TaskGraduated,
    TaskReturned,
    TaskReviewed,
    TierReached,
)
from bombus.curriculum.progress import CurriculumProgress, decayed_rate
from bombus.errors import Code, Refused

GROUP_CHARACTERS_MAX = 512


class RecordResult(msgspec.Struct, frozen=True, kw_only=True):
    """The only command: record the result of a group of episodes for one task."""

    task: str
    achieved: bool
    reward: float
    group: str = ""


def decide(command: RecordResult, progress: CurriculumProgress) -> list[AnyCurriculumEvent]:
    """Return the events that follow, or none if the group is already recorded.

    Raises `Refused` for an unknown task, for a reward that is not finite, and for a group name that is too long.
    """
    _check(command, progress)
    if command.group and command.group in progress.groups:
        return []
    recorded = ResultRecorded(
        task=command.task, achieved=command.achieved, reward=float(command.reward), group=command.group
    )
    return [recorded, *_of_task(command, progress), *_of_tier(command, progress)]


def _check(command: RecordResult, progress: CurriculumProgress) -> None:
    if command.task not in progress.tier_of:
        raise Refused(Code.MALFORMED, f"the curriculum has no task {command.task!r}: record results only of its tasks")
    if not math.isfinite(command.reward):
        raise Refused(
            Code.BAD_REWARD, f"the reward of {command.task!r} is {command.reward}: it must be a finite number"
        )
    if len(command.group) > GROUP_CHARACTERS_MAX:
        raise Refused(Code.MALFORMED, f"the name of a group has over {GROUP_CHARACTERS_MAX} characters")


def _of_task(command: RecordResult, progress: CurriculumProgress) -> list[AnyCurriculumEvent]:
    rules = progress.plan.mastery
    task = progress.of(command.task)
    results = progress.results + 1
    rate = decayed_rate((*task.recent, command.achieved)[-rules.window :], rules.decay)
    if not task.has_graduated:
        if task.results + 1 < rules.graduation_results or rate < rules.graduation_rate:
            return []
        return [TaskGraduated(task=command.task, interval=rules.review_first, due=results + rules.review_first)]
    if rate < rules.graduation_rate:
        return [TaskReturned(task=command.task)]
    if not command.achieved:
        interval = rules.review_first
    elif results >= task.due:
        interval = min(2 * task.interval, rules.review_longest)
    else:
        return []  # the task was not due yet: a success now does not show how long it is remembered
    return [TaskReviewed(task=command.task, interval=interval, due=results + interval)]


def _of_tier(command: RecordResult, progress: CurriculumProgress) -> list[AnyCurriculumEvent]:
    if progress.is_last_tier or progress.tier_of[command.task] != progress.tier_index:
        return []
    shared, rules = progress.plan.mastery, progress.tier.rules
    count = progress.tier_results + 1
    rate = decayed_rate((*progress.tier_recent, command.achieved)[-shared.window :], shared.decay)
    is_fast = count >= shared.fast_results and rate >= shared.fast_rate
    if not is_fast and (count < rules.results_min or rate < rules.rate_min):
        return []
    after = progress.plan.tiers[progress.tier_index + 1].name
    return [TierReached(tier=after, fast=count < rules.results_min or rate < rules.rate_min)]
