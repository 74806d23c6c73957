"""What a door implements to offer model calls in its dialect, and the route that every such door serves.

A dialect turns the body of a request into a `CompletionRequest`, and the answer into bytes. The rest is the same for
all: keys, limits, retries, records, streams, disconnects.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Receive

from bombus import telemetry
from bombus.hive.records import digest
from bombus_gateway import limits
from bombus_gateway.access import EpisodeGuard, HeaderPair
from bombus_gateway.call.calls import AnswerHead, Call, Calls, RecordedAnswer
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.http import ErrorEncoder, HeaderMap, Responder, hang_up_on_disconnect, read_body, route
from bombus_gateway.call.request import CallRequest, CompletionRequest

RETRY_COUNT = b"x-stainless-retry-count"  # set by the SDKs of OpenAI and of Anthropic


class ResponseEncoder(Protocol):
    """Turns one answer into a dialect's bytes: either `whole`, or the parts of a stream. Pure."""

    @property
    def headers(self) -> Sequence[HeaderPair]:
        """Further headers of the response."""
        ...

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        """Return the body of a whole response."""
        ...

    def opening(self) -> bytes:
        """Return what a stream begins with."""
        ...

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        """Return what a portion of tokens adds; empty when nothing may go out yet."""
        ...

    def closing(self, completion: Completion) -> bytes:
        """Return how a choice ends; it goes out after the call is recorded."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream that is complete."""
        ...


class ParsedRequest(NamedTuple):
    """A body as its dialect read it. `encoder` makes the encoder of its answer."""

    completion: CompletionRequest
    encoder: Callable[[AnswerHead], ResponseEncoder]


class Dialect(ErrorEncoder, Protocol):
    """One route's wire format. `name` tells equal bodies of different routes apart."""

    @property
    def name(self) -> bytes: ...

    def key(self, headers: HeaderMap) -> str:
        """Return the episode's key that a request presents. Raises `Refused` BAD_KEY."""
        ...

    def read(self, body: bytes) -> ParsedRequest:
        """Read the body of a request. Raises `Refused` when it is not one."""
        ...


def call_route(calls: Calls, dialect: Dialect, guard: EpisodeGuard) -> ASGIApp:
    """Return the ASGI application that answers model calls in a dialect."""
    return route("POST", dialect, _CallRoute(calls, dialect, guard).answer)


class _CallRoute:
    """Answers the model calls of one route."""

    def __init__(self, calls: Calls, dialect: Dialect, guard: EpisodeGuard) -> None:
        self._calls = calls
        self._dialect = dialect
        self._guard = guard
        self._body_bytes_max = calls.settings.body_mb_max << 20

    async def answer(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        received_ns = time.time_ns()
        self._calls.check_ready()
        claims = self._guard.verify(self._dialect.key(headers), received_ns)
        self._calls.admission.check_episode(claims)
        body = await read_body(headers, receive, self._body_bytes_max)
        completion, encoder = await self._calls.workers.run(len(body), partial(self._dialect.read, body))
        parent = telemetry.traceparent_of(headers.get(b"traceparent", b"").decode("latin-1"))
        with telemetry.span("gateway.call", parent, episode=claims.episode) as span:
            request = CallRequest(
                claims=claims,
                completion=completion,
                digest=digest(self._dialect.name + b"\0" + body),
                body_bytes=len(body),
                received_ns=received_ns,
                retried=headers.get(RETRY_COUNT, b"0") not in (b"0", b""),
                role=headers.get(b"x-bombus-role", b"").decode("latin-1")[: limits.ROLE_CHARACTERS],
                traceparent=span.traceparent,
            )
            recorded = await self._calls.recorded(request)
            if recorded is not None:
                await _replay(recorded, encoder(recorded.head), completion.stream, response)
                return
            async with self._calls.open(request) as call:
                answer = _stream if completion.stream else _whole
                with hang_up_on_disconnect(receive, call):
                    await answer(call, encoder(call.head), response)


async def _whole(call: Call, encoder: ResponseEncoder, response: Responder) -> None:
    async for _ in call.deltas():
        pass
    await call.record()
    await response.whole(encoder.whole(call.completions, call.usage), encoder.headers)


async def _stream(call: Call, encoder: ResponseEncoder, response: Responder) -> None:
    waiting = encoder.opening()
    async for deltas in call.deltas():
        # What arrived together leaves together, and the last words wait for the record.
        waiting += b"".join([encoder.progress(completion, delta) for completion, delta in deltas])
        if waiting and not all(completion.done for completion in call.completions):
            await response.stream(waiting, encoder.headers)
            waiting = b""
    await call.record()
    waiting += b"".join([encoder.closing(completion) for completion in call.completions])
    await response.stream(waiting + encoder.end(call.usage), encoder.headers, more=False)


async def _replay(recorded: RecordedAnswer, encoder: ResponseEncoder, stream: bool, response: Responder) -> None:
    """Send the recorded answer in the form that this request wants."""
    if not stream:
        await response.whole(encoder.whole(recorded.completions, recorded.usage), encoder.headers)
        return
    events = [encoder.opening()]
    for completion, deltas in zip(recorded.completions, recorded.deltas):
        events += [encoder.progress(completion, delta) for delta in deltas]
        events.append(encoder.closing(completion))
    await response.stream(b"".join(events) + encoder.end(recorded.usage), encoder.headers, more=False)
