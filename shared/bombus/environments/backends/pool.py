"""A pool of backends. Each is bound to one session from `take` to `give_back`, and is cleaned before the next one."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bombus.environments.backends.kinds import Backend
from bombus.environments.kinds import EnvironmentLost, EnvironmentsBusy
from bombus.errors import Refused, in_one_line
from bombus.sdk.errors import InfraError

log = logging.getLogger(__name__)

START_TRIES = 3
PAUSE_S = 5.0  # before a backend that could not be started is tried again; it doubles up to
PAUSE_S_MAX = 60.0
CALL_S = 10.0  # for a scrub, for a question whether a backend is healthy, and for its end
IDLE_CALL_S = 3.0  # for that question to one that does nothing: a client waits, and another backend may be ready


class BackendPool:
    """Keeps `size` backends that can be in use at once, and `spares` more that take the place of dead ones.

    `make(number)` makes the backend with that number, from 0 to `size + spares - 1`, without starting it. A backend
    that dies or cannot be scrubbed is stopped, and one with the same number is started in its place. If that fails, it
    is tried again, `pause_s` seconds after the first failure, until it succeeds.
    """

    def __init__(
        self,
        make: Callable[[int], Backend],
        size: int,
        spares: int = 0,
        kind: str = "Backend",
        pause_s: float = PAUSE_S,
    ) -> None:
        if size < 1 or spares < 0:
            raise ValueError(f"a pool has at least 1 backend and 0 spares, not {size} and {spares}")
        self.size = size
        self.exhausted = f"{kind} pool exhausted"
        self._make = make
        self._pause_s = pause_s
        self._numbers = range(size + spares)
        self._ready: deque[tuple[int, Backend]] = deque()
        self._bound: dict[str, tuple[int, Backend]] = {}
        self._all: dict[int, Backend] = {}
        self._unscrubbed: set[str] = set()  # sessions whose backend is replaced when they end
        self._replacing: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()  # those that are expected soon: they have not failed to start yet
        self._changed = asyncio.Event()  # of these sets and queues; each change has an event of its own
        self._closed = False

    async def __aenter__(self) -> Self:
        """Start all backends. If one does not start, stop the others, and raise the first error."""
        done = await asyncio.gather(*(self._start(number) for number in self._numbers), return_exceptions=True)
        failed = [each for each in done if isinstance(each, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def counts(self) -> dict[str, int]:
        return {"ready": len(self._ready), "bound": len(self._bound), "replacing": len(self._replacing)}

    async def take(self, session: str) -> Backend:
        """Bind a backend that answers to a session; for a session that has one, return that.

        Raises `EnvironmentsBusy` when all are in use, and `EnvironmentLost` when none works. Where
        all that are free are being replaced, it waits for one.
        """
        if session in self._bound:
            return self._bound[session][1]
        if self._closed or len(self._bound) >= self.size:
            raise EnvironmentsBusy(f"{self.exhausted}: all {self.size} are in use")
        while self._ready or self._starting:
            if not self._ready:
                await self._changed.wait()
                continue
            number, backend = self._bound[session] = self._ready.popleft()
            if await self._answers(backend, IDLE_CALL_S):
                return backend
            del self._bound[session]
            log.warning("backend %d at %s does not answer, and is replaced", number, backend.address)
            self._replace(number)
        raise EnvironmentLost(f"none of {self.size} backends works: the log of the server says why")

    async def renew(self, session: str) -> None:
        """Scrub the backend of a session, which keeps it. Raises `InfraError` when that fails.

        That backend is not scrubbed again, but replaced, when the session gives it back.
        """
        number, backend = self._bound.get(session, (0, None))
        if backend is None:
            raise EnvironmentLost("this session has no backend left")
        try:
            async with asyncio.timeout(CALL_S):
                await backend.scrub()
        except Exception as error:  # a backend may raise anything, and its session must not be used again then
            self._unscrubbed.add(session)
            if isinstance(error, InfraError):
                raise
            raise EnvironmentLost(f"backend {number} could not be scrubbed: {in_one_line(error)}") from error

    async def check(self, session: str) -> None:
        """Raise `EnvironmentLost` when the backend of a session no longer answers."""
        number, backend = self._bound.get(session, (0, None))
        if backend is None or not await self._answers(backend):
            raise EnvironmentLost(f"backend {number} of this session has died")

    async def give_back(self, session: str, in_use: bool = False) -> None:
        """Release a session's backend, whether or not it can be scrubbed. Doing it again does nothing.

        One that may be `in_use` by code of the session that goes on, such as a thread, is replaced, and not scrubbed.
        """
        number, backend = self._bound.pop(session, (0, None))
        was_unscrubbed = session in self._unscrubbed
        self._unscrubbed.discard(session)
        if backend is None:
            return
        if was_unscrubbed or in_use:
            why = "could not be scrubbed" if was_unscrubbed else f"may be in use by what session {session} left running"
            log.warning("backend %d %s, and is replaced", number, why)
            self._replace(number)
            return
        try:
            async with asyncio.timeout(CALL_S):
                await backend.scrub()
                healthy = await backend.is_healthy()
        except Exception as error:  # whatever a backend raises, it is unknown what was scrubbed
            log.warning("backend %d could not be scrubbed, and is replaced: %s", number, in_one_line(error))
            healthy = False
        except BaseException:  # cancelled: it is unknown what was scrubbed
            self._replace(number)
            raise
        if healthy and not self._closed:
            self._ready.append((number, backend))
            self._tell()
        else:
            self._replace(number)

    async def close(self) -> None:
        """Stop all backends."""
        self._closed = True
        self._starting.clear()
        self._tell()
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(self._stop(number) for number in list(self._all)))
        self._ready.clear()

    async def _start(self, number: int) -> None:
        for left in reversed(range(START_TRIES)):
            backend = self._all[number] = self._make(number)
            try:
                await backend.start()
            except Refused:  # this machine has no such backends, however often it is asked
                await self._stop(number)
                raise
            except Exception as error:  # whatever it raises, it is stopped, and tried again
                log.warning("backend %d does not start: %s", number, in_one_line(error))
                await self._stop(number)
                if not left:
                    raise
            else:
                self._ready.append((number, backend))
                self._starting.discard(number)
                self._tell()
                return

    def _replace(self, number: int) -> None:
        if self._closed:
            return
        self._starting.add(number)
        task = asyncio.create_task(self._replaced(number))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replaced(self, number: int) -> None:
        await self._stop(number)
        pause_s = self._pause_s
        while True:
            try:
                await self._start(number)
            except Exception as error:  # a slot without a backend is of no use: it is tried again
                log.error("backend %d is out of use for %.3g s: %s", number, pause_s, in_one_line(error))
            else:
                return
            self._starting.discard(number)
            self._tell()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _tell(self) -> None:
        """Wake those that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stop(self, number: int) -> None:
        backend = self._all.pop(number, None)
        if backend is None:
            return
        try:
            async with asyncio.timeout(CALL_S):
                await backend.stop()
        except Exception as error:  # the backend is given up in any case
            log.error("backend %d at %s was not stopped: %s", number, backend.address, in_one_line(error))

    async def _answers(self, backend: Backend, limit_s: float = CALL_S) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                return await backend.is_healthy()
        except Exception as error:  # one that cannot answer is as good as dead
            log.warning("backend at %s does not answer: %s", backend.address, in_one_line(error))
            return False
