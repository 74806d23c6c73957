"""Shows an environment server on a hive's bus: an entry in the bucket of leases, which ends when it is not renewed."""

import asyncio
import logging
import secrets
import time

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.bus.headers import TTL
from bombus.environments.serving.server import EnvironmentServer
from bombus.errors import BusUnavailable

log = logging.getLogger(__name__)

RENEW_S = 2.0
LEASE_S = 10


async def announce(server: EnvironmentServer, nats: str, hive: str, url: str) -> None:
    """Write the server's slots to the bus, again and again, until cancelled.

    The bus is for show: without it the server goes on, and its slots stay leases all the same.
    """
    name = secrets.token_hex(6)
    while True:
        try:
            async with await Bus.connect(nats, hive, name="env") as bus:
                await _renew(bus, server, name, url)
        except (BusUnavailable, ServerRefused, OSError) as error:
            log.warning("the bus does not show this server's slots: %s", error)
        await asyncio.sleep(RENEW_S)


async def _renew(bus: Bus, server: EnvironmentServer, name: str, url: str) -> None:
    subject = f"$KV.{bus.subjects.leases_bucket}.environments.{name}"
    while True:
        entry = {"url": url, "at": time.time(), **server.counts()}
        await bus.publisher.publish(
            subject, msgspec.json.encode(entry), msg_id=secrets.token_hex(8), headers={TTL: f"{LEASE_S}s"}
        )
        await asyncio.sleep(RENEW_S)
