"""Whether the run's trainer is there. One that was superseded stands aside only for as long as its successor lives.

Safety is in the trainer epochs (R11): an answer that comes too late costs an attempt, never a step.
"""

from bombus.bus import Bus
from bombus.bus.wire import ReceivedMessage
from bombus.errors import BusUnavailable
from bombus.hive.inbox import Done


class Presence:
    """One trainer's. A process that is gone has no subscription, and one that hangs does not answer."""

    def __init__(self, bus: Bus, engine: str) -> None:
        self._bus = bus
        self._engine = engine

    async def announce(self, epoch: int) -> None:
        """Answer for this trainer epoch until the connection is closed."""

        async def answer(message: ReceivedMessage) -> None:
            await self._bus.answer(message.reply, Done(epoch=epoch))

        await self._bus.client.subscribe(self._bus.subjects.trainer(self._engine, epoch), cb=answer)

    async def is_there(self, epoch: int, timeout_s: float) -> bool:
        """Whether the trainer of that epoch answers within `timeout_s`. True while the bus itself is away."""
        try:
            await self._bus.requests.request(self._bus.subjects.trainer(self._engine, epoch), timeout_s=timeout_s)
        except BusUnavailable:
            return not self._bus.is_connected
        return True
