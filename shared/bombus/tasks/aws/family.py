"""The families `aws:<tier>`: their tasks, and an environment for each episode."""

import logging
import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from bombus.environments.budgets import RolloutBudgets
from bombus.errors import Code, Refused
from bombus.sdk.types import Task
from bombus.tasks.aws.catalogue import TASKS, TIERS
from bombus.tasks.aws.environment import AwsEnvironment
from bombus.tasks.kinds import NoOptions, TaskDraw, TaskFamily, TaskName, TasksNotInstalled, TaskSplit, options_of

log = logging.getLogger("bombus")


class AwsTasks:
    """The tasks of one tier, or of all of them."""

    budgets = RolloutBudgets(turns_max=12, tokens_max=8192)

    def __init__(self, tier: str) -> None:
        self.name = f"aws:{tier}"
        self._tasks = [task for task in TASKS if tier in (task.tier, "all")]

    def draw(self, draw: TaskDraw) -> list[Task]:
        """Return as many tasks as requested, or all tasks if there are fewer, in an order determined by the seed.

        Both splits have the same tasks.
        """
        if draw.split == TaskSplit.EVAL:
            log.warning("%s has the same tasks for evaluation as for training", self.name)
        chosen = random.Random(draw.seed).sample(self._tasks, min(draw.size, len(self._tasks)))
        return [
            Task(
                main_query=task.prompt,
                task_id=f"aws/{task.name}",
                env_type=self.name,
                metadata={"aws": task.name, "tier": task.tier},
            )
            for task in chosen
        ]

    def environment(self) -> object:
        return AwsEnvironment()

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def _names() -> Sequence[TaskName]:
    return [*(TaskName(name=tier) for tier in TIERS), TaskName(name="all")]


def _open(name: str, given: Mapping[str, str]) -> AwsTasks:
    options_of(NoOptions, f"aws:{name}", given)
    if name not in {each.name for each in _names()}:
        raise Refused(Code.BAD_CONFIG, f"aws has no tier {name!r}: there are {', '.join(TIERS)}, and all")
    if find_spec("awscli") is None:
        raise TasksNotInstalled("aws needs awscli: pip install 'bombus[aws]'")
    return AwsTasks(name)


FAMILY = TaskFamily(
    name="aws",
    about="work with the AWS command line on a simulator, in five tiers, whose end state is checked",
    open=_open,
    names=_names,
    package="ministack",
    extra="aws",
)
