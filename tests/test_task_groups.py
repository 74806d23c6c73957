import asyncio

import pytest

from bombus.task_groups import first_failure, settled


class Broken(Exception):
    """What tasks of these tests fail with."""


async def broken() -> None:
    await asyncio.sleep(0)
    raise Broken


async def one_fails() -> None:
    async with first_failure() as tasks:
        tasks.create_task(broken())
        tasks.create_task(asyncio.Event().wait())


async def others_fail() -> None:
    with settled():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broken())


async def test_the_first_failure_of_a_group_is_raised_by_itself_and_timeouts_work_after_it() -> None:
    with pytest.raises(Broken):
        await one_fails()
    await check_timeout()


async def test_timeouts_work_after_a_group_of_somebody_else_has_failed() -> None:
    with pytest.raises(ExceptionGroup), settled():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broken())
    await check_timeout()


async def test_a_cancellation_from_outside_is_not_taken_back() -> None:
    async def wait() -> None:
        async with first_failure() as tasks:
            tasks.create_task(asyncio.Event().wait())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def check_timeout() -> None:
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
