"""A gateway on a real bus whose log is written by the test, for tests of what reads its event stream."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.machine.http_server import http_server
from bombus_gateway.app import create_app
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings


@asynccontextmanager
async def served_log(bus: Bus, port: int = 0) -> AsyncIterator[tuple[str, Follower]]:
    """Serve a gateway whose log is written by the test."""
    follower = Follower(bus)
    gateway = Gateway(GatewaySettings(hive=bus.subjects.hive), bus, follower, Keys(b"a secret for tests of 32 bytes!!"))
    gateway.ready = True
    following = asyncio.create_task(follower.run())
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            async with http_server(create_app(gateway), listener, drain_s=5.0):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", follower
                gateway.ready = False
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
