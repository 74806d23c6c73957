"""Our sessions and pools at a server of OpenEnv's own code: its five measured faults become typed errors."""

import asyncio

import pytest

from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    EnvironmentsBusy,
    ResetFailed,
    ToolCall,
    Transcript,
)
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.pools.remote import RemoteEnvironment
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.sdk.types import Task
from tests.environments.outside.openenv_process import OpenEnvProcess
from tests.environments.pools.both import POOLS, MakePool
from tests.patience import until


@pytest.fixture(params=POOLS)
def make(request: pytest.FixtureRequest) -> MakePool:
    return POOLS[request.param]


async def test_fault_1_the_one_over_the_cap_is_refused_when_it_connects(make: MakePool) -> None:
    async with OpenEnvProcess(cap=2) as server:
        with pytest.raises(EnvironmentsBusy, match=r"(?i)capacity"):
            await make(server.url, 3, group_size=3).connect()
        pool = make(server.url, 2, group_size=2)
        for _ in range(50):  # the server takes a moment to notice that the others were closed
            try:
                await pool.connect()
            except EnvironmentsBusy:
                await asyncio.sleep(0.05)
            else:
                break
        results = await pool.reset_group(Task(metadata={"seed": 1}))
        assert [each.observation["count"] for each in results] == [1, 1]
        await pool.close()


async def test_fault_2_a_step_that_outlasts_its_time_leaves_the_session_dead() -> None:
    async with OpenEnvProcess() as server:
        session = await EnvSession.open(server.url, SessionSettings(step_s=0.3))
        await session.reset({"seed": 1})
        with pytest.raises(EnvironmentLost, match=r"took longer than 0\.3 s"):
            await session.step({"nap_s": 1})
        with pytest.raises(EnvironmentLost, match="open another one"):
            await session.step({})


async def test_fault_3_a_server_that_is_restarted_leaves_the_session_dead() -> None:
    server = await OpenEnvProcess().start()
    try:
        session = await EnvSession.open(server.url)
        await session.reset({"seed": 1})
        await server.kill()
        await server.start()
        for _ in range(2):
            with pytest.raises(EnvironmentLost):
                await session.step({})
    finally:
        await server.kill()


async def test_fault_4_a_pool_that_is_closed_gives_its_slots_back_and_can_be_opened_again() -> None:
    async with OpenEnvProcess(cap=2) as server:
        for _ in range(5):
            pool = AsyncEnvPool(server.url, 2, group_size=2)
            try:
                await pool.connect()
            except EnvironmentsBusy:
                await asyncio.sleep(0.2)
            await pool.close()
        async with asyncio.timeout(30):
            while (await sessions_of(server)) > 0:
                await asyncio.sleep(0.05)


async def sessions_of(server: OpenEnvProcess) -> int:
    """Return how many of two slots are taken, by asking for them."""
    taken = 0
    found = []
    for _ in range(2):
        try:
            found.append(await EnvSession.open(server.url))
        except EnvironmentsBusy:
            taken += 1
    for session in found:
        await session.close()
    return taken


async def test_fault_5_a_session_that_was_idle_is_given_up_before_its_server_closes_the_environment() -> None:
    async with OpenEnvProcess(timeout_s=30) as server:
        session = await EnvSession.open(server.url, SessionSettings(idle_s=0.2))
        await session.reset({"seed": 1})
        await until(lambda: session.is_dead)
        with pytest.raises(EnvironmentLost, match=r"was not used for 0\.2 s"):
            await session.step({})


