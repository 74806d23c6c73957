"""Anthropic's API, over HTTP with a real bus and coordinator, and its encoding by hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.hive.generation import Generate
from bombus.hive.records import pack_tokens, unpack_tokens
from bombus_gateway.anthropic.response import MessagesEncoder
from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from tests.gateway.openai_hive import (
    ENGINE,
    FILES,
    JOB,
    MODEL,
    TEMPLATE,
    TEXT,
    Died,
    GatewayHive,
    Send,
    chain_of,
    frame_of,
    gateway_hive,
    says,
    tokens_of,
)

HI: dict[str, Any] = {"role": "user", "content": "what is the weather in Paris?"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
Event = dict[str, Any]


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


async def post(hive: GatewayHive, key: str, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    given = {"model": "policy", "max_tokens": 64, "messages": [HI], **body}
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(hive.base_url + path, json=given, headers={"x-api-key": key})


def events_of(stream: str) -> list[Event]:
    """Return the events of a stream, each of which has its type twice."""
    events: list[Event] = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def message_of(events: list[Event]) -> dict[str, Any]:
    """Return the message that a stream's events make, as the SDK accumulates them."""
    assert [event["type"] for event in events if not event["type"].startswith("content_block")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:-2]:
        at = event["index"]
        if event["type"] == "content_block_start":
            assert at == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert at == len(message["content"]) - 1
            kind, delta = event["delta"].pop("type"), event["delta"]
            if kind == "input_json_delta":
                inputs[at] = inputs.get(at, "") + delta["partial_json"]
            else:
                ((name, text),) = delta.items()
                message["content"][at][name] = message["content"][at].get(name, "") + text
    for at, text in inputs.items():
        message["content"][at]["input"] = json.loads(text)
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


# ---- encoding -----------------------------------------------------------------------------------------------------


class Played:
    """A completion that has sampled given deltas, and the encoder of its answer."""

    def __init__(self, *portions: list[Delta], reason: str = "stop") -> None:
        request = CompletionRequest(chat=True, messages=(HI,))
        self.completion = Completion(TEXT, request, pack_tokens(tokens_of("hi", end=False)), "c" * 32, 0)
        self.encoder = MessagesEncoder("policy", AnswerHead("c" * 32, 0, bytes(80), 1, TEXT.tokenizer))
        self.portions = [CompletionDelta(portion, []) for portion in portions]
        for portion in portions:
            self.completion._add(portion)
        self.completion.end(reason)

    def streamed(self) -> list[Event]:
        """Encode all portions as one stream, when the completion has all of them: as a recorded answer is sent."""
        encoder = self.encoder
        parts = [encoder.progress(self.completion, portion) for portion in self.portions]
        ending = encoder.closing(self.completion) + encoder.end(Usage(20, 9, 5))
        return events_of((encoder.opening() + b"".join(parts) + ending).decode())

    def whole(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.encoder.whole([self.completion], Usage(20, 9, 5)))
        return made


def test_an_answer_with_everything_is_the_same_message_whole_and_streamed() -> None:
    played = Played(
        [ReasoningDelta("h"), ReasoningDelta("m")],
        [TextDelta("I "), TextDelta("look")],
        [ToolCallDelta("weather", '{"city": "Paris"}'), ToolCallDelta("weather", "")],
        [ToolCallDelta("weather", '{"city": ')],
    )
    whole = played.whole()
    assert whole == {
        "id": f"msg_{'c' * 32}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "c" * 32},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": f"call_{'c' * 20}0_0", "name": "weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": f"call_{'c' * 20}0_1", "name": "weather", "input": {}},
            {
                "type": "tool_use",
                "id": f"call_{'c' * 20}0_2",
                "name": "weather",
                "input": {"INVALID_JSON": '{"city": '},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 15,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 9,
        },
    }
    assert message_of(played.streamed()) == whole


