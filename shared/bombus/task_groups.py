"""Groups of tasks whose failure is handled by the task that waits for them, and loops that end in bounded time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

log = logging.getLogger("bombus")

LEFT_S = 5.0  # for what is left in a loop to end, once it was cancelled

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a coroutine in a loop of its own, as `asyncio.run` does, and return its result.

    Unlike `asyncio.run`, this waits no longer than a few seconds for what other code has left running: tasks that go on
    when they are cancelled, and calls in threads, which cannot be cancelled.
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
    """Take back the cancellations that failed task groups in the block have left with this task.

    Where the task itself is cancelled, nothing is taken back.

    A `TaskGroup` cancels the task that waits for it when one of its own fails. Where it does not take that back, each
    later `asyncio.timeout` of the task raises CancelledError in some versions of Python, such as 3.11.2 of Debian 12.
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
    """Take back cancellations of a task until `left` of them are left."""
    while task.cancelling() > left:
        task.uncancel()


@asynccontextmanager
async def first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """Give a group of tasks. When tasks fail, the first failure is raised by itself, and the others are cancelled."""
    try:
        with settled():
            async with asyncio.TaskGroup() as tasks:
                yield tasks
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
