"""The memory that the gateway keeps of conversations, and when it reads the log."""

import asyncio
import time
from typing import Any

import pytest
from msgspec import structs

from bombus.bus import Bus
from bombus.hive.records import CallRecord, CallRef, Choice, SamplingParams, digest, encode_record
from bombus_gateway.call.request import CallRequest, CompletionRequest
from bombus_gateway.call.workers import Workers
from bombus_gateway.history.continuing import EarlierCalls
from bombus_gateway.history.conversation import Conversation
from bombus_gateway.history.histories import FEW, Histories
from bombus_gateway.keys import KeyClaims, Keys
from bombus_gateway.settings import GatewaySettings
from tests.conftest import SMALL_STREAMS
from tests.gateway.openai_hive import (
    FILES,
    MODEL,
    SECRET,
    THINKING_TEMPLATE,
    GatewayHive,
    gateway_hive,
    gateway_of,
    says,
)

LARGE = bytes(700 << 10)


def histories(bus: Bus, history_mb_max: int = 1) -> Histories:
    settings = GatewaySettings(hive=bus.subjects.hive, history_mb_max=history_mb_max)
    return Histories(bus, settings, Workers(), lambda *_: False)


def of(episode: str) -> KeyClaims:
    return KeyClaims("main", 1, episode, 0)


def grow(conversation: Conversation, seq: int = 1) -> None:
    """Add a call with a prompt of 700 KiB."""
    record = CallRecord(
        id=f"call-{seq}",
        engine="main",
        run=1,
        episode="main-1-1",
        prompt_tail=LARGE,
        prompt_tokens=len(LARGE) // 4,
        choices=(Choice(tokens=b"", logprobs=b"", message={"role": "assistant", "content": str(seq)}),),
        sampling=SamplingParams(),
    )
    conversation.add(CallRef(seq, record.id, b""), record, None, b"")


async def test_what_a_conversation_takes_that_was_dropped_meanwhile_is_not_counted(bus: Bus) -> None:
    known = histories(bus)
    dropped = known.conversation(of("a"))
    grow(known.conversation(of("b")))
    grow(known.conversation(of("c")))
    known.account_for(of("b"))
    known.account_for(of("c"))
    grow(dropped)
    known.account_for(of("a"))
    assert known.bytes == known.conversation(of("c")).memory_bytes


async def test_the_conversations_of_episodes_that_are_over_are_dropped_when_they_are_many(bus: Bus) -> None:
    over = set[tuple[str, int, str]]()
    settings = GatewaySettings(hive=bus.subjects.hive)
    known = Histories(bus, settings, Workers(), lambda *episode: episode in over)
    grow(first := known.conversation(of("first")))
    known.account_for(of("first"))
    for number in range(FEW - 1):
        known.conversation(of(f"{number}"))
        over.add(("main", 1, f"{number}"))
    held, taken = known.conversation(of("3")), known.bytes
    assert held is known.conversation(of("3")), "few are not looked through"
    known.conversation(of("new"))
    assert known.bytes == first.memory_bytes + Conversation().memory_bytes < taken
    assert known.conversation(of("first")) is first
    assert known.conversation(of("3")) is held, "a call may still hold it"


async def test_a_conversation_that_a_call_holds_is_found_again_after_it_was_dropped(bus: Bus) -> None:
    known = histories(bus)
    held = known.conversation(of("a"))
    for episode in "bc":
        grow(known.conversation(of(episode)))
        known.account_for(of(episode))
    grow(held)
    assert known.conversation(of("a")) is held
    known.account_for(of("a"))
    assert known.bytes == held.memory_bytes


