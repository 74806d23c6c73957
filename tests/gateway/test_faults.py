"""Model calls when the client, a replica, a gateway or the log goes away in the middle."""

import asyncio
import json
from collections.abc import AsyncIterator
from math import nan
from typing import Any

import httpx
import msgspec
import openai
import pytest

from bombus.bus import Bus, Reader
from bombus.hive.generation import Fault, Finished, Generate
from bombus.hive.inbox import Touch, decode_message
from bombus.hive.records import CallStatus, pack_logprobs, unpack_tokens
from bombus_gateway.call.upstream import WRONG_MAX
from bombus_gateway.keys import Keys
from tests.gateway.openai_hive import (
    ENGINE,
    FILES,
    JOB,
    MODEL,
    SECRET,
    TEXT,
    Died,
    GatewayHive,
    Send,
    chain_of,
    fault,
    frame_of,
    gateway_hive,
    gateway_of,
    says,
    tokens_of,
)
from tests.patience import PATIENCE_S

USER: Any = [{"role": "user", "content": "how are you?"}]
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


async def never_ends(request: Generate, send: Send) -> None:
    for token in tokens_of("the quick", end=False):
        await send(frame_of([token]))
    await asyncio.Event().wait()


async def dies_at_once(request: Generate, send: Send) -> None:
    raise Died


async def dies_in_the_middle(request: Generate, send: Send) -> None:
    await send(frame_of(tokens_of("the quick", end=False)))
    raise Died


