"""The interface between an environment and the code that plays it: how it opens, its tools, and its scores.

A plain class and a session at an environment server both become an `AgentEnvironment`, so one loop plays either.
"""

import inspect
import math
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from bombus.hive.episodes import reward_number
from bombus.hive.failures import FailureKind
from bombus.sdk.errors import InfraError
from bombus.sdk.reports import read_report
from bombus.sdk.types import Task

MessageDict = dict[str, Any]  # a message of a chat completion: role, content, tool_calls, tool_call_id


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is described to the model. `parameters` is the JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def as_openai(self) -> dict[str, Any]:
        """Return this tool as an entry of `tools` in a chat completion."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the model wrote it. `arguments` is the JSON text of the call's arguments, unchecked."""

    id: str
    name: str
    arguments: str = "{}"


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool call, as text. If `failed` is true, `text` is the bare reason, which the model sees as
    `<error>Tool failed: ...</error>`."""

    text: str
    failed: bool = False


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode begins: its first messages and the available tools."""

    messages: list[MessageDict]
    tools: list[ToolSchema] = []


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"  # the model or the environment declared the episode done
    TRUNCATED = "truncated"  # a budget was used up, or the model's answer was cut off at its length limit
    ABORTED = "aborted"  # something failed that is not the model's fault: there is no reward


class RolloutScores(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's scores for a rollout. `reward` is the weighted sum of `rewards`. `rewards` and `metrics` are
    only reported: entries that are not numbers are left out with a warning.

    Raises `ValueError` for a reward that is not a finite number.
    """

    reward: float
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    is_success: bool | None = None

    def __post_init__(self) -> None:
        number = reward_number(self.reward)
        if not math.isfinite(number):
            raise ValueError(f"the reward is {number}, which is not a finite number")
        msgspec.structs.force_setattr(self, "reward", number)
        said = read_report(None, self.metrics, self.is_success)
        parts = read_report(None, self.rewards, None).log_metrics
        for name, value in (("metrics", said.log_metrics), ("is_success", said.is_success), ("rewards", parts)):
            msgspec.structs.force_setattr(self, name, value)


class Transcript(msgspec.Struct, kw_only=True):
    """A rollout so far: all messages, and the totals that count against the budgets."""

    messages: list[MessageDict] = []
    turns: int = 0  # number of the model's answers
    prompt_tokens: int = 0  # tokens in the prompt of the newest request
    completion_tokens: int = 0  # tokens in all answers
    tool_calls: int = 0
    tool_failures: int = 0
    status: RolloutStatus | None = None  # None while the rollout is running
    failure: FailureKind | None = None  # the budget that was used up, if the rollout is truncated


def task_of_its_own(task: Task) -> Task:
    """Return a copy of a task for one episode, which may change its messages and metadata: lists and dicts are copied.

    Other objects in them, such as a database, are shared with other episodes.
    """
    return task.model_copy(update={"init_messages": _copied(task.init_messages), "metadata": _copied(task.metadata)})


def _copied(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copied(each) for key, each in value.items()}
        case list():
            return [_copied(each) for each in value]
        case _:
            return value


class AgentEnvironment(Protocol):
    """An environment for one agent at a time. It is not used again after one of its methods has raised `InfraError`."""

    async def open(self, task: Task) -> Opening:
        """Reset the environment for a task, and return how its episode begins."""
        ...

    async def call(self, call: ToolCall) -> ToolOutcome:
        """Carry out a tool call. If the tool fails, return an outcome with `failed` set instead of raising.

        A call that takes too long is cancelled. If that makes the environment unusable, the next use raises
        `EnvironmentLost`.
        """
        ...

    async def is_over(self, transcript: Transcript) -> bool:
        """Return whether the environment ends the episode now. Called after each turn."""
        ...

    async def score(self, transcript: Transcript) -> RolloutScores:
        """Return the scores of a finished rollout."""
        ...

    async def close(self) -> None:
        """Release the environment. Closing it again does nothing."""
        ...


def is_environment(made: object) -> bool:
    """Return whether a class or an instance is already an `AgentEnvironment`, rather than a plain class."""
    kind = made if inspect.isclass(made) else type(made)  # an instance's `__getattr__` might accept any name
    return all(hasattr(kind, name) for name in ("open", "call", "is_over", "score", "close"))


class EnvironmentLost(InfraError):
    """The session is dead and cannot be recovered: its server is gone, a step took too long, or its lease lapsed."""

    failure = FailureKind.ENVIRONMENT


class SandboxLost(EnvironmentLost):
    """What the environment runs on, for instance its sandbox, has failed."""

    failure = FailureKind.SANDBOX


class EnvironmentsBusy(InfraError):
    """All environments on a server are taken, and none became free in time."""

    failure = FailureKind.ENVIRONMENT


class ResetFailed(InfraError):
    """The environment could not be reset for a task."""

    failure = FailureKind.ENVIRONMENT


class MethodFailed(InfraError):
    """One of the environment's own methods, other than a tool, failed. By default, it is taken to be a reward
    method."""

    failure = FailureKind.GRADER


def went_on(name: str, kind: FailureKind = FailureKind.TOOL) -> EnvironmentLost:
    """Return the error for a coroutine, by default a tool, that was still running some seconds after it was
    cancelled."""
    return EnvironmentLost(
        f"`{name}` kept running after it was cancelled, so the environment was abandoned. Let the CancelledError that "
        "ends it propagate: `except Exception` does, `except:` does not",
        kind,
    )
