"""A server of OpenEnv's as an environment: what an action is, what is wrong with one, and what tools gave back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from bombus.environments.kinds import EnvironmentLost, ToolCall, ToolOutcome, Transcript
from bombus.environments.pools.remote import RemoteEnvironment, arguments_of
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.hive.failures import FailureKind
from bombus.sdk.types import Task

MOVE = {"$defs": {"Way": {"enum": ["up", "down"]}}, "type": "object", "required": ["way"], "title": "Move"}
PROPERTIES = {"way": {"$ref": "#/$defs/Way"}}
GREET = {"name": "greet", "description": "Greets.", "inputSchema": {"type": "object"}}
REFUSED = {
    "message": "Invalid message",
    "code": "VALIDATION_ERROR",
    "errors": [{"loc": ["way"], "msg": "Input should be 'up' or 'down'", "type": "enum"}, {"loc": [], "msg": "no"}, 7],
}


@asynccontextmanager
async def openenv(step: dict[str, Any], schema: str, tools: list[Any]) -> AsyncIterator[RemoteEnvironment]:
    """Play a server with a key that speaks OpenEnv's wire, and answers each step alike. No `tools` means no MCP."""

    async def page(connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != "Bearer sesame":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "")
        return connection.respond(HTTPStatus.OK, schema) if request.path == "/schema" else None

    async def answer(connection: ServerConnection) -> None:
        async for text in connection:
            message = json.loads(text)
            match message["type"]:
                case "reset":
                    said: dict[str, Any] = {"type": "observation", "data": {"observation": {"x": 0}}}
                case "mcp":
                    said = {"type": "mcp", "data": {"jsonrpc": "2.0", **rpc(message["data"], tools)}}
                case "step":
                    said = step
                case _:
                    said = {"type": "state", "data": {}}
            await connection.send(json.dumps(said))

    async with serve(answer, "127.0.0.1", 0, process_request=page) as server:
        port = server.sockets[0].getsockname()[1]
        settings = SessionSettings(key="sesame")
        async with await EnvSession.open(f"http://127.0.0.1:{port}/ws", settings) as session:
            yield RemoteEnvironment(session)


