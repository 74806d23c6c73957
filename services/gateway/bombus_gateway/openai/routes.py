"""OpenAI's routes for one engine: chat, completions and models, as plain ASGI."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import Code, Refused
from bombus_gateway.access import EpisodeGuard, HeaderMap, episode_key
from bombus_gateway.call.api import call_route
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.http import Responder, not_found, route
from bombus_gateway.context import Gateway
from bombus_gateway.openai.dialect import OpenAIDialect
from bombus_gateway.openai.request import read_chat, read_completion
from bombus_gateway.openai.tokenizing import TokenRoutes


class OpenAIAPI:
    """The routes for one engine. `chat`, `completions`, `models` and the others are ASGI applications.

    `model` answers the paths below that of `models`, and `nothing` answers all other paths that OpenAI's clients may
    try. At the root (`any_engine`), the key determines the engine.
    """

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, any_engine: bool) -> None:
        self._gateway = gateway
        self._engines = gateway.engines_at(engine, any_engine)
        self._agents = EpisodeGuard(gateway.keys, engine, any_engine)
        self._check_model = partial(gateway.check_model_name, self._engines)
        chat = OpenAIDialect(b"chat", read_chat, self._check_model)
        completions = OpenAIDialect(b"text", lambda body, _: read_completion(body), self._check_model)
        self.chat: ASGIApp = call_route(calls, chat, self._agents)
        self.completions: ASGIApp = call_route(calls, completions, self._agents)
        self._refusals = calls.metrics.refusals
        self.models: ASGIApp = route("GET", chat, self._answer_models, self._refusals)
        self.tokens = TokenRoutes(calls, self._agents, chat)
        self.nothing: ASGIApp = not_found(chat)
        self._errors = chat

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a description of one model, under a name that calls may use."""
        name = scope["path"].partition("/v1/models/")[2]
        await route("GET", self._errors, partial(self._answer_model, name), self._refusals)(scope, receive, send)

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request with an error that says that embeddings are not offered."""
        why = "Embeddings are not made here: the hive serves the model that it trains, which only generates text."
        await Responder(send, self._errors).fail(Refused(Code.UNSUPPORTED, why))

    async def _answer_model(self, name: str, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        self._engines_of(headers)
        self._check_model(name)
        await response.whole(msgspec.json.encode(_model(name)))

    async def _answer_models(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        names = self._gateway.model_names(self._engines_of(headers))
        await response.whole(msgspec.json.encode({"object": "list", "data": [_model(name) for name in names]}))

    def _engines_of(self, headers: HeaderMap) -> Sequence[str]:
        """Return the engines that a key may ask about. For an episode's key, this is only the episode's engine."""
        if self._gateway.clients.refusal(headers.items()) is not None:
            return (self._agents.verify(episode_key(headers), time.time_ns()).engine,)
        return self._engines


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "bombus"}
