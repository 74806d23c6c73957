"""Threads for environment methods that are not coroutines. A method that hangs blocks neither the event loop nor the
program's exit."""

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
    """Run a function in a new thread, and return its result."""
    thread = InstanceThread(name)
    try:
        return await thread.run(call)
    finally:
        await thread.close()


class InstanceThread:
    """A thread that runs functions one after another. The methods of an environment that may not overlap share one
    thread, so that a database connection stays usable if it belongs to the thread that opened it.

    A function that hangs cannot be cancelled: the thread is then marked `is_stuck`, and left alone until the program
    exits.
    """

    def __init__(self, name: str) -> None:
        self.is_stuck = False
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, name=f"bombus-instance-{name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return the function's result, or raise its exception. A caller that is cancelled does not wait for the
        function."""
        work: Future[T] = Future()
        self._works.put((work, contextvars.copy_context(), call))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            self.is_stuck = not work.done()
            raise

    def leave(self, last: Callable[[], object]) -> None:
        """Queue a final function, after which the thread ends. It runs once the thread is no longer stuck."""
        self._works.put((Future(), contextvars.copy_context(), last))
        self._works.put(None)

    async def close(self) -> None:
        """End the thread. Wait until it has ended, unless it is stuck."""
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
                except BaseException as error:  # any error of the method is raised in its caller
                    is_handed_on = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    done.set_exception(error if is_handed_on else RuntimeError(f"it raised {error!r}"))
            del work, done, call
        self._ended.set_result(None)
