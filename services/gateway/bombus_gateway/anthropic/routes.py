"""Anthropic's routes for one engine: messages and token counting, as plain ASGI."""

from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp

from bombus.errors import Refused
from bombus_gateway.access import EpisodeGuard, HeaderMap
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.anthropic.response import MessagesEncoder, count_body, error_body, error_event
from bombus_gateway.call.api import ParsedRequest, call_route, count_route
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.http import not_found
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.context import Gateway
from bombus_gateway.harnesses.marks import marks_of


class AnthropicDialect:
    """The wire format of both routes. `check_model` raises `Refused` for a wrong model name."""

    name = b"messages"

    def __init__(self, check_model: Callable[[str], None]) -> None:
        self._check_model = check_model

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        request = read_messages(body, before)
        self._check_model(request.model)
        marks = marks_of(headers, request.completion, request.server_tools, request.answer)
        encoder = partial(MessagesEncoder, request.model)
        return ParsedRequest(request.completion, encoder, marks.role, marks.auxiliary_call, request.prefix)

    def error(self, error: Refused) -> bytes:
        return error_body(error)

    def error_event(self, error: Refused) -> bytes:
        return error_event(error)


class AnthropicAPI:
    """The routes for one engine. `messages` and `count_tokens` are ASGI applications; `below` answers all other paths.

    At the root (`any_engine`), the key determines the engine.
    """

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, any_engine: bool) -> None:
        agents = EpisodeGuard(gateway.keys, engine, any_engine)
        dialect = AnthropicDialect(partial(gateway.check_model_name, gateway.engines_at(engine, any_engine)))
        self.messages: ASGIApp = call_route(calls, dialect, agents)
        self.count_tokens: ASGIApp = count_route(calls, dialect, agents, count_body)
        self.below: ASGIApp = not_found(dialect)
