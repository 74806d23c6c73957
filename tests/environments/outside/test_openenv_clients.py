"""OpenEnv's own client, unmodified, at a server of ours."""

import asyncio

import pytest
from openenv.cli._validation import validate_running_environment
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import CallToolAction, MCPToolClient
from pydantic import BaseModel

from tests.environments.serving.served import ServerProcess, served
from tests.environments.small_environments import Counter as PlainCounter
from tests.patience import until

TASK = {"main_query": "three", "task_id": "t1"}


async def test_a_client_resets_steps_and_reads_the_state() -> None:
    async with served() as (server, url):
        async with GenericEnvClient(base_url=url) as client:
            opened = await client.reset(task=TASK, seed=4)
            assert opened.observation["messages"][0]["content"] == "count for three"
            for _ in range(2):
                result = await client.step({"tool": "add"})
                assert (result.done, result.reward) == (False, None)
            result = await client.step({"tool": "add", "arguments": {}})
            assert (result.done, result.reward) == (True, 1.0)
            assert (await client.state())["step_count"] == 3
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                await client.step({"colour": 1})
        await until(lambda: server.counts()["leased"] == 0)


async def test_its_validation_of_a_running_server_passes() -> None:
    async with served() as (_, url):
        report = await asyncio.to_thread(validate_running_environment, url)
        assert report["passed"], report["summary"]
        assert report["mode"] == "production", "each client has an environment of its own"


async def test_a_client_without_a_task_and_without_a_loop_of_its_own_plays_too() -> None:
    async with served() as (_, url):

        def play() -> float:
            with GenericEnvClient(base_url=url).sync() as client:
                client.reset(seed=1, episode_id="e1")
                while not (result := client.step({"tool": "add"})).done:
                    pass
                return float(result.reward)

        assert await asyncio.to_thread(play) == 1.0


async def test_a_client_calls_tools_by_openenvs_own_actions() -> None:
    async with served() as (_, url), GenericEnvClient(base_url=url) as client:
        await client.reset(task=TASK)
        tools = await client.step({"type": "list_tools"})
        assert [tool["name"] for tool in tools.observation["tools"]] == ["add", "nap"]
        called = await client.step({"type": "call_tool", "tool_name": "add", "arguments": {}})
        assert called.observation["result"].endswith(":1")


async def test_fault_1_the_client_over_the_cap_gets_503_when_it_connects() -> None:
    async with served(slots=8) as (server, url):
        clients = [GenericEnvClient(base_url=url) for _ in range(8)]
        await asyncio.gather(*(client.connect() for client in clients))
        ninth = GenericEnvClient(base_url=url)
        with pytest.raises(ConnectionError, match="503"):
            await ninth.connect()
        assert server.counts()["leased"] == 8
        await asyncio.gather(*(client.close() for client in clients))
        await until(lambda: len(server.table.free) == 8)
        await ninth.connect()
        await ninth.close()


async def test_fault_2_after_a_step_that_outlasts_the_clients_time_no_environment_is_silently_new() -> None:
    async with served(slots=1) as (server, url):
        client = GenericEnvClient(base_url=url, message_timeout_s=0.2)
        await client.connect()
        await client.reset(task=TASK)
        with pytest.raises(asyncio.TimeoutError):
            await client.step({"tool": "hang"})
        await until(lambda: server.counts()["leased"] == 0)
        with pytest.raises(RuntimeError, match="the environment has no task yet: send a reset first"):
            await client.step({"tool": "add"})
        await client.close()


async def test_fault_3_after_a_restart_of_the_server_no_environment_is_silently_new() -> None:
    first = await ServerProcess().start()
    client = GenericEnvClient(base_url=first.url)
    await client.connect()
    await client.reset(task=TASK)
    await first.end()
    second = await ServerProcess().start(first.port)
    try:
        for _ in range(2):
            with pytest.raises(Exception, match=r"send a reset first|close frame"):
                await client.step({"tool": "add"})
        await client.close()
    finally:
        await second.end()


