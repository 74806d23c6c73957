"""The leader's lease, as in lease.py. It serves liveness only: the fence keeps two leaders apart."""

from bombus.bus.wire import WrongSequence
from bombus.errors import BusUnavailable
from tests.sim.link import Link

LEASE_S = 2.0
RENEW_S = 0.5
REQUEST_S = 1.0


class Lease:
    """The holder counts from before its request, so its lease ends before the server's entry does."""

    def __init__(self, link: Link, holder: str) -> None:
        self._link = link
        self._holder = holder
        self._seq = 0
        self._until_s = 0.0

    @property
    def held(self) -> bool:
        return self._link.net.loop.now_s < self._until_s

    async def acquire(self) -> bool:
        """Take or renew the lease. Return False when another process holds it or the server does not answer."""
        server, requested_s, mine = self._link.server, self._link.net.loop.now_s, self._seq if self.held else None

        def write() -> int:
            expected = mine
            if expected is None:
                entry = server.read_lease()
                if entry is not None and entry.holder != self._holder:
                    raise WrongSequence(f"{entry.holder} leads")
                expected = entry.seq if entry is not None else 0
            return server.write_lease(self._holder, expected, LEASE_S)

        try:
            self._seq = await self._link.call(write, REQUEST_S)
        except WrongSequence:
            self._until_s = 0.0
            return False
        except BusUnavailable:
            return False
        self._until_s = requested_s + LEASE_S
        return True

    async def keep(self) -> None:
        while True:
            await self.acquire()
            await self._link.process.sleep(RENEW_S)
