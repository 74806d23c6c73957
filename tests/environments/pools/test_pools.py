"""The guarantees of pools, P1 to P9, one suite for both of them (P7)."""

import asyncio
import inspect
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    EnvironmentsBusy,
    Opening,
    ResetFailed,
    ToolCall,
    Transcript,
)
from bombus.environments.openenv.messages import StepResult
from bombus.environments.pools.aio import AsyncEnvPool, close_all
from bombus.environments.pools.blocking import AcrossLoops, BlockingEnvironment, EnvPool, LoopThread, as_coroutine
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.errors import Refused
from bombus.sdk.types import Task
from tests.ctrl_c import heed_the_terminal
from tests.environments.pools.both import POOLS, MakePool, opened
from tests.environments.serving.served import served
from tests.environments.serving.small_served import Counter
from tests.patience import PATIENCE_S, until

PROGRAM = Path(__file__).parent.parent / "serving/programs/plain_rollout.py"
TASK = Task(main_query="three", task_id="t1")
ADD = {"tool": "add"}


@pytest.fixture(params=POOLS)
def make(request: pytest.FixtureRequest) -> MakePool:
    return POOLS[request.param]


async def count_to_three(task: Task, environment: AgentEnvironment) -> tuple[str, float]:
    """Play an episode, and return in which environment it was and what it is worth."""
    await environment.open(task)
    seen = []
    while not await environment.is_over(Transcript()):
        outcome = await environment.call(ToolCall(id="c", name="add"))
        seen.append(outcome.text.split(":"))
        await environment.call(ToolCall(id="n", name="nap"))
    assert [count for _, count in seen] == ["1", "2", "3"], "nobody else counts in this environment"
    assert len({environment for environment, _ in seen}) == 1
    return seen[0][0], (await environment.score(Transcript())).reward


# ---- P7: one suite for both pools -------------------------------------------------------------------------------


def test_p7_what_one_pool_offers_the_other_takes_with_the_same_arguments() -> None:
    """Both are built and called alike, so each test below that takes `make` plays both of them."""
    assert len(POOLS) == 2
    assert inspect.signature(EnvPool) == inspect.signature(AsyncEnvPool)
    for name, method in inspect.getmembers(EnvPool, inspect.isfunction):
        if not name.startswith("_"):
            other = inspect.signature(getattr(AsyncEnvPool, name))
            assert list(inspect.signature(method).parameters) == list(other.parameters), name


# ---- P1: acquire and release under contention ------------------------------------------------------------------


async def test_p1_no_slot_is_given_to_two_sessions_under_contention() -> None:
    async with served(slots=4) as (server, url):

        async def play(number: int) -> str:
            async with await EnvSession.open(url, SessionSettings(wait_s=60, connect_s=60)) as session:
                await session.reset({"task": {}})
                texts = [(await session.step(ADD)).observation["text"] for _ in range(2)]
                assert [text.split(":")[1] for text in texts] == ["1", "2"]
                return session.name

        names = await asyncio.gather(*(play(number) for number in range(24)))
        assert len(set(names)) == 24
        await until(lambda: len(server.table.free) == 4)


async def test_p1_a_pool_shares_its_environments_among_more_rollouts(make: MakePool) -> None:
    async with served(slots=2) as (_, url), opened(make, url, 2, group_size=2) as pool:
        done = await asyncio.gather(*(pool.run_group(TASK, count_to_three, 2) for _ in range(3)))
        assert [reward for group in done for _, reward in group] == [1.0] * 6


# ---- P2: exhaustion is a typed error, or a queue with a deadline ----------------------------------------------


async def test_p2_a_pool_that_finds_too_few_slots_is_told_when_it_connects(make: MakePool) -> None:
    async with served(slots=2) as (_, url):
        with pytest.raises(EnvironmentsBusy, match=r"^a pool of 3 needs 3 free slots at once.*all 2 slots are taken"):
            await make(url, 3, group_size=3).connect()
        patient = SessionSettings(wait_s=0.2)
        with pytest.raises(EnvironmentsBusy, match=r"did not get them within 0\.2 s"):
            await make(url, 3, group_size=3, settings=patient).connect()


