"""Threads for large requests, so that all other requests go on while one is read, rendered and encoded."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

INLINE_BYTES_MAX = 32 << 10  # of a request whose work takes no longer than a few milliseconds
THREADS = 2  # each of them may hold some hundred bytes for each character of a request

T = TypeVar("T")


class Workers:
    """The threads of one gateway. What waits for one of them waits in the order in which it came.

    An episode has one of them at a time, so that the others are not kept waiting by all of its requests.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="large-request")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by episode

    async def run(self, episode: str, request_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is done at once for a small request, and in a thread for a large one."""
        if request_bytes <= INLINE_BYTES_MAX:
            return work()
        turn = self._turns.setdefault(episode, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
