"""Answer environments' most frequent requests without FastAPI, whose overhead exceeds the cost of a small group."""

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus_gateway.access import Guard

log = logging.getLogger(__name__)


class DirectRoute:
    """An ASGI application for one method of a path. Requests with other methods, or with a refused key, are answered by
    `others`."""

    def __init__(
        self, method: str, guard: Guard, answer: Callable[[Request], Awaitable[Response]], others: ASGIApp
    ) -> None:
        self._method = method
        self._guard = guard
        self._answer = answer
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != self._method or self._guard.refusal(scope["headers"]) is not None:
            await self._others(scope, receive, send)
            return
        try:
            answer = await self._answer(Request(scope, receive))
        except Exception:  # outermost handler: answer the client and log the bug
            log.exception("an environment's request failed because of a bug")
            answer = JSONResponse({"detail": "The gateway failed; see its log."}, 500)
        await answer(scope, receive, send)
