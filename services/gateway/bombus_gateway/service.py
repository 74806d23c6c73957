"""Runs a gateway: connects it to the bus, lets it fold the log, and serves its doors."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from bombus import telemetry
from bombus.bus import Bus, ServerRefused
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable
from bombus.host.process import listen
from bombus_gateway.app import GatewayApp, create_app
from bombus_gateway.context import Gateway
from bombus_gateway.keys import SECRET_NAME, Keys
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

STREAMS_WAIT_S = 60.0  # for whoever makes the hive's streams
CATCH_UP_S = 600.0
CUT_OFF_S = 3  # when the gateway is stopped and open calls have had their time: to record what was sampled of them
BACKLOG = 4096


async def run(settings: GatewaySettings) -> None:
    """Serve until cancelled or a part breaks.

    Raises `BusUnavailable` when there is no bus or no hive, `Refused` when it cannot listen where it should.
    """
    telemetry.configure("gateway")
    with listen(settings.host, settings.port, settings.reuse_port) as bound:
        async with running(settings) as (app, gateway), http_server(app, bound) as serving:
            log.info("listening at %s:%d", *bound.getsockname()[:2])
            try:
                await asyncio.wait({serving})
            finally:
                gateway.ready = False  # new calls go to another one while the open ones end


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[tuple[GatewayApp, Gateway]]:
    """A gateway that folds the log, and its app, which anybody may serve. A part that breaks ends the block."""
    async with await Bus.connect(settings.bus_url, settings.hive, name="gateway") as bus:
        await _streams(bus)
        gateway = Gateway(settings, bus, Follower(bus), Keys(await bus.secret(SECRET_NAME)))
        app = create_app(gateway)
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(gateway.follower.run()),
                tasks.create_task(gateway.touches.run()),
                tasks.create_task(app.calls.room.run()),
                tasks.create_task(app.calls.upstream.run()),
                tasks.create_task(_become_ready(gateway)),
            ]
            try:
                yield app, gateway
            finally:
                for part in parts:
                    part.cancel()
                app.calls.client.close()


async def _become_ready(gateway: Gateway) -> None:
    """Keys of episodes that are over must be refused: nothing is answered before the log is folded (R18)."""
    await gateway.follower.caught_up(CATCH_UP_S)
    gateway.ready = True
    log.info("the gateway is ready", extra={"position": gateway.follower.position})


async def _streams(bus: Bus) -> None:
    deadline = asyncio.get_running_loop().time() + STREAMS_WAIT_S
    while True:
        try:
            await bus.state(bus.subjects.calls_stream)
            return
        except (BusUnavailable, ServerRefused) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise BusUnavailable(f"hive {bus.subjects.hive} has no streams yet: {error}") from error
        await asyncio.sleep(0.2)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: who cancels us stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def http_server(app: GatewayApp, bound: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve `app` on a bound socket while the block runs; then let open requests finish.

    Calls that are still open after `drain_s` are recorded as cut off, and answered with an error.
    """
    drain_s = app.calls.settings.drain_s
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=round(drain_s) + CUT_OFF_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        yield serving
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=drain_s)
        app.calls.hang_up()
        await serving