async def test_p2_a_pool_may_wait_for_slots(make: MakePool) -> None:
    async with served(slots=2) as (server, url):
        other = await EnvSession.open(url)
        pool = make(url, 2, group_size=2, settings=SessionSettings(wait_s=60))
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: server.counts()["waiting"] == 1)
        await other.close()
        await connecting
        await pool.close()


async def test_p2_a_pool_that_waits_lets_go_what_it_has_so_that_two_do_not_keep_each_other_out(
    make: MakePool,
) -> None:
    waiting = SessionSettings(wait_s=60)
    async with served(slots=2) as (server, url):
        first = await EnvSession.open(url)
        pool = make(url, 2, group_size=2, settings=waiting)
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: server.counts()["waiting"] == 1)
        second = await EnvSession.open(url, waiting)
        assert not connecting.done()
        await first.close()
        await second.close()
        await connecting
        await pool.close()


async def test_p2_more_rollouts_than_a_pool_has_environments_wait_and_are_refused() -> None:
    async with served() as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        first = await pool.take()
        with pytest.raises(EnvironmentsBusy, match="all 1 environments of the pool are in use"):
            await pool.take(wait_s=0.05)
        pool.give_back(first)
        pool.give_back(first)
        second = await pool.take(wait_s=0.05)
        assert second.session is first.session
        pool.give_back(first)
        with pytest.raises(EnvironmentsBusy):
            await pool.take(wait_s=0.05)


async def test_p1_what_was_taken_before_a_pool_was_closed_is_not_given_back_to_it_later() -> None:
    async with served() as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        before = await pool.take()
        await pool.close()
        await pool.connect()
        pool.give_back(before)
        await pool.take()
        with pytest.raises(EnvironmentsBusy):
            await pool.take(wait_s=0.05)


@pytest.mark.parametrize("ticks", range(6))
async def test_p1_one_that_is_cancelled_as_it_is_served_takes_no_environment_along(ticks: int) -> None:
    async with served() as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        first = await pool.take()
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        pool.give_back(first)
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        (taken,) = await asyncio.gather(waiting, return_exceptions=True)
        if not isinstance(taken, BaseException):
            pool.give_back(taken)
        await pool.take(wait_s=0.05)


async def test_one_that_waits_for_an_environment_is_told_when_the_pool_is_closed() -> None:
    async with served() as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        await pool.take()
        waiting = asyncio.create_task(pool.take())
        more = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        await pool.close()
        for each in (waiting, more):
            with pytest.raises(EnvironmentLost, match="is no longer open"):
                await each


async def test_in_the_place_of_one_that_died_the_slot_is_awaited_that_another_client_has_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="bombus")
    settings = SessionSettings(connect_s=PATIENCE_S)
    async with served() as (server, url), AsyncEnvPool(url, 1, group_size=1, settings=settings) as pool:
        pool.session(0).cut()
        await until(lambda: len(server.table.free) == 1)
        async with await EnvSession.open(url):
            taking = asyncio.create_task(pool.take())
            await until(lambda: "a lost environment could not be replaced yet" in caplog.text)
        assert not (await taking).session.is_dead


async def test_p1_a_take_that_fails_takes_no_environment_along() -> None:
    settings = SessionSettings(connect_s=2)
    async with served() as (server, url), AsyncEnvPool(url, 1, group_size=1, settings=settings) as pool:
        pool.session(0).cut()
        await until(lambda: len(server.table.free) == 1)
        async with await EnvSession.open(url):
            with pytest.raises(EnvironmentsBusy, match="all 1 slots are taken"):
                await pool.take()
        assert not (await pool.take(wait_s=0.05)).session.is_dead


