"""Plain Starlette routes, whose handlers read their requests themselves.

If these were FastAPI routes, FastAPI would analyse each of them at every start, looking for parameters and models that
they do not have.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], Awaitable[None]]  # raises an error, which is sent in place of the handler's response


class JsonResponse(JSONResponse):
    """A JSON response encoded by msgspec, so that its content may include structs."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class PlainRoute(NamedTuple):
    method: str
    path: str
    handler: Handler


def checked(routes: Iterable[PlainRoute], *checks: Check) -> list[PlainRoute]:
    """Return these routes with checks that run, in order, before each request's handler."""

    async def answer(handler: Handler, request: Request) -> Response:
        for check in checks:
            await check(request)
        return await handler(request)

    return [PlainRoute(method, path, partial(answer, handler)) for method, path, handler in routes]


def below(prefix: str, routes: Iterable[PlainRoute]) -> list[PlainRoute]:
    return [PlainRoute(method, f"{prefix}{path}", handler) for method, path, handler in routes]


def add_plain(app: FastAPI, routes: Iterable[PlainRoute]) -> None:
    for method, path, handler in routes:
        route = Route(path, handler, methods=[method])
        route.methods = {method}  # no HEAD, as for all other routes
        app.router.routes.append(route)
