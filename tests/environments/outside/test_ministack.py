"""MiniStack as the backend of environments: simulators of AWS beside each other, and their server with OpenEnv's
client."""

import asyncio

import httpx
import pytest
from openenv.core.generic_client import GenericEnvClient

from bombus.environments.backends.kinds import Backend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import ministack
from bombus.environments.kinds import EnvironmentsBusy
from tests.environments.serving.served import ServerProcess


async def buckets(backend: Backend) -> str:
    async with httpx.AsyncClient(base_url=backend.address) as http:
        return (await http.get("/")).text


async def plant(backend: Backend, text: str) -> None:
    async with httpx.AsyncClient(base_url=backend.address) as http:
        (await http.put("/same-bucket")).raise_for_status()
        (await http.put("/same-bucket/who", content=text)).raise_for_status()


async def test_eight_sessions_plant_the_same_bucket_and_do_not_meet() -> None:
    async with BackendPool(lambda number: ministack(number, 0), 8, kind="MiniStack") as pool:
        sessions = [f"s{number}" for number in range(8)]
        backends = await asyncio.gather(*(pool.take(session) for session in sessions))
        assert len({backend.address for backend in backends}) == 8
        assert not any("same-bucket" in text for text in await asyncio.gather(*map(buckets, backends)))
        await asyncio.gather(*(plant(backend, session) for backend, session in zip(backends, sessions)))
        async with httpx.AsyncClient() as http:
            found = [(await http.get(f"{backend.address}/same-bucket/who")).text for backend in backends]
        assert found == sessions
        with pytest.raises(EnvironmentsBusy, match="MiniStack pool exhausted"):
            await pool.take("ninth")
        await pool.give_back("s3")
        assert "same-bucket" not in await buckets(await pool.take("ninth"))


async def test_openenvs_client_plays_in_an_account_of_its_own_at_a_server_of_ours() -> None:
    bucket = "tests.environments.outside.buckets:Bucket"
    async with ServerProcess("--backend", "ministack", "--slots", "2", path=bucket) as server:

        async def play(name: str) -> None:
            async with GenericEnvClient(base_url=server.url) as client:
                for _ in range(2):
                    await client.reset(task={"metadata": {"name": name}})
                    put = await client.step({"tool": "put", "arguments": {"name": f"other-{name}", "text": "x"}})
                    assert put.observation["text"].count("<Key>") == 1, "nothing of another session or episode"
                    await client.step({"tool": "put", "arguments": {"name": name, "text": "x"}})
                    ended = await client.step({"message": "It is there."})
                    assert (ended.done, ended.reward) == (True, 1.0)

        await asyncio.gather(play("one"), play("two"))
        held = [GenericEnvClient(base_url=server.url) for _ in range(2)]
        await asyncio.gather(*(client.connect() for client in held))
        with pytest.raises(ConnectionError, match="503"):
            await GenericEnvClient(base_url=server.url).connect()
        await asyncio.gather(*(client.close() for client in held))
        await server.until_leased(0)
