"""Limits on the bytes, time and connections that clients may use before their requests are complete.

uvicorn with httptools has no such limits: it accepts a head of any length, and waits forever for the rest of a request.
The application limits the content of requests.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from bombus.errors import Code

LINGER_S = 2.0  # time for a client that is still sending to read why it was refused
TICK_S = 1.0
GATHERED_MAX = 8  # pieces of an answer that are sent together
GATHERED_BYTES_MAX = 16 << 10  # a larger piece is passed on immediately
# A key in the extensions of a request's scope. Its value is a future that is done when the client has closed the
# connection.
HUNG_UP = "bombus.hung_up"


@dataclass(frozen=True)
class HttpLimits:
    """The limits of one server.

    `head_bytes` limits the URL and the headers together. In a chunked body, the chunk sizes and trailers may take up as
    many bytes as the content. A client has `head_s` seconds for the head, and then `body_s` seconds for the body.
    """

    head_bytes: int = 64 << 10
    head_s: float = 10.0
    body_s: float = 60.0
    connections: int = 8192


DEFAULTS = HttpLimits()


class Awaited(Enum):
    """What a connection is waiting for its client to send. `NOTHING` includes a connection that is idle but may be used
    for another request."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()
    END = auto()  # end of a connection whose request was refused


class Patience:
    """Keeps track of the connections of one server that wait for their clients, and of how long each may wait.

    Time is counted in ticks of `run`, so that clients lose no time while this process is stopped.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._now = 0.0
        self._until: dict[LimitedProtocol, float] = {}  # in the order in which they began to wait

    def begin(self, connection: "LimitedProtocol", limit_s: float) -> None:
        """Allow a connection to wait for `limit_s` seconds from now."""
        self._until.pop(connection, None)
        self._until[connection] = self._now + limit_s

    def end(self, connection: "LimitedProtocol") -> None:
        self._until.pop(connection, None)

    def drop_oldest(self, but: "LimitedProtocol") -> bool:
        """Close the connection that has waited longest, to make room for another. Return whether any connection was
        waiting."""
        oldest = next((each for each in self._until if each is not but), None)
        if oldest is None:
            return False
        self.end(oldest)
        oldest.flush()  # it may have been answered in this turn of the loop
        oldest.transport.abort()
        return True

    async def run(self) -> None:
        """Close the connections whose clients take too long, until cancelled."""
        tick_s = min(TICK_S, self.limits.head_s / 4, self.limits.body_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            self._now += tick_s
            for connection in [each for each, until in self._until.items() if until < self._now]:
                connection.time_is_up()


class GatheringTransport:
    """A transport that sends all writes of one turn of the event loop together.

    uvicorn writes a head and a body separately. Joining them costs less than a second system call, and the client needs
    only one read. Large pieces are passed on immediately, so that the transport's flow control sees them.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written.append(data)
        if len(data) > GATHERED_BYTES_MAX or len(self._written) >= GATHERED_MAX:
            self.flush()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        written, self._written = self._written, []
        if written and not self._transport.is_closing():
            self._transport.write(b"".join(written) if len(written) > 1 else written[0])


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `HttpLimits`."""

    def __init__(self, patience: Patience, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._patience = patience
        self._limits = patience.limits
        self._awaited = Awaited.NOTHING
        self._cycles: list[RequestResponseCycle] = []  # the last one is `cycle`; one is answered at a time
        self._received = 0  # bytes of the message that is being read
        self._content = 0  # how many of these bytes belong to the body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport, self.loop)))
        self._await(Awaited.HEAD, self._limits.head_s)
        if len(self.connections) > self._limits.connections and not self._patience.drop_oldest(but=self):
            why = f"There are {self._limits.connections} connections, which is the limit; try again in a moment."
            self._refuse(503, Code.OVERLOADED, why)

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.end(self)
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn only notifies the last one
            cycle.disconnected = True
            cycle.message_event.set()
            if not (hung_up := _hung_up(cycle)).done():
                hung_up.set_result(None)

    def eof_received(self) -> None:
        """Flush pending writes, because the loop closes the transport after this."""
        self.flush()
        super().eof_received()

    def flush(self) -> None:
        cast(GatheringTransport, self.transport).flush()

    def data_received(self, data: bytes) -> None:
        if self._awaited is Awaited.END or self.transport.is_closing():
            return
        if self._awaited is Awaited.NOTHING:
            self._await(Awaited.HEAD, self._limits.head_s)
        self._received += len(data)
        super().data_received(data)
        if self._received - self._content > self._limits.head_bytes + self._content:
            self._refuse_bytes()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, or whose head was refused by a callback of the parser."""
        if self._awaited is not Awaited.END:
            super().send_400_response(msg)

    # ---- called by the parser ----

    def on_headers_complete(self) -> None:
        if self._received > self._limits.head_bytes:  # this may include bytes after the head
            head = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if head > self._limits.head_bytes:
                self._refuse_bytes()
                raise ValueError("the head is too long")  # stops the parser
        self.scope["extensions"] = cast(Any, {HUNG_UP: self.loop.create_future()})
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [each for each in self._cycles if not each.response_complete] + [self.cycle]
        self._await(Awaited.BODY, self._limits.body_s)

    def on_body(self, body: bytes) -> None:
        self._content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = self._content = 0
        self._awaited = Awaited.NOTHING
        self._patience.end(self)
        super().on_message_complete()
        if not self.pipeline:  # the body is complete, but only reading shows that a client leaves
            self.flow.resume_reading()

    # ---- called when an answer is complete ----

    def on_response_complete(self) -> None:
        """Count an idle connection as waiting, so that it can make room for another before uvicorn closes it."""
        super().on_response_complete()
        if self._awaited is Awaited.NOTHING and self.timeout_keep_alive_task is not None:
            self._patience.begin(self, self.timeout_keep_alive)

    # ---- called by `Patience` ----

    def time_is_up(self) -> None:
        """Close the connection, giving the reason if possible, unless the delay is not the client's fault."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._awaited is Awaited.HEAD and answering:
            self._await(Awaited.HEAD, self._limits.head_s)  # the next request, while the last is being answered
        elif self._awaited is Awaited.BODY and self.flow.read_paused:
            self._await(Awaited.BODY, self._limits.body_s)  # the application is not reading
        elif self._awaited is Awaited.END:
            self._patience.end(self)
            self.transport.abort()
        elif self._awaited is Awaited.NOTHING:
            self._patience.end(self)
        else:
            part, limit_s = (
                ("body", self._limits.body_s) if self._awaited is Awaited.BODY else ("head", self._limits.head_s)
            )
            self._refuse(408, Code.TIMEOUT, f"The {part} of this request took longer than the limit of {limit_s:g} s.")

    def _await(self, what: Awaited, limit_s: float) -> None:
        self._awaited = what
        self._patience.begin(self, limit_s)

    def _refuse_bytes(self) -> None:
        limit = self._limits.head_bytes
        self._refuse(
            431, Code.TOO_LARGE, f"The URL and the headers of this request together exceed the limit of {limit} bytes."
        )

    def _refuse(self, status: int, code: Code, why: str) -> None:
        """Answer with an error unless an answer has begun. Close the connection after the client has read the error."""
        if self._awaited is Awaited.END:
            return
        cycle = self.cycle
        begun = cycle is not None and not cycle.response_complete
        if begun and (self._awaited is Awaited.HEAD or cycle.response_started):
            self._patience.end(self)
            self.transport.abort()
            return
        if begun:
            cycle.disconnected = True  # tell the application that nothing more will come
            cycle.message_event.set()
        self._await(Awaited.END, LINGER_S)
        self._unset_keepalive_if_required()
        body = json.dumps({"detail": why, "code": code}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        again = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(STATUS_LINE[status] + head + again + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _hung_up(cycle: RequestResponseCycle) -> asyncio.Future[None]:
    extensions: Mapping[str, Any] = cycle.scope["extensions"]
    return cast(asyncio.Future[None], extensions[HUNG_UP])
