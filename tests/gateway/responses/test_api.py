"""The Responses API, called by OpenAI's own SDK."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from bombus.bus import Bus
from bombus.hive.generation import Generate
from bombus_gateway.call import api
from tests.gateway.openai_hive import (
    FILES,
    MODEL,
    TEXT,
    THINKING_TEMPLATE,
    Died,
    GatewayHive,
    Send,
    chain_of,
    frame_of,
    gateway_hive,
    gateway_of,
    says,
    tokens_of,
)
from tests.patience import PATIENCE_S

QUESTION = "what is the weather in Paris?"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

LENGTHS = {"max_prompt_length": 1000, "max_response_length": 900, "max_response_length_in_one_turn": 100}
JOB: Any = {"bombus": {"model": {"path": MODEL, "tools": "hermes"}, "rollout": LENGTHS}}


async def answer_of(client: openai.AsyncOpenAI, streamed: bool, **body: Any) -> Response:
    """Ask for a response, and collect it from its events where it is streamed."""
    found: Response
    if streamed:
        async with client.responses.stream(model=MODEL, **body) as stream:
            found = Response.model_validate((await stream.get_final_response()).model_dump(warnings=False))
    else:
        found = await client.responses.create(model=MODEL, **body)
    return found


def results_of(answer: Response) -> list[Any]:
    """Return what a harness sends after an answer: the result of each of its calls."""
    calls: list[Any] = [item for item in answer.output if item.type in ("function_call", "custom_tool_call")]
    return [{"type": f"{call.type}_output", "call_id": call.call_id, "output": "sunny"} for call in calls]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_text_is_answered_with_a_message(served: GatewayHive, streamed: bool) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("the weather is fine", portion=1))
    answer = await answer_of(served.client(key), streamed, input=QUESTION, instructions="be kind", max_output_tokens=20)
    (record,) = await served.records(episode, 1)
    assert answer.id == f"resp_{record.id}"
    assert (answer.status, answer.output_text, answer.model) == ("completed", "the weather is fine", MODEL)
    assert [item.id for item in answer.output] == [f"msg_{record.id}_0"]
    assert answer.instructions == "be kind"
    assert answer.usage is not None
    assert answer.usage.total_tokens == record.prompt_tokens + record.completion_tokens()
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert record.sampling.max_tokens == 20
    assert list(record.messages) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": QUESTION},
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("continued", [False, True])
async def test_turns_with_tools_are_one_chain_of_records(served: GatewayHive, streamed: bool, continued: bool) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    items: list[Any] = [{"role": "developer", "content": "use tools"}, {"role": "user", "content": QUESTION}]
    more: dict[str, Any] = {}
    for turn in range(4):
        served.replica.scripts.append(says(f"hello {turn}\n{CALL}\n{CALL}" if turn < 3 else "it is fine", portion=1))
        answer = await answer_of(client, streamed, input=items, instructions="be kind", tools=TOOLS, **more)
        results = results_of(answer)
        assert [item.type for item in answer.output] == ["message", *["function_call"] * len(results)]
        if continued:
            items, more = results, {"previous_response_id": answer.id}
        else:
            items = [*items, *(item.model_dump() for item in answer.output), *results]
    records = await served.records(episode, 4)
    text = TEXT.tokenizer.decode(chain_of(records), with_specials=True)
    assert text.startswith("<|im_start|>system\nbe kind")
    assert text.endswith("<|im_start|>assistant\nit is fine<|im_end|>")
    assert text.count("<tool_response>\nsunny\n</tool_response>") == 6
    assert [len(record.messages) for record in records] == [3, 2, 2, 2]


async def test_a_conversation_continues_at_another_gateway_and_after_a_restart(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        episode, key = await hive.claim()
        first = await hive.client(key).responses.create(model=MODEL, input=QUESTION, instructions="be kind")
        last = first
        for _ in range(2):
            async with gateway_of(bus) as (_, elsewhere):  # it knows the conversation from the log alone
                client = hive.client(key, elsewhere)
                last = await client.responses.create(
                    model=MODEL, input="hello", instructions="be kind", previous_response_id=last.id
                )
                found = await client.responses.retrieve(first.id)
                assert found.output == first.output
        chain_of(await hive.records(episode, 3))


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_that_are_referred_to_are_read_from_the_log(bus: Bus, streamed: bool) -> None:
    async with gateway_hive(bus) as hive, gateway_of(bus) as (_, elsewhere):
        episode, key = await hive.claim()
        hive.replica.scripts += [says(f"hello\n{CALL}\n{CALL}"), says("fine"), says("bye")]
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        for url in ("", "", elsewhere):  # the last gateway knows the conversation from the log alone
            answer = await answer_of(hive.client(key, url), streamed, input=items, tools=TOOLS)
            references = [{"type": "item_reference", "id": item.id} for item in answer.output]
            items += [*references, *(results_of(answer) or [{"role": "user", "content": "and?"}])]
        records = await hive.records(episode, 3)
        chain_of(records)
        assert [len(record.messages) for record in records] == [1, 2, 1]


async def test_instructions_are_those_of_one_request_and_a_branch_begins_where_they_change(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    first = await client.responses.create(model=MODEL, input="hello", instructions="be kind")
    await client.responses.create(model=MODEL, input="and now?", previous_response_id=first.id)
    changed = (await served.records(episode, 2))[1]
    assert changed.parent is None
    assert [message["content"] for message in changed.messages] == ["hello", "ok", "and now?"]


async def test_two_requests_may_continue_one_response(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    first = await client.responses.create(model=MODEL, input="hello")
    for text in ("one", "two"):
        await client.responses.create(model=MODEL, input=text, previous_response_id=first.id)
    records = await served.records(episode, 3)
    assert [record.parent.id if record.parent else None for record in records] == [None, records[0].id, records[0].id]


async def test_of_two_equal_responses_the_one_that_is_named_is_continued(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("the same")] * 2
    answers = [await client.responses.create(model=MODEL, input=QUESTION) for _ in range(2)]
    named = answers[1].id
    await client.responses.create(model=MODEL, input="more", previous_response_id=named)
    *_, last = await served.records(episode, 3)
    assert last.parent is not None
    assert f"resp_{last.parent.id}" == named


async def test_a_response_of_another_episode_or_of_none_is_not_found(served: GatewayHive) -> None:
    _, key = await served.claim()
    _, other = await served.claim()
    theirs = await served.client(other).responses.create(model=MODEL, input="hello")
    client = served.client(key)
    for response_id in (theirs.id, "resp_none", f"resp_{'0' * 32}"):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=response_id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
    reference: Any = {"type": "item_reference", "id": theirs.output[0].id}
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, reference])
    assert refused.value.param == "input"


async def test_a_stored_response_is_the_one_that_was_sent(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.append(says(f"hello\n{CALL}"))
    sent = await client.responses.create(model=MODEL, input=QUESTION, instructions="be kind", tools=TOOLS)
    found = await client.responses.retrieve(sent.id)
    assert (found.output, found.status, found.created_at) == (sent.output, sent.status, sent.created_at)
    assert found.instructions == "be kind"
    assert [tool.type for tool in found.tools] == ["function"]
    assert found.usage is not None
    assert sent.usage is not None
    assert found.usage.total_tokens == sent.usage.total_tokens


async def test_the_events_of_a_stream_come_in_the_vendors_order(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says(f"hello\n{CALL}"))
    stream = await served.client(key).responses.create(model=MODEL, input=QUESTION, tools=TOOLS, stream=True)
    events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == [
        *["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"],
        *["output_text.done", "content_part.done", "output_item.done"],
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"],
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_calls_that_arrive_together_are_items_of_their_own(served: GatewayHive) -> None:
    """They came out as the same one twice, where a portion of tokens or a read of the replica held both."""
    _, key = await served.claim()
    other = CALL.replace("Paris", "Rome")
    served.replica.scripts.append(says(f"{CALL}\n{other}"))
    stream = await served.client(key).responses.create(model=MODEL, input=QUESTION, tools=TOOLS, stream=True)
    done: list[Any] = [event async for event in stream if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1]
    assert [json.loads(event.item.arguments)["city"] for event in done] == ["Paris", "Rome"]
    assert len({event.item.call_id for event in done} | {event.item.id for event in done}) == 4


@pytest.mark.parametrize("streamed", [False, True])
async def test_custom_tools_get_text_and_tools_of_a_namespace_their_own_names(
    served: GatewayHive, streamed: bool
) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    tools: Any = [
        {"type": "custom", "name": "patch", "description": "edits", "format": {"type": "text"}},
        {"type": "namespace", "name": "sky", "description": "", "tools": TOOLS},
    ]
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
    served.replica.scripts.append(says(f"{patch}\n{CALL.replace('weather', 'sky__weather')}", portion=3))
    body: dict[str, Any] = {"model": MODEL, "input": [{"role": "user", "content": QUESTION}], "tools": tools}
    if streamed:
        stream = await client.responses.create(**body, stream=True)
        events: list[Any] = [event async for event in stream]
        assert "response.custom_tool_call_input.done" in [event.type for event in events]
        output = events[-1].response.output
    else:
        output = (await client.responses.create(**body)).output
    custom, inner = output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "*** Begin\n+a")
    assert (inner.type, inner.name, inner.namespace) == ("function_call", "weather", "sky")
    outputs = [
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call_output", "call_id": inner.call_id, "output": "b"},
    ]
    await client.responses.create(
        **{**body, "input": [*body["input"], *(item.model_dump() for item in output), *outputs]}
    )
    chain_of(await served.records(episode, 2))


async def test_an_answer_that_reaches_its_limit_is_incomplete(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    for streamed in (False, True):
        served.replica.scripts.append(says("the quick", finish="length"))
        if streamed:
            stream = await client.responses.create(model=MODEL, input="go", max_output_tokens=2, stream=True)
            events = [event async for event in stream]
            assert events[-1].type == "response.incomplete"
            answer = events[-1].response
        else:
            answer = await client.responses.create(model=MODEL, input="go", max_output_tokens=2)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_has_the_tokens_of_reasoning_also_when_it_is_read_again(bus: Bus, streamed: bool) -> None:
    async with gateway_hive(bus, JOB, {**FILES, "chat_template.jinja": THINKING_TEMPLATE.encode()}) as hive:
        _, key = await hive.claim()
        client = hive.client(key)
        hive.replica.scripts.append(says("the quick fox</think>the dog", portion=2))
        answer = await answer_of(client, streamed, input=QUESTION)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        stored = await client.responses.retrieve(answer.id)
        for found in (answer, stored):
            assert found.usage is not None
            reasoning = found.usage.output_tokens_details.reasoning_tokens
            assert reasoning == len(tokens_of("the quick fox", end=False))


async def test_a_stream_that_breaks_off_ends_with_an_error_that_the_sdk_raises(served: GatewayHive) -> None:
    _, key = await served.claim()

    async def breaks_off(request: Generate, send: Send) -> None:
        await send(frame_of(tokens_of("the quick", end=False)))
        raise Died

    served.replica.scripts.append(breaks_off)
    stream = await served.client(key).responses.create(model=MODEL, input="go", stream=True)
    kinds: list[str] = []
    with pytest.raises(openai.APIError, match="broke off"):
        kinds += [event.type async for event in stream]
    assert "response.completed" not in kinds
    served.replica.scripts.append(breaks_off)
    with pytest.raises(openai.APIError, match="broke off"):
        await answer_of(served.client(key), streamed=True, input="go")


async def test_a_slow_stream_is_kept_alive_by_events_after_the_first_one(
    served: GatewayHive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "BEAT_S", 0.05)
    _, key = await served.claim()
    beaten = asyncio.Event()

    async def waits(request: Generate, send: Send) -> None:
        await beaten.wait()
        await says("ok")(request, send)

    served.replica.scripts.append(waits)
    kinds: list[str] = []
    async with served.client(key).responses.stream(model=MODEL, input="go") as stream:
        async for event in stream:
            kinds.append(str(event.type))
            if kinds[-1] == "keepalive":
                beaten.set()
    assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}, {"type": "compaction", "id": "c"}]}, "input"),
        ({"input": [{"type": "additional_tools", "tools": []}]}, "input"),
        ({"input": "hello " * 9000}, "input"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(served: GatewayHive, body: Any, param: str) -> None:
    _, key = await served.claim()
    with pytest.raises(openai.BadRequestError) as refused:
        await served.client(key).responses.create(model=MODEL, **body)
    assert refused.value.param == param


async def test_what_nobody_here_can_do_is_left_out_and_named(served: GatewayHive) -> None:
    _, key = await served.claim()
    answer = await served.client(key).responses.with_raw_response.create(
        model=MODEL,
        input="hi",
        tools=[{"type": "web_search"}],
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        prompt_cache_key="k",
        max_output_tokens=32000,
        extra_body={"client_metadata": {"a": "b"}, "novelty": 1},
    )
    assert answer.headers["x-bombus-overridden"] == "tools.0.type, novelty, max_output_tokens"


async def test_a_client_that_asks_for_a_websocket_is_sent_to_http(served: GatewayHive) -> None:
    """Codex then asks over HTTP at once; other statuses cost it seven tries."""
    host = served.base_url.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    handshake = ["GET /v1/responses HTTP/1.1", f"Host: {host}", "Connection: Upgrade", "Upgrade: websocket"]
    handshake += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13", "", ""]
    writer.write("\r\n".join(handshake).encode())
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode()
    writer.close()
    assert head.startswith("HTTP/1.1 426 ")
    assert "upgrade: HTTP/1.1" in head
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        plain = await http.get("/v1/responses")
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")


async def test_paths_that_nobody_serves_are_refused_in_openais_shape(served: GatewayHive) -> None:
    _, key = await served.claim()
    async with httpx.AsyncClient(base_url=served.base_url, headers={"authorization": f"Bearer {key}"}) as http:
        for prefix in ("", "/e/main"):
            for path in ("/v1/nowhere", "/v1/", "/v1/responses/resp_1/input_items", "/v1/chat/completions/x"):
                reply = await http.get(prefix + path)
                assert reply.status_code == 404, path
                assert reply.json()["error"]["type"] == "not_found_error"
        assert (await http.post("/v1/models/main", json={})).json()["error"]["message"] == "Use GET here."


async def test_embeddings_are_refused_and_any_name_is_a_model(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    with pytest.raises(openai.BadRequestError, match="Embeddings are not made here"):
        await client.embeddings.create(model=MODEL, input="hi")
    assert (await client.models.retrieve(MODEL)).id == MODEL
