"""OpenAI's routes of one engine: chat, completions and models, as plain ASGI."""

import time
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.types import ASGIApp, Receive

from bombus.errors import Code, Refused
from bombus_gateway.access import Access, EpisodeGuard, Guard
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.door import ParsedRequest, call_route
from bombus_gateway.call.http import HeaderMap, Responder, route
from bombus_gateway.context import Gateway
from bombus_gateway.openai.request import OpenAIRequest, read_chat, read_completion
from bombus_gateway.openai.response import OpenAIEncoder, error_body, event


class OpenAIDialect:
    """The wire format of one route. `read_request` decodes a body, `check_model` refuses a model's name."""

    def __init__(
        self, name: bytes, read_request: Callable[[bytes], OpenAIRequest], check_model: Callable[[str], None]
    ) -> None:
        self.name = name
        self._read_request = read_request
        self._check_model = check_model

    def key(self, headers: HeaderMap) -> str:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refused(Code.BAD_KEY, "Send an episode's key as 'Authorization: Bearer sk-bombus-...'.")
        return key.strip()

    def read(self, body: bytes) -> ParsedRequest:
        request = self._read_request(body)
        self._check_model(request.model)
        return ParsedRequest(request.completion, partial(OpenAIEncoder, request))

    def error(self, error: Refused) -> bytes:
        return error_body(error)

    def error_event(self, error: Refused) -> bytes:
        """Without [DONE] after it: the answer is not complete, and the SDK raises."""
        return event(error_body(error))


class OpenAIDoor:
    """The routes of one engine: `chat`, `completions` and `models` are ASGI applications.

    At the root (`any_engine`) each key leads to the engine that it was made for.
    """

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, any_engine: bool) -> None:
        self._gateway = gateway
        self._engine = engine
        self._clients = Guard(Access.CLIENT, gateway.settings.keys, gateway.settings.public_url)
        self._agents = EpisodeGuard(gateway.keys, engine, any_engine)
        chat = self._chat = OpenAIDialect(b"chat", read_chat, self._check_model)
        completions = OpenAIDialect(b"text", read_completion, self._check_model)
        self.chat: ASGIApp = call_route(calls, chat, self._agents)
        self.completions: ASGIApp = call_route(calls, completions, self._agents)
        self.models: ASGIApp = route("GET", chat, self._answer_models)

    async def _answer_models(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        if self._clients.refusal(headers.items()) is not None:
            self._agents.verify(self._chat.key(headers), time.time_ns())  # an agent has its episode's key
        names = self._model_names()
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "bombus"} for name in names]
        await response.whole(msgspec.json.encode({"object": "list", "data": entries}))

    def _check_model(self, name: str) -> None:
        """Harnesses have model names written into them: any name is taken, unless the settings are strict."""
        if self._gateway.settings.strict_model_names and name not in self._model_names():
            raise Refused(
                Code.UNKNOWN_MODEL,
                f"The model '{name}' does not exist. This door serves {', '.join(self._model_names())}.",
            )

    def _model_names(self) -> list[str]:
        """Return the model's name in the job, and the engine's name."""
        state = self._gateway.follower.hive.engine(self._engine)
        job = state.active or state.configured
        return list(dict.fromkeys([*([job.model] if job else []), self._engine]))
