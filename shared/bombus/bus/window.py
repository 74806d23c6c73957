"""A bound on messages in flight, by number and by bytes. When it is full, senders wait, and are then refused (R20)."""

import asyncio
from collections import deque

from bombus.errors import BusUnavailable


class Window:
    """A bound on messages in flight, which admits senders in order. A message larger than `bytes_max` is admitted only
    when nothing else is in flight."""

    def __init__(self, messages_max: int, bytes_max: int, waiting_max: int | None = None) -> None:
        """Make a window in which at most `waiting_max` senders wait (by default, `messages_max`)."""
        if messages_max < 1 or bytes_max < 1:
            raise ValueError(f"a window needs room for 1 message and 1 byte, not {messages_max} and {bytes_max}")
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self._waiting_max = messages_max if waiting_max is None else waiting_max
        self.messages = 0
        self.bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_acquire(self, size: int) -> bool:
        """Take room for a message of `size` bytes if there is enough and no other sender is waiting. Return whether it
        was taken."""
        if self._queue or not self._fits(size):
            return False
        self.messages += 1
        self.bytes += size
        return True

    async def acquire(self, size: int, timeout_s: float) -> None:
        """Wait for room. Raises `BusUnavailable` if there is none within `timeout_s`."""
        if self.try_acquire(size):
            return
        if len(self._queue) >= self._waiting_max:
            raise BusUnavailable(
                f"{self.messages} messages are in flight and {len(self._queue)} are waiting: the bus cannot keep up"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # our turn came just as we gave up waiting
                self.release(size)
            else:
                turn.cancel()
                self._admit()
            if isinstance(error, TimeoutError):
                raise BusUnavailable(
                    f"no room within {timeout_s:g} s: {self.messages} messages, {self.bytes} bytes are in flight"
                ) from None
            raise

    def release(self, size: int) -> None:
        """Give back the room taken by a message of `size` bytes."""
        self.messages -= 1
        self.bytes -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        if self.messages == 0:
            return True
        return self.messages < self.messages_max and self.bytes + size <= self.bytes_max

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if turn.done():
                self._queue.popleft()
                continue
            if not self._fits(size):
                return
            self._queue.popleft()
            self.messages += 1
            self.bytes += size
            turn.set_result(None)
