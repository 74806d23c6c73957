"""Waits until what a server has stored would survive a power cut, with `--durability power`.

nats-server acknowledges what it has written to the page cache. With `--durability power`, the process that runs the
server syncs its files on request (`bombus.bus.syncer`). The server's name, which each client gets when it connects,
tells clients to wait for these syncs. All callers that wait on one connection share a request.
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

SYNC = "bombus-sync"  # the subject of requests

SyncNotice = Callable[[BombusError | None], None]


class Syncing:
    """Waits for syncs on behalf of one connection, whose owner calls `connection_lost`.

    A sync covers nothing that was stored over an earlier connection: the server may have lost those messages in a power
    cut.
    """

    def __init__(self, client: Any, requests: Requests) -> None:
        self._client = client
        self._requests = requests
        self._waiting: list[SyncNotice] = []
        self._shared: list[SyncNotice] = []  # the notices to call after the request in flight
        self._flight: asyncio.Task[None] | None = None

    @property
    def needed(self) -> bool:
        """Return whether acknowledgements of the present server must wait for a sync."""
        return str(self._client._server_info.get("server_name", "")).startswith(POWER_NAME)

    async def wait(self) -> None:
        """Return once everything stored before this call would survive a power cut, or immediately if no sync is
        `needed`.

        Raises `BusUnavailable` if the connection breaks: what was stored may be gone.
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
        """Call `notify` with None after a sync that begins after this call, or with the error that prevented it."""
        if not self._client.is_connected:
            notify(AckLost("the connection broke before the disk was synced"))
            return
        self._waiting.append(notify)
        if self._flight is None:
            self._flight = asyncio.create_task(self._fly())

    def connection_lost(self) -> None:
        """Tell all waiting callers that no sync will cover what they stored."""
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
                await self._requests.request(SYNC)
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
