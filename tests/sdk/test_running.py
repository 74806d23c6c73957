"""What other code leaves with the task that waits for it, and what it raises there."""

import asyncio

import pytest

from bombus.sdk.running import contained, contained_here


async def fails() -> None:
    raise ValueError("a bug")


async def caught() -> str:
    """Wait for a group of tasks that fails, which cancels this task in some versions of Python."""
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())
    return "caught"


async def caught_and_failed() -> None:
    await caught()
    await fails()


async def cancellations() -> int:
    this = asyncio.current_task()
    assert this is not None
    return this.cancelling()


async def test_a_failed_group_in_other_code_leaves_no_cancellation_with_whoever_waits_for_it() -> None:
    assert await contained_here(caught()) == "caught"
    assert await cancellations() == 0
    with pytest.raises(ValueError, match="a bug"):
        await contained_here(caught_and_failed())
    assert await cancellations() == 0


async def test_nobody_is_cancelled_by_other_code_that_cancels_itself_after_a_failed_group() -> None:
    async def cancels_itself() -> None:
        await caught()
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="nobody had cancelled it"):
        await contained(cancels_itself())
    assert await cancellations() == 0


async def test_a_cancellation_from_outside_is_one() -> None:
    waiting = asyncio.Event()

    async def waits() -> None:
        await caught()
        waiting.set()
        await asyncio.Event().wait()

    for held in (contained, contained_here):
        waiting.clear()
        task = asyncio.create_task(held(waits()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
