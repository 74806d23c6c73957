"""Carries out one session's OpenEnv messages as calls to an `AgentEnvironment`, and answers them. Has no sockets."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import ValidationError

from bombus.environments.kinds import (
    AgentEnvironment,
    Opening,
    ResetFailed,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Transcript,
)
from bombus.environments.openenv.messages import (
    MESSAGE_BYTES_MAX,
    Rpc,
    RpcError,
    StepResult,
    WireError,
    WireMessage,
    error_message,
    observation_message,
    rpc_error,
    rpc_result,
)
from bombus.environments.serving.loop_blocking import watched
from bombus.errors import in_one_line
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained_here
from bombus.sdk.types import Task

log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSCRIPT_MESSAGES_MAX = 4096  # the most messages in an episode that its client plays step by step
TRANSCRIPT_CHARACTERS_MAX = MESSAGE_BYTES_MAX  # the most characters in the episode's texts, as in a client's transcript
TEXT_CHARACTERS_MAX = 1_000_000  # the longest text of a tool's result: JSON takes at most six bytes for each character
NOT_RESET = "the environment has no task yet: send a reset first"


class BadRequestMessage(ValueError):
    """Raised for an invalid message. The error's text is sent to the client, and the session continues."""


class EnvironmentSource(Protocol):
    """Makes environments, and manages the backends that they run on."""

    exhausted: str  # the message to a client when all slots are taken

    async def make(self, session: str, is_stopped: Callable[[], bool]) -> AgentEnvironment:
        """Return a new environment for a session. `is_stopped` returns whether the session has ended. Raises
        `InfraError`."""
        ...

    async def renew(self, session: str) -> None:
        """Reset the backend of the session's environment for another task. Raises `InfraError`."""
        ...

    async def check(self, session: str) -> None:
        """Raise `InfraError` if the backend of the session's environment is broken."""
        ...

    async def clean(self, session: str, in_use: bool) -> None:
        """Take back the backend of the session's environment. Calling this again does nothing.

        `in_use` means that the environment's code may still be running and using the backend, in which case no other
        session may get the backend.
        """
        ...

    def tools(self) -> Sequence[ToolSchema]:
        """Return the tools that are known before a reset."""
        ...

    def metadata(self) -> dict[str, str]:
        """Return the environment's `name` and `description`."""
        ...

    def schema(self) -> dict[str, object]:
        """Return the JSON schemas of actions, observations and states."""
        ...