async def test_p5_one_that_is_opened_while_its_pool_is_closed_keeps_no_slot() -> None:
    settings = SessionSettings(wait_s=PATIENCE_S)
    async with served() as (server, url):
        pool = await AsyncEnvPool(url, 1, group_size=1, settings=settings).connect()
        pool.session(0).cut()
        await until(lambda: len(server.table.free) == 1)
        async with await EnvSession.open(url):
            taking = asyncio.create_task(pool.take())
            await until(lambda: server.counts()["waiting"] == 1)
            await pool.close()
        with pytest.raises(EnvironmentLost):
            await taking
        await until(lambda: len(server.table.free) == 1)


# ---- P3: a session is bound for its life, and its release is idempotent ----------------------------------------


async def test_p3_a_session_stays_in_its_environment_and_gives_it_back_once(make: MakePool) -> None:
    made: list[Counter] = []

    class Noted(Counter):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    async with served(Noted, slots=2) as (server, url):
        async with opened(make, url, 2, group_size=2) as pool:
            for _ in range(3):
                await pool.reset_group(TASK)
                await pool.run_group_step([ADD, ADD])
            await pool.close()
            await pool.close()
        await until(lambda: len(server.table.free) == 2)
        assert [(environment.count, environment.closed) for environment in made] == [(1, 1), (1, 1)]


# ---- P4: connecting is all or nothing --------------------------------------------------------------------------


async def test_p4_a_pool_that_cannot_connect_leaves_no_slot_and_can_be_tried_again(make: MakePool) -> None:
    async with served(slots=3) as (server, url):
        other = await EnvSession.open(url)
        pool = make(url, 3, group_size=3)
        with pytest.raises(EnvironmentsBusy):
            await pool.connect()
        await until(lambda: server.counts()["leased"] == 1)
        await other.close()
        await pool.connect()
        assert server.counts()["leased"] == 3
        assert len(await pool.reset_group(TASK)) == 3
        await pool.close()


async def test_p4_the_first_error_is_the_one_that_is_raised(make: MakePool) -> None:
    with pytest.raises(EnvironmentLost, match=r"no environment server answers at http://127\.0\.0\.1:9: "):
        await make("http://127.0.0.1:9", 2, group_size=2).connect()


async def test_p4_a_pool_that_is_cancelled_while_it_connects_leaves_no_slot() -> None:
    async with served(slots=1) as (server, url):
        pool = AsyncEnvPool(url, 2, group_size=2, settings=SessionSettings(wait_s=60))
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: server.counts()["waiting"] == 1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await until(lambda: server.counts() == {"slots": 1, "leased": 0, "waiting": 0})


@pytest.mark.parametrize("ticks", range(1, 6))
@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_p4_a_pool_that_is_given_up_twice_while_it_connects_leaves_no_slot(how: str, ticks: int) -> None:
    async with served(slots=3) as (server, url):
        pool = AsyncEnvPool(url, 4, group_size=4, settings=SessionSettings(wait_s=600))
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: server.counts() == {"slots": 3, "leased": 3, "waiting": 1})
        for _ in range(2):
            if how == "closed":
                await pool.close()
            else:
                connecting.cancel()
            for _ in range(ticks):
                await asyncio.sleep(0)
        (raised,) = await asyncio.gather(connecting, return_exceptions=True)
        assert isinstance(raised, EnvironmentLost if how == "closed" else asyncio.CancelledError)
        await until(lambda: server.counts() == {"slots": 3, "leased": 0, "waiting": 0})


async def test_p4_a_pool_that_is_connected_twice_at_once_opens_its_sessions_once() -> None:
    async with served(slots=4) as (server, url):
        pool = AsyncEnvPool(url, 2, group_size=2)
        await asyncio.gather(pool.connect(), pool.connect())
        assert server.counts()["leased"] == 2
        await pool.close()
        await until(lambda: server.counts()["leased"] == 0)


