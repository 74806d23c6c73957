"""OpenAI's Responses routes for one engine, as plain ASGI."""

import time
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import Code, Refused
from bombus_gateway.access import EpisodeGuard, HeaderMap, episode_key
from bombus_gateway.call.api import ParsedRequest, call_route
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.http import Responder, route
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.context import Gateway
from bombus_gateway.harnesses.marks import marks_of
from bombus_gateway.openai_errors import error_body, error_fields
from bombus_gateway.responses.output import stored_body
from bombus_gateway.responses.request import call_of, read_response_request
from bombus_gateway.responses.response import ResponsesEncoder, event

# This dialect's names for fields of a `CompletionRequest`.
_PARAMETERS = {"continues": "previous_response_id", "messages": "input"}
_NO_WEBSOCKET = Refused(Code.UNSUPPORTED, "WebSockets are not supported: use POST, with `stream` for events.")


class ResponsesDialect:
    """The wire format. `check_model` raises `Refused` for an unknown model name."""

    name = b"responses"

    def __init__(self, check_model: Callable[[str], None]) -> None:
        self._check_model = check_model

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        request = read_response_request(body, before)
        self._check_model(request.model)
        marks = marks_of(headers, request.completion)
        encoder = partial(ResponsesEncoder, request)
        return ParsedRequest(request.completion, encoder, marks.role, marks.auxiliary_call, request.prefix)

    def error(self, error: Refused) -> bytes:
        return error_body(error, _PARAMETERS)

    def error_event(self, error: Refused) -> bytes:
        """Return the last event of a stream that fails. The SDK raises the contents of `error`."""
        found = error_fields(error, _PARAMETERS)
        return event("error", {name: found[name] for name in ("code", "message", "param")} | {"error": found})


class ResponsesAPI:
    """The routes for one engine, as two ASGI applications: `create`, and `stored` for the paths below that of `create`.

    At the root (`any_engine`), the key determines the engine.
    """

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, any_engine: bool) -> None:
        self._calls = calls
        self._agents = EpisodeGuard(gateway.keys, engine, any_engine)
        self._dialect = ResponsesDialect(partial(gateway.check_model_name, gateway.engines_at(engine, any_engine)))
        self._create = call_route(calls, self._dialect, self._agents)

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a model call. Refuse a WebSocket, so that the client falls back to HTTP."""
        if scope["method"] == "GET" and dict(scope["headers"]).get(b"upgrade", b"").lower() == b"websocket":
            upgrade = [(b"upgrade", b"HTTP/1.1")]
            await Responder(send, self._dialect).whole(self._dialect.error(_NO_WEBSOCKET), upgrade, 426)
            return
        await self._create(scope, receive, send)

    async def stored(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the response to an earlier call of the key's episode."""
        response_id = scope["path"].partition("/v1/responses/")[2]
        answer = partial(self._answer_stored, response_id)
        app: ASGIApp = route("GET", self._dialect, answer, self._calls.metrics.refusals)
        await app(scope, receive, send)

    async def _answer_stored(self, response_id: str, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        self._calls.check_ready()
        claims = self._agents.verify(episode_key(headers), time.time_ns())
        self._calls.admission.check_episode(claims)
        records = await self._calls.earlier.records(claims, call_of(response_id))
        await response.whole(msgspec.json.encode(stored_body(records, claims.engine)))
