"""The gateway's ASGI application, with all of the gateway's APIs: `create_app(gateway)`."""

import asyncio
import logging
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import BusUnavailable, Code, EngineFault, Refused
from bombus.machine.metrics import PATH
from bombus_gateway.access import PATH_KEY, EpisodeGuard, without_path_key
from bombus_gateway.anthropic.routes import AnthropicAPI
from bombus_gateway.call.calls import Calls
from bombus_gateway.context import Gateway
from bombus_gateway.docs_page import HEADERS, docs_page
from bombus_gateway.generate.routes import GenerateAPI
from bombus_gateway.limits import in_short
from bombus_gateway.metrics import MetricsRoutes
from bombus_gateway.open_requests import OpenRequests, places_of, share_by_key
from bombus_gateway.openai.routes import OpenAIAPI
from bombus_gateway.operations.routes import training_routes
from bombus_gateway.plain_routes import PlainRoute, add_plain, below, checked
from bombus_gateway.refusals import headers_of
from bombus_gateway.responses.routes import ResponsesAPI
from bombus_gateway.rollout_groups.routes import group_routes
from bombus_gateway.swarm.health import health_router
from bombus_gateway.swarm.routes import hive_routes, plain, swarm_routes

log = logging.getLogger(__name__)


class GatewayApp(FastAPI):
    """A FastAPI application with a table of paths (`hot`) that are answered before FastAPI's middleware and routing.

    FastAPI's own work would cost more than a model call itself. `below` lists path prefixes with the applications that
    answer all other paths under them; the first matching prefix is used. Requests to `uncounted` paths do not count as
    open: these are health checks and heartbeats, which must be answered even if the gateway is full.
    """

    gateway: Gateway
    calls: Calls
    requests: OpenRequests
    metrics: MetricsRoutes
    uncounted: set[str]
    hot: dict[str, ASGIApp]
    below: list[tuple[str, ASGIApp]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if scope["path"].startswith(PATH_KEY):
            scope = without_path_key(scope)
        path = scope["path"]
        if path in self.uncounted:
            await self.routed(scope, receive, send)
            return
        try:
            request = self.requests.enter(scope["headers"])
        except Refused as refusal:
            await self.refusal(refusal)(scope, receive, send)
            return
        try:
            counting = partial(self.requests.received, request, receive)
            await (self._mounted(path) or self.routed)(scope, counting, send)
        finally:
            self.requests.leave(request)

    def refused(self, code: Code, why: str) -> JSONResponse:
        """Return the answer to a request that is refused, and count it."""
        return self.refusal(Refused(code, why))

    def refusal(self, error: Refused) -> JSONResponse:
        """Return the answer to a request that is refused, and count it."""
        self.calls.metrics.refusals.labels(error.code).inc()
        body = {"detail": in_short(error.why), "code": str(error.code)}
        return JSONResponse(body, status_code=error.status, headers=headers_of(error))

    async def routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer through FastAPI's own routes."""
        await super().__call__(scope, receive, send)

    def _mounted(self, path: str) -> ASGIApp | None:
        found = self.hot.get(path)
        return found or next((below for prefix, below in self.below if path.startswith(prefix)), None)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. Building it takes 0.1 s for each engine, so call this in a thread."""
        if self.openapi_schema is None:
            from bombus_gateway.openapi import openapi_document  # imported late: only this document needs it

            self.openapi_schema = openapi_document(self.title, self.description, self.gateway)
        return self.openapi_schema


def create_app(gateway: Gateway) -> GatewayApp:
    """Return the app. Each engine's APIs are under `/e/<engine>`; the first engine's are at the root too."""
    app = GatewayApp(
        title="bombus",
        description="Train language models with the agent harness that you have: change `base_url` and `api_key`.",
        openapi_url=None,  # FastAPI would build it on the event loop, and its docs page loads other sites' scripts
    )
    app.gateway = gateway
    app.calls = calls = Calls(gateway)
    app.requests = OpenRequests(
        places_of(gateway.settings), gateway.settings.bodies_mb_max << 20, share_by_key(gateway)
    )
    app.uncounted = {PATH}
    app.hot = {}
    app.below = []
    _add_error_handlers(app)

    async def docs(_: Request) -> HTMLResponse:
        return HTMLResponse(docs_page(await asyncio.to_thread(app.openapi)), headers=HEADERS)

    async def document(_: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(app.openapi))

    add_plain(app, [PlainRoute("GET", "/docs", docs), PlainRoute("GET", "/openapi.json", document)])
    app.metrics = MetricsRoutes(gateway, calls.metrics, calls.opened)
    add_plain(app, checked(app.metrics.plain, gateway.clients, gateway.check_ready))
    for prefix, engine in gateway.mounts:
        openai = OpenAIAPI(gateway, calls, engine, any_engine=not prefix)
        app.hot[f"{prefix}/v1/chat/completions"] = openai.chat
        app.hot[f"{prefix}/v1/completions"] = openai.completions
        app.hot[f"{prefix}/v1/models"] = openai.models
        anthropic = AnthropicAPI(gateway, calls, engine, any_engine=not prefix)
        app.hot[f"{prefix}/v1/messages"] = anthropic.messages
        app.hot[f"{prefix}/v1/messages/count_tokens"] = anthropic.count_tokens
        app.hot[f"{prefix}/v1/embeddings"] = openai.embeddings
        for place in (prefix, f"{prefix}/v1"):  # vLLM has these at the root
            app.hot[f"{place}/tokenize"] = openai.tokens.tokenize
            app.hot[f"{place}/detokenize"] = openai.tokens.detokenize
        agents = EpisodeGuard(gateway.keys, engine, any_engine=not prefix)
        app.hot[f"{prefix}/generate"] = GenerateAPI(calls, agents, app.routed)
        responses = ResponsesAPI(gateway, calls, engine, any_engine=not prefix)
        app.hot[f"{prefix}/v1/responses"] = responses.create
        app.below += [
            (f"{prefix}/v1/responses/", responses.stored),
            (f"{prefix}/v1/models/", openai.model),
            (f"{prefix}/v1/messages/", anthropic.below),
            (f"{prefix}/v1/", openai.nothing),
        ]
        app.include_router(health_router(gateway, engine), prefix=prefix)
        signs = ("/health", "/ready", "/touch_client", "/api/v1/session_heartbeat")
        app.uncounted.update(f"{prefix}{path}" for path in signs)
        swarm = swarm_routes(gateway, engine)
        groups, direct = group_routes(gateway, engine, app.routed)
        add_plain(app, below(prefix, [*plain(gateway, swarm), *training_routes(gateway, calls, engine), *groups]))
        app.hot |= {f"{prefix}{path}": route for path, route in direct.items()}
    add_plain(app, plain(gateway, hive_routes(gateway)))
    return app


def _add_error_handlers(app: GatewayApp) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return app.refusal(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        places = [
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()[:5]
        ]
        unknown = any(problem["type"] == "extra_forbidden" for problem in error.errors())
        return app.refused(Code.UNKNOWN_FIELD if unknown else Code.MALFORMED, "; ".join(places))

    @app.exception_handler(BusUnavailable)
    async def bus_down(_: Request, error: BusUnavailable) -> JSONResponse:
        return app.refused(Code.BUS_DOWN, f"The log cannot be reached right now; try again. ({error})")

    @app.exception_handler(EngineFault)
    async def fault(_: Request, error: EngineFault) -> JSONResponse:
        log.error("an engine cannot do what was asked", extra={"why": str(error)})
        return app.refused(Code.INTERNAL, str(error))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        """Answer with an error code, so that clients can distinguish a bug from a server that is shutting down.

        The server logs the traceback.
        """
        return app.refused(Code.INTERNAL, f"The gateway failed ({type(error).__name__}); see its log.")
