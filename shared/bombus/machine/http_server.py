"""The HTTP server of the gateway and of replicas: uvicorn on a socket that is already bound."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from bombus.errors import Code
from bombus.machine.certificates import keep_current, served
from bombus.machine.http_limits import DEFAULTS, HttpLimits, LimitedProtocol, Patience

log = logging.getLogger(__name__)

BACKLOG = 4096
CUT_OFF_S = 3
FILES_KEPT = 256  # open files of a process other than its clients' connections


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and without checking every tenth of a second whether to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Have the server stop: it accepts no more connections, and closes each open connection after its current
        request."""
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # lets connections without a request close
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


class CutOff:
    """An ASGI app that answers 503 if the server cancels a request because it is stopping.

    uvicorn alone would answer with a 500 that has no code. An answer that has begun is cut off.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        begun = False

        async def sending(message: dict[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if begun:
                raise
            log.warning("a request was not finished when the server stopped", extra={"path": scope.get("path")})
            why = "The server is stopping before this request is finished: send it again in a moment."
            body = json.dumps({"detail": why, "code": Code.OVERLOADED}).encode()
            length = str(len(body)).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", length),
                (b"retry-after", b"1"),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def http_server(
    app: Callable[..., Any],
    bound: socket.socket,
    drain_s: float,
    cut_off: Callable[[], None] | None = None,
    limits: HttpLimits = DEFAULTS,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve an ASGI app on a bound socket while the block runs, then give open requests `drain_s` seconds to finish.

    The block begins only once clients can connect, so it may tell others the address immediately. It gets the task that
    runs the server, which ends early only if the server breaks.

    If `cut_off` is given, it is called after `drain_s` seconds, and requests that are still open have another
    `CUT_OFF_S` seconds to end. The limit on connections is lowered to what the process's limit on open files allows.
    With `$BOMBUS_TLS` it serves HTTPS, and raises `Refused` if that file cannot be used.
    """
    patience = Patience(replace(limits, connections=connections_max(limits.connections)))
    config = uvicorn.Config(
        CutOff(app),
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, patience)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_s)) if cut_off is None else round(drain_s) + CUT_OFF_S,
    )
    context = served()
    config.load()
    config.ssl = context
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve([bound]))
    beside = [asyncio.create_task(each) for each in (patience.run(), keep_current(context))]
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0)
        yield serving
    finally:
        server.leave()
        if cut_off is not None:
            await asyncio.wait({serving}, timeout=drain_s)
            cut_off()
        await serving
        for task in beside:
            task.cancel()


def connections_max(wanted: int) -> int:
    """Return `wanted`, or the most connections that this process's limit on open files allows if that is lower."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - FILES_KEPT))
