"""Task groups whose failures the waiting task can handle, and event loops that end in bounded time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

log = logging.getLogger("bombus")

LEFT_S = 5.0  # how long a loop's remaining tasks may take to end after being cancelled

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a coroutine in a new event loop, as `asyncio.run` does, and return its result.

    Unlike `asyncio.run`, this waits at most a few seconds for work that other code has left running: tasks that ignore
    cancellation, and calls in threads, which cannot be cancelled.
    """
    runner = asyncio.Runner(loop_factory=loop_factory or asyncio.new_event_loop)
    loop = runner.get_loop()
    try:
        return runner.run(work)
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))
        loop.close()


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=LEFT_S)
        for task in left:
            log.warning("%s is still running after it was cancelled; not waiting for it", task.get_coro())
    closing = asyncio.create_task(asyncio.get_running_loop().shutdown_asyncgens())
    await asyncio.wait({closing}, timeout=LEFT_S)


@contextmanager
def settled() -> Iterator[None]:
    """Undo the cancellations of this task that failed task groups in the block have left behind.

    If the task itself is cancelled, undo nothing.

    A `TaskGroup` cancels the task that waits for it when one of its tasks fails. In some versions of Python, such as
    3.11.2 in Debian 12, the group does not undo that, and every later `asyncio.timeout` in the waiting task raises
    CancelledError.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException:
        take_back_cancellations(task, before)
        raise
    take_back_cancellations(task, before)


def take_back_cancellations(task: asyncio.Task[Any], left: int) -> None:
    """Undo a task's cancellations until `left` of them remain."""
    while task.cancelling() > left:
        task.uncancel()


@asynccontextmanager
async def first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """Provide a task group. If a task fails, cancel the others and raise the first failure itself, not in a group."""
    try:
        with settled():
            async with asyncio.TaskGroup() as tasks:
                yield tasks
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
