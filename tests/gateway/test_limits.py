"""What one request can do to a gateway, sent to a real one: it is refused in the dialect's words, and others go on."""

import asyncio
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus.hive.records import pack_tokens
from bombus_gateway.call.workers import INLINE_BYTES_MAX, Workers
from bombus_gateway.keys import Keys
from bombus_gateway.limits import QUOTED_CHARACTERS, UNSUPPORTED
from bombus_gateway.openai.request import read_chat
from tests.gateway.openai_hive import (
    FILES,
    MODEL,
    SECRET,
    TEXT,
    GatewayHive,
    every_thread_busy,
    gateway_hive,
    gateway_of,
    says,
)
from tests.patience import PATIENCE_S, until

ROLLOUT = {"max_prompt_length": 500_000, "max_response_length": 1500, "max_response_length_in_one_turn": 64}
LONG_JOB: dict[str, Any] = {
    "bombus": {"model": {"path": MODEL, "tools": "hermes"}, "rollout": {**ROLLOUT, "max_model_len": 600_000}}
}
LONG_FILES = {**FILES, "config.json": json.dumps({"max_position_embeddings": 1 << 20, "vocab_size": 420}).encode()}
USER = '{"role": "user", "content": "hi"}'
TRACE = f"00-{1:032x}-{2:016x}-01"


@pytest_asyncio.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


class Agent:
    """An agent with the key of one episode, and raw bodies."""

    def __init__(self, hive: GatewayHive, episode: str, key: str) -> None:
        self.hive, self.episode = hive, episode
        self.url = hive.base_url
        self._http = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60)

    async def __aenter__(self) -> "Agent":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        return await self._http.post(self.url + path, content=content, headers=headers)

    async def chat(self, content: bytes, **headers: str) -> httpx.Response:
        return await self.post("/v1/chat/completions", content, **headers)

    async def say(self, text: str, **more: Any) -> httpx.Response:
        return await self.chat(body([{"role": "user", "content": text, **more}]))


