"""The thread of an `EnvPool`: what ends, forks, blocks or uses it at once holds nobody up for good."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from bombus.environments.kinds import AgentEnvironment, EnvironmentLost, ToolCall
from bombus.environments.pools.blocking import EnvPool, LoopThread, as_coroutine
from bombus.environments.pools.session import SessionSettings
from bombus.errors import Refused
from bombus.sdk.types import Task
from tests.ctrl_c import check_that_ctrl_c_ends
from tests.environments.serving.served import served
from tests.patience import PATIENCE_S, until

PROGRAM = Path(__file__).parent.parent / "serving/programs/forked_pool.py"
TASK = Task(main_query="three", task_id="t1")
TO_THE_LOOP = """
import asyncio, signal, threading
from bombus.environments.pools.blocking import LoopThread

async def work():
    await asyncio.sleep(0.2)  # by then the main thread waits
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    await asyncio.sleep(3600)

LoopThread().run(work())
"""


def test_a_loop_goes_on_after_a_coroutine_that_has_ended_the_program() -> None:
    async def exits() -> None:
        sys.exit(3)

    thread = LoopThread()
    with pytest.raises(SystemExit):
        thread.run(exits(), PATIENCE_S)
    assert thread.run(asyncio.sleep(0, "goes on"), PATIENCE_S) == "goes on"
    thread.stop()


class Plays:
    """A rollout that is an object, whose call is a coroutine."""

    async def __call__(self, task: Task, environment: AgentEnvironment) -> str:
        return task.main_query


async def test_an_object_whose_call_is_a_coroutine_runs_in_the_loop() -> None:
    rollout = Plays()
    assert as_coroutine(rollout) is rollout


@pytest.mark.parametrize(("error", "raised"), [(SystemExit, RuntimeError), (KeyboardInterrupt, KeyboardInterrupt)])
async def test_what_ends_a_program_is_raised_out_of_a_group_and_does_not_end_the_pool(
    error: type[BaseException], raised: type[BaseException]
) -> None:
    async def exits(task: Task, environment: AgentEnvironment) -> None:
        await environment.open(task)
        raise error

    def play(pool: EnvPool) -> str:
        try:
            pool.run_group(TASK, exits)
        except BaseException as found:  # a thread of the test's, which must not end by it
            return type(found).__name__
        return "nothing"

    async with served(slots=2) as (server, url):
        with await asyncio.to_thread(EnvPool(url, 2, group_size=2).connect) as pool:
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.to_thread(play, pool) == raised.__name__
                assert len(await asyncio.to_thread(pool.reset_group, TASK)) == 2
                await asyncio.to_thread(pool.close)
        await until(lambda: server.counts()["leased"] == 0)


async def test_a_pool_that_was_closed_is_connected_again_whoever_waited_for_whom_before() -> None:
    async with served(slots=2) as (_, url):
        pool = EnvPool(url, 2, group_size=2)
        for _ in range(2):
            await asyncio.to_thread(pool.connect)
            opened = [asyncio.to_thread(pool.reset_group, TASK) for _ in range(4)]
            assert [len(each) for each in await asyncio.gather(*opened)] == [2] * 4
            await asyncio.to_thread(pool.close)


async def test_a_pool_that_threads_connect_at_once_has_one_loop_and_its_slots_once() -> None:
    async with served(slots=4) as (server, url):
        pool = EnvPool(url, 2, group_size=2)
        await asyncio.gather(*(asyncio.to_thread(pool.connect) for _ in range(3)))
        assert server.counts()["leased"] == 2
        assert len([each for each in threading.enumerate() if each.name == "bombus-environments"]) == 1
        await asyncio.to_thread(pool.close)
        await until(lambda: server.counts()["leased"] == 0)


async def test_p8_a_pool_is_closed_in_time_where_a_coroutine_blocks_its_loop() -> None:
    begun, may_end = threading.Event(), threading.Event()

    async def blocks(task: Task, environment: AgentEnvironment) -> None:
        begun.set()
        may_end.wait()

    async with served(slots=1) as (_, url):
        pool = await asyncio.to_thread(EnvPool(url, 1, group_size=1).connect)
        playing = asyncio.create_task(asyncio.to_thread(pool.run_group, TASK, blocks))
        await until(begun.is_set)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(pool.close, within_s=0.1)
        may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({playing})


async def test_p8_a_pool_that_is_closed_while_it_connects_does_not_open() -> None:
    async with served(slots=1) as (server, url):
        pool = EnvPool(url, 2, group_size=2, settings=SessionSettings(wait_s=600))
        connecting = asyncio.create_task(asyncio.to_thread(pool.connect))
        await until(lambda: server.counts()["waiting"] == 1)
        await asyncio.to_thread(pool.close)
        with pytest.raises(EnvironmentLost, match="closed"):
            await connecting
        await until(lambda: server.counts() == {"slots": 1, "leased": 0, "waiting": 0})


async def test_what_its_caller_does_not_wait_for_any_longer_is_cancelled_in_the_loop() -> None:
    thread, ended = LoopThread(), threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.to_thread(thread.run, never(), 0.1)
    await until(ended.is_set)
    await asyncio.to_thread(thread.stop)


async def test_a_rollout_that_would_wait_for_its_own_loop_is_refused() -> None:
    async def plays_another(task: Task, environment: AgentEnvironment) -> object:
        return pool.run_group(task, plays_another)

    async def closes(task: Task, environment: AgentEnvironment) -> None:
        pool.close()

    async with served(slots=1) as (_, url):
        pool = await asyncio.to_thread(EnvPool(url, 1, group_size=1).connect)
        for rollout in (plays_another, closes):
            with pytest.raises(Refused, match="would deadlock"):
                await asyncio.to_thread(pool.run_group, TASK, rollout)
        await asyncio.to_thread(pool.close)


async def test_an_environment_of_a_pool_that_was_closed_says_so() -> None:
    async with served(slots=1) as (_, url):
        pool = await asyncio.to_thread(EnvPool(url, 1, group_size=1).connect)
        environment = pool.environment()
        await environment.open(TASK)
        await asyncio.to_thread(pool.close)
        with pytest.raises(EnvironmentLost, match="is not open here"):
            await environment.call(ToolCall(id="c", name="add"))
        await environment.close()


async def test_a_forked_process_has_no_pool_and_leaves_that_of_the_other_alone() -> None:
    async with served(slots=1) as (_, url), asyncio.timeout(PATIENCE_S):
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), url, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            printed, _ = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
    child, parent = printed.decode().splitlines()
    assert "this process was forked from the one that opened it" in child
    assert ":1'" in parent


def test_ctrl_c_that_comes_to_the_loops_thread_ends_the_program() -> None:
    check_that_ctrl_c_ends(TO_THE_LOOP)
