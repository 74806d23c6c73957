"""A session at an environment server as an `AgentEnvironment`, which whatever runs an agent can play."""

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
from bombus.sdk.types import Task

ACTION_TOOL = "step"  # acts in an environment whose actions are not calls of tools


class RemoteEnvironment:
    """An environment at a server. Its methods raise `InfraError` once the session is dead.

    At a server of ours the environment itself says when it is over and what a rollout is worth. At another server of
    OpenEnv's, a call is a step; an episode is over when a step said so, and is worth the sum of the steps' rewards. No
    call is carried out after that, also not another one of the same answer: it would earn a reward again.
    A server with tools of MCP has those; at one without, the model is given a tool `step` whose arguments are the
    action, as the server's `/schema` describes it. Where there are tools, but its actions do not call them, there is
    `step` beside them.
    """

    def __init__(self, session: EnvSession) -> None:
        self.session = session
        self._has_tools = False  # of MCP
        self._steps_call_tools = False
        self._is_over = False
        self._reward = 0.0
        self._turn = asyncio.Lock()  # for one step at a time, so that each is sent knowing what the last one ended

    async def open(self, task: Task) -> Opening:
        """Make the environment new for a task. Raises `ResetFailed` and `EnvironmentLost`."""
        self._is_over, self._reward = False, 0.0
        if not self.session.is_ours:
            return await self._open_other(task)
        result = await self.session.reset({"task": task.model_dump(mode="json")})
        try:
            return msgspec.convert(result.observation, Opening)
        except msgspec.ValidationError as error:
            raise ResetFailed(f"the server's answer to the reset has no first messages: {error}") from error

    async def call(self, call: ToolCall) -> ToolOutcome:
        """Carry out a call. If the server declines it, the outcome is `failed`. Raises `EnvironmentLost`."""
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
        """Return what a rollout is worth. Raises `EnvironmentLost` where the server cannot say it."""
        if not self.session.is_ours:
            return RolloutScores(reward=self._reward)
        try:
            return msgspec.convert(await self._call(Rpc.SCORE, transcript), RolloutScores)
        except msgspec.ValidationError as error:
            raise EnvironmentLost(f"the server's scores cannot be read: {error}") from error

    async def close(self) -> None:
        await self.session.close()

    async def _call(self, method: Rpc, transcript: Transcript) -> dict[str, Any]:
        try:
            return await self.session.rpc(method, {"transcript": msgspec.to_builtins(transcript)})
        except StepRefused as error:
            raise EnvironmentLost(f"the environment does not answer {method}: {error}") from error

    # ---- servers that are not ours --------------------------------------------------------------------------------

    async def _open_other(self, task: Task) -> Opening:
        result = await self.session.reset(reset_of(task))
        self._note(result)
        tools = await self._tools()
        seen = result.observation
        is_shown = any(seen.values()) or not (task.main_query or task.init_messages)  # a model is sent some message
        shown = [msgspec.json.encode(seen).decode()] if is_shown else []
        text = "\n\n".join([task.main_query, *shown] if task.main_query else shown)
        messages = [*task.init_messages, *([{"role": "user", "content": text}] if text else [])]
        return Opening(messages=messages, tools=tools)

    async def _tools(self) -> list[ToolSchema]:
        """Return the tools of MCP, and the one that takes a step where there are none or steps do not call them."""
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
        """Return the tools of MCP. A server may tell them by JSON-RPC, or only by a step."""
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
                raise StepRefused("", f"{call.name} is not a tool: there is {ACTION_TOOL}")
            return _seen({"result": await self.session.rpc(Rpc.CALL_TOOL, {"name": call.name, "arguments": arguments})})

    async def _stepped(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take a step, note what it was worth, and return what was seen."""
        result = await self.session.step(action)
        self._note(result)
        return result.observation

    def _note(self, result: StepResult) -> None:
        self._is_over = result.done
        self._reward += result.reward or 0.0


def _is_described(action: dict[str, Any]) -> bool:
    """Return whether the schema of an action says what there is in one."""
    return any(action.get(name) for name in ("properties", "oneOf", "anyOf"))


def _names_tools(action: dict[str, Any]) -> bool:
    """Return whether an action may be the one of OpenEnv's that calls a tool."""
    return b'"tool_name"' in msgspec.json.encode(action)


def _seen(observation: dict[str, Any]) -> ToolOutcome:
    """Return what a model is shown of a tool of MCP: its text, or the whole as JSON where there is more than text."""
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
    """Return what a model wrote as the arguments of a call. Raises `StepRefused`."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise StepRefused("", f"the arguments are not a JSON object: {error}") from error
