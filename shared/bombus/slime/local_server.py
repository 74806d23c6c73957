"""A small HTTP/1.1 server for programs on this machine, without streaming. It refuses requests from web pages."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import h11
import msgspec

from bombus.errors import Code, Refused

HOST = "127.0.0.1"
JSON = "application/json"
BODY_BYTES_MAX = 64 << 20
READ_BYTES = 1 << 16


class LocalAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    kind: str = JSON


LocalAnswering = Callable[[str, str, bytes], Awaitable[LocalAnswer]]  # called with a method, a path and a body


class LocalServer:
    """Serves what `answer` returns on a separate port. If `answer` raises `Refused`, the message is sent as JSON."""

    def __init__(self, answer: LocalAnswering) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self, port: int = 0) -> int:
        """Listen on `port`, or on a free port if `port` is 0. Return the port. Raises `OSError` if it is in use."""
        listening = socket.create_server((HOST, port))
        self._server = await asyncio.start_server(self._serve, sock=listening)
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in [*self._open]:
                writer.transport.abort()
            await self._server.wait_closed()

    async def _answered(self, request: h11.Request, body: bytes | None) -> LocalAnswer:
        try:
            if any(name == b"origin" for name, _ in request.headers):  # only browsers send this header
                raise Refused(Code.BAD_KEY, "a web page may not use this address: it is for programs on this machine")
            if body is None:
                raise Refused(Code.TOO_LARGE, f"the body is over {BODY_BYTES_MAX >> 20} MiB: send less")
            return await self._answer(request.method.decode(), request.target.decode(), body)
        except Refused as refused:
            return LocalAnswer(refused.status, msgspec.json.encode({"error": {"message": refused.why}}))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        wire = h11.Connection(h11.SERVER)
        try:
            while await self._answer_one(wire, reader, writer):
                wire.start_next_cycle()
        except (h11.ProtocolError, ConnectionError):
            pass  # the client is gone, or does not speak HTTP, so no answer can be sent
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer_one(
        self, wire: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request. Returns whether the connection can carry another."""
        request, body = await _read_request(wire, reader, writer)
        if request is None:
            return False
        answer = await self._answered(request, body)
        headers = [("content-type", answer.kind), ("content-length", str(len(answer.body)))]
        parts: Sequence[Any] = (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(data=answer.body),
            h11.EndOfMessage(),
        )
        for part in parts:
            writer.write(wire.send(part) or b"")
        await writer.drain()
        return wire.our_state is h11.DONE and wire.their_state is h11.DONE


async def _read_request(
    wire: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[h11.Request | None, bytes | None]:
    """Return a request and its body. The body is None if it is too long. Both are None if no request arrives."""
    request: h11.Request | None = None
    body = bytearray()
    is_long = False
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            if wire.they_are_waiting_for_100_continue:
                writer.write(wire.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            wire.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            is_long = is_long or len(body) + len(event.data) > BODY_BYTES_MAX
            if not is_long:
                body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return request, None if is_long else bytes(body)
        else:
            return None, None
