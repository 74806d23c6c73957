"""Anthropic's own SDK, unmodified, at the gateway: what it sends is understood, and it understands what it gets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from bombus.bus import Bus
from bombus.hive.generation import Generate
from bombus.hive.records import unpack_tokens
from tests.gateway.openai_hive import (
    ENGINE,
    FILES,
    JOB,
    MODEL,
    TEXT,
    THINKING_TEMPLATE,
    Died,
    GatewayHive,
    Send,
    chain_of,
    fault,
    frame_of,
    gateway_hive,
    says,
    tokens_of,
)
from tests.gateway.test_anthropic import CALL, HI, OTHER_CALL, WEATHER

Client = Callable[..., AsyncAnthropic]
Ask = Callable[..., Awaitable[Any]]


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


@pytest.fixture
async def client(served: GatewayHive) -> AsyncIterator[Client]:
    """Return what makes a client of a key, which is closed after the test."""
    made: list[AsyncAnthropic] = []

    def make(key: str, **more: Any) -> AsyncAnthropic:
        made.append(AsyncAnthropic(base_url=served.base_url, api_key=key, **{"max_retries": 0, **more}))
        return made[-1]

    yield make
    for each in made:
        await each.close()


def asking(client: AsyncAnthropic, streamed: bool) -> Ask:
    """Return what asks for a message, and collects it from its events where it is streamed."""

    async def ask(**body: Any) -> Any:
        body = {"model": "policy", "max_tokens": 250, **body}
        if not streamed:
            return await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert "".join(texts) == "".join(block.text for block in message.content if block.type == "text")
        return message

    return ask


def results_of(message: Any) -> list[dict[str, Any]]:
    """Return the results of a message's calls, of which the second one fails."""
    uses = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": use.id, "content": "sunny", "is_error": number == 1}
        for number, use in enumerate(uses)
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_with_parallel_calls_are_one_chain_of_records(
    served: GatewayHive, client: Client, streamed: bool
) -> None:
    episode, key = await served.claim()
    ask = asking(client(key), streamed)
    messages: list[Any] = [HI]
    for _ in range(3):
        served.replica.scripts.append(says(f"hello\n{CALL}\n{OTHER_CALL}", portion=3))
        answer = await ask(messages=messages, tools=[WEATHER], system="use tools")
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in answer.content[1:]] == [{"city": "Paris"}, {"city": "Rome"}]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results_of(answer)}]
    served.replica.scripts.append(says("it is fine"))
    last = await ask(messages=messages, tools=[WEATHER], system="use tools")
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "it is fine")
    records = await served.records(episode, 4)
    text = TEXT.tokenizer.decode(chain_of(records), with_specials=True)
    assert text.count("sunny") == 6
    assert text.count("Error: sunny") == 3
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == records[-1].prompt_tokens
    assert last.usage.output_tokens == records[-1].completion_tokens()


async def test_the_events_of_a_stream_are_those_that_the_sdk_knows(served: GatewayHive, client: Client) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says(f"hello\n{CALL}", portion=1))
    given: Any = {"model": "policy", "max_tokens": 60, "messages": [HI], "tools": [WEATHER]}
    async with client(key).messages.stream(**given) as stream:
        kinds = [event.type async for event in stream]
    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "text",
        "content_block_stop",
        "input_json",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_is_a_block_of_its_own_that_may_be_sent_back(bus: Bus, streamed: bool) -> None:
    async with gateway_hive(bus, JOB, {**FILES, "chat_template.jinja": THINKING_TEMPLATE.encode()}) as hive:
        episode, key = await hive.claim()
        hive.replica.scripts += [says("the fox</think>the dog", portion=1), says("hm</think>ok")]
        async with AsyncAnthropic(base_url=hive.base_url, api_key=key, max_retries=0) as sdk:
            ask = asking(sdk, streamed)
            thinks: Any = {"type": "enabled", "budget_tokens": 1024}
            answer = await ask(messages=[HI], thinking=thinks)
            assert [block.type for block in answer.content] == ["thinking", "text"]
            assert (answer.content[0].thinking, answer.content[1].text) == ("the fox", "the dog")
            assert answer.content[0].signature
            more = [HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "and?"}]
            again = await ask(messages=more, thinking=thinks)
        assert again.content[0].thinking == "hm"
        assert len(await hive.records(episode, 2)) == 2


async def test_tokens_are_counted_as_the_next_call_has_them(served: GatewayHive, client: Client) -> None:
    episode, key = await served.claim()
    sdk = client(key)
    given: Any = {"messages": [HI], "tools": [WEATHER], "system": "be kind"}
    counted = await sdk.messages.count_tokens(model="policy", **given)
    await asking(sdk, False)(**given)
    (record,) = await served.records(episode, 1)
    assert counted.input_tokens == record.prompt_tokens == len(unpack_tokens(served.replica.requests[0].prompt))


async def test_refusals_are_the_sdks_own_errors(served: GatewayHive, client: Client) -> None:
    episode, key = await served.claim()
    ask = asking(client(key), False)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 500 maximum") as refused:
        await ask(messages=[{"role": "user", "content": "hello " * 600}])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages"):
        await ask(messages=[])
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await asking(client("nobody's key"), False)(messages=[HI])
    assert unknown.value.type == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as nowhere:
        await client(key).messages.batches.retrieve("batch_1")
    assert nowhere.value.type == "not_found_error"
    await served.end(episode)
    with pytest.raises(anthropic.PermissionDeniedError, match="claim another one") as over:
        await ask(messages=[HI])
    assert over.value.type == "permission_error"
    assert served.replica.requests == []


async def test_an_overloaded_hive_says_when_to_ask_again_and_the_sdk_does(served: GatewayHive, client: Client) -> None:
    episode, key = await served.claim()
    failing = fault("the replica is full")
    served.replica.scripts += [failing] * 3
    with pytest.raises(anthropic.InternalServerError) as refused:
        await asking(client(key), False)(messages=[HI])
    assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
    assert refused.value.response.headers["retry-after"] == "1"
    served.replica.scripts += [failing] * 3
    answer = await asking(client(key, max_retries=2), False)(messages=[HI])
    assert answer.content[0].text == "ok"
    assert len(await served.records(episode, 1)) == 1


async def test_a_stream_that_breaks_off_is_an_error(served: GatewayHive, client: Client) -> None:
    async def breaks_off(request: Generate, send: Send) -> None:
        await send(frame_of(tokens_of("the quick", end=False)))
        raise Died

    _, key = await served.claim()
    served.replica.scripts.append(breaks_off)
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        await asking(client(key), True)(messages=[HI])


async def test_a_retry_gets_the_recorded_answer(served: GatewayHive, client: Client) -> None:
    """An answer is lost on its way: the SDK marks its retry, and nothing is sampled again."""
    episode, key = await served.claim()
    given: Any = {"model": "policy", "max_tokens": 60, "messages": [HI]}
    sent = await client(key).messages.create(**given)
    again = await client(key).messages.create(**given, extra_headers={"x-stainless-retry-count": "1"})
    assert (again.id, again.content) == (sent.id, sent.content)
    assert len(await served.records(episode, 1)) == len(served.replica.requests) == 1


async def test_models_can_be_listed_and_retrieved(served: GatewayHive, client: Client) -> None:
    _, key = await served.claim()
    sdk = client(key)
    assert [model.id async for model in sdk.models.list()] == [MODEL, ENGINE]
    assert (await sdk.models.retrieve("claude-of-some-kind")).id == "claude-of-some-kind"
