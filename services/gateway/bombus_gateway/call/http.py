"""The HTTP side of model calls, as plain ASGI: routes, whole and streamed responses, and errors in responses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.machine.host_names import HeaderPair
from bombus.machine.http_limits import HUNG_UP
from bombus_gateway import limits
from bombus_gateway.access import HeaderMap
from bombus_gateway.call.calls import HungUp
from bombus_gateway.call.replica_client import ReplicaGone
from bombus_gateway.refusals import headers_of

log = logging.getLogger(__name__)

JSON: HeaderPair = (b"content-type", b"application/json")
SSE: list[HeaderPair] = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ErrorEncoder(Protocol):
    """Writes errors in a dialect's own format."""

    def error(self, error: Refused) -> bytes:
        """Return the body of an error response."""
        ...

    def error_event(self, error: Refused) -> bytes:
        """Return the bytes that report an error at the end of a stream that has already begun."""
        ...


class Responder:
    """Writes one response. A failure is reported as an HTTP status or, if a stream has begun, as the stream's last
    event."""

    def __init__(self, send: Send, errors: ErrorEncoder, hung_up: asyncio.Future[None] | None = None) -> None:
        self._hung_up = hung_up
        self._send = send
        self._errors = errors
        self._started = False
        self._ended = False
        self._spaced = False  # true once white space was sent, which only the JSON may follow

    @contextmanager
    def hanging_up(self, hang_up: Callable[[object], None]) -> Iterator[None]:
        """Call `hang_up` if the server reports, while the block runs, that the client has closed the connection."""
        if self._hung_up is None:
            yield
            return
        self._hung_up.add_done_callback(hang_up)
        try:
            yield
        finally:
            self._hung_up.remove_done_callback(hang_up)

    async def whole(self, body: bytes, headers: Iterable[HeaderPair] = (), status: int = 200) -> None:
        """Send a complete JSON response. If white space has already been sent, send only the JSON itself."""
        if not self._started:
            length = (b"content-length", str(len(body)).encode())
            await self._start(status, [JSON, length, *headers])
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def space(self, headers: Iterable[HeaderPair] = ()) -> None:
        """Send white space, which may precede JSON, so that the client sees that its answer is in progress.

        Once white space has been sent, a failure can be reported only by closing the connection.
        """
        if not self._started:
            await self._start(200, [JSON, *headers])
        self._spaced = True
        await self._send({"type": "http.response.body", "body": b" ", "more_body": True})

    async def stream(self, events: bytes, headers: Iterable[HeaderPair] = (), more: bool = True) -> None:
        """Send server-sent events. The first events begin the response; until they are sent, an error can still set the
        HTTP status."""
        if not self._started:
            await self._start(200, [*SSE, *headers])
        self._ended = not more
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    async def fail(self, error: Refused) -> None:
        """Report a failure, unless the response is already complete.

        If white space has been sent, nothing more is sent: the server then closes the connection before the end of the
        response, so no client mistakes the white space for an answer.
        """
        if not self._started:
            headers = [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
            await self.whole(self._errors.error(error), headers, error.status)
        elif not self._ended and not self._spaced:
            await self.stream(self._errors.error_event(error), more=False)

    async def _start(self, status: int, headers: Sequence[HeaderPair]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


Responding = Callable[[HeaderMap, Receive, Responder], Awaitable[None]]
"""Answers one request, given its headers, the channel on which its body arrives, and its responder. It may raise any
error."""


def route(method: str, errors: ErrorEncoder, answer: Responding, refusals: Counter) -> ASGIApp:
    """Return an ASGI application that calls `answer` to respond, and reports whatever it raises as an error.

    `refusals` counts these errors.
    """

    async def refuse(response: Responder, refusal: Refused) -> None:
        refusals.labels(refusal.code).inc()
        await response.fail(refusal)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = Responder(send, errors, (scope.get("extensions") or {}).get(HUNG_UP))
        try:
            if scope["method"] != method:
                wrong = Refused(Code.MALFORMED, f"Use {method} here.")
                await response.whole(errors.error(wrong), [(b"allow", method.encode())], 405)
                return
            await answer(dict(scope["headers"]), receive, response)
        except HungUp:
            pass
        except BombusError as error:
            await refuse(response, _as_refusal(error))
        except Exception:  # the process boundary: answer the client, and log the bug
            log.exception("a model call failed because of a bug")
            await refuse(response, Refused(Code.INTERNAL, "An internal error occurred; see the gateway's log."))

    return app


def not_found(errors: ErrorEncoder) -> ASGIApp:
    """Return an ASGI application that refuses every path as unknown."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        why = f"There is nothing at {scope['method']} {scope['path'][: limits.QUOTED_CHARACTERS]}."
        await Responder(send, errors).fail(Refused(Code.UNKNOWN_PATH, why))

    return app


def _as_refusal(error: BombusError) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, BusUnavailable):
        return Refused(Code.BUS_DOWN, f"The log cannot be written right now; try again. ({error})")
    if isinstance(error, ReplicaGone):
        return Refused(Code.NO_REPLICA, f"The answer broke off: {error}.")
    log.error("a model call failed", extra={"why": str(error)})
    return Refused(Code.INTERNAL, str(error))
