"""What harnesses of the chat dialect do to answers and histories, through a real gateway: one sequence all the same.

Each case ended or branched a harness's run: see docs/harnesses.md.
"""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from bombus.bus import Bus
from bombus.hive.generation import Fault, Generate
from bombus.hive.records import CallRecord, unpack_tokens
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.call.workers import INLINE_BYTES_MAX
from tests.gateway.openai_hive import (
    FILES,
    IM_END,
    TEXT,
    GatewayHive,
    Send,
    chain_of,
    gateway_hive,
    gateway_of,
    says,
    tokens_of,
)

MODEL = "policy"
USER: Any = {"role": "user", "content": "What is the weather?"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call_text(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


TWO_CALLS = call_text("Paris") + "\n" + call_text("Rome")


async def two_turns(served: GatewayHive, sampled: str, echo: Any, **more: Any) -> list[CallRecord]:
    """Let a model sample a text, and ask again after what `echo` makes of the answer; return both records."""
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says(sampled), says("fine")]
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, **more}
    first = await client.chat.completions.create(messages=[USER], **asked)
    messages = [USER, *echo(first.choices[0].message), {"role": "user", "content": "and?"}]
    await client.chat.completions.create(messages=messages, **asked)
    return await served.records(episode, 2)


def result(call: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": "sunny", **more}


def litellm(message: Any) -> list[Any]:
    """Echo an answer as LiteLLM does, with fields that nobody asked for."""
    fields: dict[str, Any] = {"provider_specific_fields": {"refusal": None}, "function_call": None, "annotations": []}
    calls = [{**call.model_dump(), "index": 0, "caller": None} for call in message.tool_calls]
    return [{**message.model_dump(), **fields, "tool_calls": calls}, result(message.tool_calls[0])]


def openhands(message: Any) -> list[Any]:
    """Echo an answer with parts of text, and its result with a name."""
    echo = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": message.tool_calls}
    return [echo, result(message.tool_calls[0], name="weather")]


def opencode(message: Any) -> list[Any]:
    """Echo a call whose name and arguments the harness did not like."""
    call = message.tool_calls[0].model_dump()
    call["function"] = {"name": "invalid", "arguments": '{"tool": "weather", "error": "no such city"}'}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result(message.tool_calls[0])]


@pytest.mark.parametrize("echo", [litellm, openhands, opencode])
async def test_a_call_that_comes_back_with_other_fields_is_one_sequence(served: GatewayHive, echo: Any) -> None:
    """mini-swe-agent and everything on LiteLLM was refused at turn two."""
    chain_of(await two_turns(served, call_text("Paris"), echo))


def in_parts(message: Any) -> list[Any]:
    """Echo a message for each call, with its result after it, as LangGraph does."""
    calls = message.tool_calls
    assert len(calls) > 1
    return [
        each for call in calls for each in ({"role": "assistant", "content": "", "tool_calls": [call]}, result(call))
    ]


async def test_parallel_calls_that_come_back_one_by_one_are_one_sequence(served: GatewayHive) -> None:
    records = await two_turns(served, TWO_CALLS, in_parts)
    chain_of(records)
    assert [message["role"] for message in records[1].messages] == ["tool", "tool", "user"]


async def test_parallel_calls_that_come_back_one_by_one_to_another_gateway_are_one_sequence(
    bus: Bus, served: GatewayHive
) -> None:
    """It read the log, found fewer messages than there seemed to be, and answered 500."""
    episode, key = await served.claim()
    served.replica.scripts += [says(f"{TWO_CALLS}\n{call_text('Oslo')}"), says("fine")]
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS}
    first = await served.client(key).chat.completions.create(messages=[USER], **asked)
    async with gateway_of(bus) as (_, url):
        messages = [USER, *in_parts(first.choices[0].message)]
        await served.client(key, url).chat.completions.create(messages=messages, **asked)
    chain_of(await served.records(episode, 2))


