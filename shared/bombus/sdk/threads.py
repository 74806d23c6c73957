"""The threads in which a client runs agents, and how they learn that the program was interrupted."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar, overload

from bombus import task_groups
from bombus.hive.bounded import trim
from bombus.sdk.claimed import EPISODES_MAX
from bombus.sdk.running import contained

T = TypeVar("T")

LEAVE_S = 5.0  # how long agents' own code may take to end after the program is interrupted
WAKE_S = 1.0  # the main thread acts on a Ctrl-C only when it wakes, if another thread received the signal


class Interruption:
    """Records whether a program was interrupted, and the episodes that its threads have claimed so far."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()
        self._is_acted_on = threading.Event()
        self._lock = threading.Lock()
        self._claimed: dict[str, None] = {}
        self._on_interrupt: list[Callable[[], object]] = []

    def tell(self, end: Callable[[], object] = lambda: None) -> None:
        """Interrupt all threads, then call `end` to end what they are waiting for.

        `end` runs before any thread starts its cleanup. Otherwise `end` could end the cleanup too.
        """
        with self._lock:
            self._interrupted.set()
            try:
                end()
                for each in self._on_interrupt:
                    each()
            finally:
                self._is_acted_on.set()

    @contextmanager
    def telling(self, call: Callable[[], object]) -> Iterator[None]:
        """While the block runs, call `call` in another thread if the program is interrupted. `call` must not block."""
        with self._lock:
            self.check()
            self._on_interrupt.append(call)
        try:
            yield
        finally:
            with self._lock:
                self._on_interrupt.remove(call)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` once the program is interrupted."""
        if self._interrupted.is_set():
            self._is_acted_on.wait()
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Sleep. If the program is interrupted, wake up and raise `KeyboardInterrupt`."""
        self._interrupted.wait(seconds)
        self.check()

    def claimed(self, episodes: Sequence[str]) -> None:
        with self._lock:
            self._claimed |= dict.fromkeys(episodes)
            trim(self._claimed, EPISODES_MAX)

    def take_claimed(self) -> list[str]:
        """Return the episodes claimed since the last call."""
        with self._lock:
            taken, self._claimed = list(self._claimed), {}
        return taken


class _Here(threading.local):
    interruption: Interruption | None = None


_here = _Here()


def check() -> None:
    """Raise `KeyboardInterrupt` in a thread of `AgentThreads` once the program is interrupted."""
    if _here.interruption is not None:
        _here.interruption.check()


def sleep(seconds: float) -> None:
    """Sleep as `time.sleep` does. In a thread of `AgentThreads`, raise `KeyboardInterrupt` if the program is
    interrupted."""
    if _here.interruption is not None:
        _here.interruption.sleep(seconds)
    else:
        time.sleep(seconds)


def note_claimed(episodes: Sequence[str]) -> None:
    """Record that this thread has claimed these episodes. If the program is interrupted, they are given back."""
    if _here.interruption is not None:
        _here.interruption.claimed(episodes)


@overload
def result_of(agent: Callable[[], Awaitable[T]]) -> T: ...
@overload
def result_of(agent: Callable[[], T | Awaitable[T]]) -> T: ...
def result_of(agent: Callable[[], object]) -> object:
    """Return an agent's result. If the agent returns an awaitable, run it in an event loop of this thread.

    If the program is interrupted, the awaitable is cancelled. A `StopIteration`, or an error that is not an
    `Exception`, such as `SystemExit`, is raised as a `RuntimeError`.
    """
    try:
        found = agent()
        return task_groups.run(_awaited(found)) if inspect.isawaitable(found) else found
    except StopIteration as error:  # a coroutine cannot raise it
        raise RuntimeError(f"it raised {error!r}").with_traceback(error.__traceback__) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # the caller's code must end neither its group nor the program
        check()
        raise RuntimeError(f"it raised {error!r}") from error


async def _awaited(found: Awaitable[T]) -> T:
    interruption = _here.interruption
    if interruption is None:
        return await contained(found)
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    with interruption.telling(lambda: loop.call_soon_threadsafe(this.cancel)):
        try:
            return await contained(found)
        except asyncio.CancelledError:
            interruption.check()
            raise


class AgentThreads:
    """Threads that each call `attempt(index)` for one index after another.

    Unlike the threads of `ThreadPoolExecutor`, they do not keep an interrupted program from exiting, however long the
    agents' own code takes. Threads started inside one of these threads are interrupted with it.
    """

    def __init__(self, indices: Sequence[int], attempt: Callable[[int], None], count: int) -> None:
        self.is_inner = _here.interruption is not None  # started inside a thread of another `AgentThreads`
        self.interruption = _here.interruption or Interruption()
        self._left = iter(indices)
        self._lock = threading.Lock()
        self._attempt = attempt
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"bombus-episode-{number}", daemon=True) for number in range(count)
        ]

    def run(self) -> None:
        """Start the threads, and wait until all indices are done.

        Raises an attempt's error, or the interruption of this call.
        """
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if (error := self._next_end()) is not None:
                raise error

    def _next_end(self) -> BaseException | None:
        while True:
            with suppress(queue.Empty):
                return self._ended.get(timeout=WAKE_S)

    def leave(self, within_s: float = LEAVE_S) -> None:
        """Wait for the interrupted threads to end."""
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        _here.interruption = self.interruption
        try:
            for index in self._indices():
                self._attempt(index)
        except BaseException as error:  # any error is raised by `run`
            self._ended.put(error)
        else:
            self._ended.put(None)

    def _indices(self) -> Iterator[int]:
        while True:
            self.interruption.check()
            with self._lock:
                index = next(self._left, None)
            if index is None:
                return
            yield index