async def test_one_large_request_of_an_episode_is_worked_on_at_a_time() -> None:
    workers, large, may_end = Workers(), INLINE_BYTES_MAX + 1, threading.Event()
    slow = [asyncio.create_task(workers.run("one", large, partial(may_end.wait, 20))) for _ in range(8)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await workers.run("other", large, lambda: 3) == 3
    finally:
        may_end.set()
    assert all(await asyncio.gather(*slow))


async def test_a_long_conversation_goes_on_without_a_thread_as_its_template_says(bus: Bus) -> None:
    async with gateway_hive(bus, LONG_JOB, LONG_FILES) as hive, await agent(hive) as one:
        assert hive.gateway is not None
        hive.replica.scripts += [says("ok")] * 12
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(12):
            with every_thread_busy(hive.gateway.workers) if turn == 11 else nullcontext():
                assert (await one.chat(body(messages))).status_code == 200
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"{turn} " * 3000}]
        records = await hive.records(one.episode, 12)
    assert len(body(messages)) > 2 * INLINE_BYTES_MAX
    last, before = records[-1], hive.replica.requests[-2].prompt
    assert last.parent is not None
    assert last.parent.id == records[-2].id
    history = before + records[-2].choices[0].tokens
    said = messages[:-2]
    tail = TEXT.renderer.extend_as_given(history, len(before) // 4, said, len(said) - 1, ())
    assert tail is not None
    assert last.prompt_tail == pack_tokens(tail)


async def test_an_answer_of_many_numbers_is_written_in_a_thread_while_others_go_on(served: GatewayHive) -> None:
    assert served.gateway is not None
    served.replica.scripts.append(says([5] * 220, finish="length"))
    asked_for = {"logprobs": True, "top_logprobs": 20, "max_tokens": 220}
    async with await agent(served) as one, await agent(served) as other:
        with every_thread_busy(served.gateway.workers):
            large = asyncio.create_task(one.chat(body([{"role": "user", "content": "hi"}], **asked_for)))
            await until(lambda: served.replica.requests)
            assert (await other.say("hi")).status_code == 200
            assert not large.done()
        answer = (await large).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 220


@pytest.mark.parametrize("what", [{"unknown": 300}, {"parts": UNSUPPORTED + 1}])
def test_more_fields_or_parts_than_anybody_sends_are_refused(what: dict[str, int]) -> None:
    fields = {f"k{number}": 1 for number in range(what.get("unknown", 0))}
    content = [{"type": "x"}] * what.get("parts", 1)
    made = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    with pytest.raises(Refused, match="limit") as refused:
        read_chat(json.dumps(made).encode())
    assert refused.value.code == Code.TOO_LARGE


async def test_the_characters_of_tools_are_those_that_a_template_writes(served: GatewayHive) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["a"] * 20_000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    made = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    async with await agent(served) as client:
        refused = await client.chat(json.dumps(made).encode())
    assert refused.status_code == 400
    assert "characters are" in refused.text


async def agent(hive: GatewayHive) -> Agent:
    return Agent(hive, *await hive.claim())


def body(messages: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()


def raw(messages: str = USER, more: str = "") -> bytes:
    return ('{"model": "m", "messages": [' + messages + "]" + more + "}").encode()


# ---- values that some library cannot hold ----

ODD = {
    "5,000 digits": "9" * 5000,
    "4,200 digits": "-" + "9" * 4200,
    "a float of 5,000 digits": "9" * 5000 + ".5",
    "infinity": "1e400",
    "3,000 brackets": "[" * 3000 + "]" * 3000,
    "200 brackets": "[" * 200 + "]" * 200,
    "200 objects": '{"a":' * 200 + "1" + "}" * 200,
    "half a character": '"\\ud800"',
    "100,000 characters": '"' + "x" * 100_000 + '"',
}
FIELDS = (
    "metadata",
    "response_format",
    "tool_choice",
    "logit_bias",
    "seed",
    "max_tokens",
    "top_k",
    "n",
    "stop",
    "model",
)
MESSAGE_FIELDS = (
    "name",
    "refusal",
    "annotations",
    "function_call",
    "reasoning_content",
    "tool_call_id",
    "role",
    "content",
)


def calling(id: str = '"c"', name: str = '"f"', arguments: str = '"{}"', index: str = "0") -> str:
    call = f'"id": {id}, "type": "function", "index": {index}, "function": {{"name": {name}, "arguments": {arguments}}}'
    assistant = f'{{"role": "assistant", "content": null, "tool_calls": [{{{call}}}]}}'
    return f'{USER}, {assistant}, {{"role": "tool", "tool_call_id": "c", "content": "x"}}'


# Each place of a call that takes any value, or a text; @ stands for the value.
CHATS = [
    *(raw(more=f', "{field}": @') for field in FIELDS),
    *(raw(more=f', "{field}": {{"type": @}}') for field in FIELDS),
    *(raw(f'{{"role": "assistant", "content": "x", "{field}": @}}, {USER}') for field in MESSAGE_FIELDS),
    raw('{"role": "user", "content": [{"type": @, "text": "x"}]}'),
    raw('{"role": "user", "content": [{"type": "text", "text": @}]}'),
    raw('{"role": "user", "content": [{"type": "text", "text": "x", "z": @}]}'),
    raw(more=', "tools": [{"type": "function", "function": {"name": "f", "parameters": @}}]'),
    raw(more=', "tools": [{"type": "function", "function": {"name": "f", "description": @}}]'),
    raw(more=', "tools": [{"type": "function", "function": {"name": @}}]'),
    raw(more=', "tools": [{"type": @, "function": {"name": "f"}}]'),
    raw(more=', "chat_template_kwargs": {"a": @}'),
    raw(calling(id="@")),
    raw(calling(name="@")),
    raw(calling(index="@")),
]
OUTPUTS = ['"metadata": {"a": @}', '"log_metrics": {"a": @}', '"log_metrics": {"a": [@]}', '"z": @']


def chats(value: str) -> Iterator[bytes]:
    """Yield calls with a value at each place."""
    yield from (chat.replace(b"@", value.encode()) for chat in CHATS)
    yield raw(calling(arguments=json.dumps(value)))
    yield raw(calling(arguments=json.dumps(f'{{"a": {value}}}')))
    name = value.replace('"', "").replace("\\", "\\\\")
    yield raw(more=f', "{name}": 1')


def ends(episode: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield routes that end an episode, and bodies with a value at each place."""
    for output in OUTPUTS:
        given = output.replace("@", value)
        end = f'"episode_uuid": "{episode}", "task_id": "t", "workflow_output": {{"reward": null, {given}}}'
        yield "/end_episode", f'{{"client_uuid": "c1", {end}}}'
        yield "/end_episodes", f'{{"client_uuid": "c1", "episodes": [{{{end}}}]}}'


@pytest.mark.parametrize("name", ODD)
async def test_no_value_at_any_place_of_a_call_is_a_500(served: GatewayHive, name: str) -> None:
    async with await agent(served) as one:
        for content in chats(ODD[name]):
            answer = await one.chat(content)
            assert answer.status_code in (200, 400), content[:200]
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert len(answer.content) < 3 * QUOTED_CHARACTERS
            await served.alive("replica-1", served.replica)
        for prompt in (ODD[name], f"[{ODD[name]}]"):
            answer = await one.post("/v1/completions", b'{"model": "m", "prompt": %s}' % prompt.encode())
            assert answer.status_code in (200, 400), prompt[:200]


@pytest.mark.parametrize("name", ODD)
async def test_no_value_at_any_place_of_an_end_is_a_500(served: GatewayHive, name: str) -> None:
    episode = Keys(SECRET).claimed_id((await served.claim())[0])
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
        for route, content in ends(episode, ODD[name]):
            answer = await client.post(route, content=content)
            assert answer.status_code in (200, 400, 409, 413), content[:200]
            assert len(answer.content) < 3 * QUOTED_CHARACTERS


@pytest.mark.parametrize("place", [b"hi", b"user", b"model", b"messages"])
async def test_a_body_that_is_not_utf_8_is_a_400(served: GatewayHive, place: bytes) -> None:
    async with await agent(served) as one:
        answer = await one.chat(raw().replace(place, b"\xff\xfe"))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] in ("malformed", "unknown_field")


NUMBERS = [
    "0x" + "f" * 5000,
    "1" + ":59" * 5000,
    "1" + ":59" * 5000 + ".5",
    "9" * 4200,
    "[" * 3000,
    "&a 1",
    "{<<: {a: 1}}",
    '"\\ud800"',
    '"\\U0000dfff"',
]


JOBS = [
    "bombus:\n  trainer:\n    lr: @\n",
    "bombus:\n  model:\n    path: @\n",
    "bombus:\n  model:\n    path: x\n    chat_template_kwargs:\n      a: @\n",
    "ajet:\n  data:\n    train_batch_size: @\n",
    '{"bombus": {"model": {"path": "x", "chat_template_kwargs": {"a": @}}}}',
]


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff"])
async def test_half_a_character_in_a_name_of_a_job_is_a_400(served: GatewayHive, half: str) -> None:
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
        for job in ('{"bombus": {"%s": {}}}', '{"ajet": {"%s": 1}}', 'bombus:\n  "%s": {}\n', '"%s": 1\n'):
            for route in ("/sync_train_config", "/compare_train_config"):
                answer = await client.post(route, content=json.dumps({"yaml_as_string": job % half}))
                assert answer.status_code == 400, job
                assert "surrogates not allowed" in answer.json()["detail"]


@pytest.mark.parametrize("value", NUMBERS, ids=[number[:12] for number in NUMBERS])
async def test_no_value_of_a_job_is_a_500(served: GatewayHive, value: str) -> None:
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
        for job in JOBS:
            text = job.replace("@", value)
            began = time.monotonic()
            answer = await client.post("/sync_train_config", content=json.dumps({"yaml_as_string": text}))
            assert answer.status_code == 400, job[:100]
            assert len(answer.content) < 3 * QUOTED_CHARACTERS
            assert time.monotonic() - began < 5


# ---- lengths ----


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (body([{"role": "user", "content": "hi", "name": "n" * 257}]), "messages[0].name"),
        (body([{"role": "tool", "content": "hi", "tool_call_id": "n" * 257}]), "messages[0].tool_call_id"),
        (raw(calling(id=json.dumps("n" * 257))), "messages[1].tool_calls[0].id"),
        (raw(calling(name=json.dumps("n" * 257))), "messages[1].tool_calls[0].function.name"),
        (body([{"role": "user", "content": "hi"}], tools=[{"function": {"name": "n" * 257}}]), "tools.0.function.name"),
        (raw().replace(b'"m"', json.dumps("n" * 257).encode()), "model"),
    ],
)
async def test_a_name_or_an_id_that_is_too_long_is_refused_with_the_limit(
    served: GatewayHive, content: bytes, param: str
) -> None:
    async with await agent(served) as one:
        answer = await one.chat(content)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "256" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a" * 7_000_000},
        {"role": "assistant", "content": "a", "reasoning_content": "r" * 7_000_000},
        {"role": "user", "content": "a b " * 20_000},
    ],
    ids=["text", "reasoning", "just over"],
)
async def test_more_text_than_the_model_can_read_is_refused_before_it_is_encoded(
    served: GatewayHive, message: dict[str, Any]
) -> None:
    async with await agent(served) as one:
        await one.say("hello")
        content = body([message, {"role": "user", "content": "hi"}])
        began = time.process_time()
        answer = await one.chat(content)
        assert time.process_time() - began < 2
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "up to 32000 characters" in answer.json()["error"]["message"]


async def test_other_requests_go_on_while_a_long_conversation_is_read(bus: Bus) -> None:
    async with gateway_hive(bus, LONG_JOB, LONG_FILES) as hive, await agent(hive) as one, await agent(hive) as other:
        await one.say("hello")
        began = time.monotonic()
        long = asyncio.create_task(one.say("the quick brown fox jumps over " * 20_000))
        waits: list[float] = []
        while not long.done():
            asked = time.monotonic()
            assert (await other.say("hello")).status_code == 200
            waits.append(time.monotonic() - asked)
            await hive.alive("replica-1", hive.replica)
        assert (await long).status_code == 200
        assert len(waits) > 2
        assert statistics.median(waits) < (time.monotonic() - began) / 2


async def test_a_large_conversation_is_rendered_as_a_small_one_is(bus: Bus) -> None:
    async with gateway_hive(bus, LONG_JOB, LONG_FILES) as hive, await agent(hive) as one:
        text = "what is the weather in Paris? " * 2000
        assert (await one.say(text)).status_code == 200
        record, *_ = await hive.records(one.episode, 1)
        tokens = hive.replica.requests[0].prompt
        assert record.prompt_tail == tokens
        model = (await hive_model(hive)).tokenizer
        assert text in model.decode([*memoryview(tokens).cast("i")])


async def hive_model(hive: GatewayHive) -> Any:
    from bombus_gateway.call.models import EngineModels

    return await EngineModels(hive.bus).text_model(hive.engine)


async def test_a_report_that_the_log_cannot_have_loses_what_is_wrong_with_it_and_no_reward(served: GatewayHive) -> None:
    deep, large = "[" * 300 + "]" * 300, "x" * 70_000
    odd = f'"half": "\\ud800", "nan": NaN, "big": {"9" * 100}, "bigger": {"9" * 5000}'
    metadata = f'{{"large": "{large}", "deep": {deep}, {odd}, "kept": 1}}'
    metrics = f'{{"none": null, "text": "a", "{"m" * 300}": 1, "kept": [1, 2]}}'
    output = f'{{"reward": 1, "metadata": {metadata}, "log_metrics": {metrics}, "is_success": "yes"}}'
    name, _ = await served.claim()
    end = f'"episode_uuid": "{Keys(SECRET).claimed_id(name)}", "task_id": "t", "workflow_output": {output}'
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
        for path, body in (
            ("/end_episode", f'{{"client_uuid": "c1", {end}}}'),
            ("/end_episodes", f'{{"client_uuid": "c1", "episodes": [{{{end}}}]}}'),  # the same end again
        ):
            reply = await client.post(path, content=body)
            assert reply.status_code == 200, reply.text
    await served.until(lambda engine: name in engine.pool)
    assert served.engine.pool[name].reward == 1.0


async def test_the_calls_of_one_episode_have_a_limit_of_bytes_in_the_log(bus: Bus) -> None:
    async with gateway_hive(bus, LONG_JOB, LONG_FILES, episode_mb_max=1) as hive, await agent(hive) as one:
        hidden = "r" * 600_000  # the template drops it, the record has it
        assistant = {"role": "assistant", "content": "x", "reasoning_content": hidden}
        statuses = []
        for turn in range(4):
            content = body([{"role": "user", "content": f"{turn}"}, assistant, {"role": "user", "content": "?"}])
            answer = await one.chat(content)
            statuses.append(answer.status_code)
        assert statuses == [200, 200, 413, 413]
        assert "the limit is 1048576" in answer.json()["error"]["message"]
        async with await agent(hive) as another:
            assert (await another.say("hello")).status_code == 200
        async with gateway_of(bus, episode_mb_max=1) as (_, url):
            one.url = url
            assert (await one.chat(content)).status_code == 200  # for this one reads the log
            assert (await one.chat(content)).status_code == 413


# ---- headers ----


async def test_a_trace_goes_into_the_record_and_what_is_not_one_does_not(served: GatewayHive) -> None:
    async with await agent(served) as one:
        for trace in (TRACE, "x" * 60_000, "00-zz", TRACE * 2):
            assert (await one.chat(raw(), traceparent=trace)).status_code == 200
        records = await served.records(one.episode, 4)
        assert [record.trace for record in records] == [TRACE, "", "", ""]


async def test_a_header_over_the_limit_is_a_431_at_a_gateway_too(served: GatewayHive) -> None:
    async with await agent(served) as one:
        try:
            answer = await one.chat(raw(), traceparent="x" * 5_000_000)
        except httpx.TransportError:  # the client noticed only that it could not send on
            pass
        else:
            assert answer.status_code == 431
        assert (await one.say("hello")).status_code == 200


async def test_bodies_that_are_half_sent_take_no_more_memory_than_they_may_together(bus: Bus) -> None:
    async with gateway_hive(bus, bodies_mb_max=4) as hive, await agent(hive) as honest:
        large = b"{" + b" " * 500_000
        assert (await honest.post("/end_episode", large)).status_code == 400
        writers, refused = await filled(hive.base_url, honest, large)
        assert refused.json()["code"] == "overloaded"
        assert "fill the limit of 4 MiB" in refused.text
        assert (await honest.say("hello")).status_code == 200
        for writer in writers:
            writer.close()
        while (answer := await honest.post("/end_episode", large)).status_code == 503:
            await asyncio.sleep(0.05)
        assert answer.status_code == 400


async def filled(url: str, honest: Agent, probe: bytes) -> tuple[list[asyncio.StreamWriter], httpx.Response]:
    """Hold all of the memory by two bodies that are half sent, and return them and how a probe is refused then."""
    while True:
        writers = [await half_sent(url, (2 << 20) - 1000) for _ in range(2)]
        for _ in range(20):  # until the server has read what was sent
            if (answer := await honest.post("/end_episode", probe)).status_code == 503:
                return writers, answer
            await asyncio.sleep(0.05)
        for writer in writers:  # one was refused, since a probe took its room
            writer.close()


async def half_sent(url: str, size: int) -> asyncio.StreamWriter:
    """Send so many bytes of a body, and leave the connection open."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /end_episode HTTP/1.1\r\nhost: {host}\r\ncontent-length: {size + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * size)
    return writer
