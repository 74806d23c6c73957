"""`post`, as hook files call it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from bombus.slime.http import close_clients, post
from bombus.slime.local_server import HOST, LocalAnswer, LocalServer


@pytest.fixture(autouse=True)
async def client() -> AsyncIterator[None]:
    yield
    await close_clients()


async def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not() -> None:
    statuses = [503, 200, 400, 200]

    async def answer(method: str, path: str, body: bytes) -> LocalAnswer:
        return LocalAnswer(statuses.pop(0), b'{"found": 1}')

    server = LocalServer(answer)
    url = f"http://{HOST}:{await server.open()}/retrieve"
    try:
        assert await post(url, {"queries": ["a"]}) == {"found": 1}
        assert statuses == [400, 200]
        with pytest.raises(httpx.HTTPStatusError, match="answered 400"):
            await post(url, {})
        assert statuses == [200]
    finally:
        await server.close()


async def test_a_server_that_stays_busy_is_given_up() -> None:
    asked = []

    async def answer(method: str, path: str, body: bytes) -> LocalAnswer:
        asked.append(path)
        return LocalAnswer(503, b"busy")

    server = LocalServer(answer)
    url = f"http://{HOST}:{await server.open()}/"
    try:
        with pytest.raises(httpx.HTTPStatusError, match="answered 503: busy"):
            await post(url, {}, max_retries=2)
        assert len(asked) == 2
    finally:
        await server.close()