async def test_fault_4_a_client_that_vanishes_gives_its_slot_back() -> None:
    async with served(slots=1, ttl_s=1) as (server, url):
        client = GenericEnvClient(base_url=url)
        await client.connect()
        await client.reset(task=TASK)
        client._ws.transport.abort()
        await until(lambda: len(server.table.free) == 1)


async def test_fault_5_a_client_that_was_idle_too_long_does_not_step_in_an_environment_that_was_closed() -> None:
    async with served(slots=1, ttl_s=5, idle_s=0.3) as (server, url):
        client = GenericEnvClient(base_url=url)
        await client.connect()
        await client.reset(task=TASK)
        await until(lambda: server.counts()["leased"] == 0)
        with pytest.raises(Exception, match=r"send a reset first|lapsed"):
            await client.step({"tool": "add"})
        await client.close()


class FinalAnswer(BaseModel):
    message: str


async def test_a_client_of_tools_lists_and_calls_them_in_the_environment_that_it_resets_and_steps_in() -> None:
    async with served(PlainCounter) as (server, url):
        async with MCPToolClient(base_url=url) as client:
            assert server.counts()["leased"] == 1
            assert [tool.name for tool in await client.list_tools()] == ["add", "where", "fail"]
            assert (await client.get_tool("add")).input_schema["required"] == ["amount"]
            with pytest.raises(RuntimeError, match="the environment has no task yet: send a reset first"):
                await client.call_tool("add", amount=1)
            opened = await client.reset(task={"metadata": {"goal": 3}})
            assert [tool.name for tool in opened.observation.tools] == ["add", "where", "fail"]
            assert await client.call_tool("add", amount=1) == '{"count":1}'
            with pytest.raises(RuntimeError, match="Tool 'fail' failed: "):
                await client.call_tool("fail")
            with pytest.raises(RuntimeError, match="amount"):
                await client.call_tool("add", amount="many")
            stepped = await client.step(CallToolAction(tool_name="add", arguments={"amount": 2}))
            assert (stepped.observation.result, stepped.done) == ('{"count":3}', False)
            ended = await client.step(FinalAnswer(message="It is 3."))
            assert (ended.done, ended.reward) == (True, 1.5)
            assert (await client.state()).step_count == 5
        await until(lambda: len(server.table.free) == 1)


async def test_eight_clients_of_tools_have_an_environment_each_and_the_ninth_is_told_that_there_is_none() -> None:
    async with served(PlainCounter, slots=8) as (server, url):
        clients = [MCPToolClient(base_url=url) for _ in range(8)]
        await asyncio.gather(*(client.connect() for client in clients))
        await asyncio.gather(*(client.reset(task={"metadata": {"goal": 3}}) for client in clients))
        for number, client in enumerate(clients):
            assert await client.call_tool("add", amount=number) == f'{{"count":{number}}}'
        with pytest.raises(RuntimeError, match="Environment pool exhausted: all 8 slots are taken"):
            await MCPToolClient(base_url=url).connect()
        await asyncio.gather(*(client.close() for client in clients))
        await until(lambda: len(server.table.free) == 8)


async def test_a_client_of_tools_that_vanishes_gives_its_slot_back_and_never_finds_another_environment() -> None:
    async with served(PlainCounter, ttl_s=1) as (server, url):
        client = MCPToolClient(base_url=url)
        await client.connect()
        await client.reset(task={"metadata": {"goal": 3}})
        client._ws.transport.abort()
        await until(lambda: len(server.table.free) == 1)
        with pytest.raises(RuntimeError, match="has ended, or does not exist"):
            await client.call_tool("add", amount=1)
        with pytest.raises(ConnectionError, match="410"):
            await client.reset()
        alone = MCPToolClient(base_url=url)
        assert len(await alone.list_tools()) == 3, "without a connection"
        await until(lambda: len(server.table.free) == 1)


async def test_a_client_of_tools_without_a_loop_of_its_own_plays_too() -> None:
    async with served(PlainCounter) as (_, url):

        def play() -> str:
            with MCPToolClient(base_url=url).sync() as client:
                client.reset(task={"metadata": {"goal": 3}})
                return str(client.call_tool("add", amount=3))

        assert await asyncio.to_thread(play) == '{"count":3}'
