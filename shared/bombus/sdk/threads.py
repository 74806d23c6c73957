"""The threads of a client in which agents run, and how they learn that the program is interrupted."""

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

LEAVE_S = 5.0  # for agents' own code, once the program is interrupted
WAKE_S = 1.0  # a Ctrl-C that came to another thread is acted on by the main thread, once that wakes


class Interruption:
    """Whether a program is interrupted, and the episodes that its threads have claimed until then."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()
        self._is_acted_on = threading.Event()
        self._lock = threading.Lock()
        self._claimed: dict[str, None] = {}
        self._on_interrupt: list[Callable[[], object]] = []

    def tell(self, end: Callable[[], object] = lambda: None) -> None:
        """Interrupt all threads, and end what they wait for: none of them begins to undo its own before that is done.

        Otherwise `end` could end that too.
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
        """Call this, which must not block, from another thread when the program is interrupted while the block runs."""
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
        """Sleep until the program is interrupted, and raise `KeyboardInterrupt` then."""
        self._interrupted.wait(seconds)
        self.check()

    def claimed(self, episodes: Sequence[str]) -> None:
        with self._lock:
            self._claimed |= dict.fromkeys(episodes)
            trim(self._claimed, EPISODES_MAX)

    def take_claimed(self) -> list[str]:
        """Return what was claimed since the last time."""
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
    """Sleep as `time.sleep` does. In a thread of `AgentThreads`, an interruption of the program ends it."""
    if _here.interruption is not None:
        _here.interruption.sleep(seconds)
    else:
        time.sleep(seconds)


def note_claimed(episodes: Sequence[str]) -> None:
    """Note that this thread has claimed these episodes, which an interrupted program gives back."""
    if _here.interruption is not None:
        _here.interruption.claimed(episodes)


@overload
def result_of(agent: Callable[[], Awaitable[T]]) -> T: ...
@overload
def result_of(agent: Callable[[], T | Awaitable[T]]) -> T: ...
def result_of(agent: Callable[[], object]) -> object:
    """Return what an agent returns, and where that is awaitable, its result from a loop of this thread.

    When the program is interrupted, what is awaited is cancelled. A `StopIteration`, and an error that is not an
    `Exception`, such as `SystemExit`, is raised as a `RuntimeError`.
    """
    try:
        found = agent()
        return task_groups.run(_awaited(found)) if inspect.isawaitable(found) else found
    except StopIteration as error:  # no coroutine can raise it
        raise RuntimeError(f"it raised {error!r}").with_traceback(error.__traceback__) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # the caller's code, which may end neither its group nor the program
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

    They do not keep an interrupted program from ending, unlike the threads of `ThreadPoolExecutor`: agents' own code
    may take as long as it likes. Threads that are started in one of these threads are interrupted with it.
    """

    def __init__(self, indices: Sequence[int], attempt: Callable[[int], None], count: int) -> None:
        self.is_inner = _here.interruption is not None  # these are started in a thread of others
        self.interruption = _here.interruption or Interruption()
        self._left = iter(indices)
        self._lock = threading.Lock()
        self._attempt = attempt
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"bombus-episode-{number}", daemon=True) for number in range(count)
        ]

    def run(self) -> None:
        """Return when all is done. Raises what an attempt raises, and what interrupts this."""
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
        """Wait for the threads, which were told, to end."""
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        _here.interruption = self.interruption
        try:
            for index in self._indices():
                self._attempt(index)
        except BaseException as error:  # whatever it is, `run` raises it
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
