"""Runs a gateway: connects it to the bus, folds the log, and serves its APIs."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from bombus import telemetry
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive.bounded import trim
from bombus.hive.events import AnyEvent, EpisodeClaimed
from bombus.hive.subjects import SIGNING_SECRET
from bombus.machine.host_names import OwnHostsOnly, host_of
from bombus.machine.http_limits import HttpLimits
from bombus.machine.http_server import http_server
from bombus.machine.metrics import metrics_server
from bombus.machine.process import listen
from bombus_gateway.app import GatewayApp, create_app
from bombus_gateway.context import Gateway
from bombus_gateway.formats import FormatReports
from bombus_gateway.keys import Keys
from bombus_gateway.open_requests import connections_of
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

CATCH_UP_S = 600.0
TRACES_KEPT = 100_000  # of the newest episodes


async def run(settings: GatewaySettings) -> None:
    """Serve until cancelled or until one of the gateway's tasks fails.

    Raises `BusUnavailable` if there is no bus or no hive, and `Refused` if the gateway cannot listen at the configured
    address.
    """
    telemetry.configure("gateway")
    with listen(settings.host, settings.port, settings.reuse_port) as bound:
        async with (
            running(settings) as (app, gateway),
            metrics_server(gateway.bus, settings, app.metrics.exposed),
            serving(app, bound) as server,
        ):
            log.info("listening at %s:%d", *bound.getsockname()[:2])
            try:
                await asyncio.wait({server})
            finally:
                # While the open calls finish, new ones are sent to other gateways, and claims stop waiting.
                gateway.ready = False


def serving(app: GatewayApp, bound: socket.socket) -> AbstractAsyncContextManager[asyncio.Task[None]]:
    """Serve the app while the block runs. Calls that are still open `drain_s` seconds after the block ends are recorded
    as cut off."""
    settings = app.calls.settings
    limits = HttpLimits(connections=connections_of(settings))
    named = (settings.host, host_of(settings.public_url), *settings.host_names)
    checked = app if settings.keys.for_clients else OwnHostsOnly(app, bound, named)
    return http_server(checked, bound, settings.drain_s, app.calls.hang_up, limits)


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[tuple[GatewayApp, Gateway]]:
    """Run a gateway that folds the log, without serving its app, while the block runs.

    The block gets the app and the gateway. The block is cancelled if one of the gateway's tasks fails.
    """
    async with await Bus.connect(settings.bus_url, settings.hive, name="gateway") as bus:
        await bus.until_streams_exist()
        traces: dict[str, str] = {}

        def note(_: int, event: AnyEvent) -> None:
            if isinstance(event, EpisodeClaimed) and follower.traceparent:
                traces.update(dict.fromkeys(event.episodes, follower.traceparent))
                trim(traces, TRACES_KEPT)

        follower = Follower(bus, note if telemetry.enabled() else None)
        await bus.hand_out_replica_key()
        gateway = Gateway(settings, bus, follower, Keys(await bus.secret(SIGNING_SECRET)), traces)
        app = create_app(gateway)
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(gateway.follower.run()),
                tasks.create_task(gateway.heartbeats.run()),
                tasks.create_task(gateway.key_ring.follow()),
                tasks.create_task(app.calls.capacity.run()),
                tasks.create_task(app.calls.upstream.run()),
                tasks.create_task(FormatReports(gateway, app.calls.models).run()),
                tasks.create_task(_become_ready(gateway)),
            ]
            try:
                yield app, gateway
            finally:
                for part in parts:
                    part.cancel()
                app.calls.client.close()
                app.calls.workers.close()


async def _become_ready(gateway: Gateway) -> None:
    """Wait until the log is folded. Until then, the gateway cannot refuse the keys of ended episodes (R18)."""
    await gateway.follower.caught_up(CATCH_UP_S)
    gateway.ready = True
    log.info("the gateway is ready", extra={"position": gateway.follower.position})