def test_the_events_of_a_stream_have_the_order_of_anthropics() -> None:
    events = Played(
        [ReasoningDelta("hm")], [TextDelta("so"), ToolCallDelta("weather", "{}")], [TextDelta("!")]
    ).streamed()
    told = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert told == [
        ("message_start", None, None),
        (start, 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, None),
        (delta, 1, "text_delta"),
        (stop, 1, None),
        (start, 2, None),
        (delta, 2, "input_json_delta"),
        (stop, 2, None),
        (start, 3, None),
        (delta, 3, "text_delta"),
        (stop, 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 20
    assert events[0]["message"]["stop_reason"] is None


@pytest.mark.parametrize(("reason", "stop"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_an_answer_says_why_it_ended(reason: str, stop: str) -> None:
    assert Played([TextDelta("so")], reason=reason).whole()["stop_reason"] == stop


def test_an_empty_answer_has_no_blocks() -> None:
    assert Played().whole()["content"] == []
    assert message_of(Played().streamed())["content"] == []


def test_a_sign_of_life_is_a_ping() -> None:
    assert events_of(Played().encoder.beat().decode()) == [{"type": "ping"}]


# ---- the API -----------------------------------------------------------------------------------------------------


async def test_a_message_is_answered_and_recorded(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("the weather is fine"))
    reply = await post(served, key, system="use tools", max_tokens=20)
    (record,) = await served.records(episode, 1)
    assert reply.headers["request-id"] == record.id
    answer = reply.json()
    assert answer["id"] == f"msg_{record.id}"
    assert answer["content"] == [{"type": "text", "text": "the weather is fine"}]
    assert (answer["model"], answer["stop_reason"], answer["stop_sequence"]) == ("policy", "end_turn", None)
    assert record.messages == ({"role": "system", "content": "use tools"}, HI)
    assert record.sampling.max_tokens == 20
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == record.prompt_tokens
    assert answer["usage"]["cache_read_input_tokens"] == 7  # as the replica says
    assert answer["usage"]["output_tokens"] == record.completion_tokens()


async def test_a_stream_has_the_text_as_it_is_sampled_and_the_usage_at_its_end(served: GatewayHive) -> None:
    read = asyncio.Event()

    async def waits_for_its_reader(request: Generate, send: Send) -> None:
        await send(frame_of(tokens_of("the quick", end=False)))
        await read.wait()
        await says(" brown fox jumps")(request, send)

    episode, key = await served.claim()
    served.replica.scripts.append(waits_for_its_reader)
    given = {"model": "policy", "max_tokens": 64, "messages": [HI], "stream": True}
    stream = ""
    async with (
        httpx.AsyncClient(timeout=60, headers={"x-api-key": key}) as http,
        http.stream("POST", f"{served.base_url}/v1/messages", json=given) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for text in reply.aiter_text():
            stream += text
            if "quick" in stream:
                read.set()
    events = events_of(stream)
    assert sum(event["type"] == "content_block_delta" for event in events) > 1
    message = message_of(events)
    assert message["content"] == [{"type": "text", "text": "the quick brown fox jumps"}]
    (record,) = await served.records(episode, 1)
    assert message["usage"]["output_tokens"] == record.completion_tokens()


@pytest.mark.parametrize("stream", [False, True])
async def test_six_turns_with_tools_and_moving_marks_are_one_chain_of_records(
    served: GatewayHive, stream: bool
) -> None:
    """What Claude Code changes from turn to turn: the mark of its cache, and lists of one block that become texts."""
    episode, key = await served.claim()
    messages: list[dict[str, Any]] = [HI]
    for turn in range(6):
        served.replica.scripts.append(says(f"hello {turn}\n{CALL}" if turn < 5 else "it is fine"))
        marked = {**messages[-1], "content": messages[-1]["content"]}
        if isinstance(marked["content"], str):
            block = {"type": "text", "text": marked["content"], "cache_control": {"type": "ephemeral"}}
            marked["content"] = [block]
        reply = await post(
            served, key, messages=[*messages[:-1], marked], tools=[WEATHER], system="use tools", stream=stream
        )
        answer = message_of(events_of(reply.text)) if stream else reply.json()
        messages.append({"role": "assistant", "content": answer["content"]})
        if turn < 5:
            assert answer["stop_reason"] == "tool_use"
            assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
            use = answer["content"][1]
            assert (use["name"], use["input"]) == ("weather", {"city": "Paris"})
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}]}
            )
    records = await served.records(episode, 6)
    text = TEXT.tokenizer.decode(chain_of(records), with_specials=True)
    assert text.endswith("<|im_start|>assistant\nit is fine<|im_end|>")
    assert text.count("<tool_response>\nsunny\n</tool_response>") == 5
    assert [len(record.messages) for record in records] == [2, 1, 1, 1, 1, 1]


async def test_two_calls_in_one_portion_are_two_blocks_with_ids_of_their_own(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says(f"{CALL}\n{OTHER_CALL}"))
    message = message_of(events_of((await post(served, key, tools=[WEATHER], stream=True)).text))
    assert [block["input"] for block in message["content"]] == [{"city": "Paris"}, {"city": "Rome"}]
    (record,) = await served.records(episode, 1)
    recorded = record.choices[0].message
    assert recorded is not None
    ids = [call["id"] for call in recorded["tool_calls"]]
    assert [block["id"] for block in message["content"]] == ids
    assert len(set(ids)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_recorded_answer(served: GatewayHive, stream: bool) -> None:
    episode, key = await served.claim()
    served.replica.scripts += [says(f"look\n{CALL}\n{OTHER_CALL}", portion=1), says("another")]
    body = {"model": "policy", "messages": [HI], "tools": [WEATHER], "stream": stream}
    async with httpx.AsyncClient(timeout=60) as http:
        url, headers = f"{served.base_url}/v1/messages", {"authorization": f"Bearer {key}"}
        first = await http.post(url, json=body, headers=headers)
        again = await http.post(url, json=body, headers={**headers, "x-stainless-retry-count": "1"})
    if stream:
        one, other = (message_of(events_of(reply.text)) for reply in (first, again))
    else:
        one, other = first.json(), again.json()
    one.pop("usage"), other.pop("usage")  # what was cached is not recorded
    assert one == other
    assert len(await served.calls(episode, 1)) == 1


async def test_a_stop_sequence_is_named(served: GatewayHive) -> None:
    _, key = await served.claim()
    fox = "the quick brown fox"
    served.replica.scripts += [says(fox), says(fox, finish="length"), *[says(fox)] * 3]
    stopped = (await post(served, key, stop_sequences=[" brown"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " brown")
    assert stopped["content"] == [{"type": "text", "text": "the quick"}]
    assert (await post(served, key)).json()["stop_reason"] == "max_tokens"
    for stop, text in (("<|im_end|>", fox), ("<|im_end|>\n", fox), (" fox<|im_end|>", "the quick brown")):
        ended = (await post(served, key, stop_sequences=[stop])).json()
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
        assert ended["content"] == [{"type": "text", "text": text}]


async def test_what_is_not_done_is_named_in_a_header(served: GatewayHive) -> None:
    _, key = await served.claim()
    reply = await post(
        served,
        key,
        temperature=0,
        max_tokens=32000,
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        output_config={"format": {"type": "json_schema", "schema": {}}},
    )
    assert reply.status_code == 200
    named = "output_config.format, tools.0.type, temperature, max_tokens"
    assert reply.headers["x-bombus-overridden"] == named


async def test_a_job_may_refuse_what_is_not_supported(bus: Bus) -> None:
    groups = JOB["bombus"]
    job = {"bombus": {**groups, "rollout": {**groups["rollout"], "unsupported": "refuse"}}}
    async with gateway_hive(bus, job) as hive:
        _, key = await hive.claim()
        reply = await post(hive, key, tools=[WEATHER], tool_choice={"type": "any"})
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["message"].startswith("tool_choice is not supported here")


# ---- counting -----------------------------------------------------------------------------------------------------


async def test_tokens_are_counted_as_a_call_has_them_and_nothing_is_recorded(served: GatewayHive) -> None:
    episode, key = await served.claim()
    body: dict[str, Any] = {"system": "use tools", "tools": [WEATHER]}
    counted = (await post(served, key, "/v1/messages/count_tokens", **body)).json()
    assert served.replica.requests == []
    served.replica.scripts.append(says(f"hello\n{CALL}"))
    answer = (await post(served, key, **body)).json()
    assert counted == {"input_tokens": len(unpack_tokens(served.replica.requests[0].prompt))}
    result = {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": "sunny"}
    body["messages"] = [HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    counted = (await post(served, key, "/v1/messages/count_tokens", **body)).json()
    await post(served, key, **body)
    assert counted == {"input_tokens": len(unpack_tokens(served.replica.requests[1].prompt))}
    assert len(await served.calls(episode, 2)) == 2


async def test_tokens_are_counted_of_a_prompt_that_is_too_long_for_a_call(served: GatewayHive) -> None:
    _, key = await served.claim()
    long = [{"role": "user", "content": "hello " * 600}]
    counted = (await post(served, key, "/v1/messages/count_tokens", messages=long)).json()["input_tokens"]
    refused = await post(served, key, messages=long)
    assert (refused.status_code, refused.json()) == (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": f"prompt is too long: {counted} tokens > 500 maximum",  # which Claude Code looks for
            },
        },
    )


async def test_a_conversation_whose_budget_is_spent_is_not_told_to_compact(bus: Bus) -> None:
    """Claude Code's call for a summary continues the conversation, so it would be refused as well."""
    rollout = {"max_prompt_length": 500, "max_response_length": 8, "max_response_length_in_one_turn": 8}
    job: dict[str, Any] = {"bombus": {"model": {"path": MODEL}, "rollout": rollout | {"max_model_len": 2000}}}
    async with gateway_hive(bus, job) as hive:
        _, key = await hive.claim()
        hive.replica.scripts.append(says([300] * 8, finish="length"))
        answer = (await post(hive, key)).json()
        messages = [HI, {"role": "assistant", "content": answer["content"]}, HI]
        refused = await post(hive, key, messages=messages)
        assert refused.status_code == 400
        assert "max_response_length for all of them is 8" in refused.json()["error"]["message"]
        assert "prompt is too long" not in refused.text


# ---- refusals -----------------------------------------------------------------------------------------------------


async def test_every_refusal_below_the_route_has_anthropics_shape(served: GatewayHive) -> None:
    _, key = await served.claim()
    async with httpx.AsyncClient(base_url=served.base_url, headers={"x-api-key": key}) as http:
        for method, path, content, status, kind in (
            ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
            ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
            ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
            ("GET", "/v1/messages/count_tokens", b"", 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
            ("GET", f"/e/{ENGINE}/v1/messages/batches/1/results", b"", 404, "not_found_error"),
        ):
            reply = await http.request(method, path, content=content)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), path
            assert reply.json()["type"] == "error"
            assert reply.json()["error"]["message"]
        for path in ("/v1/messages", f"/e/{ENGINE}/v1/messages/count_tokens"):
            reply = await http.post(path, content=b"{}", headers={"x-api-key": "wrong"})
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_template_without_a_place_for_a_late_system_message_says_so_in_words_that_claude_code_knows(
    bus: Bus,
) -> None:
    strict = (
        "{% for each in messages %}{% if each['role'] == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    )
    async with gateway_hive(bus, files={**FILES, "chat_template.jinja": (strict + TEMPLATE).encode()}) as hive:
        _, key = await hive.claim()
        late = {"role": "system", "content": "today is Sunday"}
        refused = await post(hive, key, messages=[HI, late])
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith(
            "System message must be at the beginning. At this place the role 'system' is not supported."
        )
        assert (await post(hive, key, messages=[HI], system="today is Sunday")).status_code == 200


async def test_a_key_works_in_either_header_and_under_the_engines_prefix(served: GatewayHive) -> None:
    _, key = await served.claim()
    async with httpx.AsyncClient(timeout=60) as http:
        for path in ("/v1/messages?beta=true", f"/e/{ENGINE}/v1/messages"):
            for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                body = {"model": "claude-opus-5-5", "max_tokens": 4, "messages": [HI]}
                reply = await http.post(served.base_url + path, json=body, headers=headers)
                assert (reply.status_code, reply.json()["model"]) == (200, "claude-opus-5-5")


async def test_a_stream_that_breaks_ends_with_an_error(served: GatewayHive) -> None:
    _, key = await served.claim()

    async def breaks_off(request: Generate, send: Send) -> None:
        await send(frame_of(tokens_of("the quick", end=False)))
        raise Died

    served.replica.scripts.append(breaks_off)
    events = events_of((await post(served, key, stream=True)).text)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "overloaded_error"


async def test_a_page_of_the_api_describes_the_routes(served: GatewayHive) -> None:
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert "anthropic" in paths["/v1/messages"]["post"]["tags"]
    assert f"/e/{ENGINE}/v1/messages/count_tokens" in paths
