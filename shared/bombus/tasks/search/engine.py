"""Runs the searches of many episodes. Queries made at the same time form one batch; repeated ones come from a cache."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from bombus.tasks.search.backends import SearchBackend, SearchFailed
from bombus.tasks.search.corpus import SearchDocument

CACHE_MAX = 10_000
BATCH_MAX = 64

Documents = tuple[SearchDocument, ...]


class SearchCache:
    """The answers to the newest queries, at most `size` of them. Threads may share it."""

    def __init__(self, size: int = CACHE_MAX) -> None:
        self._size = size
        self._found: OrderedDict[str, Documents] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def get(self, query: str) -> Documents | None:
        with self._lock:
            found = self._found.get(query)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._found.move_to_end(query)
            return found

    def put(self, query: str, found: Documents) -> None:
        with self._lock:
            self._found[query] = found
            self._found.move_to_end(query)
            while len(self._found) > self._size:
                self._found.popitem(last=False)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class _Lane:
    """The searches in one event loop, to which their futures belong."""

    def __init__(self, at_once: int) -> None:
        self.slots = asyncio.Semaphore(at_once)
        self.entering = (
            asyncio.Lock()
        )  # batches take their slots one batch at a time: two with half of theirs would deadlock
        self.waiting: dict[str, asyncio.Future[Documents]] = {}
        self.running: dict[str, asyncio.Future[Documents]] = {}
        self.flushes: set[asyncio.Task[None]] = set()


class SearchEngine:
    """Answers queries through a cache.

    In each event loop, the backend works on at most `at_once` queries at a time.
    """

    def __init__(self, backend: SearchBackend, count: int, at_once: int) -> None:
        self.cache = SearchCache()
        self.batches = 0
        self._backend = backend
        self._count = count
        self._at_once = at_once
        self._batch = min(BATCH_MAX, at_once)
        self._lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = WeakKeyDictionary()

    async def search(self, query: str) -> Documents:
        """Return the documents for a query. Raises `SearchFailed` if the search engine gives no answer."""
        query = " ".join(query.split())
        if (known := self.cache.get(query)) is not None:
            return known
        lane = self._lanes.setdefault(asyncio.get_running_loop(), _Lane(self._at_once))
        future = lane.running.get(query) or lane.waiting.get(query)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            lane.waiting[query] = future
            if len(lane.waiting) == 1:
                self._begin_flush(lane)
        return await asyncio.shield(future)  # a cancelled caller must not cancel the answer for others

    def figures(self) -> Mapping[str, float]:
        asked = self.cache.hits + self.cache.misses
        return {"searches": asked, "cache_hit_rate": self.cache.hit_rate, "batches": self.batches} if asked else {}

    def _begin_flush(self, lane: _Lane) -> None:
        task = asyncio.get_running_loop().create_task(self._flush(lane))
        lane.flushes.add(task)
        task.add_done_callback(lane.flushes.discard)

    async def _flush(self, lane: _Lane) -> None:
        """Send the waiting queries, once all tasks that are ready now have added theirs."""
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            while lane.waiting:
                batch = {query: lane.waiting.pop(query) for query in list(lane.waiting)[: self._batch]}
                lane.running |= batch
                group.create_task(self._send(lane, batch))

    async def _send(self, lane: _Lane, batch: dict[str, asyncio.Future[Documents]]) -> None:
        taken = 0
        try:
            async with lane.entering:
                for _ in batch:
                    await lane.slots.acquire()
                    taken += 1
            self.batches += 1
            found = await self._backend.search(list(batch), self._count)
            for (query, future), documents in zip(batch.items(), found, strict=True):
                if isinstance(documents, SearchFailed):
                    _fail(future, documents)
                    continue
                self.cache.put(query, tuple(documents))
                if not future.done():
                    future.set_result(tuple(documents))
        except Exception as error:  # whatever it is, the error is raised to all callers
            for future in batch.values():
                _fail(future, error)
        finally:
            for query, future in batch.items():
                lane.running.pop(query, None)
                future.cancel()  # no effect, unless this task was cancelled
            for _ in range(taken):
                lane.slots.release()


def _fail(future: asyncio.Future[Documents], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks the exception as retrieved: the caller may be gone
