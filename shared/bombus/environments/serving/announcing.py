"""Shows environment servers on a hive's bus. Each server has a lease in a bucket, which expires unless it is
renewed."""

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Callable

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.bus.accounts import ENTRIES
from bombus.bus.headers import TTL
from bombus.bus.requests import ApiCall
from bombus.bus.streams import lease_stream
from bombus.bus.wire import decode_info
from bombus.errors import BusUnavailable
from bombus.machine.advertising import url_for_others

log = logging.getLogger(__name__)

RENEW_S = 2.0
LEASE_S = 10
SHOWN_MAX = 64


class ShownServer(msgspec.Struct, frozen=True, kw_only=True):
    """An environment server as shown by `bombus status`."""

    url: str
    slots: int
    leased: int
    waiting: int

    def text(self) -> str:
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        return f"{self.url}: {self.leased} of {self.slots} slots leased{waiting}"


async def announce(counts: Callable[[], dict[str, int]], nats: str, hive: str, url: str) -> None:
    """Write the number of leased slots to the bus periodically, until cancelled.

    If the server listens on every address, the URL shown contains the machine's own address on its connection to the
    bus or, failing that, its host name. The bus only displays these counts: without the bus, the server keeps running
    and its leases stay valid.
    """
    name = secrets.token_hex(6)
    while True:
        try:
            async with await Bus.connect(nats, hive, name="env") as bus:
                shown = url_for_others(url, await bus.own_address()) or url_for_others(url, socket.gethostname())
                while True:
                    await show(bus, name, ShownServer(url=shown, **counts()))
                    await asyncio.sleep(RENEW_S)
        except (BusUnavailable, ServerRefused) as error:
            log.warning("this server's slots cannot be shown on the bus: %s", error)
        await asyncio.sleep(RENEW_S)


async def show(bus: Bus, name: str, server: ShownServer) -> None:
    """Write a server's entry, which expires after some seconds."""
    await bus.publisher.publish(
        f"{_prefix(bus)}.{name}",
        msgspec.json.encode(server),
        msg_id=secrets.token_hex(8),
        headers={TTL: f"{LEASE_S}s"},
    )


async def shown_servers(bus: Bus) -> list[ShownServer]:
    """Return the environment servers that the bus shows, sorted by URL. Raises `BusUnavailable`."""
    stream = lease_stream(bus.subjects)
    body = json.dumps({"subjects_filter": f"{_prefix(bus)}.*"}).encode()
    reply = await bus.requests.api(ApiCall(f"stream {stream}", f"STREAM.INFO.{stream}", decode_info, body))
    entries = [await bus.last(stream, subject) for subject in sorted(reply.state.subjects)[:SHOWN_MAX]]
    found = [msgspec.json.decode(entry.data, type=ShownServer) for entry in entries if entry is not None]
    return sorted(found, key=lambda server: server.url)


def _prefix(bus: Bus) -> str:
    return f"$KV.{bus.subjects.leases_bucket}.{ENTRIES}"
