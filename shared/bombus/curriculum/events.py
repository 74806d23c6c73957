"""The events of a curriculum. They may only be extended: new fields have defaults, and fields never change their
meaning."""

import msgspec


class CurriculumEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all events."""


class ResultRecorded(CurriculumEvent, frozen=True, kw_only=True, tag="result.recorded"):
    """A group of episodes for a task has ended. A named `group` is recorded only once; "" means no name."""

    task: str
    achieved: bool
    reward: float
    group: str = ""


class TaskGraduated(CurriculumEvent, frozen=True, kw_only=True, tag="task.graduated"):
    """A task is mastered. It is due for review when all tasks together have `due` results."""

    task: str
    interval: int
    due: int


class TaskReviewed(CurriculumEvent, frozen=True, kw_only=True, tag="task.reviewed"):
    """A graduated task was played again, and its next review is set."""

    task: str
    interval: int
    due: int


class TaskReturned(CurriculumEvent, frozen=True, kw_only=True, tag="task.returned"):
    """A task that had graduated fails too often, and is practised again."""

    task: str


class TierReached(CurriculumEvent, frozen=True, kw_only=True, tag="tier.reached"):
    """The previous tier is mastered. `fast` means after only a few results, nearly all of them successes."""

    tier: str
    fast: bool = False


AnyCurriculumEvent = ResultRecorded | TaskGraduated | TaskReviewed | TaskReturned | TierReached
