"""`/generate` for one engine. A request with an episode's key is a model call; requests with other keys go to another
app."""

from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import Refused
from bombus.hive.episodes import KEY_PREFIX
from bombus_gateway.access import EpisodeGuard, episode_key
from bombus_gateway.call.api import call_route
from bombus_gateway.call.calls import Calls
from bombus_gateway.generate.dialect import GenerateDialect


class GenerateAPI:
    """An ASGI application. Requests without an episode's key are answered by `others` and not recorded."""

    def __init__(self, calls: Calls, guard: EpisodeGuard, others: ASGIApp) -> None:
        self._call = call_route(calls, GenerateDialect(), guard)
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            is_call = episode_key(dict(scope["headers"])).startswith(KEY_PREFIX)
        except Refused:
            is_call = False
        await (self._call if is_call else self._others)(scope, receive, send)
