"""The interfaces that an API implements to offer model calls in its dialect, and the route that serves them.

A dialect turns the body of a request into a `CompletionRequest`, and the answer into bytes. Everything else is the same
for all dialects: keys, limits, retries, records, keep-alives, and the handling of disconnects.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from starlette.types import ASGIApp, Receive

from bombus import telemetry
from bombus.machine.host_names import HeaderPair
from bombus_gateway import limits
from bombus_gateway.access import EpisodeGuard, HeaderMap, episode_key
from bombus_gateway.call.calls import AnswerHead, Call, Calls, RecordedAnswer
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.http import ErrorEncoder, Responder, route
from bombus_gateway.call.prefixes import NOTHING_READ, AnotherList, BodyPrefix, EarlierBody, nothing_of
from bombus_gateway.call.request import CallRequest, CompletionRequest
from bombus_gateway.call.workers import NUMBER_BYTES, Workers
from bombus_gateway.keys import KeyClaims
from bombus_gateway.traces import attributes_of

RETRY_COUNT = b"x-stainless-retry-count"  # set by the SDKs of OpenAI and Anthropic
OVERRIDDEN = b"x-bombus-overridden"  # response header that names what was requested but not applied
# Send something after this much silence: clients give up after 120 s without headers, or 240 s of silence.
BEAT_S = 50.0
_COMMENT = b":\n\n"  # in an event stream


class ResponseEncoder(Protocol):
    """Turns one answer into a dialect's bytes: either `whole`, or the parts of a stream. Pure."""

    @property
    def headers(self) -> Sequence[HeaderPair]:
        """Additional headers for the response."""
        ...

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        """Return the body of a complete response."""
        ...

    def opening(self) -> bytes:
        """Return the first bytes of a stream."""
        ...

    def beat(self) -> bytes:
        """Return an event without content, to keep a slow stream alive. A comment would not be enough, as some clients
        ignore comments."""
        ...

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        """Return the events for a portion of tokens, or b"" if none may be sent yet."""
        ...

    def closing(self, completion: Completion) -> bytes:
        """Return the events that end a choice. They are sent after the call is recorded."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last bytes of a complete stream."""
        ...


class ParsedRequest(NamedTuple):
    """A request as read by its dialect. `encoder` creates the encoder for its answer.

    `role` and `auxiliary_call` are what the harness reveals about the calling agent: see `CallRequest`. `prefix` is the
    beginning of the body, which need not be read again for the conversation's next request.
    """

    completion: CompletionRequest
    encoder: Callable[[AnswerHead], ResponseEncoder]
    role: str = ""
    auxiliary_call: str = ""
    prefix: BodyPrefix = NOTHING_READ


class Dialect(ErrorEncoder, Protocol):
    """One route's wire format. `name` distinguishes equal bodies sent to different routes."""

    @property
    def name(self) -> bytes: ...

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        """Read a request whose body begins with the prefix `before`. Raises `Refused` if the request is malformed, and
        `AnotherList` if its body has to be read without the prefix.

        A dialect whose bodies are not conversations is never given a prefix.
        """
        ...


def call_route(calls: Calls, dialect: Dialect, guard: EpisodeGuard) -> ASGIApp:
    """Return the ASGI application that answers model calls in a dialect."""
    return route("POST", dialect, _CallRoute(calls, dialect, guard).answer, calls.metrics.refusals)


def count_route(calls: Calls, dialect: Dialect, guard: EpisodeGuard, body: Callable[[int], bytes]) -> ASGIApp:
    """Return the ASGI application that counts the tokens of prompts. `body` encodes the count as the answer's body."""
    reading = _CallRoute(calls, dialect, guard)

    async def count(headers: HeaderMap, receive: Receive, response: Responder) -> None:
        request, _ = await reading.read(headers, receive)
        await response.whole(body(await calls.prompt_tokens(request)))

    return route("POST", dialect, count, calls.metrics.refusals)


