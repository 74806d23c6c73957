"""A pool of backends. Each is bound to a session from `take` to `give_back`, and scrubbed before the next session."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Self

from bombus.environments.backends.kinds import Backend
from bombus.environments.kinds import EnvironmentsBusy, SandboxLost
from bombus.errors import Refused, in_one_line
from bombus.sdk.errors import InfraError

log = logging.getLogger(__name__)

START_TRIES = 3
PAUSE_S = 5.0  # pause after a failed start, doubled each time up to PAUSE_S_MAX
PAUSE_S_MAX = 60.0
CALL_S = 10.0  # time limit for a scrub, a health check or a stop
IDLE_CALL_S = 3.0  # time limit for checking an idle backend: a client is waiting, and another backend may be ready


class BackendPool:
    """Keeps `size` backends that can be in use at the same time, and `spares` more to take the place of dead ones.

    `make(number)` creates the backend with that number, from 0 to `size + spares - 1`, without starting it. A backend
    that dies or cannot be scrubbed is stopped, and another with the same number is started in its place. If the new one
    does not start, starting it is retried until it succeeds, first after `pause_s` seconds.
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
            raise ValueError(f"a pool must have at least 1 backend and 0 spares, not {size} and {spares}")
        self.size = size
        self.exhausted = f"{kind} pool exhausted"
        self._make = make
        self._pause_s = pause_s
        self._numbers = range(size + spares)
        self._ready: deque[tuple[int, Backend]] = deque()
        self._bound: dict[str, tuple[int, Backend]] = {}
        self._all: dict[int, Backend] = {}
        self._unscrubbed: set[str] = set()  # sessions whose backend will be replaced when they end
        self._replacing: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()  # numbers of backends that are expected soon: no start has failed yet
        self._changed = asyncio.Event()  # set when these sets and queues change, then replaced by a new event
        self._closed = False

    async def __aenter__(self) -> Self:
        """Start all backends. If any does not start, stop the others and raise the first error."""
        done = await asyncio.gather(*(self._start(number) for number in self._numbers), return_exceptions=True)
        failed = [each for each in done if isinstance(each, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def counts(self) -> dict[str, int]:
        return {"ready": len(self._ready), "bound": len(self._bound), "replacing": len(self._replacing)}

    async def take(self, session: str) -> Backend:
        """Bind a healthy backend to a session, and return it. If the session already has a backend, return that one.

        Raises `EnvironmentsBusy` if all backends are in use, and `SandboxLost` if none works. If all free backends are
        being replaced, wait for one.
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
            log.warning("backend %d at %s does not respond and will be replaced", number, backend.address)
            self._replace(number)
        raise SandboxLost(f"none of the {self.size} backends works: see the server's log for the reason")

    async def renew(self, session: str) -> None:
        """Scrub a session's backend, which the session keeps. Raises `InfraError` if scrubbing fails.

        After a failure, the backend is replaced when the session gives it back, instead of being scrubbed again.
        """
        number, backend = self._bound.get(session, (0, None))
        if backend is None:
            raise SandboxLost("this session has no backend left")
        try:
            async with asyncio.timeout(CALL_S):
                await backend.scrub()
        except Exception as error:  # a backend may raise anything; the session must not be used after that
            self._unscrubbed.add(session)
            if isinstance(error, InfraError):
                raise
            raise SandboxLost(f"backend {number} could not be scrubbed: {in_one_line(error)}") from error

    async def check(self, session: str) -> None:
        """Raise `SandboxLost` if a session's backend no longer responds."""
        number, backend = self._bound.get(session, (0, None))
        if backend is None or not await self._answers(backend):
            raise SandboxLost(f"backend {number} of this session has died")

    async def give_back(self, session: str, in_use: bool = False) -> None:
        """Release a session's backend, even if it cannot be scrubbed. Repeating this does nothing.

        If code from the session that is still running, such as a thread, may be using the backend (`in_use`), the
        backend is replaced rather than scrubbed.
        """
        number, backend = self._bound.pop(session, (0, None))
        was_unscrubbed = session in self._unscrubbed
        self._unscrubbed.discard(session)
        if backend is None:
            return
        if was_unscrubbed or in_use:
            why = "could not be scrubbed" if was_unscrubbed else f"may be in use by code of session {session}"
            log.warning("backend %d %s and will be replaced", number, why)
            self._replace(number)
            return
        try:
            async with asyncio.timeout(CALL_S):
                await backend.scrub()
                healthy = await backend.is_healthy()
        except Exception as error:  # a backend may raise anything; how far the scrub got is unknown
            log.warning("backend %d could not be scrubbed and will be replaced: %s", number, in_one_line(error))
            healthy = False
        except BaseException:  # cancelled; how far the scrub got is unknown
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
            except Refused:  # this machine cannot run such backends, so a retry is useless
                await self._stop(number)
                raise
            except Exception as error:  # a backend may raise anything; stop it and try again
                log.warning("backend %d did not start: %s", number, in_one_line(error))
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
            except Exception as error:  # a slot without a backend is useless, so try again
                log.error("backend %d will be tried again in %.3g s: %s", number, pause_s, in_one_line(error))
            else:
                return
            self._starting.discard(number)
            self._tell()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _tell(self) -> None:
        """Wake all callers that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stop(self, number: int) -> None:
        backend = self._all.pop(number, None)
        if backend is None:
            return
        try:
            async with asyncio.timeout(CALL_S):
                await backend.stop()
        except Exception as error:  # the backend is dropped anyway
            log.error("backend %d at %s could not be stopped: %s", number, backend.address, in_one_line(error))

    async def _answers(self, backend: Backend, limit_s: float = CALL_S) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                return await backend.is_healthy()
        except Exception as error:  # a backend whose health check fails counts as dead
            log.warning("backend at %s does not respond: %s", backend.address, in_one_line(error))
            return False
