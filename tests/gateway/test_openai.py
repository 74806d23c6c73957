"""The OpenAI API, called by OpenAI's own SDK."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from bombus.bus import Bus
from bombus.hive.events import EpisodeType
from bombus.hive.records import LengthLimit, SamplingParams, unpack_tokens
from bombus_gateway.call.policy import seed_of_episode
from tests.gateway.openai_hive import (
    FILES,
    IM_END,
    JOB,
    MODEL,
    TEXT,
    GatewayHive,
    chain_of,
    frame_of,
    gateway_hive,
    gateway_of,
    says,
    tokens_of,
)

USER: Any = [{"role": "user", "content": "what is the weather in Paris?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


async def test_a_model_without_a_chat_template_answers_plain_completions_where_the_job_says_so(bus: Bus) -> None:
    base = {name: content for name, content in FILES.items() if name != "chat_template.jinja"}
    groups = JOB["bombus"]
    job = {"bombus": {**groups, "model": {"path": MODEL, "chat_template": "none"}}}
    async with gateway_hive(bus, job, base) as hive:
        _, key = await hive.claim()
        hive.replica.scripts.append(says("jumps over"))
        answer = await hive.client(key).completions.create(model=MODEL, prompt="the quick brown fox")
        assert answer.choices[0].text == "jumps over"
        assert hive.replica.requests[0].sampling.stop_token_ids == (IM_END,)
        with pytest.raises(openai.BadRequestError, match=r"the job has model\.chat_template: none, for plain"):
            await hive.client(key).chat.completions.create(model=MODEL, messages=USER)


async def test_a_chat_is_answered_and_recorded_with_its_exact_tokens(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("the weather is fine"))
    answer = await served.client(key).chat.completions.create(model="whatever", messages=USER, seed=3, max_tokens=20)
    assert answer.choices[0].message.content == "the weather is fine"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "whatever"
    (record,) = await served.records(episode, 1)
    prompt = TEXT.tokenizer.decode(unpack_tokens(record.prompt_tail), with_specials=True)
    assert prompt == (
        "<|im_start|>system\nYou are a bee<|im_end|>\n"
        "<|im_start|>user\nwhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert record.choices[0].token_ids() == tokens_of("the weather is fine")
    assert record.sampling.seed == seed_of_episode(3, episode)
    assert record.sampling.max_tokens == 20
    assert record.choices[0].message == {"role": "assistant", "content": "the weather is fine"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == record.prompt_tokens
    assert answer.usage.completion_tokens == len(tokens_of("the weather is fine"))
    assert served.replica.requests[0].stream is False
    assert served.replica.requests[0].prompt == record.prompt_tail
    assert IM_END in served.replica.requests[0].sampling.stop_token_ids


async def test_a_stream_has_the_text_in_pieces_and_then_the_usage(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("the quick brown fox jumps", portion=1))
    stream = await served.client(key).chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "the quick brown fox jumps"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    (record,) = await served.records(episode, 1)
    assert chunks[-1].usage.completion_tokens == record.completion_tokens()
    assert served.replica.requests[0].stream is True


async def test_an_answered_call_leaves_nothing_to_the_garbage_collector(served: GatewayHive) -> None:
    _, key = await served.claim()
    chats = served.client(key).chat.completions
    served.replica.scripts.append(says("hello"))
    await chats.create(model=MODEL, messages=USER)  # loads the tokenizer and the template
    gc.collect()
    gc.disable()
    try:
        for said in ("the weather is fine", f"hello\n{CALL}"):
            served.replica.scripts += [says(said), says(said, portion=1)]
            await chats.create(model=MODEL, messages=USER, tools=TOOLS)
            async for _ in await chats.create(model=MODEL, messages=USER, tools=TOOLS, stream=True):
                pass
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("bombus_gateway")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


async def test_six_turns_with_tools_are_one_chain_of_records(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    messages: Any = [{"role": "system", "content": "use tools"}, *USER]
    for turn in range(6):
        served.replica.scripts.append(says(f"hello {turn}\n{CALL}" if turn < 5 else "it is fine"))
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump())  # with its nulls, as harnesses send it
        if turn < 5:
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.content == f"hello {turn}"
            assert message.tool_calls is not None
            call: Any = message.tool_calls[0]
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    records = await served.records(episode, 6)
    tokens = chain_of(records)
    text = TEXT.tokenizer.decode(tokens, with_specials=True)
    assert text.startswith("<|im_start|>system\nuse tools\n\n# Tools")
    assert text.endswith("<|im_start|>assistant\nit is fine<|im_end|>")
    answer_turn = "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    assert text.count(f"<|im_end|>\n{answer_turn}<|im_start|>assistant\n") == 5
    assert unpack_tokens(served.replica.requests[-1].prompt) == tokens[: records[-1].prompt_tokens]
    assert [call.merged for call in await served.calls(episode, 6)] == [False, *[True] * 5]
    assert [len(record.messages) for record in records] == [2, 1, 1, 1, 1, 1]


async def test_a_streamed_tool_call_arrives_whole_and_none_of_its_markup_leaks(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says(f"hello\n{CALL}", portion=1))
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert len(calls) == 1
    assert calls[0].function is not None
    assert calls[0].function.name == "weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_logprobs_are_those_of_the_tokens_whose_text_was_returned(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says("the fox", portion=1))
    answer = await served.client(key).chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    expected = tokens_of("the fox", end=False)
    assert "".join(entry.token for entry in content) == "the fox"
    assert [round(entry.logprob * -1000) for entry in content] == expected
    assert bytes(byte for entry in content for byte in entry.bytes or []) == b"the fox"
    assert all(len(entry.top_logprobs) == 2 for entry in content)


async def test_every_id_of_a_call_is_ours_and_holds_what_the_model_wrote(bus: Bus) -> None:
    one, long = CALL.replace('"name"', '"id": "1", "name"'), CALL.replace('"name"', f'"id": "{"9" * 65}", "name"')
    async with gateway_hive(bus) as hive:
        _, key = await hive.claim()
        hive.replica.scripts.append(says("\n".join([one, one, long])))
        answer = await hive.client(key).chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        ids = [call.id for call in answer.choices[0].message.tool_calls or ()]
        ours = f"call_{answer.id.removeprefix('chatcmpl-')[:20]}0_"
        assert ids == [f"{ours}0-1", f"{ours}1-1", f"{ours}2"]


async def test_another_gateway_continues_an_episode_with_a_developer(bus: Bus) -> None:
    no_developer = (
        b"{% for message in messages if message.role == 'developer' %}{{ raise_exception('unknown role') }}{% endfor %}"
    )
    files = {**FILES, "chat_template.jinja": no_developer + FILES["chat_template.jinja"]}
    async with gateway_hive(bus, files=files) as hive:
        episode, key = await hive.claim()
        messages: Any = [{"role": "developer", "content": "be brief"}, *USER]
        first = await hive.client(key).chat.completions.create(model=MODEL, messages=messages)
        messages = [*messages, {"role": "assistant", "content": first.choices[0].message.content}, *USER]
        async with gateway_of(bus) as (_, url):
            await hive.client(key, url).chat.completions.create(model=MODEL, messages=messages)
        chain_of(await hive.records(episode, 2))


async def test_n_choices_are_one_record_and_either_can_be_continued(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.append(says("the fox", "the dog"))
    answer = await client.chat.completions.create(model=MODEL, messages=USER, n=2)
    assert [choice.message.content for choice in answer.choices] == ["the fox", "the dog"]
    served.replica.scripts.append(says("fine"))
    second: Any = answer.choices[1].message
    await client.chat.completions.create(model=MODEL, messages=[*USER, second, {"role": "user", "content": "and?"}])
    first, then = await served.records(episode, 2)
    assert len(first.choices) == 2
    assert then.parent is not None
    assert then.parent.id == first.id
    assert then.parent_choice == 1


async def test_a_stop_string_across_tokens_ends_the_text_and_aborts_the_replica(served: GatewayHive) -> None:
    episode, key = await served.claim()

    async def goes_on(request: Any, send: Any) -> None:
        for token in tokens_of("the quick broXYn fox", end=False):
            await send(frame_of([token]))
        await asyncio.Event().wait()

    served.replica.scripts.append(goes_on)
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stop="XY", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the quick bro"
    assert chunks[-1].choices[0].finish_reason == "stop"
    await served.replica.aborted.wait()
    (record,) = await served.records(episode, 1)
    assert TEXT.tokenizer.decode(record.choices[0].token_ids()) == "the quick broXY"
    assert record.choices[0].message == {"role": "assistant", "content": "the quick bro"}


async def test_stop_tokens_and_stop_texts_that_are_special_tokens_end_an_answer_at_the_replica(
    served: GatewayHive,
) -> None:
    """A special token has no text, so its name was never found in one. Within a longer text it is looked for."""
    _, key = await served.claim()
    client = served.client(key)
    start = TEXT.tokenizer.token_id("<|im_start|>") or 0
    await client.completions.create(
        model=MODEL, prompt="the quick", extra_body={"stop": [5, "x"], "stop_token_ids": [7]}
    )
    await client.chat.completions.create(model=MODEL, messages=USER, stop=["<|im_start|>", "fox"])
    await client.chat.completions.create(model=MODEL, messages=USER, stop=["<|im_start|>user"])
    served.replica.scripts.append(says([*TEXT.tokenizer.encode("a\n<|im_start|>b\n<|im_start|>user\nmore")]))
    turn = "\n<|im_start|>user"  # its token does not end the answer: what comes before and after it has to be there
    cut = await client.chat.completions.create(model=MODEL, messages=USER, stop=[turn])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("a\nb", "stop")
    asked = [set(request.sampling.stop_token_ids) for request in served.replica.requests]
    assert asked == [{IM_END, 5, 7}, {IM_END, start}, {IM_END, start}, {IM_END}]
    for stop in (-1, 1 << 40):
        with pytest.raises(openai.BadRequestError, match=r"token ids|stop tokens are ids below"):
            await client.completions.create(model=MODEL, prompt="the", extra_body={"stop_token_ids": [stop]})


async def test_a_turn_after_an_answer_cut_by_length_keeps_its_tokens_and_closes_it(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.append(says("the quick", finish="length"))
    answer = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    message: Any = answer.choices[0].message
    await client.chat.completions.create(model=MODEL, messages=[*USER, message, {"role": "user", "content": "go on"}])
    records = await served.records(episode, 2)
    chain_of(records)
    tail = TEXT.tokenizer.decode(unpack_tokens(records[1].prompt_tail), with_specials=True)
    assert tail == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


async def test_the_limit_that_cut_an_answer_is_recorded(served: GatewayHive) -> None:
    episode, key = await served.claim()
    for tokens, wanted in ((2, 2), (256, None), (5, None)):  # its own, a turn's, and what only the replica knows
        served.replica.scripts.append(says([300] * tokens, finish="length"))
        await served.client(key).chat.completions.create(model=MODEL, messages=USER, max_tokens=wanted)
    limits = [record.choices[0].limit for record in await served.records(episode, 3)]
    assert limits == [LengthLimit.REQUEST, LengthLimit.TURN, LengthLimit.REPLICA]


async def test_the_answers_of_one_conversation_share_the_jobs_response_length(bus: Bus) -> None:
    rollout = {"max_prompt_length": 500, "max_response_length": 100, "max_response_length_in_one_turn": 64}
    job: dict[str, Any] = {"bombus": {"model": {"path": MODEL}, "rollout": rollout | {"max_model_len": 2000}}}
    async with gateway_hive(bus, job) as hive, gateway_of(bus) as (_, elsewhere):
        episode, key = await hive.claim()
        messages: list[Any] = [*USER]
        for tokens in (64, 36):
            hive.replica.scripts.append(says([300] * tokens, finish="length"))
            answer = await hive.client(key).chat.completions.create(model=MODEL, messages=messages)
            content = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
        assert hive.replica.requests[-1].sampling.max_tokens == 36
        limits = [record.choices[0].limit for record in await hive.records(episode, 2)]
        assert limits == [LengthLimit.TURN, LengthLimit.EPISODE]
        for gateway in (hive.base_url, elsewhere):  # the other one knows the conversation from the log alone
            with pytest.raises(openai.BadRequestError, match="max_response_length for all of them is 100"):
                await hive.client(key, gateway).chat.completions.create(model=MODEL, messages=messages)
        hive.replica.scripts.append(says("ok"))
        await hive.client(key).chat.completions.create(model=MODEL, messages=USER)  # a conversation of its own
        assert hive.replica.requests[-1].sampling.max_tokens == 64


async def test_a_character_that_spans_tokens_is_never_sent_in_halves(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says("a bee: 🐝!", portion=1))
    stream = await served.client(key).chat.completions.create(model=MODEL, messages=USER, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "a bee: 🐝!"
    assert not any("\ufffd" in text for text in texts)


async def test_a_plain_completion_takes_text_or_token_ids_and_merges_by_tokens(served: GatewayHive) -> None:
    episode, key = await served.claim()
    client = served.client(key)
    served.replica.scripts.append(says("the dog", portion=1))
    first = await client.completions.create(model=MODEL, prompt="the quick", max_tokens=4, logprobs=1)
    assert first.choices[0].text == "the dog"
    assert first.choices[0].logprobs is not None
    known = [*tokens_of("the quick", end=False), *tokens_of("the dog")]
    await client.completions.create(model=MODEL, prompt=[*known, *tokens_of(" and", end=False)])
    records = await served.records(episode, 2)
    assert chain_of(records)[: len(known)] == known


async def test_models_lists_the_jobs_model_without_a_key(served: GatewayHive) -> None:
    models = await served.client("none").models.list()
    assert [model.id for model in models.data] == [MODEL, "main"]


IMAGE: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f", "maximum": 2**70}}]}, "malformed", "tools.0.function"),
    ({"temperature": 3}, "malformed", "temperature"),
    ({"top_logprobs": 2}, "malformed", "top_logprobs"),
    ({"logit_bias": {"a": 1}}, "malformed", "logit_bias"),
    ({"n": 65}, "malformed", "n"),
    (IMAGE, "unsupported", "messages.0.content.0"),
    ({"messages": [{"role": "function", "name": "f", "content": "1"}]}, "unsupported", "messages.0.role"),
    ({"messages": [{"role": "user", "content": "the fox " * 400}]}, "context_length_exceeded", "messages"),
]
# What a training episode does not get: how tokens are drawn, and what nobody here can do.
BIASED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "temperature"),
    ({"temperature": 5e-324}, "temperature"),
    ({"top_p": 0.5}, "top_p"),
    ({"extra_body": {"top_k": 5}}, "top_k"),
    ({"extra_body": {"min_p": 0.1}}, "min_p"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"seed": 3}, "seed"),
    ({"max_tokens": 128_000}, "max_tokens"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools.1.type"),
    ({"extra_body": {"colour": "red"}}, "colour"),
]


async def test_an_unsupported_parameter_is_a_400_that_names_it(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)
    for more, code, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": MODEL, "messages": USER, **more})
        assert refused.value.code == code, more
        assert param in (refused.value.param or refused.value.message), more
        assert refused.value.type == "invalid_request_error"
    assert served.replica.requests == []


@pytest.mark.parametrize(("more", "param"), [*BIASED, *UNSUPPORTED])
async def test_what_a_harness_has_written_into_it_is_overridden_or_left_out_and_the_answer_says_so(
    served: GatewayHive, more: dict[str, Any], param: str
) -> None:
    """aider sends temperature 0, and smolagents a forced tool call: both ended at their first call."""
    episode, key = await served.claim()
    answer = await served.client(key).chat.completions.with_raw_response.create(
        **{"model": MODEL, "messages": USER, **more}
    )
    assert answer.headers["x-bombus-overridden"] == param
    (record,) = await served.records(episode, 1)
    assert record.overridden == (param,)
    plain = SamplingParams(max_tokens=256, stop_token_ids=record.sampling.stop_token_ids, seed=record.sampling.seed)
    assert record.sampling == plain


async def test_a_call_without_its_image_is_counted(served: GatewayHive) -> None:
    episode, key = await served.claim(EpisodeType.EVAL)
    answer = await served.client(key).chat.completions.with_raw_response.create(model=MODEL, **IMAGE)
    assert answer.headers["x-bombus-overridden"] == "messages.0.content.0"
    assert (await served.records(episode, 1))[0].overridden == ("messages.0.content.0",)
    await served.until(lambda engine: engine.counters.calls_incomplete == 1)


# An image at each API: the path, the body, and how the API names the image.
IMAGES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", IMAGE, "messages.0.content.0"),
    (
        "/v1/messages",
        {"max_tokens": 8, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input.0.content.0",
    ),
]


async def answers_to_images(served: GatewayHive, key: str) -> list[httpx.Response]:
    headers = {"authorization": f"Bearer {key}", "x-api-key": key}
    async with httpx.AsyncClient(base_url=served.base_url, headers=headers, timeout=60) as http:
        return [await http.post(path, json={"model": MODEL, **body}) for path, body, _ in IMAGES]


async def test_every_api_refuses_an_image_in_a_training_episode(served: GatewayHive) -> None:
    """The model would learn from an empty turn."""
    _, key = await served.claim()
    for answer, (path, _, place) in zip(await answers_to_images(served, key), IMAGES, strict=True):
        assert answer.status_code == 400, path
        assert f"{place} is refused in a training episode" in answer.json()["error"]["message"], path
    assert served.replica.requests == []


async def test_every_api_leaves_an_image_out_of_training_for_a_job_that_relaxes_it(bus: Bus) -> None:
    groups = JOB["bombus"]
    job = {"bombus": {**groups, "rollout": {**groups["rollout"], "unsupported": "relax"}}}
    async with gateway_hive(bus, job) as served:
        episode, key = await served.claim()
        answers = await answers_to_images(served, key)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        places = [place for _, _, place in IMAGES]
        assert [answer.headers["x-bombus-overridden"] for answer in answers] == places
        assert [record.overridden for record in await served.records(episode, 3)] == [(place,) for place in places]


async def test_a_client_may_limit_prompt_and_answer_together(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key)

    async def ask(total: str) -> Any:
        return await client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=60, extra_headers={"x-bombus-total-tokens": total}
        )

    used = (await ask("no number")).usage
    assert used is not None
    assert served.replica.requests[-1].sampling.max_tokens == 60
    await ask(str(used.prompt_tokens + 7))
    assert served.replica.requests[-1].sampling.max_tokens == 7
    await ask(str(used.prompt_tokens + 61))
    assert served.replica.requests[-1].sampling.max_tokens == 60
    with pytest.raises(openai.BadRequestError, match=f"x-bombus-total-tokens.*is {used.prompt_tokens}") as refused:
        await ask(str(used.prompt_tokens))
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_length_that_is_capped_is_named_as_the_client_named_it(served: GatewayHive, field: str) -> None:
    _, key = await served.claim()
    asked_for: Any = {field: 5000}
    answer = await served.client(key).chat.completions.with_raw_response.create(model=MODEL, messages=USER, **asked_for)
    assert answer.headers["x-bombus-overridden"] == field


async def test_a_call_without_wishes_has_nothing_overridden(served: GatewayHive) -> None:
    _, key = await served.claim()
    answer = await served.client(key).chat.completions.with_raw_response.create(model=MODEL, messages=USER)
    assert "x-bombus-overridden" not in answer.headers


async def test_harmless_parameters_are_accepted(served: GatewayHive) -> None:
    _, key = await served.claim()
    answer = await served.client(key).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        user="u",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        presence_penalty=0,
        frequency_penalty=0,
        response_format={"type": "text"},
        logit_bias={},
    )
    assert answer.choices[0].message.content == "ok"


async def test_an_eval_episode_may_be_greedy(served: GatewayHive) -> None:
    _, key = await served.claim(EpisodeType.EVAL)
    await served.client(key).chat.completions.create(model=MODEL, messages=USER, temperature=0, top_p=0.9)
    assert served.replica.requests[0].sampling.temperature == 0


async def test_r18_a_forged_key_is_401_and_that_of_an_ended_episode_403(served: GatewayHive) -> None:
    episode, key = await served.claim()
    with pytest.raises(openai.AuthenticationError) as forged:
        await served.client(key[:-3] + "abc").chat.completions.create(model=MODEL, messages=USER)
    assert forged.value.code == "invalid_api_key"
    await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    await served.calls(episode, 1)
    await served.end(episode)
    gateway = served.gateway
    assert gateway is not None
    await gateway.follower.wait_position(served.follower.position)
    with pytest.raises(openai.PermissionDeniedError) as over:
        await served.client(key).chat.completions.create(model=MODEL, messages=USER)
    assert "has been ended" in over.value.message


async def test_r20_a_body_over_the_limit_is_413(bus: Bus) -> None:
    async with gateway_hive(bus, body_mb_max=1) as hive:
        _, key = await hive.claim()
        with pytest.raises(openai.APIStatusError) as refused:
            await hive.client(key).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * (1 << 20)}]
            )
        assert refused.value.status_code == 413


async def test_other_model_names_are_refused_where_the_settings_are_strict(bus: Bus) -> None:
    async with gateway_hive(bus, strict_model_names=True) as hive:
        _, key = await hive.claim()
        with pytest.raises(openai.NotFoundError, match=f"serves {MODEL}, main") as refused:
            await hive.client(key).chat.completions.create(model="whatever", messages=USER)
        assert refused.value.code == "model_not_found"
        answer = await hive.client(key).chat.completions.create(model="main", messages=USER)
        assert answer.choices[0].message.content == "ok"


async def test_the_routes_are_described_for_programs_and_on_a_page_that_loads_nothing(served: GatewayHive) -> None:
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        assert (await http.get("/health")).json() == {
            "status": "healthy",
            "engine_running": True,
            "active_requests": 0,
            "total_requests": 0,
        }
        assert (await http.get("/ready")).json() == {"ready": True, "why": ""}
        page = await http.get("/docs")
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/models", "/claim_episode", "/e/main/v1/completions"} <= set(paths)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for path in ("/v1/chat/completions", "/v1/models", "/claim_episode", "/health"):
        assert f"<code>{path}</code>" in page.text
    assert not re.search(r"@import|url\(|//", page.text.partition("<body>")[0])
    assert re.findall(r"(?:href|src|action)=.[^ >]*", page.text) == ['href="openapi.json"']
    assert not re.search("<script|<link|<img|<iframe", page.text)