class _CallRoute:
    """Reads and answers the model calls of one route."""

    def __init__(self, calls: Calls, dialect: Dialect, guard: EpisodeGuard) -> None:
        self._calls = calls
        self._dialect = dialect
        self._guard = guard

    async def answer(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        request, encoder = await self.read(headers, receive)
        stream, workers = request.completion.stream, self._calls.workers
        name, parent, about = "chat" if request.completion.chat else "text_completion", request.traceparent, None
        if telemetry.enabled():
            parent = parent or self._calls.traces.get(request.claims.episode, "")
            about = telemetry.gen_ai(name, request.claims.episode)
        with telemetry.span(name, parent, about, "SERVER") as span:
            request = msgspec.structs.replace(request, traceparent=span.traceparent)
            recorded = await self._recorded(request, response)
            if recorded is not None:
                answer = _Answer(request, encoder, recorded.head, response, workers)
                await answer.replay(recorded, stream)
                recorded.attempt.sent = True
                return
            async with self._calls.open(request) as call:
                answer = _Answer(request, encoder, call.head, response, workers)
                with response.hanging_up(lambda _: call.hang_up()):
                    await (answer.stream(call) if stream else answer.whole(call))
                call.sent()
                if telemetry.enabled() and call.recorded is not None:
                    span.set(attributes_of(call.recorded, call.engine))

    async def _recorded(self, request: CallRequest, response: Responder) -> RecordedAnswer | None:
        """Return the recorded answer to a retry, or None if there is none. This may have to wait until an earlier
        attempt has ended."""
        if not request.retry:
            return None

        async def beat() -> None:
            await (response.stream(_COMMENT) if request.completion.stream else response.space())

        async with _Beats(beat):
            return await self._calls.recorded(request)

    async def read(
        self, headers: HeaderMap, receive: Receive
    ) -> tuple[CallRequest, Callable[[AnswerHead], ResponseEncoder]]:
        """Return the request, and a factory for its answer's encoder. Raises `Refused` if the request is invalid or its
        episode key is."""
        received_ns = time.time_ns()
        self._calls.check_ready()
        claims = self._guard.verify(episode_key(headers), received_ns)
        self._calls.admission.check_episode(claims)
        bodies = self._calls.bodies
        body = await bodies.unpacked(headers, receive, bodies.calls, claims.episode)
        read_bodies = self._calls.histories.conversation(claims).bodies
        before = read_bodies.continued_by(self._dialect.name, body)
        try:
            parsed, body_digest, kept = await self._decoded(claims, headers, body, before)
        except AnotherList:
            before = nothing_of(self._dialect.name)
            parsed, body_digest, kept = await self._decoded(claims, headers, body, before)
        if kept is not before:
            read_bodies.keep(kept, before)
            self._calls.histories.account_for(claims)
        request = CallRequest(
            claims=claims,
            completion=_within_total(parsed.completion, headers),
            digest=body_digest,
            body_bytes=len(body),
            read_bytes=before.prefix.work_bytes(body),
            received_ns=received_ns,
            retry=_retry(headers.get(RETRY_COUNT, b"")),
            role=_named_role(headers) or parsed.role,
            auxiliary_call=parsed.auxiliary_call,
            traceparent=telemetry.traceparent_of(headers.get(b"traceparent", b"").decode("latin-1")),
        )
        return request, parsed.encoder

    async def _decoded(
        self, claims: KeyClaims, headers: HeaderMap, body: bytes, before: EarlierBody
    ) -> tuple[ParsedRequest, bytes, EarlierBody]:
        """Return the request in a body, the body's digest, and the entry to keep for the next body. A large body is
        read in a thread."""

        def work() -> tuple[ParsedRequest, bytes, EarlierBody]:
            parsed = self._dialect.read(body, headers, before.prefix)
            return parsed, *before.continued(body, parsed.prefix)

        work_bytes = before.prefix.work_bytes(body)
        return await self._calls.workers.run(claims.episode, work_bytes, work, self._calls.bodies.calls.inline_bytes)


def _retry(count: bytes) -> int:
    """Return how often a request was sent before. Any count other than a number of one or two digits is taken as 1."""
    return int(count) if count.isdigit() and len(count) <= 2 else int(bool(count))


def _named_role(headers: HeaderMap) -> str:
    return headers.get(b"x-bombus-role", b"").decode("latin-1")[: limits.ROLE_CHARACTERS]


def _within_total(request: CompletionRequest, headers: HeaderMap) -> CompletionRequest:
    """Return the request with the client's limit on prompt and answer together, if the headers set one. An invalid
    limit is ignored."""
    total = headers.get(b"x-bombus-total-tokens", b"")
    if not (total.isdigit() and len(total) <= limits.TOTAL_TOKENS_DIGITS):
        return request
    sampling = msgspec.structs.replace(request.sampling, total_tokens=int(total))
    return msgspec.structs.replace(request, sampling=sampling)


class _Answer:
    """Sends one answer in its dialect."""

    def __init__(
        self,
        request: CallRequest,
        encoder: Callable[[AnswerHead], ResponseEncoder],
        head: AnswerHead,
        response: Responder,
        workers: Workers,
    ) -> None:
        self._request = request
        self._encoder = encoder(head)
        self._head = head
        self._response = response
        self._workers = workers
        self._headers = [*self._encoder.headers, *_overridden(head)]
        self._waiting = b""  # events not sent yet
        self._sent_s = 0.0

    async def whole(self, call: Call) -> None:
        async with _Beats(partial(self._response.space, self._headers)):
            async for _ in call.deltas():
                pass
            await call.record()
            usage = call.usage
            body = await self._written(usage, partial(self._encoder.whole, call.completions, usage))
        await self._response.whole(body, self._headers)

    async def stream(self, call: Call) -> None:
        encoder = self._encoder
        self._waiting = encoder.opening()
        self._sent_s = time.monotonic()
        async with _Beats(self._beat):
            async for deltas in call.deltas():
                # Deltas that arrived together are sent together. The last ones wait until the call is recorded.
                self._waiting += b"".join([encoder.progress(completion, delta) for completion, delta in deltas])
                if self._waiting and not all(completion.done for completion in call.completions):
                    await self._send(b"")
            await call.record()
        closing = b"".join([encoder.closing(completion) for completion in call.completions])
        await self._send(closing + encoder.end(call.usage), more=False)

    async def replay(self, recorded: RecordedAnswer, stream: bool) -> None:
        """Send the recorded answer in the form that this request wants: in one piece, or as a stream."""
        encoder = self._encoder
        if not stream:
            write = partial(encoder.whole, recorded.completions, recorded.usage)
            await self._response.whole(await self._written(recorded.usage, write), self._headers)
            return
        events = [encoder.opening()]
        for completion, deltas in zip(recorded.completions, recorded.deltas):
            events += [encoder.progress(completion, delta) for delta in deltas]
            events.append(encoder.closing(completion))
        await self._send(b"".join(events) + encoder.end(recorded.usage), more=False)

    async def _written(self, usage: Usage, write: Callable[[], bytes]) -> bytes:
        """Return what `write` returns for the complete answer. If the answer has many numbers, run it in a thread.

        The numbers are logprobs with their alternatives and, unless this is a chat, the tokens of prompt and answer.
        """
        completion = self._request.completion
        numbers = usage.completion * (1 + completion.top_logprobs) if completion.logprobs else 0
        numbers += 0 if completion.chat else usage.completion + self._head.prompt_tokens
        return await self._workers.run(self._request.claims.episode, NUMBER_BYTES * numbers, write)

    async def _beat(self) -> float:
        """If nothing has been sent for `BEAT_S`, send the waiting events and an event without content.

        Return the number of seconds until the next check.
        """
        silent_s = time.monotonic() - self._sent_s
        if silent_s < BEAT_S:
            return BEAT_S - silent_s
        await self._send(self._encoder.beat())
        return BEAT_S

    async def _send(self, events: bytes, more: bool = True) -> None:
        waiting, self._waiting = self._waiting, b""
        self._sent_s = time.monotonic()
        await self._response.stream(waiting + events, self._headers, more)


class _Beats:
    """A context manager that calls `beat` repeatedly while the block runs, starting `BEAT_S` after the block began.

    `beat` returns the seconds until its next call, or None for `BEAT_S`. Nearly all blocks end before the first call,
    so no task is created until then.
    """

    def __init__(self, beat: Callable[[], Awaitable[float | None]]) -> None:
        self._beat = beat
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._begin)

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(await self._beat() or BEAT_S)


def _overridden(head: AnswerHead) -> list[HeaderPair]:
    return [(OVERRIDDEN, ", ".join(head.overridden).encode())] if head.overridden else []