async def test_p8_a_pool_that_is_closed_while_it_connects_is_not_waited_for() -> None:
    async with served(slots=1) as (server, url):
        pool = AsyncEnvPool(url, 2, group_size=2, settings=SessionSettings(wait_s=600))
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: server.counts()["waiting"] == 1)
        await pool.close()
        with pytest.raises(EnvironmentLost, match="was closed while it connected"):
            await connecting
        await until(lambda: server.counts() == {"slots": 1, "leased": 0, "waiting": 0})


# ---- P6: one task for all, by value ----------------------------------------------------------------------------


async def test_p6_all_environments_of_a_group_get_the_same_task_by_value(make: MakePool) -> None:
    made: list[Counter] = []

    class Noted(Counter):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    async with served(Noted, slots=3) as (_, url), opened(make, url, 3, group_size=3) as pool:
        task = TASK.model_copy(update={"metadata": {"seeds": [1, 2]}})
        results = await pool.reset_group(task)
        assert [each.observation["messages"][0]["content"] for each in results] == ["count for three"] * 3
        assert [environment.task for environment in made] == [task] * 3
        made[0].task.metadata["seeds"].append(3)
        assert made[1].task.metadata["seeds"] == [1, 2]
        assert task.metadata["seeds"] == [1, 2]


async def test_p6_a_rollout_cannot_change_the_task_of_another(make: MakePool) -> None:
    async def greedy(task: Task, environment: AgentEnvironment) -> int:
        task.metadata["seen"].append(1)
        return len(task.metadata["seen"])

    async with served(slots=2) as (_, url), opened(make, url, 2, group_size=2) as pool:
        assert await pool.run_group(Task(metadata={"seen": []}), greedy) == [1, 1]


# ---- P8: closing is bounded in time ----------------------------------------------------------------------------


