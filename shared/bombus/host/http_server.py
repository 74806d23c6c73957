"""The HTTP server of the gateway and of replicas: uvicorn on a socket that is already bound."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn

BACKLOG = 4096
CUT_OFF_S = 3


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the server stops when `should_exit` is set."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def http_server(
    app: Callable[..., Any],
    bound: socket.socket,
    drain_s: float,
    cut_off: Callable[[], None] | None = None,
    standard_headers: bool = True,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve an ASGI app on a bound socket while the block runs; then let open requests finish for `drain_s` seconds.

    With `cut_off`, it is called after these seconds, and what is still open has `CUT_OFF_S` more to end. The block is
    given the task that serves, which ends early only when the server breaks. `standard_headers` are `date` and
    `server`.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=standard_headers,
        date_header=standard_headers,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_s)) if cut_off is None else round(drain_s) + CUT_OFF_S,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        yield serving
    finally:
        server.should_exit = True
        if cut_off is not None:
            await asyncio.wait({serving}, timeout=drain_s)
            cut_off()
        await serving
