"""Groups of tasks whose failure is handled by the task that waits for them, and after which its timeouts work."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any


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
