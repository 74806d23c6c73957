"""The options that `bombus run` and `bombus eval` share: which tasks, how many of them, and what an episode may use."""

import argparse
from pathlib import Path
from typing import Annotated

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from bombus.config.flags import Flag
from bombus.environments.budgets import RolloutBudgets
from bombus.errors import Code, Refused
from bombus.sdk.types import Task
from bombus.tasks.files import SUFFIX
from bombus.tasks.kinds import SIZE_MAX, TaskDraw, TaskSet, TaskSplit
from bombus.tasks.registry import family_of
from bombus.terminal import say


class PlayOptions(BaseModel):
    """The command-line options of both commands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Annotated[tuple[str, ...], Flag(declared_elsewhere=True)]
    engine: Annotated[str, Flag(declared_elsewhere=True)]
    split: TaskSplit
    n: Annotated[int, Flag(declared_elsewhere=True)] = Field(default=8, ge=1, le=SIZE_MAX)
    repeat: int = Field(default=1, ge=1, le=4096, description="how many episodes to play of each task")
    seed: int = Field(default=0, ge=0, le=999, description="which tasks are drawn")
    temperature: Annotated[float | None, Flag(metavar="T", default="the server's")] = Field(
        default=None, ge=0, le=10, description="the temperature of sampling"
    )
    turns_max: Annotated[int | None, Flag(default="that of the tasks")] = Field(
        default=None, ge=1, le=10_000, description="how many answers the model may give in an episode"
    )
    tokens_max: Annotated[int | None, Flag(default="that of the tasks")] = Field(
        default=None, ge=2, le=10_000_000, description="how many tokens a conversation may have"
    )
    at_once: int = Field(default=8, ge=1, le=1024, description="how many episodes run at the same time")
    option: Annotated[tuple[str, ...], Flag(name="--set", metavar="NAME=VALUE")] = Field(
        default=(), description="an option for the tasks that have it; may be given several times"
    )
    out: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        default=None, description="write a JSON line for each episode to this new file"
    )

    @field_validator("option")
    @classmethod
    def _named(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            if "=" not in each:
                raise ValueError(f"--set {each!r} has no value: write NAME=VALUE")
        return given

    @field_validator("engine")
    @classmethod
    def _is_url(cls, given: str) -> str:
        try:
            httpx.URL(given)
        except httpx.InvalidURL as error:
            raise ValueError(f"it is not an address: {error}") from error
        if not given.startswith(("http://", "https://")):
            raise ValueError("it is not the address of a server, such as http://127.0.0.1:8000/v1")
        return given

    def options_for(self, name: str) -> dict[str, str]:
        """Return the options for one of the sets: those that it has, and those that no set has, so that the set refuses
        them.

        Raises `Refused` for any option if all tasks come from files, which have no options.
        """
        given = dict(each.split("=", 1) for each in self.option)
        families = [family_of(each) for each in self.task if not each.endswith(SUFFIX)]
        if given and not families:
            raise Refused(Code.BAD_CONFIG, f"--set {min(given)} is refused: the tasks of a file have no options")
        if name.endswith(SUFFIX):
            return {}
        known = frozenset().union(*(family.options for family in families))
        own = family_of(name).options
        return {option: value for option, value in given.items() if option in own or option not in known}

    def draw(self, tasks: TaskSet) -> list[Task]:
        """Return the tasks of a set to play, and print a line if there are fewer than requested."""
        drawn = tasks.draw(TaskDraw(size=self.n, seed=self.seed, split=self.split))
        if len(drawn) < self.n:
            say(f"{tasks.name}: {len(drawn)} tasks will be played: there are no more", flush=True)
        return drawn

    @property
    def sampling(self) -> dict[str, float]:
        return {} if self.temperature is None else {"temperature": self.temperature}

    def budgets(self, tasks: TaskSet) -> RolloutBudgets:
        """Return the budgets for an episode of these tasks."""
        given = {"turns_max": self.turns_max, "tokens_max": self.tokens_max}
        return tasks.budgets.model_copy(update={name: value for name, value in given.items() if value is not None})


def add_play_arguments(parser: argparse.ArgumentParser, *, task: str, engine: str) -> None:
    """Add `--task`, `--engine` and `-n`. `task` and `engine` are the help texts for the first two."""
    parser.add_argument("--task", action="append", required=True, metavar="NAME", help=task)
    parser.add_argument("--engine", required=True, metavar="URL", help=engine)
    parser.add_argument(
        "-n", type=int, default=8, metavar="N", help="how many tasks of each name (default: %(default)s)"
    )


def flaw_of(name: str) -> str:
    """Return the known flaw of a set of tasks, or "" if there is none."""
    family, _, member = name.partition(":")
    return next((each.flaw for each in family_of(family).names() if each.name == member), "")
