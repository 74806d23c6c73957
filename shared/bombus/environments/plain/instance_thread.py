"""Threads for the methods of an environment that are not coroutines: what hangs there blocks neither the loop nor the
end of the program."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Future[Any], contextvars.Context, Callable[[], Any]]


async def in_a_thread(call: Callable[[], T], name: str) -> T:
    """Return the result of a function that runs in its own thread."""
    thread = InstanceThread(name)
    try:
        return await thread.run(call)
    finally:
        await thread.close()


class InstanceThread:
    """A thread that calls one function after another. A database that belongs to the thread that opened it stays
    usable, because the methods of an environment are all called in one.

    A function that hangs cannot be cancelled: the thread then `is_stuck`, and is left to end with the program.
    """

    def __init__(self, name: str) -> None:
        self.is_stuck = False
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, name=f"bombus-instance-{name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return what the function returns, or raise what it raises. A cancelled caller does not wait for it."""
        work: Future[T] = Future()
        self._works.put((work, contextvars.copy_context(), call))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            self.is_stuck = not work.done()
            raise

    def leave(self, last: Callable[[], object]) -> None:
        """Let the thread call one more function once it is no longer stuck, and end."""
        self._works.put((Future(), contextvars.copy_context(), last))
        self._works.put(None)

    async def close(self) -> None:
        """End the thread, and wait for that unless it is stuck."""
        self._works.put(None)
        if not self.is_stuck:
            await asyncio.shield(asyncio.wrap_future(self._ended))
            self._thread.join()

    def _loop(self) -> None:
        while (work := self._works.get()) is not None:
            done, context, call = work
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(context.run(call))
                except BaseException as error:  # whatever the method raises is raised where it was called
                    is_handed_on = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    done.set_exception(error if is_handed_on else RuntimeError(f"it raised {error!r}"))
            del work, done, call
        self._ended.set_result(None)
