"""Limits of client keys on model calls: rate, concurrency, tokens and bytes, each key by itself."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from bombus.bus import Bus
from bombus.machine.hive_keys import HiveKeys, KeyRing, NamedKey
from bombus_gateway.call.key_limits import RETRY_S_MAX, KeyLimits
from bombus_gateway.refusals import RateLimited
from tests.gateway.openai_hive import GatewayHive, gateway_hive

ALICE, BOB = "the-key-of-alice-for-tests", "the-key-of-bob-for-tests"
USER: Any = [{"role": "user", "content": "what is the weather in Paris?"}]


class Used:
    """The limits of alice's key, with a clock that the test sets."""

    def __init__(self, **limits: Any) -> None:
        self.now = 1000.0
        self.ring = KeyRing(keys_with(**limits))
        self.limits = KeyLimits(self.ring, lambda: self.now)

    def wait_of(self, holder: str = "alice") -> int:
        """Begin a call. Return after how many seconds to try again, or 0 if the call may be made."""
        try:
            self.limits.enter(holder)
        except RateLimited as error:
            return error.retry_after_s
        return 0

    def charge(self, tokens: int, size: int = 0) -> None:
        self.limits.charge("alice", lambda: tokens, size)


def keys_with(**limits: Any) -> HiveKeys:
    return HiveKeys(clients={"alice": NamedKey(key=ALICE, **limits), "bob": NamedKey(key=BOB)})


def test_each_refused_call_is_told_a_time_of_its_own_at_which_there_is_room_for_it() -> None:
    used = Used(calls_per_s_max=2.0)
    waits = [used.wait_of() for _ in range(8)]
    assert waits == [0, 0, 1, 1, 2, 2, 3, 3]
    for second in (1.0, 1.0, 1.0):
        used.now += second
        assert [used.wait_of(), used.wait_of()] == [0, 0], "those that were told this second"
    assert used.wait_of() == 1


def test_no_client_is_told_to_wait_for_longer_than_a_minute() -> None:
    used = Used(calls_per_s_max=0.5)
    assert max(used.wait_of() for _ in range(200)) == RETRY_S_MAX
    used.now += 2.0
    assert used.wait_of() == 0


def test_calls_at_a_time_are_counted_until_they_end() -> None:
    used = Used(calls_open_max=2)
    assert [used.wait_of() for _ in range(3)] == [0, 0, 1]
    used.limits.leave("alice")
    assert [used.wait_of(), used.wait_of()] == [0, 1]


@pytest.mark.parametrize("limit", ["tokens_per_minute_max", "bytes_per_minute_max"])
def test_a_call_that_took_more_than_was_left_is_made_up_for(limit: str) -> None:
    used = Used(**{limit: 600})
    assert used.wait_of() == 0
    used.charge(700, 700)
    assert used.wait_of() == 11  # 101 more at 10 a second
    used.now += 11
    assert used.wait_of() == 0
    used.now += 3600
    used.charge(600, 600)
    assert used.wait_of() == 1, "no more than a minute's worth was saved up"


def test_a_key_without_limits_and_one_without_a_name_are_never_refused() -> None:
    used = Used(calls_per_s_max=1.0)
    assert used.wait_of() == 0
    assert used.wait_of() == 1
    assert {used.wait_of(holder) for holder in ("bob", "", "/admin", "who-left") for _ in range(100)} == {0}


def test_limits_that_were_read_again_hold_at_once() -> None:
    used = Used(calls_open_max=1)
    assert [used.wait_of(), used.wait_of()] == [0, 1]
    used.ring.keys = keys_with(calls_open_max=2)
    assert [used.wait_of(), used.wait_of()] == [0, 1]
    used.ring.keys = keys_with()
    assert used.wait_of() == 0
    used.ring.keys = keys_with(calls_open_max=1)
    for _ in range(3):
        used.limits.leave("alice")  # calls that began before
    assert [used.wait_of(), used.wait_of()] == [0, 1]


# ---- with the clients that meet these limits ----------------------------------------------------------------------


@pytest.fixture
async def limited(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, keys=keys_with(calls_per_s_max=4.0)) as hive:
        yield hive


async def test_openais_client_waits_as_told_and_then_has_all_its_answers(limited: GatewayHive) -> None:
    """While alice's calls wait, bob's do not."""
    statuses: list[int] = []

    async def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)

    (_, alice), (_, bob) = await limited.claim(owner="alice"), await limited.claim(owner="bob")
    hooked = httpx.AsyncClient(event_hooks={"response": [note]})
    client = limited.client(alice, http_client=hooked).with_options(max_retries=2)  # as by default
    asking = asyncio.gather(*(client.chat.completions.create(model="m", messages=USER) for _ in range(10)))
    of_bob = limited.client(bob)  # which does not retry
    for _ in range(12):
        assert (await of_bob.chat.completions.create(model="m", messages=USER)).choices
    answers = await asking
    assert [answer.choices[0].message.content for answer in answers] == ["ok"] * 10
    assert statuses.count(200) == 10
    assert 429 in statuses


async def test_a_limit_is_an_error_that_clients_of_both_vendors_know(limited: GatewayHive) -> None:
    _, key = await limited.claim(owner="alice")
    client = limited.client(key)
    for _ in range(4):
        await client.chat.completions.create(model="m", messages=USER)
    with pytest.raises(openai.RateLimitError) as refused:
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=USER) for _ in range(6)))
    assert refused.value.code == "quota"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= RETRY_S_MAX
    assert "Key alice has made more than 4 calls a second" in str(refused.value)
    other = anthropic.AsyncAnthropic(base_url=limited.base_url, api_key=key, max_retries=0)
    async with other:
        with pytest.raises(anthropic.RateLimitError):
            await asyncio.gather(*(other.messages.create(model="m", messages=USER, max_tokens=4) for _ in range(9)))


async def test_tokens_of_prompts_and_answers_count(bus: Bus) -> None:
    async with gateway_hive(bus, keys=keys_with(tokens_per_minute_max=1)) as hive:
        _, key = await hive.claim(owner="alice")
        client = hive.client(key)
        usage = (await client.chat.completions.create(model="m", messages=USER)).usage
        assert usage is not None
        with pytest.raises(openai.RateLimitError, match="used up its 1 tokens a minute") as refused:
            await client.chat.completions.create(model="m", messages=USER)
        assert refused.value.response.headers["retry-after"] == str(int(RETRY_S_MAX)), "the most that clients take"
        assert usage.total_tokens > 1
