"""What has happened in a curriculum. Only ever added to: a new field has a default, and none changes its meaning."""

import msgspec


class CurriculumEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all events."""


class ResultRecorded(CurriculumEvent, frozen=True, kw_only=True, tag="result.recorded"):
    """A group of episodes of a task has ended. `group` is the name by which it is recorded once, "" for none."""

    task: str
    achieved: bool
    reward: float
    group: str = ""


class TaskGraduated(CurriculumEvent, frozen=True, kw_only=True, tag="task.graduated"):
    """A task is mastered. It is reviewed again once there are `due` results."""

    task: str
    interval: int
    due: int


class TaskReviewed(CurriculumEvent, frozen=True, kw_only=True, tag="task.reviewed"):
    """A task that has graduated was played again, and its next review is set."""

    task: str
    interval: int
    due: int


class TaskReturned(CurriculumEvent, frozen=True, kw_only=True, tag="task.returned"):
    """A task that had graduated fails too often, and is practised again."""

    task: str


class TierReached(CurriculumEvent, frozen=True, kw_only=True, tag="tier.reached"):
    """The tier before this one is mastered. `fast` means by few results, nearly all of them successes."""

    tier: str
    fast: bool = False


AnyCurriculumEvent = ResultRecorded | TaskGraduated | TaskReviewed | TaskReturned | TierReached
