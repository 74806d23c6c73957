"""Answers that take longer than clients wait for a header, in each dialect, through a real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.hive.generation import Generate
from bombus_gateway.call import api
from bombus_gateway.call.upstream import ATTEMPTS_MAX
from tests.gateway.openai_hive import MODEL, Died, GatewayHive, Send, gateway_hive, says

USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WIRES = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": USER}), (MESSAGES, {"messages": USER}), (RESPONSES, {"input": USER})]
)


@pytest.fixture
async def served(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayHive]:
    monkeypatch.setattr(api, "BEAT_S", 0.05)
    async with gateway_hive(bus) as hive:
        yield hive


class SlowReplica:
    """Answers when a client has got a header, or breaks then."""

    def __init__(self, hive: GatewayHive, breaks: bool = False) -> None:
        self.asked, self.seen, self._breaks = asyncio.Event(), asyncio.Event(), breaks
        hive.replica.scripts += [self._script] * (ATTEMPTS_MAX if breaks else 1)

    async def _script(self, request: Generate, send: Send) -> None:
        self.asked.set()
        await self.seen.wait()
        if self._breaks:
            raise Died
        await says("the fox")(request, send)

    async def on_response(self, response: httpx.Response) -> None:
        self.seen.set()

    def http(self, key: str) -> httpx.AsyncClient:
        """Return a client of an episode, whose first header lets the replica go on."""
        hooks: Any = {"response": [self.on_response]}
        return httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30, event_hooks=hooks)


@WIRES
async def test_a_whole_answer_begins_with_white_space_where_it_takes_long(
    served: GatewayHive, path: str, body: dict[str, Any]
) -> None:
    _, key = await served.claim()
    async with SlowReplica(served).http(key) as client:
        answer = await client.post(served.base_url + path, json={"model": MODEL, **body})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content.startswith(b" ")
    assert "the fox" in json.dumps(answer.json())


async def test_the_sdk_reads_a_slow_answer(served: GatewayHive) -> None:
    _, key = await served.claim()
    client = served.client(key, http_client=SlowReplica(served).http(key))
    answer = await client.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "the fox"


@WIRES
async def test_a_slow_answer_that_fails_is_never_a_complete_response(
    served: GatewayHive, path: str, body: dict[str, Any]
) -> None:
    _, key = await served.claim()
    async with SlowReplica(served, breaks=True).http(key) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(served.base_url + path, json={"model": MODEL, **body})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_that_waits_for_the_first_request_shows_that_it_is_alive(
    served: GatewayHive, stream: bool
) -> None:
    episode, key = await served.claim()
    replica, body = SlowReplica(served), {"model": MODEL, "messages": USER, "stream": stream}
    plain = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30)
    async with plain, replica.http(key) as retrying:
        first = asyncio.create_task(plain.post(served.base_url + CHAT, json=body))
        await replica.asked.wait()
        again = await retrying.post(served.base_url + CHAT, json=body, headers={"x-stainless-retry-count": "1"})
        assert "the fox" in again.text
        assert again.content.startswith(b":\n\n" if stream else b" ")
        assert "the fox" in (await first).text
    assert len(await served.records(episode, 1)) == 1
