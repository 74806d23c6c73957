"""A data set in a JSON Lines file, whose tasks are played with the user's own environment class."""

from collections.abc import Mapping
from pathlib import Path

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.loading import load_class, read_environment_tasks
from bombus.errors import Code, Refused
from bombus.sdk.types import Task
from bombus.tasks.kinds import TaskDraw

SUFFIX = ".jsonl"
NAME_CHARACTERS_MAX = 128  # the hive's limit


class FileTasks:
    """The tasks in a file, as a `TaskSet` with the file's name. A draw returns the first tasks, whatever the draw's
    seed.

    `environment` is `module:Class`. Raises `Refused` if the file or the class cannot be used.
    """

    def __init__(self, path: Path, environment: str) -> None:
        if not environment:
            raise Refused(
                Code.BAD_CONFIG,
                f"--task {path} is a file, so its tasks need an environment: name a class with --env module:Class",
            )
        if len(path.stem) > NAME_CHARACTERS_MAX:
            raise Refused(
                Code.BAD_CONFIG, f"--task {path}: a data set's name must have at most {NAME_CHARACTERS_MAX} characters"
            )
        self._tasks = read_environment_tasks(path)
        if not all(task.task_id for task in self._tasks):
            raise Refused(Code.BAD_CONFIG, f"--task {path} has an empty task_id: leave it out, or give it a value")
        self._class = load_class(environment)
        self.name = path.stem
        self.budgets = RolloutBudgets()

    def draw(self, draw: TaskDraw) -> list[Task]:
        return self._tasks[: draw.size]

    def environment(self) -> object:
        return self._class()

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: the file has been read and closed."""
