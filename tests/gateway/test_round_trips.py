"""What goes out in an answer may come back in the next request, in each dialect, through a real gateway."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
import pytest

from bombus.bus import Bus
from bombus_gateway.limits import CALLS_IN_ANSWER
from tests.gateway.openai_hive import FILES, MODEL, GatewayHive, chain_of, gateway_hive, says

USER: dict[str, Any] = {"role": "user", "content": "What is the weather?"}
SCHEMA = {"type": "object", "properties": {}}
ROLLOUT = {"max_prompt_length": 5000, "max_response_length": 90_000, "max_response_length_in_one_turn": 60_000}
LONG_JOB: dict[str, Any] = {
    "bombus": {"model": {"path": MODEL, "tools": "hermes"}, "rollout": {**ROLLOUT, "max_model_len": 200_000}}
}
LONG_FILES = {**FILES, "config.json": json.dumps({"max_position_embeddings": 1 << 20, "vocab_size": 420}).encode()}


class Wire(NamedTuple):
    """How one dialect asks, and how it sends an answer back with the results of its calls."""

    path: str
    messages: str
    tool: dict[str, Any]
    echo: Callable[[Any], list[Any]]


def chat_echo(answer: Any) -> list[Any]:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls)]


def messages_echo(answer: Any) -> list[Any]:
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "sunny"} for call in calls]
    return [
        {"role": "assistant", "content": answer["content"]},
        *([{"role": "user", "content": results}] if calls else []),
    ]


def responses_echo(answer: Any) -> list[Any]:
    calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls]
    return [*answer["output"], *outputs]


FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT = Wire("/v1/chat/completions", "messages", {"type": "function", "function": FUNCTION}, chat_echo)
MESSAGES = Wire("/v1/messages", "messages", {"name": "weather", "input_schema": SCHEMA}, messages_echo)
RESPONSES = Wire("/v1/responses", "input", {"type": "function", **FUNCTION}, responses_echo)
WIRES = pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, LONG_JOB, LONG_FILES) as hive:
        yield hive


def called(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n'


@WIRES
@pytest.mark.parametrize(
    "sampled", [called("weather") * (CALLS_IN_ANSWER + 1), called("n" * 280)], ids=["calls", "name"]
)
async def test_whatever_the_model_writes_its_answer_may_come_back(
    served: GatewayHive, wire: Wire, sampled: str
) -> None:
    episode, key = await served.claim()
    served.replica.scripts += [says(sampled), says("fine")]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        conversation = [USER]
        for _ in range(2):
            asked = {"model": MODEL, wire.messages: conversation, "tools": [wire.tool]}
            answer = await client.post(served.base_url + wire.path, json=asked)
            assert answer.status_code == 200, answer.text
            conversation = [*conversation, *wire.echo(answer.json()), USER]
    chain_of(await served.records(episode, 2))