async def test_a_client_that_hangs_up_leaves_a_record_marked_as_cut_off(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(never_ends)
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "the quick":
            break
    await stream.close()
    await asyncio.wait_for(served.replica.aborted.wait(), PATIENCE_S)
    (record,) = await served.records(episode, 1)
    assert record.status == CallStatus.CUT_OFF
    assert TEXT.tokenizer.decode(record.choices[0].token_ids()) == "the quick"
    assert record.choices[0].message is None


async def test_a_client_that_hangs_up_before_a_whole_answer_aborts_the_replica(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(never_ends)
    with pytest.raises(openai.APITimeoutError):
        await served.client(key, timeout=3).chat.completions.create(model=MODEL, messages=USER)
    await asyncio.wait_for(served.replica.aborted.wait(), PATIENCE_S)
    (call,) = await served.calls(episode, 1)
    assert call.status == CallStatus.CUT_OFF


async def test_a_replica_that_dies_costs_a_retry_that_the_client_does_not_notice(served: GatewayHive) -> None:
    episode, key = await served.claim()
    other = await served.another_replica("replica-2")
    assert served.gateway is not None
    await served.gateway.follower.wait_position(served.follower.position)
    for replica in (served.replica, other):
        replica.scripts.extend([dies_at_once])
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
    text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "ok"
    assert len(served.replica.requests + other.requests) == 3
    (record,) = await served.records(episode, 1)
    assert record.status == CallStatus.COMPLETE


async def test_a_replica_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(dies_in_the_middle)
    async with httpx.AsyncClient(base_url=served.base_url, headers={"authorization": f"Bearer {key}"}) as http:
        body = {"model": MODEL, "messages": USER, "stream": True}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.text.count("data: ") >= 2
    assert "broke off" in answer.text
    assert "[DONE]" not in answer.text
    (record,) = await served.records(episode, 1)
    assert record.status == CallStatus.CUT_OFF
    assert TEXT.tokenizer.decode(record.choices[0].token_ids()) == "the quick"


async def test_a_whole_answer_is_sampled_again_when_its_replica_dies_in_the_middle(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.extend([dies_in_the_middle, says("the fox")])
    answer = await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == "the fox"
    assert len(await served.calls(episode, 1)) == 1


async def test_a_call_whose_replicas_all_fail_is_a_503_that_says_why(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.extend([fault("out of memory")] * 3)
    with pytest.raises(openai.InternalServerError, match="out of memory") as failed:
        await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    assert failed.value.status_code == 503
    assert failed.value.response.headers["retry-after"] == "1"


async def test_a_replica_of_another_key_is_left_for_one_that_knows_its_gateways(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    served.replica.key = "of another hive"
    with pytest.raises(openai.InternalServerError, match="the replica refuses this gateway's key") as failed:
        await client.chat.completions.create(model=MODEL, messages=USER)
    assert (failed.value.status_code, failed.value.code) == (503, "no_replica")
    other = await served.another_replica("replica-2")
    for _ in range(2):
        await client.chat.completions.create(model=MODEL, messages=USER)
    assert (len(other.requests), served.replica.requests) == (2, [])


async def answers_nan(request: Generate, send: Send) -> None:
    frame = frame_of(tokens_of("the quick", end=False))
    await send(frame)
    await send(msgspec.structs.replace(frame, logprobs=pack_logprobs([nan] * (len(frame.tokens) // 4))))
    await send(Finished(reason="stop"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_whose_answers_cannot_be_right_is_quarantined_and_nothing_of_them_is_trained(
    served: GatewayHive, stream: bool
) -> None:
    episode, key = await served.claim()
    served.replica.otherwise = answers_nan
    body = {"model": MODEL, "messages": USER, "stream": stream}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=served.base_url, headers=headers, timeout=PATIENCE_S) as http:
        answers = 0
        while len(served.replica.requests) < WRONG_MAX:  # an attempt of which nothing has gone out is made again
            answer = await http.post("/v1/chat/completions", json=body)
            answers += answer.status_code == 200
            assert "is invalid: a token has the logprob nan" in answer.text
            assert "[DONE]" not in answer.text
    await served.until(lambda engine: engine.suspended != "")
    assert "replica-1: a replica's answer is invalid: a token has the logprob nan" in served.engine.suspended
    if answers:
        records = await served.records(episode, answers)
        assert {record.status for record in records} == {CallStatus.CUT_OFF}


async def test_r9_a_retry_gets_the_recorded_answer_and_not_a_second_sample(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.extend([says("the fox"), says("another")])
    first = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    again = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, extra_headers=AGAIN)
    assert again.choices == first.choices
    assert again.id == first.id
    other = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    assert other.choices[0].message.content == "another"
    assert len(served.replica.requests) == 2
    assert len(await served.calls(episode, 2)) == 2


async def test_a_retry_joins_the_first_request_while_that_is_running(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    go_on, started = asyncio.Event(), asyncio.Event()

    async def waits(request: Generate, send: Send) -> None:
        started.set()
        await go_on.wait()
        await says("the fox")(request, send)

    served.replica.scripts.append(waits)
    first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER))
    await started.wait()
    again = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN))
    go_on.set()
    assert (await first).choices == (await again).choices
    assert len(served.replica.requests) == 1


async def test_r9_a_retry_of_a_refused_call_does_not_get_the_answer_of_an_equal_one(bus: Bus) -> None:
    """Sub-agents send equal requests. One was refused while the other was under way, and its retry joined that one."""
    async with gateway_hive(bus, open_calls_max=1) as hive:
        _, key = await hive.claim()
        client = hive.client(key)
        go_on, started = asyncio.Event(), asyncio.Event()

        async def waits(request: Generate, send: Send) -> None:
            started.set()
            await go_on.wait()
            await says("one")(request, send)

        hive.replica.scripts += [waits, says("two")]
        first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER))
        await started.wait()
        for again in ({}, AGAIN):
            with pytest.raises(openai.InternalServerError):  # there is no room, also for the retry
                await client.chat.completions.create(model=MODEL, messages=USER, extra_headers=again)
        go_on.set()
        assert (await first).choices[0].message.content == "one"
        twice = {"x-stainless-retry-count": "2"}
        second = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers=twice)
        assert second.choices[0].message.content == "two"


async def test_retries_of_equal_requests_that_never_arrived_are_calls_of_their_own(served: GatewayHive) -> None:
    """Each of them bears the number 1, so none repeats another."""
    _, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("one"), says("two")]
    asked = [client.chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN) for _ in range(2)]
    answers = await asyncio.gather(*asked)
    assert {answer.choices[0].message.content for answer in answers} == {"one", "two"}


async def test_a_retry_does_not_get_an_answer_that_is_continued(served: GatewayHive, bus: Bus) -> None:
    _, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says("one"), says("next"), says("two"), says("three")]
    await client.chat.completions.create(model=MODEL, messages=USER)
    more: Any = [*USER, {"role": "assistant", "content": "one"}, *USER]
    await client.chat.completions.create(model=MODEL, messages=more)
    again = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN)
    assert again.choices[0].message.content == "two"
    async with gateway_of(bus) as (_, url):
        for expected in ("two", "three"):  # which the log has, and nobody continues; each only once
            elsewhere = await served.client(key, url).chat.completions.create(
                model=MODEL, messages=USER, extra_headers=AGAIN
            )
            assert elsewhere.choices[0].message.content == expected


