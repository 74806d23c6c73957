"""Agents in threads: coroutines among them, and how they learn that the program is interrupted."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

import pytest

from bombus.sdk import threads
from tests.ctrl_c import check_that_ctrl_c_ends
from tests.patience import PATIENCE_S


async def _seven() -> float:
    return 7.0


def test_a_result_may_be_there_or_awaited() -> None:
    assert threads.result_of(lambda: 7.0) == 7.0
    assert threads.result_of(_seven) == 7.0


def _cancelled() -> float:
    raise asyncio.CancelledError


def _exhausted() -> float:
    return next(iter(()))


@pytest.mark.parametrize("agent", [lambda: sys.exit(2), _cancelled, lambda: pytest.fail("as tests do"), _exhausted])
def test_what_an_agent_raises_that_is_no_exception_is_its_own_failure(agent: Callable[[], float]) -> None:
    with pytest.raises(RuntimeError, match="it raised") as raised:
        threads.result_of(agent)
    cause = raised.value.__cause__
    assert cause is not None
    assert traceback.extract_tb(cause.__traceback__), "where the agent raised it"


def test_a_result_does_not_wait_for_a_thread_that_its_agent_has_left() -> None:
    release, ended = threading.Event(), threading.Event()

    def hangs() -> None:
        release.wait()
        ended.set()

    async def agent() -> float:
        helper = asyncio.create_task(asyncio.to_thread(hangs))
        await asyncio.sleep(0)
        helper.cancel()
        return 7.0

    assert threads.result_of(agent) == 7.0
    assert not ended.is_set()
    release.set()
    assert ended.wait(PATIENCE_S)


async def test_no_thread_undoes_its_own_before_an_interruption_has_ended_what_they_wait_for() -> None:
    sleeps, told, undone = threading.Event(), threading.Event(), threading.Event()

    def attempt(index: int) -> None:
        sleeps.set()
        try:
            threads.sleep(3600)
        finally:
            undone.set()

    def end() -> None:
        told.set()
        assert not undone.wait(0.1)

    agents = threads.AgentThreads([0], attempt, 1)

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            agents.run()

    running = asyncio.create_task(asyncio.to_thread(run))
    assert await asyncio.to_thread(sleeps.wait, PATIENCE_S)
    await asyncio.to_thread(agents.interruption.tell, end)
    await running
    assert told.is_set()
    assert undone.is_set()


async def test_an_interruption_cancels_coroutines_of_agents_too() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def agent() -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0.0

    def attempt(index: int) -> None:
        threads.result_of(agent)

    agents = threads.AgentThreads([0], attempt, 1)

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            agents.run()

    running = asyncio.create_task(asyncio.to_thread(run))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    agents.interruption.tell()
    await running
    assert cancelled.is_set()
    with pytest.raises(KeyboardInterrupt), agents.interruption.telling(lambda: None):
        raise AssertionError("what begins after the interruption does not run")


TO_ANOTHER_THREAD = """
import signal, threading, time
from bombus.sdk.threads import AgentThreads

def attempt(index):
    time.sleep(0.2)  # by then the main thread waits
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(3600)

AgentThreads([0], attempt, 1).run()
"""


def test_ctrl_c_ends_a_program_whichever_thread_it_comes_to() -> None:
    check_that_ctrl_c_ends(TO_ANOTHER_THREAD)