async def test_words_of_the_harness_that_another_gateway_samples_later_are_continued(
    bus: Bus, served: GatewayHive
) -> None:
    """The first gateway had looked for them in the log, and did not look again."""
    episode, key = await served.claim()
    served.replica.scripts += [says("fine"), says("ok"), says("fine")]
    here = served.client(key)
    echo: list[Any] = [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
    await here.chat.completions.create(model=MODEL, messages=echo)
    async with gateway_of(bus) as (_, url):
        await served.client(key, url).chat.completions.create(model=MODEL, messages=[USER])
        await here.chat.completions.create(model=MODEL, messages=echo)
    invented, sampled, continued = await served.records(episode, 3)
    assert invented.parent is None
    chain_of([sampled, continued])


async def test_a_stop_string_that_is_put_back_is_one_sequence(served: GatewayHive) -> None:
    """CodeAgent of smolagents asks to stop at </code>, and writes it back."""

    def code_agent(message: Any) -> list[Any]:
        return [{"role": "assistant", "content": message.content.strip() + "</code>"}]

    chain_of(await two_turns(served, "the fox jumps \n</code> over", code_agent, stop=["</code>"]))


async def test_a_developer_is_understood_and_rendered(served: GatewayHive) -> None:
    episode, key = await served.claim()
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, USER]
    await served.client(key).chat.completions.create(model=MODEL, messages=messages)
    (record,) = await served.records(episode, 1)
    assert "Be brief." in TEXT.tokenizer.decode(unpack_tokens(record.prompt_tail))


