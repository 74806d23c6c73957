"""Requests that give variables to the chat template, sent by OpenAI's own SDK."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from bombus.bus import Bus
from bombus.errors import Refused
from bombus.hive.records import digest, encode_record, unpack_tokens
from bombus_gateway.history.identity import TOOLS_BYTES_MAX, TOOLS_KEPT, _kept, root_digest
from bombus_gateway.keys import Keys
from bombus_gateway.text.rendering import TextModel, TextOptions
from tests.gateway.openai_hive import FILES, JOB, MODEL, SECRET, TEXT, GatewayHive, gateway_hive, gateway_of, says

# Like that of Qwen3: an answer without thinking begins with empty reasoning.
THINKS = (
    "{% set plain = enable_thinking is defined and enable_thinking is false %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and plain %}{{ '<think>\n\n</think>\n\n' }}"
    "{% elif message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if plain %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Nothing of reasoning is to be seen unless a request turns it on.
THINKS_ON_REQUEST = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if thinking is defined and thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
USER: Any = [{"role": "user", "content": "what is the weather?"}]
AGAIN = {"x-stainless-retry-count": "1"}


def job(**model: Any) -> dict[str, Any]:
    groups = JOB["bombus"]
    rollout = {**groups["rollout"], "allow_chat_template_kwargs": True}
    return {"bombus": {**groups, "model": {"path": MODEL, **model}, "rollout": rollout}}


def files(template: str) -> dict[str, bytes]:
    return {**FILES, "chat_template.jinja": template.encode()}


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, job(), files(THINKS)) as hive:
        yield hive


def prompts(hive: GatewayHive) -> list[str]:
    """Return the text of each prompt that the replica was given."""
    return [TEXT.tokenizer.decode(unpack_tokens(sent.prompt), with_specials=True) for sent in hive.replica.requests]


async def test_a_requests_variables_reach_the_template_and_are_recorded(served: GatewayHive) -> None:
    episode, key = await served.claim()
    chat = served.client(key).chat.completions
    await chat.create(model=MODEL, messages=USER)
    await chat.create(model=MODEL, messages=USER, extra_body=NO_THINKING)
    thinking, plain = prompts(served)
    assert thinking.endswith("<|im_start|>assistant\n")
    assert plain == thinking + "<think>\n\n</think>\n\n"
    records = await served.records(episode, 2)
    assert [record.chat_template_kwargs for record in records] == [{}, {"enable_thinking": False}]
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        body = {"episode_uuid": Keys(SECRET).claimed_id(episode)}
        replay = (await http.post("/replay_latest_llm_call", json=body)).json()
    assert replay["input"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert b"chat_template_kwargs" not in encode_record(records[0]), "the bytes are those of earlier versions"


async def test_a_requests_variables_win_over_the_jobs_and_leave_the_others(bus: Bus) -> None:
    shown = "{{ tone }} {{ level }}" + THINKS
    given = {"tone": "soft", "level": 1}
    async with gateway_hive(bus, job(chat_template_kwargs=given), files(shown)) as hive:
        _, key = await hive.claim()
        chat = hive.client(key).chat.completions
        await chat.create(model=MODEL, messages=USER, extra_body={"chat_template_kwargs": {"level": 2.5}})
        await chat.create(model=MODEL, messages=USER)
        assert [prompt.partition("<")[0] for prompt in prompts(hive)] == ["soft 2.5", "soft 1"]


async def test_a_job_that_says_nothing_refuses_variables_and_names_the_cure(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        _, key = await hive.claim()
        chat = hive.client(key).chat.completions
        with pytest.raises(
            openai.BadRequestError, match=r"set in the job model\.chat_template_kwargs .* or rollout\.allow"
        ) as no:
            await chat.create(model=MODEL, messages=USER, extra_body=NO_THINKING)
        assert no.value.param == "chat_template_kwargs"
        assert no.value.code == "unsupported"
        await chat.create(model=MODEL, messages=USER, extra_body={"chat_template_kwargs": {}})
        assert len(hive.replica.requests) == 1


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"messages": "x"}, "messages is set by the renderer"),
        ({"add_generation_prompt": False}, "add_generation_prompt is set by the renderer"),
        ({"bos_token": ""}, "bos_token is set by the renderer"),
        ({"date": 2**63}, "date is a whole number of more than 64 bits"),
        ({f"v{index}": 1 for index in range(65)}, "65 variables, but the limit is 64"),
        ({"tools": [1]}, "Expected `bool | int | float | str`, got `array`"),
        ({"enable_thinking": None}, "got `null`"),
        ("enable_thinking", "Expected `object"),
    ],
    ids=str,
)
async def test_variables_that_nobody_may_give_are_refused(served: GatewayHive, variables: Any, why: str) -> None:
    _, key = await served.claim()
    with pytest.raises(openai.BadRequestError) as no:
        await served.client(key).chat.completions.create(
            model=MODEL, messages=USER, extra_body={"chat_template_kwargs": variables}
        )
    assert why in no.value.message
    assert str(no.value.param).startswith("chat_template_kwargs")
    assert not served.replica.requests


async def test_a_conversation_is_continued_only_with_the_variables_that_it_began_with(
    served: GatewayHive, bus: Bus
) -> None:
    episode, key = await served.claim()
    chat = served.client(key).chat.completions
    messages = list(USER)
    for _ in range(2):
        answer = await chat.create(model=MODEL, messages=messages, extra_body=NO_THINKING)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "and?"},
        ]
    await chat.create(model=MODEL, messages=messages)
    async with gateway_of(bus) as (_, url):  # it reads what came before from the log
        elsewhere = served.client(key, url).chat.completions
        await elsewhere.create(model=MODEL, messages=messages, extra_body=NO_THINKING)
    first, second, other, third = await served.records(episode, 4)
    assert [record.parent and record.parent.id for record in (first, second, other, third)] == [
        None,
        first.id,
        None,
        second.id,
    ]
    assert [record.chat_template_kwargs for record in (first, second, other, third)] == [
        {"enable_thinking": False},
        {},
        {},
        {},
    ]
    *_, without, again = prompts(served)
    assert "<think>" not in without
    assert again.count("<think>\n\n</think>\n\n") == 3


async def test_a_retry_with_the_same_variables_gets_the_recorded_answer(served: GatewayHive) -> None:
    _, key = await served.claim()
    chat = served.client(key).chat.completions
    served.replica.scripts.extend([says("fine"), says("other")])
    first = await chat.create(model=MODEL, messages=USER, extra_body=NO_THINKING)
    again = await chat.create(model=MODEL, messages=USER, extra_body=NO_THINKING, extra_headers=AGAIN)
    other = await chat.create(model=MODEL, messages=USER, extra_headers=AGAIN)
    assert again.id == first.id
    assert other.choices[0].message.content == "other"


@pytest.mark.parametrize("default", [True, False])
async def test_reasoning_is_read_whatever_the_job_and_the_request_say(bus: Bus, default: bool) -> None:
    async with gateway_hive(bus, job(chat_template_kwargs={"enable_thinking": default}), files(THINKS)) as hive:
        _, key = await hive.claim()
        chat = hive.client(key).chat.completions
        for thinks in (True, False):
            body = {"chat_template_kwargs": {"enable_thinking": thinks}}
            hive.replica.scripts.append(says("<think>\nhm\n</think>\n\nfine" if thinks else "fine"))
            message = (await chat.create(model=MODEL, messages=USER, extra_body=body)).choices[0].message
            assert message.content == "fine"
            assert getattr(message, "reasoning_content", None) == ("hm" if thinks else None)


async def test_reasoning_that_only_a_request_turns_on_is_read(bus: Bus) -> None:
    async with gateway_hive(bus, job(), files(THINKS_ON_REQUEST)) as hive:
        _, key = await hive.claim()
        chat = hive.client(key).chat.completions
        hive.replica.scripts.extend([says("hm\n</think>\n\nfine"), says("fine")])
        on = await chat.create(model=MODEL, messages=USER, extra_body={"chat_template_kwargs": {"thinking": True}})
        off = await chat.create(model=MODEL, messages=USER)
        assert on.choices[0].message.model_extra == {"reasoning_content": "hm"}
        assert [answer.choices[0].message.content for answer in (on, off)] == ["fine", "fine"]


def test_tools_that_a_variable_hides_are_refused_although_their_names_are_in_the_conversation() -> None:
    hides = "{% for tool in tools or [] if not quiet %}{{ tool | tojson }}{% endfor %}" + THINKS
    renderer = TextModel(files(hides), MODEL, TextOptions()).renderer
    tools = [{"type": "function", "function": {"name": "weather"}}]
    renderer.render(USER, tools)
    with pytest.raises(Refused, match="no place for tools"):
        renderer.given({"quiet": True}).render(USER, tools)


def test_a_conversation_without_variables_has_the_digest_of_earlier_versions() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert root_digest((), {}) == b""
    assert root_digest(tools, {}).hex() == "1f2980398d3cbcb4ee805d578db146bd"
    variables: list[dict[str, bool | int | float | str]] = [{}, {"a": True}, {"a": 1}, {"a": 1.0}, {"a": "1"}, {"b": 1}]
    assert len({root_digest(tools, each) for each in variables}) == len(variables)
    assert root_digest(tools, {"a": 1, "b": 2}) == root_digest(tools, {"b": 2, "a": 1})


def test_the_digest_of_tools_is_that_of_their_text_whichever_were_seen_before() -> None:
    for number in range(3 * TOOLS_KEPT):  # objects with the ids of earlier ones
        assert root_digest([{"n": number}], {}, shared=True) == digest(b'[{"n":%d}]' % number)
    assert len(_kept) <= TOOLS_KEPT
    equal = float(3 * TOOLS_KEPT - 1)
    assert root_digest([{"n": equal}], {}, shared=True) == digest(b'[{"n":%.1f}]' % equal), (
        "equal ones may have another text"
    )
    tools = [{"n": 1, "m": "x" * TOOLS_BYTES_MAX}]
    other = [{**tools[0], "n": 2}]
    assert root_digest(tools, {}, shared=True) == root_digest(tools, {}) != root_digest(other, {}, shared=True)
    before = dict(_kept)
    root_digest([{"n": -1}], {})
    assert _kept == before, "tools that are not shared are not kept"
    assert all(held[0][0] is not tools[0] for held in _kept.values()), "long ones are not kept"


PLAIN = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
APIS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}, {"reasoning_effort": "none"}),
    ("/v1/responses", {"input": USER}, {"reasoning": {"effort": "none", "summary": "auto"}}),
    ("/v1/messages", {"messages": USER}, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
]


async def post(hive: GatewayHive, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=hive.base_url) as http:
        answer = await http.post(path, json={"model": MODEL, **body}, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_wish_for_thinking_reaches_the_template_at_every_api_without_a_word_of_the_job(bus: Bus) -> None:
    async with gateway_hive(bus, files=files(THINKS)) as hive:
        for path, asked, asked_for in APIS:
            episode, key = await hive.claim()
            answer = await post(hive, key, path, {**asked, **asked_for})
            assert prompts(hive)[-1].endswith(PLAIN)
            assert "x-bombus-overridden" not in answer.headers
            (record,) = await hive.records(episode, 1)
            assert record.chat_template_kwargs == {"enable_thinking": False}
        counted = await post(hive, key, "/v1/messages/count_tokens", {"messages": USER, **asked_for})
        tokens = await post(hive, key, "/tokenize", {"messages": USER, "reasoning_effort": "none"})
        assert counted.json()["input_tokens"] == tokens.json()["count"] == record.prompt_tokens


async def test_a_conversation_goes_on_where_its_wish_for_thinking_stays_and_begins_anew_where_it_changes(
    bus: Bus,
) -> None:
    async with gateway_hive(bus, files=files(THINKS)) as hive:
        episode, key = await hive.claim()
        messages = list(USER)
        for effort in ("none", "none", "high"):
            answer = await post(hive, key, APIS[0][0], {"messages": messages, "reasoning_effort": effort})
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
        first, second, third = await hive.records(episode, 3)
        assert (first.parent, second.parent and second.parent.id, third.parent) == (None, first.id, None)
        assert third.chat_template_kwargs == {"enable_thinking": True}
        assert [record.overridden for record in (first, second, third)] == [(), (), ("reasoning_effort",)]
        sent = [unpack_tokens(request.prompt) for request in hive.replica.requests]
        assert sent[1][: len(sent[0])] == sent[0]


async def test_a_job_that_says_how_much_is_thought_is_not_overruled_and_the_answer_says_so(bus: Bus) -> None:
    groups = JOB["bombus"]
    fixed = {"bombus": {**groups, "model": {"path": MODEL, "chat_template_kwargs": {"enable_thinking": True}}}}
    async with gateway_hive(bus, fixed, files(THINKS)) as hive:
        for path, asked, asked_for in APIS:
            episode, key = await hive.claim()
            answer = await post(hive, key, path, {**asked, **asked_for})
            assert answer.headers["x-bombus-overridden"] in ("reasoning_effort", "reasoning.effort", "thinking")
            (record,) = await hive.records(episode, 1)
            assert (record.chat_template_kwargs, len(record.overridden)) == ({}, 1)
        assert not any(prompt.endswith(PLAIN) for prompt in prompts(hive))


async def test_variables_that_a_request_gives_itself_win_over_its_wish_for_thinking(served: GatewayHive) -> None:
    _, key = await served.claim()
    answer = await post(served, key, APIS[0][0], {"messages": USER, "reasoning_effort": "medium", **NO_THINKING})
    assert answer.headers["x-bombus-overridden"] == "reasoning_effort"
    assert prompts(served)[-1].endswith(PLAIN)


async def test_what_a_model_has_no_variable_for_is_named_and_the_usual_is_not(bus: Bus) -> None:
    """Codex and Claude Code send the usual with every request."""
    async with gateway_hive(bus) as hive:
        _, key = await hive.claim()
        beyond: list[dict[str, Any]] = [
            {"reasoning_effort": "high"},
            {"reasoning": {"effort": "low"}},
            {"thinking": {"type": "enabled"}},
        ]
        usual: list[dict[str, Any]] = [
            {"reasoning_effort": "medium"},
            {"reasoning": {"effort": "medium", "summary": "auto"}},
            {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}},
        ]
        for (path, asked, _), asked_for, plain in zip(APIS, beyond, usual, strict=True):
            assert (await post(hive, key, path, {**asked, **asked_for})).headers["x-bombus-overridden"] in (
                "reasoning_effort",
                "reasoning.effort",
                "thinking",
            )
            assert "x-bombus-overridden" not in (await post(hive, key, path, {**asked, **plain})).headers
