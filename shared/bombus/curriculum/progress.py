"""The progress of a curriculum: the fold of its events. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from bombus.curriculum.events import (
    AnyCurriculumEvent,
    ResultRecorded,
    TaskGraduated,
    TaskReturned,
    TaskReviewed,
    TierReached,
)
from bombus.curriculum.plan import CurriculumPlan, CurriculumTier

GROUPS_REMEMBERED = 4096  # number of newest groups whose names are kept, so that each is recorded only once


class TaskProgress(msgspec.Struct, kw_only=True):
    """The results of one task. `recent` holds the newest results, oldest first."""

    results: int = 0
    recent: tuple[bool, ...] = ()
    rewards: float = 0.0  # the sum of all rewards
    newest: int = 0  # how many results all tasks together had when the newest one for this task was recorded
    has_graduated: bool = False
    has_returned: bool = False
    interval: int = 0  # number of results between its reviews
    due: int = 0  # the task is due for review when all tasks together have this many results


class CurriculumProgress:
    """The state of a curriculum. Tasks that are not (or no longer) in the plan are kept but never chosen."""

    def __init__(self, plan: CurriculumPlan) -> None:
        self.plan = plan
        self.tier_of = {task: index for index, tier in enumerate(plan.tiers) for task in tier.tasks}
        self._index_of = {tier.name: index for index, tier in enumerate(plan.tiers)}
        self.tasks: dict[str, TaskProgress] = {}
        self.results = 0
        self.tier_index = 0
        self.unknown_tier = ""  # the latest tier reached, if the plan does not have it
        self.tier_results = 0  # number of results of the current tier's tasks since it was reached
        self.tier_recent: tuple[bool, ...] = ()
        self.groups: dict[str, None] = {}

    @property
    def tier(self) -> CurriculumTier:
        return self.plan.tiers[self.tier_index]

    @property
    def is_last_tier(self) -> bool:
        return self.tier_index == len(self.plan.tiers) - 1

    def of(self, task: str) -> TaskProgress:
        """Return the progress of a task. The caller must not change it."""
        return self.tasks.get(task) or TaskProgress()

    def rate(self, task: str) -> float:
        """Return a task's success rate, or 0 if it has no results."""
        return decayed_rate(self.of(task).recent, self.plan.mastery.decay)

    def tier_rate(self) -> float:
        """Return the success rate in the current tier."""
        return decayed_rate(self.tier_recent, self.plan.mastery.decay)

    def evolve(self, event: AnyCurriculumEvent) -> None:
        """Apply an event in place."""
        match event:
            case ResultRecorded():
                self._recorded(event)
            case TaskGraduated() | TaskReviewed():
                task = self._task(event.task)
                task.has_graduated, task.has_returned = True, False
                task.interval, task.due = event.interval, event.due
            case TaskReturned():
                task = self._task(event.task)
                task.has_graduated, task.has_returned = False, True
                task.interval = task.due = 0
            case TierReached():
                self.unknown_tier = "" if event.tier in self._index_of else event.tier
                self.tier_index = self._index_of.get(event.tier, self.tier_index)
                self.tier_results, self.tier_recent = 0, ()

    def fold(self, events: Iterable[AnyCurriculumEvent]) -> "CurriculumProgress":
        """Apply events in order, and return self."""
        for event in events:
            self.evolve(event)
        return self

    def _recorded(self, event: ResultRecorded) -> None:
        window = self.plan.mastery.window
        self.results += 1
        task = self._task(event.task)
        task.results += 1
        task.rewards += event.reward
        task.newest = self.results
        task.recent = (*task.recent, event.achieved)[-window:]
        if self.tier_of.get(event.task) == self.tier_index:
            self.tier_results += 1
            self.tier_recent = (*self.tier_recent, event.achieved)[-window:]
        if event.group:
            self.groups[event.group] = None
            if len(self.groups) > GROUPS_REMEMBERED:
                del self.groups[next(iter(self.groups))]

    def _task(self, task: str) -> TaskProgress:
        return self.tasks.setdefault(task, TaskProgress())


def decayed_rate(results: Sequence[bool], decay: float) -> float:
    """Return the weighted share of successes, or 0 if there are no results. Each result weighs `decay` times as much as
    the one after it."""
    weight, total, achieved = 1.0, 0.0, 0.0
    for result in reversed(results):
        total += weight
        achieved += weight * result
        weight *= decay
    return achieved / total if total else 0.0
