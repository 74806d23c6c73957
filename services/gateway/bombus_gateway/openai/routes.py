"""OpenAI's routes: HTTP in, HTTP out. Plain ASGI, because this is the path that every model call takes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bombus import telemetry
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.records import CallRecord, digest
from bombus_gateway.access import Door, Guard
from bombus_gateway.call.calls import Call, Calls, HungUp, Request
from bombus_gateway.call.completion import Completion
from bombus_gateway.call.replica_client import ReplicaGone
from bombus_gateway.context import Gateway
from bombus_gateway.keys import KeyClaims
from bombus_gateway.openai.request import Ask, read_chat, read_completion
from bombus_gateway.openai.response import DONE, Answers, Header, Usage, error_body, event
from bombus_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
ROLE_CHARACTERS_MAX = 64

Headers = dict[bytes, bytes]
Named = tuple[tuple[bytes, bytes], ...]  # further headers of an answer

ERROR_HEADERS: dict[int, Named] = {401: ((b"www-authenticate", b"Bearer"),), 503: ((b"retry-after", b"1"),)}


class OpenAIDoor:
    """The routes of one engine: `chat`, `completions` and `models` are ASGI applications.

    At the root (`any_engine`) a key leads to its own engine, whichever that is.
    """

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, any_engine: bool) -> None:
        self._gateway = gateway
        self._calls = calls
        self._engine = engine
        self._any_engine = any_engine
        self._guard = Guard(Door.CLIENT, gateway.settings.keys, gateway.settings.public_url)
        self.chat: ASGIApp = self._route("POST", self._answer_chat)
        self.completions: ASGIApp = self._route("POST", self._answer_completion)
        self.models: ASGIApp = self._route("GET", self._answer_models)

    def _route(self, method: str, answer: Callable[[Headers, Receive, Send], Awaitable[None]]) -> ASGIApp:
        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            answering = _Answering(send)
            try:
                if scope["method"] != method:
                    await _whole(send, error_body(Refused(Code.MALFORMED, f"Use {method} here.")), (), 405)
                    return
                await answer(dict(scope["headers"]), receive, answering)
            except HungUp:
                pass
            except BombusError as error:
                await answering.fail(_as_refusal(error))
            except Exception:  # the boundary of the process: whoever asked gets an answer, and the log the bug
                log.exception("a model call failed by a bug")
                await answering.fail(
                    Refused(Code.INTERNAL, "Something went wrong inside; the gateway's log says what.")
                )

        return route

    # ---- routes -----------------------------------------------------------------------------------------------

    async def _answer_models(self, headers: Headers, receive: Receive, send: Send) -> None:
        if self._guard.refusal(headers.items()) is not None:
            self._verify(headers, time.time_ns())  # an agent asks with its episode's key
        names = self._model_names()
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "bombus"} for name in names]
        await _whole(send, msgspec.json.encode({"object": "list", "data": entries}), ())

    async def _answer_chat(self, headers: Headers, receive: Receive, send: Send) -> None:
        await self._answer(headers, receive, send, b"chat\0", read_chat)

    async def _answer_completion(self, headers: Headers, receive: Receive, send: Send) -> None:
        await self._answer(headers, receive, send, b"text\0", read_completion)

    async def _answer(
        self, headers: Headers, receive: Receive, send: Send, route: bytes, read: Callable[[bytes], Ask]
    ) -> None:
        received_ns = time.time_ns()
        claims = self._admit(headers, received_ns)
        body = await self._body(headers, receive)
        ask = read(body)
        self._check_ask(ask)
        parent = headers.get(b"traceparent", b"").decode("latin-1")
        with telemetry.span("gateway.call", parent, episode=claims.episode) as span:
            request = Request(
                claims=claims,
                ask=ask,
                digest=digest(route + body),
                body_bytes=len(body),
                received_ns=received_ns,
                retried=headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b""),
                role=headers.get(b"x-bombus-role", b"").decode("latin-1")[:ROLE_CHARACTERS_MAX],
                traceparent=span.traceparent,
            )
            recorded = await self._calls.recorded(request)
            if recorded is not None:
                await self._again(request, *recorded, send)
            else:
                await self._sample(request, receive, send)

    # ---- before a call ----------------------------------------------------------------------------------------

    def _admit(self, headers: Headers, now_ns: int) -> KeyClaims:
        if not self._gateway.ready:
            raise Refused(Code.BUS_DOWN, "This gateway is starting; try again in a moment.")
        claims = self._verify(headers, now_ns)
        self._calls.check(claims)
        return claims

    def _verify(self, headers: Headers, now_ns: int) -> KeyClaims:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refused(Code.BAD_KEY, "Send an episode's key as 'Authorization: Bearer sk-bombus-...'.")
        claims = self._gateway.keys.verify(key.strip(), now_ns)
        if claims.engine != self._engine and not self._any_engine:
            raise Refused(
                Code.BAD_KEY, f"This key is for engine {claims.engine}, and these are the doors of {self._engine}."
            )
        return claims

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._gateway.settings.body_bytes_max
        parts: list[bytes] = []
        size = 0
        if int(headers.get(b"content-length", b"0")) > limit:  # the server has checked that it is a number
            raise Refused(Code.TOO_LARGE, f"The body is over the limit of {limit} bytes.")
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HungUp("the client hung up while it was sending")
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise Refused(Code.TOO_LARGE, f"The body is over the limit of {limit} bytes.")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_ask(self, ask: Ask) -> None:
        settings = self._gateway.settings
        if len(ask.messages) > settings.messages_max:
            raise Refused(
                Code.TOO_LARGE, f"{len(ask.messages)} messages are over the limit of {settings.messages_max}."
            )
        if ask.n > settings.choices_max:
            raise Refused(Code.MALFORMED, f"n is {ask.n}, and the limit is {settings.choices_max}.")
        if settings.strict_model_names and ask.model not in self._model_names():
            raise Refused(
                Code.UNKNOWN_MODEL,
                f"The model '{ask.model}' does not exist. This door serves {', '.join(self._model_names())}.",
            )

    def _model_names(self) -> list[str]:
        """The model as the job names it, and the engine's name. Others are taken too, unless settings forbid it:
        harnesses have names written into them."""
        state = self._gateway.follower.hive.engine(self._engine)
        job = state.active or state.configured
        return list(dict.fromkeys([*([job.model] if job else []), self._engine]))

    # ---- a call -----------------------------------------------------------------------------------------------

    async def _sample(self, request: Request, receive: Receive, send: Send) -> None:
        call = await self._calls.open(request)
        watching = asyncio.create_task(_watch(receive, call))
        answers = self._answers(request, call.id, call.plan.model.tokenizer)
        limit_s = self._gateway.settings.call_s_max
        try:
            async with asyncio.timeout(limit_s):
                if request.ask.stream:
                    await self._stream(call, answers, send)
                else:
                    async for _ in call.pieces():
                        pass
                    await call.record()
                    await _whole(send, answers.whole(call.completions, _usage(call)), _named(call.id))
        except (HungUp, ReplicaGone):
            await call.cut_off()
            if not self._gateway.ready:
                raise Refused(Code.BUS_DOWN, "This gateway is stopping; ask again, another one answers.") from None
            raise
        except TimeoutError:
            call.hang_up()
            await call.cut_off()
            raise Refused(Code.TIMEOUT, f"The call took longer than the limit of {limit_s:g} s.") from None
        finally:
            watching.cancel()
            call.close()

    async def _stream(self, call: Call, answers: Answers, send: Send) -> None:
        stream = _Stream(send, _named(call.id))
        waiting = answers.opening(len(call.completions))
        async for pieces in call.pieces():
            # What arrived together leaves together, and the last words wait for the record.
            waiting += b"".join([answers.progress(completion, piece) for completion, piece in pieces])
            if waiting and not all(completion.done for completion in call.completions):
                await stream.write(waiting)
                waiting = b""
        await call.record()
        waiting += b"".join([answers.closing(completion) for completion in call.completions])
        if call.request.ask.include_usage:
            waiting += answers.usage(_usage(call))
        await stream.end(waiting + DONE)

    async def _again(self, request: Request, record: CallRecord, prompt: bytes, send: Send) -> None:
        """The answer that was recorded, in the form that is asked for."""
        engine = self._gateway.follower.hive.engine(request.claims.engine)
        model = await self._calls.models.text_model(engine)
        answers = self._answers(request, record.id, model.tokenizer)
        log.info("a retried call gets its recorded answer", extra={"call": record.id, "episode": record.episode})
        completions: list[Completion] = []
        out: list[bytes] = [answers.opening(len(record.choices))]
        for index, choice in enumerate(record.choices):
            completion = Completion(model, request.ask, prompt, record.id, index)
            pieces = completion.replay(choice)
            out += [answers.progress(completion, piece) for piece in pieces]
            out.append(answers.closing(completion))
            completions.append(completion)
        usage = Usage(record.prompt_tokens, record.completion_tokens())
        if not request.ask.stream:
            await _whole(send, answers.whole(completions, usage), _named(record.id))
            return
        if request.ask.include_usage:
            out.append(answers.usage(usage))
        await _Stream(send, _named(record.id)).end(b"".join(out) + DONE)

    def _answers(self, request: Request, call: str, tokenizer: Tokenizer) -> Answers:
        ask = request.ask
        header = Header(call, request.received_ns // 1_000_000_000, ask.model, ask.chat)
        return Answers(header, tokenizer if ask.logprobs else None)


def _usage(call: Call) -> Usage:
    sampled = sum(completion.sampled for completion in call.completions)
    return Usage(call.plan.prompt_tokens, sampled, call.cached_tokens)


async def _watch(receive: Receive, call: Call) -> None:
    """Once the body is read, the next thing that is heard from a client is that it hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.hang_up()


