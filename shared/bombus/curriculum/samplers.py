"""Endless iterators of tasks for `run_group` and `begin_episodes`: chosen by a curriculum, or all equally often."""

import math
import random
import threading
from collections.abc import Iterator, Sequence

from bombus.curriculum.curriculum import Curriculum
from bombus.sdk.types import Task, WorkflowOutput


class UniformSampler:
    """Yields all tasks in random order, then all of them in another random order, and so on. The seed determines the
    orders."""

    def __init__(self, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise ValueError("there are no tasks to sample from: give at least one")
        self._tasks = list(tasks)
        self._random = random.Random(seed)
        self._left: list[int] = []

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        if not self._left:
            self._left = self._random.sample(range(len(self._tasks)), len(self._tasks))
        return self._tasks[self._left.pop()]

    def record(self, task: Task, outputs: Sequence[WorkflowOutput | None], *, group: str = "") -> None:
        """Do nothing: results do not change the order."""


class CurriculumSampler:
    """Yields the tasks that a curriculum chooses.

    The same seed and the same results in the same order yield the same tasks. This holds across a restart too, unless
    groups were running at the time or had no result. A task whose group is still running is not yielded again while
    another task is open, because two groups for the same task would be mistaken for one. Threads may share a sampler.
    """

    def __init__(
        self, curriculum: Curriculum, tasks: Sequence[Task], seed: int = 0, reward_of_success: float = 1.0
    ) -> None:
        self.curriculum = curriculum
        self._tasks = {task.task_id: task for task in tasks}
        self._seed = seed
        self._reward_of_success = reward_of_success
        self._draws = curriculum.progress.results  # not 0, so that a restart does not repeat the first draws
        self._running: dict[str, None] = {}  # running tasks, in the order in which they were yielded
        self._lock = threading.Lock()  # held while a task is chosen and noted as running
        missing = curriculum.progress.tier_of.keys() - self._tasks.keys()
        if missing:
            raise ValueError(f"the curriculum has the task {min(missing)!r}, which is not among the tasks given")

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        with self._lock:
            chosen = None
            while chosen is None:  # a result from another thread may change the open tasks between the two calls
                chosen = self.curriculum.choose(self._seed, self._draws, self._running) or self._given_longest_ago()
            self._draws += 1
            self._running.pop(chosen, None)
            self._running[chosen] = None
        return self._tasks[chosen]

    def _given_longest_ago(self) -> str | None:
        """Return the open task that has been running longest, or None if no running task is open."""
        free = set(self.curriculum.open_tasks())
        return next((task for task in self._running if task in free), None)

    def record(self, task: Task, outputs: Sequence[WorkflowOutput | None], *, group: str = "") -> None:
        """Record a group's result, unless none of its episodes was scored."""
        self.give_back(task)
        result = result_of_group(outputs, self._reward_of_success)
        if result is not None:
            self.curriculum.record_result(task, *result, group=group)

    def give_back(self, task: Task) -> None:
        """Note that a task's group is no longer running, so that the task may be yielded again."""
        with self._lock:
            self._running.pop(task.task_id, None)


def result_of_group(
    outputs: Sequence[WorkflowOutput | None], reward_of_success: float = 1.0
) -> tuple[bool, float] | None:
    """Return whether at least half of a group's episodes succeeded, and their mean reward.

    An episode without a finite reward does not count. If no episode has a finite reward, return None. An episode
    succeeded if its output says so or, if the output does not say, if its reward is at least `reward_of_success`. If an
    episode has a reward for each call, their mean is the episode's reward.
    """
    scored = [(output, reward) for output in outputs if output is not None and (reward := _reward(output)) is not None]
    if not scored:
        return None
    successes = sum(
        reward >= reward_of_success if output.is_success is None else output.is_success for output, reward in scored
    )
    return 2 * successes >= len(scored), sum(reward for _, reward in scored) / len(scored)


def _reward(output: WorkflowOutput) -> float | None:
    reward = _mean_reward(output)
    return reward if reward is not None and math.isfinite(reward) else None


def _mean_reward(output: WorkflowOutput) -> float | None:
    match output.reward:
        case list() as by_call:
            return sum(by_call) / len(by_call) if by_call else None
        case dict() as by_name:
            return sum(by_name.values()) / len(by_name) if by_name else None
        case reward:
            return reward
