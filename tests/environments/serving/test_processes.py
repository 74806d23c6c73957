"""P5: no slot leaks, and no session is silently new, when real processes are killed and stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bombus.environments.kinds import AgentEnvironment, EnvironmentLost, ToolCall, Transcript
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.pools.session import EnvSession, SessionSettings
from bombus.sdk.types import Task
from tests.environments.serving.served import CutLine, ServerProcess
from tests.patience import PATIENCE_S, until

PROGRAM = Path(__file__).parent / "programs/client.py"
TTL_S = 1.0
TASK = {"task": {"main_query": "three"}}
ADD = {"tool": "add"}


@pytest.fixture
async def server() -> AsyncIterator[ServerProcess]:
    async with ServerProcess("--slots", "2", "--ttl-s", str(TTL_S)) as process:
        yield process


class Client:
    """A process with a pool of two sessions."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def step(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(b"step\n")
        return await self.line()


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), server.url, "2", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    started = Client(process)
    assert await started.line() == "open"
    assert await server.counts() == {"slots": 2, "leased": 2, "waiting": 0}
    yield started
    if process.returncode is None:
        process.kill()
    await process.wait()


async def given_back_after(server: ServerProcess) -> float:
    """Return how long it took until all slots were free."""
    began = asyncio.get_running_loop().time()
    await server.until_leased(0)
    return asyncio.get_running_loop().time() - began


async def test_p5_a_client_that_is_killed_leaves_no_slot(server: ServerProcess, client: Client) -> None:
    client.process.kill()
    assert await given_back_after(server) < 5 * TTL_S
    async with AsyncEnvPool(server.url, 2, group_size=2) as pool:
        assert len(await pool.reset_group(Task())) == 2


async def test_p5_a_client_that_is_stopped_loses_its_slots_and_never_gets_them_back(
    server: ServerProcess, client: Client
) -> None:
    client.process.send_signal(signal.SIGSTOP)
    assert await given_back_after(server) < 10 * TTL_S, "OpenEnv's server takes 40 s"
    async with AsyncEnvPool(server.url, 2, group_size=2) as pool:
        await pool.reset_group(Task())
        await pool.run_group_step([ADD, ADD])
        client.process.send_signal(signal.SIGCONT)
        for _ in range(2):
            told = await client.step()
            assert told.count("EnvironmentLost") == 2, told
        results = await pool.run_group_step([ADD, ADD])
        assert [getattr(each, "observation")["text"].split(":")[1] for each in results] == ["2", "2"]  # noqa: B009


async def test_p5_a_network_that_is_cut_costs_both_sides_the_session(server: ServerProcess) -> None:
    async with CutLine(server.url) as line:
        session = await EnvSession.open(line.url, SessionSettings(silence_s=TTL_S))
        await session.reset(TASK)
        line.cut()
        assert await given_back_after(server) < 10 * TTL_S
        await until(lambda: session.is_dead)
        with pytest.raises(EnvironmentLost):
            await session.step(ADD)
        session.cut()


async def test_p5_a_server_that_is_killed_leaves_sessions_dead_and_none_is_silently_new() -> None:
    first = await ServerProcess("--slots", "1").start()
    session = await EnvSession.open(first.url)
    await session.reset(TASK)
    await first.end()
    again = await ServerProcess("--slots", "1").start(first.port)
    try:
        for _ in range(3):
            with pytest.raises(EnvironmentLost, match="open another one"):
                await session.step(ADD)
        assert await again.counts() == {"slots": 1, "leased": 0, "waiting": 0}
    finally:
        await again.end()


async def test_p5_a_server_that_stands_still_is_noticed_and_does_not_blame_its_clients(server: ServerProcess) -> None:
    patient = await EnvSession.open(server.url, SessionSettings(silence_s=60))
    hasty = await EnvSession.open(server.url, SessionSettings(silence_s=TTL_S))
    await patient.reset(TASK)
    os.kill(server.pid, signal.SIGSTOP)
    await until(lambda: hasty.is_dead)
    os.kill(server.pid, signal.SIGCONT)
    assert (await patient.step(ADD)).observation["text"].endswith(":1")
    await server.until_leased(1)
    await patient.close()


async def test_a_group_is_completed_when_the_server_is_killed_in_the_middle() -> None:
    """The episodes whose environments died are played again in fresh ones, and none of them is worth zero."""
    server = await ServerProcess("--slots", "4").start()
    restarted: list[ServerProcess] = []
    environments: list[str] = []

    async def play(task: Task, environment: AgentEnvironment) -> float:
        await environment.open(task)
        for _ in range(3):
            outcome = await environment.call(ToolCall(id="c", name="add"))
            environments.append(outcome.text)
            if len(environments) == 6:
                await server.end()
                restarted.append(await ServerProcess("--slots", "4").start(server.port))
        return (await environment.score(Transcript())).reward

    settings = SessionSettings(connect_s=PATIENCE_S)
    try:
        async with AsyncEnvPool(server.url, 4, group_size=4, settings=settings) as pool:
            assert await pool.run_group(Task(), play, retries=4) == [1.0] * 4
    finally:
        for each in (server, *restarted):
            await each.end()


async def test_a_server_ends_cleanly_at_a_signal(server: ServerProcess, client: Client) -> None:
    assert await server.end(signal.SIGTERM) == 0
    told = await client.step()
    assert told.count("EnvironmentLost") == 2, told
