"""When an HTTP server can be reached, and what becomes of requests that are open when it stops."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bombus.machine.http_server import http_server
from bombus.machine.process import listen


async def stop_during(request_begins: bool) -> httpx.Response:
    """Return what a client gets whose request is never finished, from a server that stops."""
    busy = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if request_begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        busy.set()
        await asyncio.Event().wait()

    with listen("127.0.0.1", 0) as bound:
        async with httpx.AsyncClient(timeout=60) as client:
            async with http_server(app, bound, 1.0):
                url = f"http://127.0.0.1:{bound.getsockname()[1]}/never"
                asked: asyncio.Task[Any] = asyncio.create_task(client.get(url))
                await busy.wait()
            answer: httpx.Response = await asked
    return answer


async def test_a_client_can_connect_as_soon_as_the_block_begins() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing is asked")

    async with http_server(app, bound := listen("127.0.0.1", 0), 1.0):
        socket.create_connection(bound.getsockname()).close()  # in the same turn of the loop


async def test_a_request_that_is_not_finished_when_the_server_stops_is_a_503() -> None:
    answer = await stop_during(request_begins=False)
    assert answer.status_code == 503
    assert answer.json()["code"] == "overloaded"
    assert answer.headers["retry-after"] == "1"


async def test_an_answer_that_has_begun_when_the_server_stops_is_cut() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await stop_during(request_begins=True)