async def test_an_environment_is_played_by_steps_and_is_worth_the_sum_of_its_rewards() -> None:
    async with OpenEnvProcess() as server, await EnvSession.open(server.url) as session:
        environment = RemoteEnvironment(session)
        opening = await environment.open(Task(main_query="count to three"))
        assert opening.messages[0]["content"].startswith("count to three\n\n")
        (tool,) = opening.tools
        assert tool.name == "step"
        assert {name: each["type"] for name, each in tool.parameters["properties"].items()} == {
            "amount": "integer",
            "nap_s": "number",
        }
        for _ in range(2):
            outcome = await environment.call(ToolCall(id="c", name="step", arguments='{"amount": 1}'))
            assert not outcome.failed
            assert not await environment.is_over(Transcript())
        wrong = await environment.call(ToolCall(id="c", name="step", arguments='{"amount": "many"}'))
        assert wrong.failed
        assert wrong.text.startswith("Invalid message; amount: Input should be a valid integer")
        assert (await environment.call(ToolCall(id="c", name="step", arguments="{"))).failed
        await environment.call(ToolCall(id="c", name="step"))
        assert await environment.is_over(Transcript())
        assert (await environment.score(Transcript())).reward == 3.0
        with pytest.raises(ResetFailed, match="there is no such environment"):
            await environment.open(Task(metadata={"seed": 13}))


async def test_an_environment_with_tools_of_mcp_offers_them() -> None:
    async with OpenEnvProcess(kind="mcp") as server, await EnvSession.open(server.url) as session:
        environment = RemoteEnvironment(session)
        opening = await environment.open(Task(main_query="greet"))
        (tool,) = opening.tools
        assert (tool.name, tool.description) == ("greet", "Greets somebody by name.")
        assert tool.parameters["properties"] == {"name": {"type": "string"}}
        outcome = await environment.call(ToolCall(id="c", name="greet", arguments='{"name": "Ada"}'))
        assert (outcome.text, outcome.failed) == ("hello Ada", False)
        wrong = await environment.call(ToolCall(id="c", name="greet", arguments='{"surname": "Ada"}'))
        assert wrong.failed
        assert "surname" in wrong.text


async def test_an_environment_with_tools_that_its_actions_do_not_call_offers_those_and_its_action() -> None:
    async with OpenEnvProcess(kind="both") as server, await EnvSession.open(server.url) as session:
        environment = RemoteEnvironment(session)
        opening = await environment.open(Task(main_query="greet"))
        assert [tool.name for tool in opening.tools] == ["greet", "step"]
        outcome = await environment.call(ToolCall(id="c", name="greet", arguments='{"name": "Ada"}'))
        assert (outcome.text, outcome.failed) == ("hello Ada", False)
        assert (await environment.call(ToolCall(id="c", name="greet", arguments='{"surname": "Ada"}'))).failed
        assert not (await environment.call(ToolCall(id="c", name="step", arguments='{"amount": 1}'))).failed
        assert await environment.is_over(Transcript())
        assert (await environment.score(Transcript())).reward == 1.0


async def test_an_environment_that_tells_its_tools_by_a_step_alone_offers_them() -> None:
    async with OpenEnvProcess(kind="union") as server, await EnvSession.open(server.url) as session:
        environment = RemoteEnvironment(session)
        opening = await environment.open(Task(main_query="count to three"))
        assert [tool.name for tool in opening.tools] == ["add"]
        for _ in range(4):
            last = await environment.call(ToolCall(id="c", name="add"))
        assert (last.failed, last.text) == (True, "the episode is over, so nothing was done")
        assert (await environment.score(Transcript())).reward == 3.0


async def test_a_group_is_played_at_once(make: MakePool) -> None:
    async def play(task: Task, environment: AgentEnvironment) -> float:
        await environment.open(task)
        while not await environment.is_over(Transcript()):
            await environment.call(ToolCall(id="c", name="step"))
        return (await environment.score(Transcript())).reward

    async with OpenEnvProcess() as server:
        pool = make(server.url, 8)
        await pool.connect()
        assert await pool.run_group(Task(), play) == [3.0] * 8
        assert await pool.run_group(Task(), play) == [3.0] * 8
        await pool.close()


async def test_what_the_server_declines_leaves_the_session_alive() -> None:
    async with OpenEnvProcess() as server, await EnvSession.open(server.url) as session:
        await session.reset({})
        with pytest.raises(StepRefused) as declined:
            await session.step({"colour": "red"})
        assert declined.value.code == "VALIDATION_ERROR"
        assert (await session.step({})).observation["count"] == 1