def _as_refusal(error: BombusError) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, BusUnavailable):
        return Refused(Code.BUS_DOWN, f"The log cannot be written just now; try again. ({error})")
    if isinstance(error, ReplicaGone):
        return Refused(Code.NO_REPLICA, f"The answer broke off: {error}.")
    log.error("a model call failed", extra={"why": str(error)})
    return Refused(Code.INTERNAL, str(error))


# ---- writing ----------------------------------------------------------------------------------------------------


def _named(call: str) -> Named:
    return ((b"x-request-id", call.encode()),)


async def _whole(send: Send, body: bytes, headers: Named, status: int = 200) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


class _Stream:
    """Server-sent events. Begins with the first of them, so that until then an error is an HTTP status."""

    def __init__(self, send: Send, headers: Named) -> None:
        self._send = send
        self._headers = headers
        self._started = False

    async def write(self, events: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*SSE, *self._headers]})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    async def end(self, events: bytes) -> None:
        await self.write(events, more=False)


class _Answering:
    """Knows how far an answer has come, so that a failure is told in the form that is still possible."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._ended = False

    async def __call__(self, message: Message) -> None:
        self._started = True
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: Refused) -> None:
        body = error_body(error)
        if not self._started:
            await _whole(self._send, body, ERROR_HEADERS.get(error.status, ()), error.status)
        elif not self._ended:
            # No [DONE] behind it: the answer is not complete, and the SDK raises.
            await self._send({"type": "http.response.body", "body": event(body), "more_body": False})
