"""What other code leaves with the task that waits for it, and what it raises there."""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from bombus.sdk import running
from bombus.sdk.errors import BadRequest, InfraError, NoTaskId, ServerBusy
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

    with pytest.raises(RuntimeError, match="it had not been cancelled"):
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


async def test_a_coroutine_that_goes_on_after_it_was_cancelled_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.05)
    over, left = asyncio.Event(), asyncio.Event()

    async def goes_on() -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    held = asyncio.create_task(contained(goes_on(), left.set))
    await asyncio.sleep(0)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert left.is_set()
    over.set()


async def test_what_a_coroutine_returns_although_it_was_cancelled_is_returned() -> None:
    async def finishes() -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 7

    held = asyncio.create_task(contained(finishes()))
    await asyncio.sleep(0)
    held.cancel()
    assert await held == 7


async def test_an_error_that_a_coroutine_makes_of_its_cancellation_does_not_hide_it() -> None:
    async def fails_instead() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise ValueError("interrupted") from error

    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            with suppress(Exception):  # as whoever runs tools and agents goes on after an error of theirs
                await contained(fails_instead())
            pytest.fail("it went on after its time")


async def test_a_cancellation_that_comes_as_a_coroutine_ends_is_not_lost() -> None:
    for turns in range(3):
        ending = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(contained(asyncio.wait_for(ending, None)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ending.set_result(1.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_error_of_a_coroutine_that_was_left_to_itself_is_not_complained_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.1)
    going_on = asyncio.Event()

    async def goes_on() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await going_on.wait()
        raise ValueError("a bug")

    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await contained(goes_on())
    going_on.set()
    (left,) = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait({left})
    del left
    gc.collect()
    assert "never retrieved" not in caplog.text


def raised_by(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        work()
    return raised.value


def test_each_distinct_error_is_shown_once_with_its_traceback_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def looks_up(name: str) -> object:
        found: dict[str, object] = {}
        return found[name]

    reports = running.ErrorReports()
    with caplog.at_level(logging.WARNING, "bombus"):
        for name in ("one", "two", "three"):
            reports.report(raised_by(partial(looks_up, name)), f"task {name} failed")
        reports.report(raised_by(lambda: [][1]), "task four failed")
        reports.report(InfraError("the environment is gone"), "task five failed")
    assert "task one failed: KeyError: 'one' (test_running.py, line " in caplog.text
    assert caplog.text.count("Traceback") == 2, "one for each kind, and none for an error that says what to do"
    assert "(3 of this kind so far)" in caplog.text
    assert "task five failed: InfraError: the environment is gone" in caplog.text


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (KeyError("x"), True),
        (TypeError("x"), True),
        (NoTaskId("x"), True),
        (BadRequest("x"), True),
        (ValueError("x"), False),
        (TimeoutError("x"), False),
        (InfraError("x"), False),
        (ServerBusy("x"), False),
    ],
)
def test_a_mistake_of_the_program_is_not_tried_again(error: Exception, is_one: bool) -> None:
    assert running.is_mistake(error) is is_one