@pytest.fixture
def deaf() -> Iterator[str]:
    """Accepts connections, and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_p8_a_server_that_says_nothing_is_not_waited_for(deaf: str, make: MakePool) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(EnvironmentLost, match=r"within 0\.2 s"):
        await make(deaf, 2, group_size=2, settings=SessionSettings(connect_s=0.2)).connect()
    assert asyncio.get_running_loop().time() - began < 5


class Clinging(EnvSession):
    """A session whose close never ends."""

    async def close(self) -> None:
        await asyncio.Event().wait()


async def test_p8_a_session_whose_close_does_not_end_is_cut() -> None:
    async with served(slots=2) as (server, url):
        sessions = [await Clinging.open(url), await EnvSession.open(url)]
        async with asyncio.timeout(PATIENCE_S):
            await close_all(sessions, within_s=0.1)
        assert all(session.is_dead for session in sessions)
        await until(lambda: server.counts()["leased"] == 0)


async def test_p8_a_pool_is_closed_in_time_while_its_environments_are_busy(make: MakePool) -> None:
    async with served(slots=2) as (server, url):
        pool = make(url, 2, group_size=2)
        await pool.connect()
        await pool.reset_group(TASK)
        stepping = asyncio.ensure_future(pool.run_group_step([{"tool": "hang"}, {"tool": "hang"}]))
        await until(lambda: server.working() == 2)
        began = asyncio.get_running_loop().time()
        await pool.close(within_s=0.2)
        assert asyncio.get_running_loop().time() - began < 5
        if isinstance(pool, AsyncEnvPool):
            assert all(isinstance(each, EnvironmentLost) for each in await stepping)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        await until(lambda: len(server.table.free) == 2)


# ---- P9: a pool below the size of a group ----------------------------------------------------------------------


def test_p9_a_pool_that_is_smaller_than_a_group_is_refused_at_its_start(make: MakePool) -> None:
    with pytest.raises(Refused, match=r"a pool of 4 environments cannot play groups of 8: give a size from 8"):
        make("http://127.0.0.1:9", 4, group_size=8)
    with pytest.raises(Refused, match="cannot play groups of 0"):
        make("http://127.0.0.1:9", 4, group_size=0)


async def test_p9_a_group_that_does_not_fit_is_refused(make: MakePool) -> None:
    async with served(slots=2) as (_, url), opened(make, url, 2, group_size=1) as pool:
        with pytest.raises(Refused, match="a group of 3 does not fit into a pool of 2"):
            await pool.run_group(TASK, count_to_three, 3)


@pytest.mark.parametrize(("given", "size"), [(None, 8), ("4", 4), (" ", 8)])
def test_the_size_of_a_group_is_that_of_num_generations(
    given: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("NUM_GENERATIONS", given)
    assert AsyncEnvPool("http://127.0.0.1:9").group_size == size


def test_a_num_generations_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_GENERATIONS", "2000")
    with pytest.raises(Refused, match="NUM_GENERATIONS is '2000': it must be a number from 1 to 1024"):
        AsyncEnvPool("http://127.0.0.1:9")


# ---- groups ----------------------------------------------------------------------------------------------------


async def test_a_group_is_played_at_once_in_environments_of_their_own(make: MakePool) -> None:
    async with served(slots=4) as (_, url), opened(make, url, 4, group_size=4) as pool:
        results = await pool.run_group(TASK, count_to_three)
        assert len({environment for environment, _ in results}) == 4
        assert [reward for _, reward in results] == [1.0] * 4


async def test_a_function_that_waits_plays_in_a_thread() -> None:
    def play(task: Task, environment: BlockingEnvironment) -> float:
        opening = environment.open(task)
        assert [tool.name for tool in opening.tools] == ["add", "nap"]
        while not environment.is_over(Transcript()):
            environment.call(ToolCall(id="c", name="add"))
        return environment.score(Transcript()).reward

    async with served(slots=8, ttl_s=2) as (_, url), opened(POOLS["blocking"], url, 8) as pool:
        assert await pool.run_group(TASK, play) == [1.0] * 8


async def test_an_environment_that_breaks_is_infra_in_its_place_and_is_played_again_in_another(make: MakePool) -> None:
    broken: list[int] = []

    async def play(task: Task, environment: AgentEnvironment) -> str:
        await environment.open(task)
        if len(broken) < 2:
            broken.append(1)
            await environment.call(ToolCall(id="c", name="break"))
        return "played"

    async with served(slots=3) as (_, url), opened(make, url, 3, group_size=3) as pool:
        results = await pool.run_group(TASK, play, retries=1)
        assert sorted(type(each).__name__ for each in results) == ["EnvironmentLost", "str", "str"]
        assert await pool.run_group(TASK, play) == ["played"] * 3, "the dead ones were replaced"


async def test_a_group_of_tasks_in_a_rollout_that_lost_its_environment_is_infra_too(make: MakePool) -> None:
    async def play(task: Task, environment: AgentEnvironment) -> None:
        await environment.open(task)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(environment.call(ToolCall(id="c", name="break")))

    async with served() as (_, url), opened(make, url, 1, group_size=1) as pool:
        (result,) = await pool.run_group(TASK, play)
        assert isinstance(result, EnvironmentLost)


async def test_a_bug_of_a_rollout_is_raised_as_it_is(make: MakePool) -> None:
    async def wrong(task: Task, environment: AgentEnvironment) -> None:
        await environment.open(task)
        raise ValueError("a bug")

    async with served(slots=2) as (_, url), opened(make, url, 2, group_size=2) as pool:
        with pytest.raises(ValueError, match="a bug"):
            await pool.run_group(TASK, wrong)
        assert len(await pool.reset_group(TASK)) == 2


async def test_a_cancellation_that_a_rollout_lets_out_is_a_bug_of_it_and_cancels_nobody(make: MakePool) -> None:
    async def wrong(task: Task, environment: AgentEnvironment) -> None:
        raise asyncio.CancelledError

    async with served(slots=2) as (_, url), opened(make, url, 2, group_size=2) as pool:
        with pytest.raises(RuntimeError, match="raised a CancelledError, but it had not been cancelled"):
            await pool.run_group(TASK, wrong)


async def test_a_plain_function_whose_environment_was_lost_is_played_again_at_a_server_with_a_name() -> None:
    """A name is looked up in a thread, of which the waiting functions must leave one."""
    tried: list[int] = []

    def play(task: Task, environment: BlockingEnvironment) -> str:
        environment.open(task)
        tried.append(1)
        if len(tried) == 1:
            environment.call(ToolCall(id="c", name="break"))
        return "played"

    async with served() as (_, url):
        named = url.replace("127.0.0.1", "localhost")
        settings = SessionSettings(connect_s=5)
        async with opened(POOLS["blocking"], named, 1, group_size=1, settings=settings) as pool:
            assert await pool.run_group(TASK, play, retries=1) == ["played"]


async def test_a_plain_function_that_was_cancelled_cannot_use_its_environment_any_more() -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    def play(task: Task, environment: BlockingEnvironment) -> None:
        begun.set()
        may_end.wait()
        try:
            environment.open(task)
        except EnvironmentLost as error:
            seen.append(str(error))

    thread = LoopThread()
    async with served() as (_, url):
        pool = AsyncEnvPool(url, 1, group_size=1)
        await asyncio.to_thread(thread.run, pool.connect())
        playing = asyncio.run_coroutine_threadsafe(pool.run_group(TASK, as_coroutine(play)), thread.loop)
        await until(begun.is_set)
        playing.cancel()
        await asyncio.to_thread(thread.run, pool.close())
        may_end.set()
        await until(lambda: seen)
        assert seen == ["this rollout was cancelled, and another one has its environment now"]
    await asyncio.to_thread(thread.stop)


async def test_an_environment_of_another_loop_is_closed_after_what_was_cancelled_in_it_has_ended() -> None:
    ended: list[str] = []
    begun = threading.Event()

    class Slow(Counter):
        async def open(self, task: Task) -> Opening:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                ended.append("open")
            return Opening(messages=[])

        async def close(self) -> None:
            ended.append("close")

    thread = LoopThread()
    environment = AcrossLoops(Slow(), thread)
    opening = asyncio.create_task(environment.open(TASK))
    await until(begun.is_set)
    opening.cancel()
    await environment.close()
    assert ended == ["open", "close"]
    await asyncio.to_thread(thread.stop)


async def test_an_interrupted_program_does_not_wait_for_a_plain_function() -> None:
    async with served() as (server, url):
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAM),
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=heed_the_terminal,
        )
        assert program.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await program.stdout.readline() == b"playing\n"
                program.send_signal(signal.SIGINT)
                await program.wait()
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        await until(lambda: server.counts()["leased"] == 0)


async def test_what_goes_wrong_in_one_environment_of_a_step_does_not_concern_the_others(make: MakePool) -> None:
    async with served(slots=3) as (_, url), opened(make, url, 3, group_size=3) as pool:
        await pool.reset_group(TASK)
        counted, declined, lost = await pool.run_group_step([ADD, {"colour": 1}, {"tool": "break"}])
        assert isinstance(counted, StepResult)
        assert isinstance(declined, StepRefused)
        assert isinstance(lost, EnvironmentLost)
        counted, left_out, lost = await pool.run_group_step([ADD, None, ADD])
        assert (counted.observation["text"].split(":")[1], left_out, type(lost)) == ("2", None, EnvironmentLost)
        assert len(await pool.reset_group(TASK)) == 3
        with pytest.raises(ResetFailed, match="there is no such environment"):
            await pool.reset_group(Task(metadata={"fail": True}))


async def test_environments_that_rollouts_use_are_not_reset_by_others(make: MakePool) -> None:
    async with served(slots=2) as (server, url), opened(make, url, 2, group_size=1) as pool:
        done = asyncio.Event()

        async def play(task: Task, environment: AgentEnvironment) -> None:
            await environment.open(task)
            while not done.is_set():
                await environment.call(ToolCall(id="n", name="nap"))

        playing = asyncio.create_task(pool.run_group(TASK, play))
        await until(lambda: server.working() == 1)
        with pytest.raises(Refused, match="1 environments of this pool are being used by rollouts"):
            await pool.reset_group(TASK)
        done.set()
        await playing


async def test_p1_a_rollout_that_begins_in_the_middle_of_a_reset_of_the_group_waits_and_opens_nothing_twice() -> None:
    async def play(task: Task, environment: AgentEnvironment) -> str:
        return str((await environment.open(task)).messages[0]["content"])

    async with served(slots=4) as (server, url), opened(AsyncEnvPool, url, 2, group_size=2) as pool:
        await pool.reset_group(TASK)
        await pool.run_group_step([{"tool": "break"}] * 2)
        await until(lambda: server.counts()["leased"] == 0)
        resetting = asyncio.create_task(pool.reset_group(TASK))
        await asyncio.sleep(0)
        assert await pool.run_group(Task(main_query="its own"), play) == ["count for its own"] * 2
        assert len(await resetting) == 2
        assert server.counts()["leased"] == 2


async def test_a_pool_that_has_its_rollout_or_its_task_is_given_the_other_one(make: MakePool) -> None:
    async def play(task: Task, environment: AgentEnvironment) -> str:
        await environment.open(task)
        return task.task_id

    async with served(slots=2) as (_, url):
        for each in ({"rollout": play}, {"task": TASK}):
            pool: Any = make(url, 2, group_size=2, **each)
            await pool.connect()
            assert await pool.run_group(TASK if "rollout" in each else play) == ["t1"] * 2
            assert await pool.run_group(TASK, play) == ["t1"] * 2
            with pytest.raises(Refused, match=r"run_group has no (rollout|task): give it as"):
                await pool.run_group(play if "rollout" in each else TASK)
            await pool.close()


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool, float]] = []

    def record_result(self, task: Task, achieved: bool, reward: float) -> None:
        self.told.append((task.task_id, achieved, reward))


def test_c1_the_curriculum_is_told_once_for_a_group(make: MakePool) -> None:
    recorder = Recorder()
    pool: Any = make("http://127.0.0.1:9", 2, group_size=2, curriculum=recorder)
    pool.record_group_result(TASK, [1.0, 0.0])
    pool.record_group_result(TASK, [0.5, 0.25, 0.5, 0.5])
    assert recorder.told == [("t1", True, 0.5), ("t1", False, 0.4375)]
    with pytest.raises(Refused, match="finite numbers"):
        pool.record_group_result(TASK, [])
    with pytest.raises(Refused, match="has no curriculum"):
        make("http://127.0.0.1:9", 2, group_size=2).record_group_result(TASK, [1.0])


# ---- G1: steps overlap -----------------------------------------------------------------------------------------


async def test_g1_eight_steps_of_50_ms_take_the_time_of_one(make: MakePool) -> None:
    async with served(slots=8) as (_, url), opened(make, url, 8) as pool:
        await pool.reset_group(TASK)
        clock = asyncio.get_running_loop().time
        best = []
        for _ in range(5):
            began = clock()
            await pool.run_group_step([{"tool": "nap"}] * 8)
            best.append(clock() - began)
        assert min(best) < 0.2, "one after the other they take 0.4 s"


async def test_a_pool_that_is_not_open_says_so(make: MakePool) -> None:
    with pytest.raises(EnvironmentLost, match="is not open"):
        await make("http://127.0.0.1:9", 2, group_size=2).reset_group(TASK)