async def test_another_gateway_gives_a_retry_the_recorded_answer(served: GatewayHive, bus: Bus) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says("the fox", portion=2))
    first = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in first])
    async with gateway_of(bus) as (_, url):
        second = await served.client(key, url).chat.completions.create(
            model=MODEL, messages=USER, stream=True, extra_headers=AGAIN
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in second]) == text == "the fox"
    assert len(served.replica.requests) == 1


async def test_r10_another_gateway_continues_an_episode_with_its_exact_tokens(served: GatewayHive, bus: Bus) -> None:
    episode, key = await served.claim()
    messages = list(USER)
    # Sampled as single bytes: rendering the text again would give other tokens.
    odd = [token for letter in "the fox" for token in tokens_of(letter, end=False)]
    assert odd != tokens_of("the fox", end=False)
    served.replica.scripts.extend([says(odd, finish="length"), says("the dog"), says("fine")])
    for _ in range(2):
        answer = await served.client(key).chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    async with gateway_of(bus) as (_, url):
        await served.client(key, url).chat.completions.create(model=MODEL, messages=messages)
    records = await served.records(episode, 3)
    tokens = chain_of(records)
    assert unpack_tokens(served.replica.requests[2].prompt) == tokens[: records[2].prompt_tokens]
    assert any(tokens[start : start + len(odd)] == odd for start in range(len(tokens)))


async def test_r10_a_gateway_that_cannot_read_the_earlier_turns_refuses(served: GatewayHive, bus: Bus) -> None:
    _, key = await served.claim()
    answer = await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    messages: Any = [*USER, answer.choices[0].message, {"role": "user", "content": "and?"}]
    async with gateway_of(bus, bus_timeout_s=0.3) as (_, url):
        await served.stop_coordinator()
        with pytest.raises(openai.InternalServerError, match="earlier turns") as refused:
            await served.client(key, url).chat.completions.create(model=MODEL, messages=messages)
        assert refused.value.status_code == 503
    assert len(served.replica.requests) == 1


async def test_interleaved_agents_merge_on_their_own_lines_and_a_rewritten_history_branches(
    served: GatewayHive,
) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    lines: dict[str, Any] = {name: [{"role": "system", "content": name}, *USER] for name in ("planner", "coder")}
    for turn in range(2):
        for name, line in lines.items():
            served.replica.scripts.append(says(f"{name} {turn}"))
            answer = await client.chat.completions.create(
                model=MODEL, messages=line, extra_headers={"x-bombus-role": name}
            )
            line += [answer.choices[0].message, {"role": "user", "content": "next"}]
    rewritten = [*lines["coder"]]
    rewritten[2] = {"role": "assistant", "content": "never said"}
    await client.chat.completions.create(model=MODEL, messages=rewritten)
    records = await served.records(episode, 5)
    assert [record.role for record in records] == ["planner", "coder", "planner", "coder", ""]
    chain_of([records[0], records[2]])
    chain_of([records[1], records[3]])
    assert records[4].parent is None
    assert len(records[4].messages) == 6


