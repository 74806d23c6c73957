"""The application: its pages, its stream of changes, and the headers of all its answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import msgspec
import vl_convert
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bombus.insight.watch import PAUSE_S, LogWatch
from bombus.insight.web import compare, episode, now, run, step
from bombus.machine.host_names import AsgiApp, AsgiMessage, AsgiReceive, AsgiSend

PAGES = (now, run, step, episode, compare)  # each has `ROUTES`
SILENCE_S = 15.0  # after which a comment finds out whether the browser is still there

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(watch: LogWatch) -> AsgiApp:
    """Return the application for one log. See `access` for who may use it."""
    routes = [route for module in PAGES for route in module.ROUTES]
    files = Mount("/static", StaticFiles(packages=[("bombus.insight.web", "static")]))
    app = Starlette(routes=[*routes, Route("/events", events), Route("/static/vega.js", vega), files])
    app.state.watch = watch
    return app


def with_headers(app: AsgiApp) -> AsgiApp:
    """Add to all answers the headers that keep a browser from running or loading anything else."""

    async def answering(scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        async def sending(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            await send(message)

        await app(scope, receive, sending)

    return answering


async def vega(request: Request) -> Response:
    """Answer with the scripts that draw charts. Their URL has their version, so that browsers keep them."""
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(await asyncio.to_thread(_bundle), media_type="text/javascript", headers=headers)


@cache
def _bundle() -> str:
    return vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its types lack the default


async def events(request: Request) -> Response:
    """Tell a page, as server-sent events, that there is something new, at most once every `PAUSE_S` seconds."""
    return StreamingResponse(_changes(request.app.state.watch), media_type="text/event-stream")


async def _changes(watch: LogWatch) -> AsyncIterator[bytes]:
    with watch.viewing():
        told = b""
        while not watch.is_closing:
            changed = watch.changed
            state = {"position": watch.position, "end": watch.end, "ready": watch.is_ready, "error": watch.error}
            now = b"data: " + msgspec.json.encode(state) + b"\n\n"
            yield now if now != told else b": still here\n\n"
            told = now
            await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await changed.wait()
