"""Threads for large requests, so that other requests continue while a large one is read, rendered and encoded."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

INLINE_BYTES_MAX = 32 << 10  # largest request that takes no longer than a few milliseconds
READ_BYTES_MAX = 128 << 10  # largest body that is only parsed in that time, unless crafted to be slow
THREADS = 2  # each may use about a hundred bytes of memory per character of a request
NUMBER_BYTES = 8  # bytes of text that take as long to write as one number
CLIENTS = "clients"  # turn shared by all requests not from agents, so that one thread is always left for agents

T = TypeVar("T")


class Workers:
    """A gateway's threads, which take requests in the order of arrival.

    An episode uses one thread at a time, so that its requests cannot occupy all threads.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="large-request")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by episode

    async def run(
        self, turn: str, request_bytes: int, work: Callable[[], T], inline_bytes: int = INLINE_BYTES_MAX
    ) -> T:
        """Return the result of `work`, which is run directly for a small request, and in a thread for a large one.

        `turn` is the episode of the request, or `CLIENTS`.
        """
        if request_bytes <= inline_bytes:
            return work()
        lock = self._turns.setdefault(turn, asyncio.Lock())
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