async def test_an_auxiliary_call_and_a_sub_agent_are_recorded_as_such(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    titled = "You are a title generator. You output ONLY a thread title. Nothing else."
    title: Any = [{"role": "system", "content": titled}, *USER]
    await client.chat.completions.create(model=MODEL, messages=title)
    await client.chat.completions.create(model=MODEL, messages=USER)
    of_sub_agent = {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
    await client.chat.completions.create(model=MODEL, messages=USER, extra_headers=of_sub_agent)
    records = await served.records(episode, 3)
    marks = [(record.role, record.auxiliary_call) for record in records]
    assert marks == [("title", "title"), ("", ""), ("subagent ses_2", "")]
    assert [call.masked for call in await served.calls(episode, 3)] == [True, False, False]


async def test_an_auxiliary_call_that_the_job_trains_is_noted_like_others(bus: Bus) -> None:
    rollout = {**JOB["bombus"]["rollout"], "auxiliary_calls": "train"}
    async with gateway_hive(bus, {"bombus": {**JOB["bombus"], "rollout": rollout}}) as hive:
        episode, key = await hive.claim()
        title: Any = [
            {"role": "system", "content": "You are a title generator. You output ONLY a thread title."},
            *USER,
        ]
        await hive.client(key).chat.completions.create(model=MODEL, messages=title)
        (call,) = await hive.calls(episode, 1)
        assert not call.masked


async def test_r9_without_the_log_the_last_byte_does_not_go(bus: Bus) -> None:
    async with gateway_hive(bus, bus_timeout_s=0.5) as hive:
        _, key = await hive.claim()
        heard = asyncio.Event()

        async def waits(request: Generate, send: Send) -> None:
            await send(frame_of(tokens_of("the", end=False)))
            await heard.wait()
            await says(" fox")(request, send)

        hive.replica.scripts.append(waits)
        await bus.requests.request(f"$JS.API.STREAM.DELETE.{bus.subjects.calls_stream}")
        stream = await hive.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
        chunks = []

        async def read() -> None:
            async for chunk in stream:
                heard.set()
                chunks.append(chunk)

        with pytest.raises(openai.APIError, match="log cannot be written"):
            await read()
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)


async def _move_inbox(bus: Bus, subject: str) -> None:
    """Let the inbox's stream take messages on `subject` alone."""
    name = bus.subjects.inbox_stream
    found = json.loads((await bus.requests.request(f"$JS.API.STREAM.INFO.{name}")).data)
    config = found["config"] | {"subjects": [subject]}
    answer = await bus.requests.request(f"$JS.API.STREAM.UPDATE.{name}", json.dumps(config).encode())
    assert "error" not in json.loads(answer.data), answer.data


async def test_r9_a_stored_call_that_could_not_be_told_is_told_by_its_retry(bus: Bus) -> None:
    async with gateway_hive(bus, bus_timeout_s=0.7) as hive:
        episode, key = await hive.claim()
        hive.replica.scripts.append(says("the fox"))
        await _move_inbox(bus, f"elsewhere.{bus.subjects.hive}.>")
        with pytest.raises(openai.InternalServerError, match="log cannot be written"):
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
        await _move_inbox(bus, bus.subjects.all_inbox)
        again = await hive.client(key).chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN)
        assert again.choices[0].message.content == "the fox"
        assert len(hive.replica.requests) == 1
        (call,) = await hive.calls(episode, 1)
        assert call.status == CallStatus.COMPLETE


