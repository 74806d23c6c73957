"""MiniStack as the backend of worlds: eight simulators of AWS beside each other."""

import asyncio

import httpx
import pytest

from bombus.environments.backends.kinds import Backend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import ministack
from bombus.environments.kinds import EnvironmentsBusy


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
