"""The interface between an environment and the code that plays it: how it opens, its tools, and its scores.

A plain class and a session at an environment server both become an `AgentEnvironment`, so one loop plays either.
"""

import inspect
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from bombus.hive.episodes import reward_number
from bombus.sdk.errors import InfraError
from bombus.sdk.reports import read_report
from bombus.sdk.types import Task

MessageDict = dict[str, Any]  # as in a chat completion: role, content, tool_calls, tool_call_id


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is described to the model. `parameters` is the JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def as_openai(self) -> dict[str, Any]:
        """Return the entry of `tools` in a chat completion."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool as the model wrote it. `arguments` is its JSON text, which may be anything."""

    id: str
    name: str
    arguments: str = "{}"


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool gave back, as text. One that `failed` has the bare reason, which the model is shown as
    `<error>Tool failed: ...</error>`."""

    text: str
    failed: bool = False


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode begins: the first messages, and the tools that there are."""

    messages: list[MessageDict]
    tools: list[ToolSchema] = []


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"  # the model or the environment said that it is done
    TRUNCATED = "truncated"  # a budget was used up, or the model's answer was cut at its length
    ABORTED = "aborted"  # something broke that is not the model's fault: there is no reward


class RolloutScores(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says of a rollout. `reward` is the weighted sum of `rewards`; these and `metrics` are only
    reported, so that what is no number in them is left out with a warning.

    Raises `ValueError` for a reward that is not a number.
    """

    reward: float
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    is_success: bool | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reward", reward_number(self.reward))
        said = read_report(None, self.metrics, self.is_success)
        parts = read_report(None, self.rewards, None).log_metrics
        for name, value in (("metrics", said.log_metrics), ("is_success", said.is_success), ("rewards", parts)):
            msgspec.structs.force_setattr(self, name, value)


class Transcript(msgspec.Struct, kw_only=True):
    """What has happened in a rollout so far: all messages, and the sums that budgets are compared with."""

    messages: list[MessageDict] = []
    turns: int = 0  # answers of the model
    prompt_tokens: int = 0  # of the newest request
    completion_tokens: int = 0  # of all answers
    tool_calls: int = 0
    tool_failures: int = 0
    status: RolloutStatus | None = None  # None while it goes on


def task_of_its_own(task: Task) -> Task:
    """Return a task whose messages and metadata one episode may change: the lists and dicts in them are copies.

    What else they hold, such as a database, is shared with other episodes.
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
    """One environment for one agent at a time. After an `InfraError` of any method it is not used again."""

    async def open(self, task: Task) -> Opening:
        """Make the environment new for a task, and return how its episode begins."""
        ...

    async def call(self, call: ToolCall) -> ToolOutcome:
        """Carry out a call. A tool that fails gives an outcome with `failed`, and does not raise.

        A call that takes too long is cancelled. Where the environment cannot be used after that, the next use of it
        raises `EnvironmentLost`.
        """
        ...

    async def is_over(self, transcript: Transcript) -> bool:
        """Return whether the environment ends the episode here. It is asked after each turn."""
        ...

    async def score(self, transcript: Transcript) -> RolloutScores:
        """Return what a rollout that is over is worth."""
        ...

    async def close(self) -> None:
        """Give up the environment. Closing again does nothing."""
        ...


def is_environment(made: object) -> bool:
    """Return whether a class, or what it makes, is an `AgentEnvironment` as it stands, and not a plain class."""
    kind = made if inspect.isclass(made) else type(made)  # an instance may have a `__getattr__` that knows any name
    return all(hasattr(kind, name) for name in ("open", "call", "is_over", "score", "close"))


class EnvironmentLost(InfraError):
    """The session is dead: its server is gone, a step took too long, or its lease has lapsed. It never comes back."""


class EnvironmentsBusy(InfraError):
    """All environments of a server are taken, and none became free in time."""


class ResetFailed(InfraError):
    """The environment could not be made new for a task."""


class MethodFailed(InfraError):
    """A method of the environment's own that is not a tool failed, such as the one that gives the reward."""


def went_on(name: str) -> EnvironmentLost:
    """Return the error for a coroutine that still ran some seconds after it was cancelled."""
    return EnvironmentLost(
        f"`{name}` kept running after it was cancelled, so the environment is given up. Let the CancelledError that "
        "ends it propagate: `except Exception` does, `except:` does not"
    )
