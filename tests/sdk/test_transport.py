"""The connections of both clients, when there are many requests at a time."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from bombus import AsyncSwarmClient, SwarmClient
from bombus.sdk import transport
from tests.patience import PATIENCE_S

STEP = json.dumps({"global_step": 3}).encode()


class SlowServer:
    """Answers all requests at once when it is told to. It answers a request that it gets later immediately."""

    def __init__(self, expected: int) -> None:
        self.open = 0
        self.expected = expected
        self.all_here = asyncio.Event()
        self.go_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.open += 1
                if self.open == self.expected:
                    self.all_here.set()
                await self.go_on.wait()
                self.open -= 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(STEP), STEP))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def slow_server(expected: int) -> AsyncIterator[tuple[SlowServer, str]]:
    slow = SlowServer(expected)
    async with (
        await asyncio.start_server(slow.serve, "127.0.0.1", 0, backlog=200) as server,
        asyncio.timeout(PATIENCE_S),
    ):
        yield slow, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_many_requests_at_a_time_share_pools_of_a_few_connections_each() -> None:
    """httpx takes time for each request that is open in a pool, whenever one begins or ends."""
    many = 3 * transport.POOL_CONNECTIONS + 1
    async with slow_server(many) as (slow, url), AsyncSwarmClient(url, verbose=False) as client:
        asked = [asyncio.create_task(client.get_global_step()) for _ in range(many)]
        await slow.all_here.wait()
        assert len(client._pools.made) == 4
        slow.go_on.set()
        assert await asyncio.gather(*asked) == [3] * many
        assert await client.get_global_step() == 3
        assert len(client._pools.made) == 4
    assert all(http.is_closed for http in client._pools.made)


async def test_no_more_requests_are_open_than_connections_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECTIONS_MAX", 5)
    async with slow_server(5) as (slow, url), AsyncSwarmClient(url, verbose=False) as client:
        asked = [asyncio.create_task(client.get_global_step()) for _ in range(12)]
        await slow.all_here.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert slow.open == 5
        slow.go_on.set()
        assert await asyncio.gather(*asked) == [3] * 12


async def test_threads_share_such_pools_too() -> None:
    many = transport.POOL_CONNECTIONS + 4
    async with slow_server(many) as (slow, url):
        with SwarmClient(url, verbose=False) as client, ThreadPoolExecutor(many) as threads:
            loop = asyncio.get_running_loop()
            asked = [loop.run_in_executor(threads, client.get_global_step) for _ in range(many)]
            await slow.all_here.wait()
            assert len(client._pools.made) == 2
            slow.go_on.set()
            assert await asyncio.gather(*asked) == [3] * many
        assert all(http.is_closed for http in client._pools.made)
