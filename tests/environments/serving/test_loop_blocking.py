"""Coroutines that block the loop of a server are noticed, and go on as without being watched."""

import asyncio
import logging
import time
from collections.abc import Awaitable

import pytest

from bombus import Task
from bombus.environments.kinds import ToolCall, ToolOutcome
from bombus.environments.plain.marks import reward
from bombus.environments.pools.session import EnvSession
from bombus.environments.serving.loop_blocking import Watched
from tests.environments.serving.served import served
from tests.environments.serving.small_served import Counter
from tests.patience import until


async def watched(work: Awaitable[str]) -> tuple[str, float]:
    noted: list[float] = []
    result = await Watched(work, noted.append)
    (longest_s,) = noted
    return result, longest_s


async def test_a_coroutine_that_blocks_is_told_from_one_that_awaits() -> None:
    async def blocks() -> str:
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - what an environment should not do
        return "blocked"

    async def awaits() -> str:
        for _ in range(30):
            await asyncio.sleep(0.01)
        return "awaited"

    blocked, held_up_s = await watched(blocks())
    assert (blocked, held_up_s >= 0.3) == ("blocked", True)
    awaited, longest_s = await watched(awaits())
    assert (awaited, longest_s < 0.3) == ("awaited", True)


async def test_what_a_watched_coroutine_raises_is_raised() -> None:
    async def fails() -> str:
        await asyncio.sleep(0)
        raise KeyError("goal")

    with pytest.raises(KeyError, match="goal"):
        await watched(fails())


async def test_a_watched_coroutine_sees_that_it_is_cancelled() -> None:
    seen: list[str] = []

    async def stubborn() -> str:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cancelled")
            raise
        return "never"

    task = asyncio.create_task(watched(stubborn()))
    await until(lambda: seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["begun", "cancelled"]


class Sleepy(Counter):
    async def call(self, call: ToolCall) -> ToolOutcome:
        time.sleep(1.1)  # noqa: ASYNC251 - what an environment should not do
        return ToolOutcome(text="slept")


class PlainSleepy:
    def reset(self, task: Task) -> str:
        return "Doze."

    async def doze(self) -> str:
        """Sleep."""
        time.sleep(1.1)  # noqa: ASYNC251 - what a tool should not do
        return "slept"

    @reward
    def always(self) -> float:
        return 1.0


@pytest.mark.parametrize("made", [Sleepy, PlainSleepy])
async def test_a_tool_that_holds_up_a_server_is_named_in_its_log(made: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with served(made) as (_, url), await EnvSession.open(url) as session:
            await session.reset({})
            await session.step({"tool": "doze"})
    assert caplog.text.count("`doze` of session") == 1
    assert "blocked all sessions of this server for " in caplog.text
