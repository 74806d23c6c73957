"""What stands between a harness and the world: a relay in front of the gateway, and a proxy that lets nothing out.

The relay notes what was asked and answered, and can fail calls as a gateway or a network does.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

import httpx
from starlette.types import Receive, Scope, Send

from bombus.machine.http_server import http_server
from bombus.machine.process import listen

CALLS = ("/chat/completions", "/messages", "/responses")
HOP_BY_HOP = {b"host", b"connection", b"transfer-encoding", b"content-length", b"keep-alive"}
FAILED_BODY = b'{"error": {"type": "overloaded_error", "message": "Try again.", "param": null, "code": "overloaded"}}'


class Failure(Enum):
    """How a call fails: before the gateway hears of it, or after its answer, as by a proxy that loses it."""

    BUSY = 503
    LOST = 502


@dataclass
class Exchange:
    """A request as the harness sent it, and what it was answered."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    failure: Failure | None = None
    status: int = 0
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    answer: bytes = b""

    @property
    def is_call(self) -> bool:
        return self.method == "POST" and self.path.endswith(CALLS)

    def __str__(self) -> str:
        return f"{self.method} {self.path} -> {self.status} {self.failure or ''} {self.answer[:600]!r}"


class Relay:
    """Passes requests on to a gateway. `failures` has those that fail, by the number of the call."""

    def __init__(self, gateway: str) -> None:
        self._client = httpx.AsyncClient(base_url=gateway, timeout=None, trust_env=False)
        self.exchanges: list[Exchange] = []
        self.failures: Mapping[int, Failure] = {}
        self.url = ""

    @property
    def calls(self) -> list[Exchange]:
        return [each for each in self.exchanges if each.is_call]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], scope["path"], headers, await _body(receive))
        self.exchanges.append(exchange)
        if exchange.is_call:
            exchange.failure = self.failures.get(len(self.calls) - 1)
        if exchange.failure != Failure.BUSY:
            await self._pass_on(scope, path, exchange, send)
        if exchange.failure is not None:
            await _fail(exchange, exchange.failure, send)

    async def _pass_on(self, scope: Scope, path: str, exchange: Exchange, send: Send) -> None:
        """Let the gateway answer. A call that fails is answered by the relay afterwards."""
        passed = [(name, value) for name, value in scope["headers"] if name not in HOP_BY_HOP]
        async with self._client.stream(exchange.method, path, headers=passed, content=exchange.body) as answer:
            exchange.status, exchange.answer_headers = answer.status_code, dict(answer.headers)
            headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in HOP_BY_HOP]
            if exchange.failure is None:
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for part in answer.aiter_raw():
                exchange.answer += part
                if exchange.failure is None:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        if exchange.failure is None:
            await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        await self._client.aclose()


async def _body(receive: Receive) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _fail(exchange: Exchange, failure: Failure, send: Send) -> None:
    exchange.status = failure.value
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": failure.value, "headers": headers})
    await send({"type": "http.response.body", "body": FAILED_BODY})


@asynccontextmanager
async def relay_to(gateway: str) -> AsyncIterator[Relay]:
    relay = Relay(gateway)
    with listen("127.0.0.1", 0) as bound:
        relay.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            async with http_server(relay, bound, drain_s=1):
                yield relay
        finally:
            await relay.close()


class ClosedProxy:
    """A proxy that refuses everything and notes the hosts that were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line:
            self.asked.append(line.decode(errors="replace").split()[1])  # of "CONNECT host:443 HTTP/1.1"
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()


@asynccontextmanager
async def closed_proxy() -> AsyncIterator[ClosedProxy]:
    proxy = ClosedProxy()
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
