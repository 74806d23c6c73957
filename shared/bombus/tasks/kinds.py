"""The interface of a set of ready-made tasks: tasks drawn from a seed, and the environment in which they are played."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from bombus.config.groups import allowed
from bombus.environments.budgets import RolloutBudgets
from bombus.errors import BombusError, Code, Refused
from bombus.sdk.types import Task

SIZE_MAX = 20_000
SEED_MAX = 999
SEEDS_OF_A_DRAW = 1_000_000  # a generator makes task i from seed + i, and draws must not overlap
EVAL_SEEDS = 1_000_000_000  # seeds of evaluation tasks begin here, so that no task is in both splits

OptionsT = TypeVar("OptionsT", bound=BaseModel)


class TaskSplit(StrEnum):
    """Which tasks to draw: those for training, or those held out for evaluation."""

    TRAIN = "train"
    EVAL = "eval"


class TaskDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A specification of the tasks to draw.

    The same draw gives the same tasks; a different seed or split gives different ones if possible.
    """

    size: int
    seed: int = 0
    split: TaskSplit = TaskSplit.TRAIN

    def __post_init__(self) -> None:
        if not 1 <= self.size <= SIZE_MAX:
            raise Refused(Code.BAD_CONFIG, f"{self.size} tasks cannot be drawn: draw from 1 to {SIZE_MAX}")
        if not 0 <= self.seed <= SEED_MAX:
            raise Refused(Code.BAD_CONFIG, f"the seed is {self.seed}: it must be from 0 to {SEED_MAX}")

    @property
    def first_seed(self) -> int:
        """Return the seed for the first task, for a generator that needs one per task.

        The other tasks use the seeds after it.
        """
        return self.seed * SEEDS_OF_A_DRAW + (EVAL_SEEDS if self.split == TaskSplit.EVAL else 0)


class TaskSet(Protocol):
    """An open set of ready-made tasks."""

    @property
    def name(self) -> str: ...

    @property
    def budgets(self) -> RolloutBudgets:
        """The default budgets of an episode."""
        ...

    def draw(self, draw: TaskDraw) -> list[Task]:
        """Return the tasks, perhaps fewer than requested. Raises `Refused` if there are none."""
        ...

    def environment(self) -> object:
        """Return the environment of one episode: an instance of a plain class, or an `AgentEnvironment`."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Return statistics of the set itself, such as the hit rate of a cache."""
        ...

    def close(self) -> None:
        """Free the set's resources, such as processes. Closing again does nothing."""
        ...


class TaskName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a set in a family. `flaw` describes a known defect in the set's tasks."""

    name: str
    flaw: str = ""


class TaskFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Sets of tasks from one source.

    `package` must be importable ("" means that none is needed), and the extra `extra` installs it. `names` lists the
    sets; a family without names (see `has_names`) is a single set. `open` opens a set by name, with options; `options`
    are the names of the options.
    """

    name: str
    about: str
    open: Callable[[str, Mapping[str, str]], TaskSet]
    has_names: bool = True
    names: Callable[[], Sequence[TaskName]] = tuple
    package: str = ""
    extra: str = ""
    options: frozenset[str] = frozenset()


class NoOptions(BaseModel):
    """The options of a set that takes none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TasksNotInstalled(BombusError):
    """Raised if a family's dependency is not installed or not usable here. The message says what to do."""


def options_of(model: type[OptionsT], name: str, given: Mapping[str, str]) -> OptionsT:
    """Parse a set's options from text. Raises `Refused` with a clause for each invalid option."""
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise Refused(Code.BAD_CONFIG, "; ".join(_sentences(model, name, error))) from error


def _sentences(model: type[BaseModel], name: str, error: ValidationError) -> list[str]:
    sentences = []
    for problem in error.errors(include_url=False):
        option = ".".join(str(part) for part in problem["loc"])
        field = model.model_fields.get(option)
        if problem["type"] == "extra_forbidden":
            takes = f"it takes {', '.join(model.model_fields)}" if model.model_fields else "it takes none"
            sentences.append(f"{name} has no option {option!r}: {takes}")
        elif field is None or problem["type"] == "value_error":
            sentences.append(f"{name}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            sentences.append(f"the option {option}={problem['input']} of {name} is not allowed: {allowed(field)}")
    return sentences