async def test_a_gateway_that_is_stopped_records_what_it_could_not_finish(served: GatewayHive, bus: Bus) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(never_ends)
    async with gateway_of(bus, drain_s=0.1) as (gateway, url):
        stream = await served.client(key, url).chat.completions.create(model=MODEL, messages=USER, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "the quick":
                break
        gateway.ready = False
    with pytest.raises(openai.APIError, match="stopping"):
        async for _ in stream:
            pass
    (record,) = await served.records(episode, 1)
    assert record.status == CallStatus.CUT_OFF
    assert TEXT.tokenizer.decode(record.choices[0].token_ids()) == "the quick"


async def test_r20_a_call_whose_record_might_not_fit_is_refused_before_it_is_sampled(bus: Bus) -> None:
    rollout = {"max_prompt_length": 500, "max_response_length": 1500, "max_response_length_in_one_turn": 1500}
    job = {"bombus": {"model": {"path": MODEL}, "rollout": {**rollout, "max_model_len": 600_000}}}
    files = {**FILES, "config.json": json.dumps({"max_position_embeddings": 1 << 20, "vocab_size": 420}).encode()}
    async with gateway_hive(bus, job, files) as hive:
        _, key = await hive.claim()
        hidden = {"role": "assistant", "content": "x", "reasoning_content": "r" * 7_500_000}  # not in the prompt
        long: Any = [USER[0], hidden, USER[0]]
        with pytest.raises(openai.APIStatusError, match="ask for fewer tokens") as refused:
            await hive.client(key).chat.completions.create(model=MODEL, messages=long, n=64, max_tokens=1500)
        assert refused.value.status_code == 413
        assert not hive.replica.requests
        await hive.client(key).chat.completions.create(model=MODEL, messages=long, n=1, max_tokens=1500)


async def test_r9_a_log_that_is_nearly_full_refuses_before_generating(bus: Bus) -> None:
    async with gateway_hive(bus, log_fill_max=0.00001) as hive:
        _, key = await hive.claim()
        with pytest.raises(openai.InternalServerError, match="full") as refused:
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
        assert refused.value.code == "overloaded"
        assert refused.value.response.headers["retry-after"]
        assert hive.replica.requests == []


async def test_r20_too_many_open_calls_are_refused(bus: Bus) -> None:
    async with gateway_hive(bus, open_calls_max=1) as hive:
        _, key = await hive.claim()
        hive.replica.scripts.append(never_ends)
        stream = await hive.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
        await anext(aiter(stream))
        with pytest.raises(openai.InternalServerError, match="open"):
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
        await stream.close()


async def test_a_call_that_takes_too_long_is_refused_and_recorded_as_cut_off(bus: Bus) -> None:
    async with gateway_hive(bus, call_timeout_s=0.3) as hive:
        episode, key = await hive.claim()
        hive.replica.scripts.append(never_ends)
        with pytest.raises(openai.InternalServerError, match=r"longer than the limit of 0\.3 s") as refused:
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
        assert refused.value.code == "timeout"
        await asyncio.wait_for(hive.replica.aborted.wait(), PATIENCE_S)
        (record,) = await hive.records(episode, 1)
        assert record.status == CallStatus.CUT_OFF


async def test_a_call_whose_time_runs_out_between_record_and_note_has_one_record(bus: Bus) -> None:
    """The record was given to the log once more as cut off: it has the first, and the note named the digest of both."""
    async with gateway_hive(bus, call_timeout_s=0.5, bus_timeout_s=1.5) as hive:
        episode, key = await hive.claim()
        hive.replica.scripts.append(says("the fox"))
        await _move_inbox(bus, f"elsewhere.{bus.subjects.hive}.>")
        with pytest.raises(openai.InternalServerError, match="longer than the limit"):
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
        await _move_inbox(bus, bus.subjects.all_inbox)
        again = await hive.client(key).chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN)
        assert again.choices[0].message.content == "the fox"
        (record,) = await hive.records(episode, 1)
        assert (record.id, record.status) == (again.id.removeprefix("chatcmpl-"), CallStatus.COMPLETE)


async def test_an_open_call_is_a_sign_of_life(served: GatewayHive, bus: Bus) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(never_ends)
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
    touches = 0
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.inbox_stream) as reader:
        while touches < 2:
            for stored in await reader.read():
                message = decode_message(stored.data)
                touches += isinstance(message, Touch) and episode in message.episodes
    await stream.close()


