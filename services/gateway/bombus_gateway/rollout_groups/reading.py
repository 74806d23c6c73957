"""Read the records of a large batch while it is being sent, so that only some of them are in memory at a time."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from bombus.errors import LogCorrupted
from bombus.hive.records import BodyRef

AHEAD_BYTES = 32 << 20  # maximum size of records read ahead
AT_ONCE_MAX = 16

FetchBody = Callable[[BodyRef], Awaitable[bytes]]


class RecordReader:
    """Reads the records of several bodies in order. `lost` is called with each body that is gone."""

    def __init__(self, fetch: FetchBody, refs: Iterable[BodyRef], lost: Callable[[BodyRef], None]) -> None:
        self._fetch = fetch
        self._refs = deque(refs)
        self._lost = lost
        self._reading: deque[tuple[BodyRef, asyncio.Task[bytes]]] = deque()
        self._ahead = 0  # bytes of records that are being read, or were read but not returned yet
        self._loop = asyncio.get_running_loop()

    async def begin(self) -> None:
        """Read the first records. Raises `LogCorrupted` if one of them is gone, and `BusUnavailable` if the bus does
        not answer."""
        self._read_ahead()
        try:
            for ref, task in self._reading:
                await self._of(ref, task)
        except BaseException:
            self.close()
            raise

    async def next(self) -> bytes | None:
        """Return the next record, or None after the last. Raises the same errors as `begin`."""
        self._read_ahead()
        if not self._reading:
            return None
        ref, task = self._reading.popleft()
        record = await self._of(ref, task)
        self._ahead -= ref.size
        self._read_ahead()
        return record

    def in_thread(self) -> Iterator[bytes]:
        """Yield the records. Call this in a thread other than the event loop's. Raises the same errors as `begin`."""
        while (record := asyncio.run_coroutine_threadsafe(self.next(), self._loop).result()) is not None:
            yield record

    def close(self) -> None:
        """Stop reading."""
        self._refs.clear()
        for _, task in self._reading:
            task.cancel()
        self._reading.clear()

    def _read_ahead(self) -> None:
        while self._refs and len(self._reading) < AT_ONCE_MAX:
            ref = self._refs[0]
            if self._reading and self._ahead + ref.size > AHEAD_BYTES:
                return
            self._ahead += ref.size
            self._reading.append((self._refs.popleft(), asyncio.ensure_future(self._fetch(ref))))

    async def _of(self, ref: BodyRef, task: asyncio.Task[bytes]) -> bytes:
        try:
            return await task
        except LogCorrupted:
            self._lost(ref)
            raise