async def test_two_calls_that_are_sampled_in_one_portion_are_two_in_the_stream(served: GatewayHive) -> None:
    """Today one came out twice, with the index and the id of the last."""
    _, key = await served.claim()
    served.replica.scripts.append(says(TWO_CALLS))
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=[USER], tools=TOOLS, stream=True)
    calls = [call for chunk in [each async for each in stream] for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert [call.function.arguments for call in calls if call.function] == ['{"city": "Paris"}', '{"city": "Rome"}']


async def test_sub_agents_that_ask_and_are_answered_alike_stay_two_sequences(served: GatewayHive) -> None:
    """Qwen Code's sub-agents send the same body at the same time: equal bytes are no proof of a retry."""
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("ok")] * 2
    same: dict[str, Any] = {"model": MODEL, "messages": [USER]}
    await asyncio.gather(*(client.chat.completions.create(**same) for _ in range(2)))
    for text in ("one", "two"):
        more: list[Any] = [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": text}]
        await client.chat.completions.create(model=MODEL, messages=more)
    records = await served.records(episode, 4)
    assert [record.parent for record in records[:2]] == [None, None]
    parents = {record.parent.id for record in records[2:] if record.parent is not None}
    assert parents == {record.id for record in records[:2]}


async def test_of_equal_answers_one_that_the_template_can_go_on_from_is_continued(bus: Bus) -> None:
    """The first was lost on its way, and its end is one that the model knows and the template does not write."""
    other_end = TEXT.tokenizer.token_id("<|endoftext|>") or 0
    ends = json.dumps({"eos_token_id": [IM_END, other_end]}).encode()
    async with gateway_hive(bus, files={**FILES, "generation_config.json": ends}) as served:
        episode, key = await served.claim()
        client = served.client(key)
        served.replica.scripts += [says([*tokens_of("ok", end=False), other_end]), says("ok"), says("fine")]
        for _ in range(2):
            await client.chat.completions.create(model=MODEL, messages=[USER])
        more: list[Any] = [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
        await client.chat.completions.create(model=MODEL, messages=more)
        _, heard, continued = await served.records(episode, 3)
    chain_of([heard, continued])


async def test_large_requests_at_the_same_time_go_on_with_an_answer_each(served: GatewayHive) -> None:
    """Both were matched in threads, before either had marked the answer that it goes on with."""
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("ok")] * 4
    for _ in range(2):
        await client.chat.completions.create(model=MODEL, messages=[USER])
    large: Any = {"metadata": {"of": "y" * INLINE_BYTES_MAX}}
    more = [
        [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": text}] for text in ("one", "two")
    ]
    asked = [client.chat.completions.create(model=MODEL, messages=each, extra_body=large) for each in more]
    await asyncio.gather(*asked)
    records = await served.records(episode, 4)
    parents = {record.parent.id for record in records[2:] if record.parent is not None}
    assert parents == {record.id for record in records[:2]}


async def test_what_is_only_counted_or_refused_continues_nothing(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts += [says("ok"), says("ok"), refuses, says("fine")]
    for _ in range(2):
        await post(served, key, "messages", {"max_tokens": 9, "messages": [USER]})
    more = [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
    await post(served, key, "messages/count_tokens", {"messages": more})
    with pytest.raises(openai.BadRequestError):
        await served.client(key).chat.completions.create(model=MODEL, messages=more)
    await post(served, key, "messages", {"max_tokens": 9, "messages": more})
    records = await served.records(episode, 3)
    assert records[2].parent is not None
    assert records[2].parent.id == records[0].id


async def refuses(request: Generate, send: Send) -> None:
    await send(Fault(why="300 tokens are too many", code="prompt_too_long"))


async def test_a_request_that_comes_again_without_a_mark_is_sampled_again(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("one"), says("two")]
    first, again = [await client.chat.completions.create(model=MODEL, messages=[USER]) for _ in range(2)]
    assert [answer.choices[0].message.content for answer in (first, again)] == ["one", "two"]
    more: list[Any] = [USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "and?"}]
    await client.chat.completions.create(model=MODEL, messages=more)
    records = await served.records(episode, 3)
    assert records[2].parent is not None
    assert records[2].parent.id == records[1].id


def numbered(*cities: str) -> str:
    """Return calls whose ids the model writes itself, and numbers from 0 in each answer."""
    body = '{{"name": "weather", "arguments": {{"city": "{}"}}, "id": "functions.weather:{}"}}'
    return "\n".join(f"<tool_call>\n{body.format(city, at)}\n</tool_call>" for at, city in enumerate(cities))


async def chat_turn(served: GatewayHive, key: str, messages: list[Any]) -> list[Any]:
    asked: Any = await served.client(key).chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message = asked.choices[0].message
    return [message.model_dump(), *(result(call) for call in message.tool_calls or ())]


async def messages_turn(served: GatewayHive, key: str, messages: list[Any]) -> list[Any]:
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    answer = await post(served, key, "messages", {"max_tokens": 60, "messages": messages, "tools": tools})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


async def responses_turn(served: GatewayHive, key: str, messages: list[Any]) -> list[Any]:
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    output = (await post(served, key, "responses", {"input": messages, "tools": tools}))["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
    return [*output, *results]


async def post(served: GatewayHive, key: str, path: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(timeout=30) as http:
        headers = {"authorization": f"Bearer {key}"}
        answer = await http.post(f"{served.base_url}/v1/{path}", json={"model": MODEL, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("turn", [chat_turn, messages_turn, responses_turn])
async def test_answers_whose_calls_the_model_numbers_alike_are_all_kept(served: GatewayHive, turn: Any) -> None:
    """The second answer was taken for a part of the first, and was gone from the third prompt."""
    episode, key = await served.claim()
    served.replica.scripts += [says(numbered("Paris", "Rome")), says("again\n" + numbered("Oslo")), says("fine")]
    messages: list[Any] = [USER]
    for _ in range(3):
        messages += await turn(served, key, messages)
    tokens = chain_of(await served.records(episode, 3))
    assert "again" in TEXT.tokenizer.decode(tokens)


async def test_an_answer_between_the_results_of_parallel_calls_is_kept(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts += [says(TWO_CALLS), says("one is pending"), says("fine")]
    messages: list[Any] = [USER]
    called, *results = await chat_turn(served, key, messages)
    messages += [called, results[0]]
    messages += await chat_turn(served, key, messages)
    await chat_turn(served, key, [*messages, results[1]])
    records = await served.records(episode, 3)
    assert "one is pending" in TEXT.tokenizer.decode(chain_of(records))
    assert [message["role"] for message in records[2].messages] == ["tool"]


async def test_a_response_that_is_named_is_the_one_that_is_continued(served: GatewayHive) -> None:
    """Answers that say the same are told apart by `previous_response_id` and by the ids of their items."""
    episode, key = await served.claim()
    served.replica.scripts += [says("ok")] * 6
    asked = [await post(served, key, "responses", {"input": [USER]}) for _ in range(3)]
    for answer in (asked[2], asked[0]):
        body = {"input": "and?", "previous_response_id": answer["id"]}
        await post(served, key, "responses", body)
    await post(served, key, "responses", {"input": [USER, *asked[2]["output"], USER]})
    records = await served.records(episode, 6)
    parents = [record.parent.id if record.parent else "" for record in records[3:]]
    assert parents == [records[2].id, records[0].id, records[2].id]
    assert all("answer_of" not in message for record in records for message in record.messages)


def test_thinking_that_is_signed_says_which_answer_it_is_of() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "a" * 32}
    echo = {"role": "assistant", "content": [thinking, {"type": "text", "text": "ok"}]}
    asked = read_messages(json.dumps({"model": MODEL, "messages": [USER, echo]}).encode())
    assert asked.completion.messages[1]["answer_of"] == ("a" * 32, 0)
