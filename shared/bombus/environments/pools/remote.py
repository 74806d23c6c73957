"""A session at an environment server as an `AgentEnvironment`, which any rollout can play."""

import asyncio
import contextlib
from typing import Any

import msgspec

from bombus.environments.kinds import (
    EnvironmentLost,
    Opening,
    ResetFailed,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Transcript,
)
from bombus.environments.openenv.messages import Rpc, StepResult
from bombus.environments.pools.session import EnvSession, StepRefused
from bombus.hive.failures import FailureKind
from bombus.sdk.types import Task

ACTION_TOOL = "step"  # the tool for environments whose actions are not tool calls


class RemoteEnvironment:
    """An environment on a server. Its methods raise `InfraError` once the session is dead.

    On one of our servers, the environment itself decides when the episode is over and what its reward is. On any other
    OpenEnv server, each call is a step; the episode is over once a step says so, and its reward is the sum of the
    steps' rewards. After that no call is carried out, not even a remaining call in the same answer, because it would
    earn another reward.

    If the server has MCP tools, the model is given those tools. If the server has none, or its actions do not call
    them, the model is given a tool `step`, whose arguments are the action as described by the server's `/schema`.
    """

    def __init__(self, session: EnvSession) -> None:
        self.session = session
        self._has_tools = False  # whether it has MCP tools
        self._steps_call_tools = False
        self._is_over = False
        self._reward: float | None = None  # sum over the steps so far, or None if no step had a reward
        self._turn = asyncio.Lock()  # one step at a time, so that each sees whether the previous step ended the episode

    async def open(self, task: Task) -> Opening:
        """Reset the environment for a task. Raises `ResetFailed` if that fails, or `EnvironmentLost` if the environment
        is gone."""
        self._is_over, self._reward = False, None
        if not self.session.is_ours:
            return await self._open_other(task)
        result = await self.session.reset({"task": task.model_dump(mode="json")})
        try:
            return msgspec.convert(result.observation, Opening)
        except msgspec.ValidationError as error:
            raise ResetFailed(f"the server's answer to the reset has no first messages: {error}") from error

    async def call(self, call: ToolCall) -> ToolOutcome:
        """Carry out a tool call. If the server declines it, the outcome has `failed` set. Raises `EnvironmentLost` if
        the environment is gone."""
        try:
            if self.session.is_ours:
                params = {"name": call.name, "arguments": call.arguments, "id": call.id}
                return _outcome(await self.session.rpc(Rpc.CALL_TOOL, params))
            return await self._step(call)
        except StepRefused as error:
            return ToolOutcome(text=str(error), failed=True)

    async def is_over(self, transcript: Transcript) -> bool:
        if not self.session.is_ours:
            return self._is_over
        return bool((await self._call(Rpc.IS_OVER, transcript)).get("is_over"))

    async def score(self, transcript: Transcript) -> RolloutScores:
        """Return the scores of a rollout. Raises `EnvironmentLost` if the server does not provide them."""
        if not self.session.is_ours:
            if self._is_over and self._reward is None:
                raise EnvironmentLost("the environment ended the episode, but no step had a reward", FailureKind.GRADER)
            return RolloutScores(reward=self._reward or 0.0)
        try:
            return msgspec.convert(await self._call(Rpc.SCORE, transcript), RolloutScores)
        except msgspec.ValidationError as error:
            raise EnvironmentLost(f"the server's scores cannot be read: {error}", FailureKind.GRADER) from error

    async def close(self) -> None:
        await self.session.close()

    async def _call(self, method: Rpc, transcript: Transcript) -> dict[str, Any]:
        try:
            return await self.session.rpc(method, {"transcript": msgspec.to_builtins(transcript)})
        except StepRefused as error:
            kind = FailureKind.GRADER if method == Rpc.SCORE else None
            raise EnvironmentLost(f"the environment did not answer {method}: {error}", kind) from error

    # ---- other OpenEnv servers --------------------------------------------------------------------------------------

    async def _open_other(self, task: Task) -> Opening:
        result = await self.session.reset(reset_of(task))
        self._note(result)
        tools = await self._tools()
        seen = result.observation
        is_shown = any(seen.values()) or not (task.main_query or task.init_messages)  # models need at least one message
        shown = [msgspec.json.encode(seen).decode()] if is_shown else []
        text = "\n\n".join([task.main_query, *shown] if task.main_query else shown)
        messages = [*task.init_messages, *([{"role": "user", "content": text}] if text else [])]
        return Opening(messages=messages, tools=tools)

    async def _tools(self) -> list[ToolSchema]:
        """Return the MCP tools, and the tool `step` if there are none or if steps do not call them."""
        action = await self.session.action_schema()
        found = await self._listed(action)
        self._has_tools = bool(found)
        self._steps_call_tools = bool(found) and (_names_tools(action) or not _is_described(action))
        tools = [
            ToolSchema(
                name=str(tool.get("name")),
                description=str(tool.get("description") or ""),
                parameters=tool.get("inputSchema") or tool.get("input_schema") or {},
            )
            for tool in found
        ]
        if not self._steps_call_tools:
            tools = [tool for tool in tools if tool.name != ACTION_TOOL]
            tools.append(ToolSchema(name=ACTION_TOOL, description="Acts in the environment.", parameters=action))
        return tools

    async def _listed(self, action: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the MCP tools. Some servers list them over JSON-RPC, others only in response to a step."""
        try:
            found = (await self.session.rpc(Rpc.LIST_TOOLS, {})).get("tools")
        except StepRefused:
            found = None
            if _names_tools(action):
                with contextlib.suppress(StepRefused):
                    found = (await self.session.step({"type": "list_tools"})).observation.get("tools")
        return [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []

    async def _step(self, call: ToolCall) -> ToolOutcome:
        arguments = arguments_of(call)
        async with self._turn:
            if self._is_over:
                raise StepRefused("", "the episode is over, so nothing was done")
            if self._steps_call_tools:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
                return _seen(await self._stepped(action))
            if call.name == ACTION_TOOL:
                seen = await self._stepped(arguments)
                return ToolOutcome(text=msgspec.json.encode(seen).decode(), failed=bool(seen.get("error")))
            if not self._has_tools:
                raise StepRefused("", f"{call.name} is not a tool: the only tool is {ACTION_TOOL}")
            return _seen({"result": await self.session.rpc(Rpc.CALL_TOOL, {"name": call.name, "arguments": arguments})})

    async def _stepped(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take a step, note its reward, and return the observation."""
        result = await self.session.step(action)
        self._note(result)
        return result.observation

    def _note(self, result: StepResult) -> None:
        self._is_over = result.done
        if result.reward is not None:
            self._reward = (self._reward or 0.0) + result.reward


def _is_described(action: dict[str, Any]) -> bool:
    """Return whether an action's schema describes the contents of an action."""
    return any(action.get(name) for name in ("properties", "oneOf", "anyOf"))


def _names_tools(action: dict[str, Any]) -> bool:
    """Return whether an action may be OpenEnv's tool-call action."""
    return b'"tool_name"' in msgspec.json.encode(action)


def _seen(observation: dict[str, Any]) -> ToolOutcome:
    """Return an MCP tool's result as shown to the model: its text, or everything as JSON if there is more than text."""
    if error := observation.get("error"):
        return ToolOutcome(text=str(error.get("message") if isinstance(error, dict) else error), failed=True)
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(result, dict) and isinstance(parts, list) and parts and all(map(_is_text, parts)):
        text = "\n".join(str(part.get("text")) for part in parts)
        return ToolOutcome(text=text, failed=bool(result.get("is_error")))
    return ToolOutcome(text=msgspec.json.encode(observation).decode())


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _outcome(result: dict[str, Any]) -> ToolOutcome:
    parts = [part.get("text", "") for part in result.get("content", []) if isinstance(part, dict)]
    return ToolOutcome(text="\n".join(parts), failed=bool(result.get("isError")))


def reset_of(task: Task) -> dict[str, Any]:
    """Return the arguments of a reset for a server that does not know tasks: the metadata, such as `seed`."""
    given = {"episode_id": task.task_id} if task.task_id else {}
    return {**given, **task.metadata}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments that a model wrote for a call. Raises `StepRefused`."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise StepRefused("", f"the arguments are not a JSON object: {error}") from error
