"""Calls whose answers an engine holds to a form, through a gateway and its bus."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bombus.bus import Bus
from bombus.hive.events import EpisodeType
from bombus.hive.records import unpack_tokens
from tests.gateway.openai_hive import JOB, MODEL, TEXT, GatewayHive, chain_of, gateway_hive, says

USER: Any = [{"role": "user", "content": "what is the weather in Paris?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


async def test_an_evaluation_is_held_to_its_form_by_a_replica_that_can(served: GatewayHive) -> None:
    """The others of the engine get no such call, however free they are."""
    able = await served.another_replica("able", constrains=True)
    for turn in range(6):
        episode, key = await served.claim(EpisodeType.EVAL)
        able.scripts.append(says(str(1 + turn % 2)))
        answer = await served.client(key).chat.completions.with_raw_response.create(
            model=MODEL, messages=USER, response_format=FORMAT
        )
        assert "x-bombus-overridden" not in answer.headers
        (record,) = await served.records(episode, 1)
        assert (record.constrained, record.overridden) == (("response_format",), ())
        assert record.replica == "able"
    assert served.replica.requests == []
    constraint = able.requests[0].constraint
    assert constraint is not None
    assert constraint.schema == '{"enum": [1, 2]}'


async def test_a_forced_call_is_asked_for_in_the_syntax_of_the_model(served: GatewayHive) -> None:
    able = await served.another_replica("able", constrains=True)
    episode, key = await served.claim(EpisodeType.EVAL)
    able.scripts.append(says(CALL))
    answer = await served.client(key).chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert call.function.name == "weather"
    (record,) = await served.records(episode, 1)
    assert record.constrained == ("tool_choice",)
    (asked,) = able.requests
    assert asked.constraint is not None
    assert asked.constraint.opens + asked.constraint.calls[0].head == '<tool_call>\n{"name": "weather", "arguments": '


async def test_without_such_a_replica_the_form_is_left_out_and_named(served: GatewayHive) -> None:
    episode, key = await served.claim(EpisodeType.EVAL)
    answer = await served.client(key).chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, response_format=FORMAT
    )
    assert answer.headers["x-bombus-overridden"] == "response_format"
    (record,) = await served.records(episode, 1)
    assert (record.constrained, record.overridden) == ((), ("response_format",))
    assert served.replica.requests[0].constraint is None


async def test_training_is_free_by_default_whatever_the_engine_can(served: GatewayHive) -> None:
    await served.another_replica("able", constrains=True)
    episode, key = await served.claim()
    answer = await served.client(key).chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, response_format=FORMAT, tools=TOOLS, tool_choice="required"
    )
    assert answer.headers["x-bombus-overridden"] == "tool_choice, response_format"
    (record,) = await served.records(episode, 1)
    assert record.constrained == ()
    assert [request.constraint for replica in served.replicas for request in replica.requests] == [None]


async def test_a_job_that_obeys_holds_training_to_forms_and_the_record_says_so(bus: Bus) -> None:
    groups = JOB["bombus"]
    job = {"bombus": {**groups, "rollout": {**groups["rollout"], "sampling": "obey"}}}
    async with gateway_hive(bus, job) as hive:
        able = await hive.another_replica("able", constrains=True)
        episode, key = await hive.claim()
        able.scripts.append(says("2"))
        await hive.client(key).chat.completions.create(model=MODEL, messages=USER, response_format=FORMAT)
        (record,) = await hive.records(episode, 1)
        assert record.constrained == ("response_format",)


async def test_an_answer_of_one_call_ends_with_it_and_the_next_turn_continues_it(served: GatewayHive) -> None:
    """Nothing is needed from the engine for that, so it holds in training too."""
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts += [says(f"{CALL}\n{CALL}", portion=5), says("fine")]
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "parallel_tool_calls": False}
    raw = await client.chat.completions.with_raw_response.create(messages=USER, **asked)
    assert "x-bombus-overridden" not in raw.headers
    message = raw.parse().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert raw.parse().choices[0].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said: Any = message.model_dump(exclude_none=True)
    await client.chat.completions.create(messages=[*USER, said, result], **asked)
    records = await served.records(episode, 2)
    text = TEXT.tokenizer.decode(chain_of(records), with_specials=True)
    assert text.count("<tool_call>") == 1 + 2, "the one that was made, and those of the description of the tools"
    assert "</tool_call><|im_end|>" in text.replace("\n", "")
    assert unpack_tokens(records[0].choices[0].tokens)[-1] != TEXT.renderer.stop_token_ids[0]
