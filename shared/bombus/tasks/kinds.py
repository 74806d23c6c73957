"""What a set of ready tasks is: tasks that are drawn from a seed, and the environment that they are played in."""

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
SEEDS_OF_A_DRAW = 1_000_000  # a generator makes its task i from seed + i, and no two draws may meet
EVAL_SEEDS = 1_000_000_000  # seeds of evaluation tasks begin here, so that no task is in both splits

OptionsT = TypeVar("OptionsT", bound=BaseModel)


class TaskSplit(StrEnum):
    """Which tasks are meant: those to train on, or those that are never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class TaskDraw(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to draw. The same draw gives the same tasks; another seed or split gives others where it can."""

    size: int
    seed: int = 0
    split: TaskSplit = TaskSplit.TRAIN

    def __post_init__(self) -> None:
        if not 1 <= self.size <= SIZE_MAX:
            raise Refused(Code.BAD_CONFIG, f"{self.size} tasks cannot be drawn: from 1 to {SIZE_MAX} can")
        if not 0 <= self.seed <= SEED_MAX:
            raise Refused(Code.BAD_CONFIG, f"the seed {self.seed} is refused: it must be from 0 to {SEED_MAX}")

    @property
    def first_seed(self) -> int:
        """The seed of the first task, where a generator takes one for each: the others have those after it."""
        return self.seed * SEEDS_OF_A_DRAW + (EVAL_SEEDS if self.split == TaskSplit.EVAL else 0)


class TaskSet(Protocol):
    """A set of ready tasks that is open."""

    @property
    def name(self) -> str: ...

    @property
    def budgets(self) -> RolloutBudgets:
        """What an episode may use unless something else is asked for."""
        ...

    def draw(self, draw: TaskDraw) -> list[Task]:
        """Return tasks, perhaps fewer than were asked for. Raises `Refused` where there are none."""
        ...

    def environment(self) -> object:
        """Return the environment of one episode: an instance of a plain class, or an `AgentEnvironment`."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Return what the set itself has counted, such as the hit rate of a cache."""
        ...

    def close(self) -> None:
        """Free what the set holds, such as processes. Closing again does nothing."""
        ...


class TaskName(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a family has. `flaw` says what is known to be wrong with its tasks."""

    name: str
    flaw: str = ""


class TaskFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Sets of tasks that come from one source.

    `package` must be importable ("": none), and the extra `extra` installs it. `names` lists the sets; a family that
    does not have names (`has_names`) is a single set. `open` opens a set by its name and its options, which are among
    `options`.
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
    """The options of a set that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TasksNotInstalled(BombusError):
    """What a family needs is not installed, or not usable here. The sentence says what to do."""


def options_of(model: type[OptionsT], name: str, given: Mapping[str, str]) -> OptionsT:
    """Return the options of a set, from text. Raises `Refused` with a sentence for each that is wrong."""
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
            sentences.append(f"the option {option}={problem['input']} of {name} is refused: {allowed(field)}")
    return sentences