class ServedSession:
    """Answers the messages in one session, one at a time.

    `answer` raises `InfraError` if the environment broke, which ends the session. For a client that plays step by step,
    the transcript is kept here, because the environment needs it to determine whether an episode is over and what its
    reward is.
    """

    def __init__(
        self,
        environment: AgentEnvironment,
        session: str,
        source: EnvironmentSource,
        is_stopped: Callable[[], bool],
    ) -> None:
        """Take an environment that `source` made. Its backend is reset before each reset of the environment, and
        checked after a failure and before a score, so that a dead backend is never mistaken for the model's fault.

        Each message is answered in a task of its own; `is_stopped` returns whether the current task was cancelled. Any
        other cancellation is a failure of the environment.
        """
        self.environment = environment
        self._source = source
        self._is_stopped = is_stopped
        self.session = session
        self.opening: Opening | None = None
        self.transcript = Transcript()
        self.steps = 0
        self._characters = 0  # number of characters in this transcript
        self.episode = ""
        self._is_over = False

    async def answer(self, message: WireMessage, is_posted: bool = False) -> WireMessage:
        """Carry out a message other than `close`. Raises `InfraError`.

        A client that posts its tool calls does not send a transcript of those calls, so the calls are added to the
        transcript kept here.
        """
        try:
            match message.type:
                case "reset":
                    return observation_message(await self._reset(message.data))
                case "step":
                    return observation_message(await self._step(message.data))
                case "state":
                    return WireMessage(type="state", data=self.state())
                case "mcp":
                    return await self._rpc(message.data, is_posted)
        except (BadRequestMessage, ValidationError, msgspec.ValidationError) as error:
            return error_message(WireError.VALIDATION_ERROR, str(error))
        except ResetFailed as error:
            return error_message(WireError.EXECUTION_ERROR, str(error))  # the environment can be reset for another task
        except InfraError:
            raise
        except Exception as error:  # any error in the environment's own code is reported to the client
            await self._source.check(self.session)
            log.warning("the environment of session %s failed: %s", self.session, in_one_line(error), exc_info=error)
            return error_message(WireError.EXECUTION_ERROR, in_one_line(error))
        return error_message(WireError.UNKNOWN_TYPE, f"{message.type!r} is not a type of message")

    def state(self) -> dict[str, Any]:
        return {"episode_id": self.episode or None, "step_count": self.steps, "session": self.session}

    # ---- resets and steps -----------------------------------------------------------------------------------------

    async def _reset(self, data: dict[str, Any]) -> StepResult:
        task = task_of(data)
        self.opening = None  # if the reset fails, the environment has no task
        await self._source.renew(self.session)
        self.opening = opening = await self._watched(self.environment.open(task), "reset")
        self.transcript = Transcript(messages=list(opening.messages))
        self.steps, self._characters, self._is_over = 0, 0, False
        self.episode = str(data.get("episode_id") or task.task_id)
        tools = [msgspec.to_builtins(tool) for tool in opening.tools]
        return StepResult(observation={"messages": opening.messages, "tools": tools})

    async def _step(self, data: dict[str, Any]) -> StepResult:
        if data.get("type") == "list_tools":
            return StepResult(observation={"tools": _mcp_tools(self._tools())})
        self._check_goes_on()
        if isinstance(text := data.get("message"), str):
            self._said({"role": "assistant", "content": text}, len(text))
            return await self._ended({})
        call = self._call_of(data)
        seen = _seen(data, call, await self._noted_outcome(call))
        if await self._watched(self.environment.is_over(self.transcript), "is_over"):
            return await self._ended(seen)
        return StepResult(observation=seen)

    async def _ended(self, seen: dict[str, Any]) -> StepResult:
        self._is_over = True
        await self._source.check(self.session)
        scores = await self._watched(self.environment.score(self.transcript), "score")
        found = msgspec.to_builtins(scores)
        return StepResult(observation=seen, reward=scores.reward, done=True, metadata={"scores": found})

    def _check_goes_on(self) -> None:
        """Raise `BadRequestMessage` if no further step may follow."""
        self._opened()
        if self._is_over:
            raise BadRequestMessage("the episode is over: send a reset to start another")
        if len(self.transcript.messages) + 2 > TRANSCRIPT_MESSAGES_MAX:
            raise BadRequestMessage(f"an episode has at most {TRANSCRIPT_MESSAGES_MAX} messages: send a reset")
        if self._characters > TRANSCRIPT_CHARACTERS_MAX:
            raise BadRequestMessage(
                f"an episode has at most {TRANSCRIPT_CHARACTERS_MAX} characters in its messages: send a reset"
            )

    async def _noted_outcome(self, call: ToolCall) -> ToolOutcome:
        """Carry out a call, and add it to the transcript."""
        made = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        outcome = await self._outcome(call)
        self._said(
            {"role": "assistant", "content": None, "tool_calls": [made]}, len(call.arguments) + len(outcome.text)
        )
        self.transcript.messages.append({"role": "tool", "tool_call_id": call.id, "content": outcome.text})
        self.transcript.tool_calls += 1
        self.transcript.tool_failures += outcome.failed
        return outcome

    async def _outcome(self, call: ToolCall) -> ToolOutcome:
        outcome = await self._watched(self.environment.call(call), call.name[:100])
        if outcome.failed:
            await self._source.check(self.session)
        return ToolOutcome(text=_sendable(outcome.text), failed=outcome.failed)

    def _watched(self, work: Awaitable[T], name: str) -> Awaitable[T]:
        """Await the environment's work. A `SystemExit` that the work raises is a failure of the environment and does
        not end the server."""
        return watched(contained_here(work, self._is_stopped), name, self.session)

    def _said(self, message: dict[str, Any], characters: int) -> None:
        self.steps += 1
        self._characters += characters
        self.transcript.turns += 1
        self.transcript.messages.append(message)

    def _call_of(self, data: dict[str, Any]) -> ToolCall:
        """Return the tool call in a step: `{"tool", "arguments"}`, or an OpenEnv action that calls a tool."""
        name = data.get("tool", data.get("tool_name"))
        if not isinstance(name, str):
            raise BadRequestMessage('a step must be {"tool": name, "arguments": {...}}, or {"message": text} to end')
        return _call(name, data.get("arguments", {}), str(data.get("id") or f"call_{self.steps}"))

    def _tools(self) -> Sequence[ToolSchema]:
        known = self._source.tools() if self.opening is None else ()
        return known or self._opened().tools

    def _opened(self) -> Opening:
        if self.opening is None:
            raise BadRequestMessage(NOT_RESET)
        return self.opening

    # ---- mcp ------------------------------------------------------------------------------------------------------

    async def _rpc(self, data: dict[str, Any], is_posted: bool) -> WireMessage:
        number, method, params = data.get("id"), data.get("method"), data.get("params") or {}
        if not isinstance(method, str) or not isinstance(params, dict):
            why = 'a request must be {"jsonrpc": "2.0", "id", "method", "params": {...}}'
            return rpc_error(number, RpcError.INVALID_REQUEST, why)
        try:
            match method:
                case Rpc.LIST_TOOLS:
                    return rpc_result(number, {"tools": _mcp_tools(self._tools())})
                case Rpc.CALL_TOOL:
                    return rpc_result(number, await self._mcp_call(params, is_posted))
                case Rpc.IS_OVER:
                    asked = self.environment.is_over(self._transcript_of(params))
                    return rpc_result(number, {"is_over": await self._watched(asked, "is_over")})
                case Rpc.SCORE:
                    await self._source.check(self.session)
                    scores = await self._watched(self.environment.score(self._transcript_of(params)), "score")
                    return rpc_result(number, msgspec.to_builtins(scores))
        except (BadRequestMessage, msgspec.ValidationError) as error:
            return rpc_error(number, RpcError.INVALID_PARAMS, str(error))
        return rpc_error(number, RpcError.METHOD_NOT_FOUND, f"{method[:100]!r} is not a method: {', '.join(Rpc)}")

    async def _mcp_call(self, params: dict[str, Any], is_posted: bool) -> dict[str, Any]:
        self._opened()
        name = params.get("name")
        if not isinstance(name, str):
            raise BadRequestMessage('the params of tools/call must be {"name", "arguments"}')
        call = _call(name, params.get("arguments", {}), str(params.get("id") or f"call_{self.steps}"))
        if is_posted:
            self._check_goes_on()
            outcome = await self._noted_outcome(call)
        else:
            outcome = await self._outcome(call)
            self.steps += 1
        return {"content": [{"type": "text", "text": outcome.text}], "isError": outcome.failed}

    def _transcript_of(self, params: dict[str, Any]) -> Transcript:
        """Return the transcript that the client sent, with its model's answers."""
        self._opened()
        return msgspec.convert(params.get("transcript", {}), Transcript)


