"""Waits until what a server has stored would survive a power cut, where the hive asks for that (`--durability power`).

nats-server acknowledges what it has written to the page cache. The process that runs it syncs the files of its streams
whenever it is asked (`bombus.bus.syncer`), and says in the server's name, which each client gets as it connects, that
it does. Those who wait for acknowledgements share one request, so that a sync serves all that were written before it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from bombus.bus.requests import Requests
from bombus.bus.wire import AckLost
from bombus.config.streams import POWER_NAME
from bombus.errors import BombusError, BusUnavailable

logger = logging.getLogger(__name__)

SYNC_NOW = "bombus-sync.now"
SYNC_SOON = "bombus-sync.soon"  # with a sync that another request causes, if one comes in a few milliseconds

SyncNotice = Callable[[BombusError | None], None]


class Syncing:
    """The syncs that one connection waits for, with requests on `subject`. Its owner calls `connection_lost`.

    A sync that was asked for over an earlier connection is void: the server may have lost what it had not synced.
    """

    def __init__(self, client: Any, requests: Requests, subject: str = SYNC_NOW) -> None:
        self._client = client
        self._subject = subject
        self._requests = requests
        self._waiting: list[SyncNotice] = []
        self._shared: list[SyncNotice] = []  # those whom the request in flight serves
        self._flight: asyncio.Task[None] | None = None

    @property
    def needed(self) -> bool:
        """Return whether acknowledgements of the server that we are connected to have to wait for a sync."""
        return str(self._client._server_info.get("server_name", "")).startswith(POWER_NAME)

    async def wait(self) -> None:
        """Return once all that was stored before this call would survive a power cut; at once if nobody asked for that.

        Raises `BusUnavailable` when the connection breaks: what was stored may be gone.
        """
        if not self.needed:
            return
        synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def notify(failure: BombusError | None) -> None:
            if synced.done():
                return
            if failure is None:
                synced.set_result(None)
            else:
                synced.set_exception(failure)

        self.after(notify)
        await synced

    def after(self, notify: SyncNotice) -> None:
        """Call `notify` with None after a sync that begins after this call, or with what has prevented it."""
        if not self._client.is_connected:
            notify(AckLost("the connection broke before the disk was synced"))
            return
        self._waiting.append(notify)
        if self._flight is None:
            self._flight = asyncio.create_task(self._fly())

    def connection_lost(self) -> None:
        """Tell all who wait that no sync will cover what they stored."""
        if self._flight is not None:
            self._flight.cancel()
            self._flight = None
        void, self._shared, self._waiting = [*self._shared, *self._waiting], [], []
        for notify in void:
            notify(AckLost("the connection broke before the disk was synced"))

    async def _fly(self) -> None:
        while self._waiting:
            self._shared, self._waiting = self._waiting, []
            try:
                await self._requests.request(self._subject)
            except BusUnavailable as error:
                if self._client.is_closed:
                    self.connection_lost()
                    return
                logger.warning("acknowledgements wait for a sync of the server's disk: %s", error)
                self._waiting = self._shared + self._waiting
                continue
            synced, self._shared = self._shared, []
            for notify in synced:
                notify(None)
        self._flight = None