async def test_conversations_that_are_continued_by_name_keep_each_message_once(bus: Bus) -> None:
    await bus.ensure_streams(SMALL_STREAMS)
    known, claims, turns = histories(bus), of("main-1-1"), 20
    earlier, conversation = EarlierCalls(known), known.conversation(claims)
    nothing = CompletionRequest(chat=True)
    request = CallRequest(claims=claims, completion=nothing, digest=b"", body_bytes=0, received_ns=0)
    text, node = "x" * 1000, None
    for turn in range(turns):
        answer = Choice(tokens=b"", logprobs=b"", message={"role": "assistant", "content": f"answer {turn}"})
        record = CallRecord(
            id=f"call-{turn}",
            engine="main",
            run=1,
            episode=claims.episode,
            parent=node.ref if node else None,
            prompt_tail=b"",
            prompt_tokens=0,
            choices=(answer,),
            sampling=SamplingParams(),
            messages=({"role": "user", "content": text},),
        )
        body = encode_record(record)
        ack = await bus.publisher.publish(bus.subjects.call("main", ""), body, msg_id=record.id)
        conversation.add(CallRef(ack.seq, record.id, digest(body)), record, node, record.id.encode())
        (node,) = conversation.sampled.after(record.id.encode())
        named = structs.replace(nothing, continues=record.id)
        continued = await earlier.continued(structs.replace(request, completion=named))
        assert len(continued.completion.messages) == 2 * (turn + 1)
        assert continued.completion.messages[-1] == {**(answer.message or {}), "answer_of": (record.id, 0)}
    assert turns * len(text) < earlier.characters < 3 * turns * len(text)


# ---- reading the log ----------------------------------------------------------------------------------------


async def test_requests_that_read_an_episode_at_the_same_time_add_each_of_its_calls_once(
    served: GatewayHive, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus_gateway.history.histories.READ_AT_ONCE", 2)
    _, key = await served.claim()
    messages: list[Any] = [{"role": "user", "content": "what is it?"}]
    for word in ("fox", "dog", "bee"):
        served.replica.scripts.append(says(word))
        answer = await served.client(key).chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    claims = Keys(SECRET).verify(key, time.time_ns())
    here = histories(bus)
    await asyncio.gather(*[here.read_log(claims) for _ in range(4)])
    calls = served.engine.open[claims.episode].calls
    stored = await bus.get_many(bus.subjects.calls_stream, [call.ref.seq for call in calls])
    assert here.conversation(claims).stored_bytes == sum(len(found.data) for found in stored)


async def test_agents_that_say_the_same_each_go_on_with_thoughts_of_their_own(bus: Bus) -> None:
    """A gateway that knows only the other's answer reads the log before it takes that one."""
    shown = "'\n' + ('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + "
    template = THINKING_TEMPLATE.replace("'\n' + message['content']", f"{shown}message['content']")
    assert template != THINKING_TEMPLATE
    files = {**FILES, "chat_template.jinja": template.encode()}
    async with gateway_hive(bus, files=files) as hive, gateway_of(bus) as (_, elsewhere):
        episode, key = await hive.claim()
        question: Any = [{"role": "user", "content": "what is it?"}]
        answers: list[dict[str, Any]] = []
        for thought, url in (("the quick", hive.base_url), ("the brown", elsewhere)):
            hive.replica.scripts.append(says(f"{thought}</think>the fox"))
            answer = await hive.client(key, url).chat.completions.create(model=MODEL, messages=question)
            answers.append(answer.choices[0].message.model_dump())
        assert [said["reasoning_content"] for said in answers] == ["the quick", "the brown"]
        for said, url in zip(answers, (elsewhere, hive.base_url)):
            more: Any = [*question, said, {"role": "user", "content": "and?"}]
            await hive.client(key, url).chat.completions.create(model=MODEL, messages=more)
        records = await hive.records(episode, 4)
        parents = [record.parent.id if record.parent is not None else "" for record in records]
        assert parents == ["", "", records[0].id, records[1].id]


async def test_a_plain_conversation_goes_on_at_another_gateway(served: GatewayHive, bus: Bus) -> None:
    """What was sampled earlier in it does not count as its first prompt, which the job limits."""
    episode, key = await served.claim()
    prompt = [300] * 400
    for url in (served.base_url, ""):
        async with gateway_of(bus) as (_, elsewhere):
            served.replica.scripts.append(says([301] * 60, finish="length"))
            answer = await served.client(key, url or elsewhere).completions.create(
                model=MODEL, prompt=prompt, max_tokens=60
            )
            assert answer.choices[0].finish_reason == "length"
            prompt += [301] * 60 + [302] * 100
            await served.until(lambda engine: bool(engine.open[episode].calls))
    first, second = await served.records(episode, 2)
    assert second.parent is not None
    assert second.parent.id == first.id
    assert second.prompt_tokens == 560
