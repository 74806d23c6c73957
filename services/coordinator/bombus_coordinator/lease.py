"""The leader's lease: who may decide at the moment. For liveness alone; what keeps two leaders apart is the fence (R4).

A key-value entry that its holder renews and that the server forgets when it is not renewed. Who finds it gone takes
it. Nobody reads the server's clock: the holder counts from before it asked, so its lease ends here first.
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
    """`holder` names a process. One that is started again under the same name gets its lease back at once."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self.holder = holder
        self._bus = bus
        self._subject = f"$KV.{bus.subjects.leases_bucket}.leader"
        self._seq = 0  # of the entry that we wrote last
        self._until = 0.0  # on the loop's clock
        self._renewed = asyncio.Event()

    @property
    def held(self) -> bool:
        """False as soon as somebody else may have it. The clock is read anew: this process may just have woken up."""
        return asyncio.get_running_loop().time() < self._until

    async def wait(self, timeout_s: float) -> None:
        """Return once it is ours again, or after `timeout_s`."""
        self._renewed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._renewed.wait()
        except TimeoutError:
            pass

    async def take(self) -> bool:
        """Take or renew it; False when another has it or the server does not answer."""
        try:
            return await self._write(self._seq if self.held else await self._free_since())
        except WrongSequence:
            self._until = 0.0
            return False
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the lease could not be asked for: %s", error)
            await self._make_bucket()
            return False

    async def keep(self) -> None:
        """Renew it until cancelled, and take it again when it was lost and is free."""
        while True:
            if not await self.take() and not self.held:
                log.warning("the lease is lost; nothing is decided until it is ours again")
            await asyncio.sleep(RENEW_S)

    async def release(self) -> None:
        """Give it back, so that a standby need not wait for its end."""
        self._until = 0.0
        stream = lease_stream(self._bus.subjects)
        try:
            entry = await self._bus.last(stream, self._subject)  # a renewal may have been under way
            if entry is not None and entry.data.decode() == self.holder:
                await self._bus.purge_below(stream, entry.seq + 1)
        except (BusUnavailable, ServerRefused) as error:
            log.info("the lease was not given back (%s); it ends by itself", error)

    async def _free_since(self) -> int:
        """The sequence at which the entry may be replaced. Raises `WrongSequence` when it is another's."""
        entry = await self._bus.last(lease_stream(self._bus.subjects), self._subject)
        if entry is None:
            return 0
        if entry.data.decode() == self.holder:
            return entry.seq
        raise WrongSequence(f"{entry.data.decode()} leads")

    async def _write(self, expected: int) -> bool:
        asked = asyncio.get_running_loop().time()
        ack = await self._bus.publisher.publish(
            self._subject,
            self.holder.encode(),
            msg_id=secrets.token_hex(8),
            headers={EXPECTED_LAST_OF_SUBJECT: str(expected), TTL: f"{LEASE_S:g}s"},
            timeout_s=REQUEST_S,
        )
        self._seq = ack.seq
        self._until = asked + LEASE_S
        self._renewed.set()
        return True

    async def _make_bucket(self) -> None:
        """The bucket may have been deleted by hand."""
        try:
            await self._bus.ensure_leases()
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the lease's bucket cannot be made: %s", error)