def task_of(data: dict[str, Any]) -> Task:
    """Return the task in the field `task` of a reset. Other fields of the reset, such as `seed`, go into the task's
    metadata.

    Raises `BadRequestMessage` if `task` is not an object.
    """
    given = data.get("task", {})
    if not isinstance(given, dict):
        raise BadRequestMessage("the field task of a reset must be an object with the fields of a Task")
    task = Task.model_validate({name: given[name] for name in Task.model_fields if name in given})  # from any release
    rest = {name: value for name, value in data.items() if name != "task"}
    return task.model_copy(update={"metadata": {**rest, **task.metadata}})


def _call(name: str, arguments: object, id: str) -> ToolCall:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(id=id, name=name, arguments=text)


def _sendable(text: str) -> str:
    """Return a tool's text, cut to a length that fits into a message, with unpaired surrogates replaced."""
    if (left := len(text) - TEXT_CHARACTERS_MAX) > 0:
        text = f"{text[:TEXT_CHARACTERS_MAX]}\n[{left} more characters were left out]"
    return text.encode(errors="replace").decode()


def _seen(data: dict[str, Any], call: ToolCall, outcome: ToolOutcome) -> dict[str, Any]:
    """Return the observation that answers a step, in the format that the request for the step used."""
    if "tool" in data:
        return {"text": outcome.text, "failed": outcome.failed}
    error = {"error_type": "execution_error", "message": outcome.text} if outcome.failed else None
    return {"tool_name": call.name, "result": None if outcome.failed else outcome.text, "error": error}


def _mcp_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    return [{"name": tool.name, "description": tool.description, "inputSchema": tool.parameters} for tool in tools]