async def test_r18_a_gateway_that_has_not_folded_the_log_takes_nothing(served: GatewayHive, bus: Bus) -> None:
    _, key = await served.claim()
    async with gateway_of(bus, ready=False) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).json()["why"].startswith("This gateway is still reading the log")
        with pytest.raises(openai.InternalServerError, match="starting"):
            await served.client(key, url).chat.completions.create(model=MODEL, messages=USER)


async def test_a_key_of_another_engine_does_not_open_this_engines_api(served: GatewayHive) -> None:
    key = Keys(SECRET).sign("other", 1, "other-1-1", 2**62)
    with pytest.raises(openai.AuthenticationError, match="for engine other"):
        await served.client(key, f"{served.base_url}/e/{ENGINE}").chat.completions.create(model=MODEL, messages=USER)


async def test_what_every_replica_would_refuse_is_not_sent_to_another(served: GatewayHive) -> None:
    _, key = await served.claim()

    async def refuses(request: Generate, send: Send) -> None:
        await send(Fault(why="300 tokens are too many", code="prompt_too_long"))

    served.replica.scripts.append(refuses)
    with pytest.raises(openai.BadRequestError, match="300 tokens") as refused:
        await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    assert refused.value.code == "context_length_exceeded"
    assert len(served.replica.requests) == 1


async def test_a_conversation_that_was_dropped_from_memory_is_read_from_the_log_again(bus: Bus) -> None:
    async with gateway_hive(bus, history_mb_max=0) as hive:
        episodes = [await hive.claim() for _ in range(2)]
        lines: list[Any] = [list(USER), list(USER)]
        for turn in range(3):
            for (_, key), line in zip(episodes, lines, strict=True):
                hive.replica.scripts.append(says(f"answer {turn}"))
                answer = await hive.client(key).chat.completions.create(model=MODEL, messages=line)
                line += [answer.choices[0].message, {"role": "user", "content": "next"}]
        for episode, _ in episodes:
            chain_of(await hive.records(episode, 3))


async def test_the_jobs_response_length_holds_for_a_conversation_that_was_dropped_while_a_call_was_open(
    bus: Bus,
) -> None:
    rollout = {"max_prompt_length": 500, "max_response_length": 20, "max_response_length_in_one_turn": 20}
    job: dict[str, Any] = {"bombus": {"model": {"path": MODEL}, "rollout": rollout}}
    async with gateway_hive(bus, job, history_mb_max=0) as hive:
        (_, key), (_, other) = await hive.claim(), await hive.claim()
        began, may_end = asyncio.Event(), asyncio.Event()

        async def slow(request: Generate, send: Send) -> None:
            began.set()
            await may_end.wait()
            await says("ok")(request, send)

        line: list[Any] = list(USER)
        sampled = 0
        for _ in range(2):
            began.clear()
            may_end.clear()
            hive.replica.scripts.append(slow)
            asking = asyncio.create_task(hive.client(key).chat.completions.create(model=MODEL, messages=line))
            await began.wait()
            await hive.client(other).chat.completions.create(model=MODEL, messages=USER)
            may_end.set()
            answer = await asking
            assert answer.usage is not None
            sampled += answer.usage.completion_tokens
            line += [answer.choices[0].message, {"role": "user", "content": "next"}]
        await hive.client(key).chat.completions.create(model=MODEL, messages=line)
        assert hive.replica.requests[-1].sampling.max_tokens == 20 - sampled


async def test_a_retry_gets_the_latest_of_equal_requests(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.extend([says("first"), says("second")])
    for _ in range(2):
        await client.chat.completions.create(model=MODEL, messages=USER)
    again = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers=AGAIN)
    assert again.choices[0].message.content == "second"


async def test_connections_to_replicas_are_used_again(served: GatewayHive) -> None:
    _, key = await served.claim()
    for _ in range(3):
        await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    assert served.replica.connections == 1
