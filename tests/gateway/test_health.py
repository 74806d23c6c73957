"""Whether a gateway lives, and whether calls that it is given would be answered: with a real bus that freezes."""

import asyncio

import httpx

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.follow import Follower
from tests.conftest import freeze, thaw
from tests.gateway.openai_hive import ENGINE, gateway_hive, gateway_of


class StandingStill(Follower):
    """A follower that reads nothing."""

    async def run(self) -> None:
        await asyncio.Event().wait()


async def why_not(url: str) -> str:
    """Return why a gateway is not ready, "" where it is."""
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.get(f"/e/{ENGINE}/ready")
        assert (await http.get(f"/e/{ENGINE}/health")).status_code == 200, "it lives all the same"
    assert (answer.status_code == 200) == answer.json()["ready"] == (not answer.json()["why"])
    return str(answer.json()["why"])


async def test_a_gateway_is_not_ready_while_the_bus_is_away_the_fold_is_behind_or_no_replica_serves(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    async with gateway_of(bus) as (_, url):
        assert await why_not(url) == "", "an engine that is offline waits for whoever starts it"
    async with gateway_hive(bus) as hive:
        assert await why_not(hive.base_url) == ""
        async with gateway_of(bus, late=StandingStill(bus)) as (_, behind):
            assert "is behind the log: it has read 0 of" in await why_not(behind)
        await freeze(server)
        assert await why_not(hive.base_url) == "The bus is unreachable."
        thaw(server)
        await hive.replica_leaves("replica-1")
        assert (await why_not(hive.base_url)).startswith(f"No replica serves engine {ENGINE}")
