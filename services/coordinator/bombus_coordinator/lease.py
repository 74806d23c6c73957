"""The leader's lease, which determines who may lead now. The lease serves only liveness: what keeps two leaders from
interfering is the fence (R4).

The lease is a key-value entry that its holder renews, and that the server removes when it is not renewed. Any process
that finds no entry may take the lease. No process reads the server's clock: the holder counts from just before it sent
its request, so it considers its lease over before the server removes the entry.
"""

import asyncio
import logging
import secrets

from bombus.bus import Bus, ServerRefused, WrongSequence
from bombus.bus.headers import EXPECTED_LAST_OF_SUBJECT, TTL
from bombus.bus.streams import lease_stream
from bombus.errors import BusUnavailable

log = logging.getLogger(__name__)

LEASE_S = 2.0
RENEW_S = 0.5
REQUEST_S = 1.0


class Lease:
    """One process's hold on the lease. A process that restarts under the same `holder` name gets the lease back
    immediately."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self.holder = holder
        self._bus = bus
        self._subject = f"$KV.{bus.subjects.leases_bucket}.leader"
        self._seq = 0  # sequence of the last entry that this process wrote
        self._until = 0.0  # time on the event loop's clock
        self._renewed = asyncio.Event()

    @property
    def held(self) -> bool:
        """Return whether, by our own clock, we still hold the lease: False from the moment that another process might
        hold it."""
        return asyncio.get_running_loop().time() < self._until

    async def wait(self, timeout_s: float) -> None:
        """Wait until we hold the lease again, for at most `timeout_s`."""
        self._renewed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._renewed.wait()
        except TimeoutError:
            pass

    async def acquire(self) -> bool:
        """Take or renew the lease. Return False if another process holds it or the server does not answer."""
        try:
            return await self._write(self._seq if self.held else await self._free_since())
        except WrongSequence:
            self._until = 0.0
            return False
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the lease could not be acquired: %s", error)
            await self._make_bucket()
            return False

    async def keep(self) -> None:
        """Keep renewing the lease until cancelled. If the lease is lost, take it again once it is free."""
        while True:
            if not await self.acquire() and not self.held:
                log.warning("the lease is lost; decisions pause until it is reacquired")
            await asyncio.sleep(RENEW_S)

    async def release(self) -> None:
        """Give the lease back, so that a standby need not wait for it to expire."""
        self._until = 0.0
        stream = lease_stream(self._bus.subjects)
        try:
            entry = await self._bus.last(stream, self._subject)  # a renewal may have been in flight
            if entry is not None and entry.data.decode() == self.holder:
                await self._bus.purge_below(stream, entry.seq + 1)
        except (BusUnavailable, ServerRefused) as error:
            log.info("the lease was not released (%s); it will expire", error)

    async def _free_since(self) -> int:
        """Return the sequence at which the entry may be replaced. Raises `WrongSequence` if another process holds the
        lease."""
        entry = await self._bus.last(lease_stream(self._bus.subjects), self._subject)
        if entry is None:
            return 0
        if entry.data.decode() == self.holder:
            return entry.seq
        raise WrongSequence(f"{entry.data.decode()} leads")

    async def _write(self, expected: int) -> bool:
        requested_at = asyncio.get_running_loop().time()
        ack = await self._bus.publisher.publish(
            self._subject,
            self.holder.encode(),
            msg_id=secrets.token_hex(8),
            headers={EXPECTED_LAST_OF_SUBJECT: str(expected), TTL: f"{LEASE_S:g}s"},
            timeout_s=REQUEST_S,
            synced=False,
        )
        self._seq = ack.seq
        self._until = requested_at + LEASE_S
        self._renewed.set()
        return True

    async def _make_bucket(self) -> None:
        """Recreate the bucket of leases, in case it was deleted by hand."""
        try:
            await self._bus.ensure_leases()
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the lease's bucket cannot be created: %s", error)
