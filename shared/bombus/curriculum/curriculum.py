"""`Curriculum`: tasks, their recorded results, and the file that stores the results."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from bombus.curriculum import choosing
from bombus.curriculum.deciding import RecordResult, decide
from bombus.curriculum.events import AnyCurriculumEvent
from bombus.curriculum.journal import CurriculumJournal
from bombus.curriculum.plan import CurriculumPlan
from bombus.curriculum.progress import CurriculumProgress
from bombus.errors import Code, Refused
from bombus.hive.episodes import reward_number
from bombus.sdk.types import Task


class CurriculumFigures(NamedTuple):
    """The progress of a curriculum, for display."""

    tier: str
    tier_results: int
    tier_rate: float
    results: int
    tried: int
    graduated: int
    tasks: int

    def line(self) -> str:
        return (
            f"tier {self.tier}: {self.tier_results} results at a rate of {self.tier_rate:.2f}; "
            f"{self.graduated} of {self.tasks} tasks graduated, {self.tried} tried"
        )


class Curriculum:
    """Chooses the next task. Only `record_result` changes its state. Threads may share it.

    With a `path`, results are stored in that file, and read again when the curriculum is reopened. Raises `Refused` if
    another process has the file open, or if the plan lacks the tier that the file has reached.
    """

    def __init__(self, plan: CurriculumPlan, path: Path | str | None = None) -> None:
        self.progress = CurriculumProgress(plan)
        self._lock = threading.Lock()  # the state must not change between a decision and its fold
        self._journal = CurriculumJournal(Path(path)) if path is not None else None
        if self._journal is not None:
            self.progress.fold(self._journal.events)
            if self.progress.unknown_tier:
                self._journal.close()
                raise Refused(Code.BAD_CONFIG, _tier_is_missing(self.progress, self._journal.path))

    def record_result(
        self, task: Task | str, achieved: bool, reward: float, *, group: str = ""
    ) -> list[AnyCurriculumEvent]:
        """Record the result of a task's group, once for the whole group, and return the resulting events.

        A named group is recorded only once: recording it again changes nothing and returns no events. Raises `Refused`
        for a task that the curriculum does not have, and for a reward that is not a number.
        """
        name = task.task_id if isinstance(task, Task) else task
        try:
            number = reward_number(reward)
        except ValueError as error:
            raise Refused(Code.BAD_REWARD, f"the reward of {name!r} is not a number: {error}") from error
        command = RecordResult(task=name, achieved=achieved, reward=number, group=group)
        with self._lock:
            events = decide(command, self.progress)
            if events and self._journal is not None:
                self._journal.append(events)
            self.progress.fold(events)
        return events

    def choose(self, seed: int, draw: int, taken: Collection[str] = ()) -> str | None:
        """Return the id of the next task, or None if all open tasks are in `taken`. Changes nothing."""
        with self._lock:
            return choosing.choose(self.progress, seed, draw, taken)

    def open_tasks(self) -> list[str]:
        """Return the ids of all tasks that may be chosen next."""
        with self._lock:
            return list(choosing.open_tasks(self.progress))

    def figures(self) -> CurriculumFigures:
        with self._lock:
            return _figures(self.progress)

    def close(self) -> None:
        """Close the file, so that another process may open it. Closing it twice does nothing."""
        if self._journal is not None:
            with self._lock:
                self._journal.close()

    def __enter__(self) -> "Curriculum":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _figures(progress: CurriculumProgress) -> CurriculumFigures:
    known = [progress.of(task) for task in progress.tier_of]
    return CurriculumFigures(
        tier=progress.tier.name,
        tier_results=progress.tier_results,
        tier_rate=progress.tier_rate(),
        results=progress.results,
        tried=sum(task.results > 0 for task in known),
        graduated=sum(task.has_graduated for task in known),
        tasks=len(known),
    )


def _tier_is_missing(progress: CurriculumProgress, path: Path) -> str:
    names = ", ".join(tier.name for tier in progress.plan.tiers)
    return (
        f"{path} is at the tier {progress.unknown_tier!r}, but the plan has only {names}: rename the tier "
        "back, or start a new file"
    )