def rpc(request: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    if not tools:
        return {"error": {"code": -32603, "message": "Environment does not support MCP"}}
    if request["method"] == "tools/call":
        told = f"{request['params']['name']} by JSON-RPC"
        return {"result": {"content": [{"type": "text", "text": told}], "is_error": False}}
    return {"result": {"tools": tools}}


async def called(environment: RemoteEnvironment, name: str) -> ToolOutcome:
    return await environment.call(ToolCall(id="c", name=name, arguments='{"way": "side"}'))


async def test_the_one_tool_of_an_environment_without_any_takes_what_the_server_says_an_action_is() -> None:
    properties = {**PROPERTIES, "metadata": {"type": "object"}}
    schema = json.dumps({"action": {**MOVE, "properties": properties}, "observation": {}})
    async with openenv({"type": "error", "data": REFUSED}, schema, []) as environment:
        (tool,) = (await environment.open(Task())).tools
        assert tool.parameters == {**MOVE, "properties": PROPERTIES}
        outcome = await called(environment, "step")
        assert (outcome.failed, outcome.text) == (True, "Invalid message; way: Input should be 'up' or 'down'; no")
    for unknown in ("no JSON", "[]", '{"action": 1}', '{"action": {}}'):
        async with openenv({"type": "error", "data": REFUSED}, unknown, []) as environment:
            (tool,) = (await environment.open(Task())).tools
            assert tool.parameters == {"type": "object", "additionalProperties": True}


async def test_after_the_step_that_ends_an_episode_no_other_call_is_carried_out_or_earns_anything() -> None:
    step = {"type": "observation", "data": {"observation": {}, "reward": 1.0, "done": True}}
    async with openenv(step, "", []) as environment:
        for _ in range(2):
            await environment.open(Task())
            first, *others = await asyncio.gather(*(called(environment, "step") for _ in range(3)))
            assert not first.failed
            assert others == [ToolOutcome(text="the episode is over, so nothing was done", failed=True)] * 2
            assert (await environment.score(Transcript())).reward == 1.0


async def test_tools_that_the_actions_of_an_environment_do_not_call_are_called_beside_its_steps() -> None:
    step = {"type": "observation", "data": {"observation": {"moved": True}, "reward": 1.0}}
    schema = json.dumps({"action": {**MOVE, "properties": PROPERTIES}})
    async with openenv(step, schema, [{"name": "step", "inputSchema": {}}, GREET]) as environment:
        tools = (await environment.open(Task())).tools
        assert [(tool.name, tool.parameters) for tool in tools] == [
            ("greet", {"type": "object"}),
            ("step", {**MOVE, "properties": PROPERTIES}),
        ]
        assert (await called(environment, "greet")) == ToolOutcome(text="greet by JSON-RPC")
        assert (await environment.score(Transcript())).reward == 0.0
        for reward in (1.0, 2.0):
            assert (await called(environment, "step")) == ToolOutcome(text='{"moved":true}')
            assert (await environment.score(Transcript())).reward == reward
    failed = {"type": "observation", "data": {"observation": {"error": "a wall"}}}
    async with openenv(failed, schema, [GREET]) as environment:
        await environment.open(Task())
        assert await called(environment, "step") == ToolOutcome(text='{"error":"a wall"}', failed=True)


async def test_tools_that_only_a_step_tells_are_those_of_an_environment_whose_actions_call_them() -> None:
    call = {"type": "object", "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}}}
    schema = json.dumps({"action": {"oneOf": [{"type": "object"}, {"$ref": "#/$defs/Call"}], "$defs": {"Call": call}}})
    step = {"type": "observation", "data": {"observation": {"tools": [GREET], "result": 7}, "reward": 1.0}}
    async with openenv(step, schema, []) as environment:
        assert [tool.name for tool in (await environment.open(Task())).tools] == ["greet"]
        assert not (await called(environment, "greet")).failed
        assert (await environment.score(Transcript())).reward == 1.0


async def test_an_action_that_is_one_of_several_kinds_is_shown_as_it_is_described() -> None:
    kinds = {"oneOf": [{**MOVE, "properties": PROPERTIES}, {"type": "object"}]}
    async with openenv({"type": "error", "data": REFUSED}, json.dumps({"action": kinds}), []) as environment:
        (tool,) = (await environment.open(Task())).tools
        assert tool.parameters == {"type": "object", **kinds}
        other = await called(environment, "look")
        assert (other.failed, other.text) == (True, "look is not a tool: the only tool is step")


async def test_of_a_tool_of_mcp_its_text_is_shown_and_of_other_parts_all_that_there_is() -> None:
    text, picture = {"type": "text", "text": "hello", "meta": None}, {"type": "image", "data": "aGVsbG8="}
    for result, shown, failed in (
        ({"content": [text, text], "is_error": False, "data": "hello"}, "hello\nhello", False),
        ({"content": [text], "is_error": True}, "hello", True),
        ({"content": [text, picture]}, '{"result":{"content":[{"type":"text","text":"hello","meta":null},', False),
        ({"content": []}, '{"result":{"content":[]}}', False),
        (7, '{"result":7}', False),
    ):
        step = {"type": "observation", "data": {"observation": {"result": result}}}
        async with openenv(step, "", [GREET]) as environment:
            assert [tool.name for tool in (await environment.open(Task())).tools] == ["greet"]
            outcome = await called(environment, "greet")
            assert outcome.text.startswith(shown)
            assert outcome.failed is failed
    for error in ({"error_type": "execution_error", "message": "no such name"}, "no such name"):
        step = {"type": "observation", "data": {"observation": {"result": None, "error": error}}}
        async with openenv(step, "", [GREET]) as environment:
            await environment.open(Task())
            assert await called(environment, "greet") == ToolOutcome(text="no such name", failed=True)


@pytest.mark.parametrize(("reward", "worth"), [(True, 1.0), (False, 0.0), (2, 2.0), (0.5, 0.5)])
async def test_a_reward_of_openenvs_may_be_a_truth_value(reward: object, worth: float) -> None:
    step = {"type": "observation", "data": {"observation": {}, "reward": reward, "done": True}}
    async with openenv(step, "", []) as environment:
        await environment.open(Task())
        await called(environment, "step")
        assert await environment.is_over(Transcript())
        assert (await environment.score(Transcript())).reward == worth


async def test_an_environment_of_openenvs_that_ends_without_any_reward_has_not_judged() -> None:
    step = {"type": "observation", "data": {"observation": {}, "reward": None, "done": True}}
    async with openenv(step, "", []) as environment:
        await environment.open(Task())
        assert (await environment.score(Transcript())).reward == 0.0  # the model has done nothing
        await called(environment, "step")
        with pytest.raises(EnvironmentLost, match="no step had a reward") as lost:
            await environment.score(Transcript())
        assert lost.value.failure == FailureKind.GRADER


async def test_a_first_observation_of_zeros_is_shown_where_a_model_would_be_sent_no_message_at_all() -> None:
    async with openenv({}, "", []) as environment:  # whose first observation is {"x": 0}
        assert (await environment.open(Task())).messages == [{"role": "user", "content": '{"x":0}'}]
        task = Task(main_query="Move.")
        assert (await environment.open(task)).messages == [{"role": "user", "content": "Move."}]


def test_the_arguments_of_a_step_are_a_json_object() -> None:
    assert arguments_of(ToolCall(id="1", name="step", arguments='{"number": 5}')) == {"number": 5}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", '{"a": NaN}', '{"a": "\ud800"}', '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"],
    ids=["empty", "list", "cut", "nan", "surrogate", "deep"],
)
def test_other_arguments_are_refused_in_words(text: str) -> None:
    with pytest.raises(StepRefused, match="not a JSON object"):
        arguments_of(ToolCall(id="1", name="step", arguments=text))
