"""What a hive's bus shows of environment servers."""

import asyncio

import pytest

from bombus.bus import Bus
from bombus.bus.headers import TTL
from bombus.bus.streams import lease_stream
from bombus.bus_address import VARIABLE
from bombus.commands import status
from bombus.config.flags import Parser
from bombus.environments.pools.session import EnvSession
from bombus.environments.serving.announcing import ShownServer, announce, show, shown_servers
from tests.environments.serving.served import ServerProcess, served
from tests.patience import PATIENCE_S


async def test_the_bus_shows_how_many_slots_of_each_server_are_leased(bus: Bus, nats_url: str, hive: str) -> None:
    await show(bus, "other", ShownServer(url="http://z:1", slots=2, leased=0, waiting=3))
    async with served(slots=4) as (server, url), await EnvSession.open(url):
        announcing = asyncio.create_task(announce(server.counts, nats_url, hive, url))
        async with asyncio.timeout(PATIENCE_S):
            while len(found := await shown_servers(bus)) < 2:
                await asyncio.sleep(0.02)
        announcing.cancel()
    assert [each.text() for each in found] == [
        f"{url}: 1 of 4 slots leased",
        "http://z:1: 0 of 2 slots leased, 3 waiting",
    ]


async def test_a_server_shows_itself_on_the_bus_of_its_environment(
    bus: Bus, nats_url: str, hive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, nats_url)
    monkeypatch.setenv("BOMBUS_HIVE", hive)
    async with ServerProcess() as server, asyncio.timeout(PATIENCE_S):
        while not (found := await shown_servers(bus)):
            await asyncio.sleep(0.02)
        assert [each.url for each in found] == [server.url]


async def test_the_entry_of_a_server_that_is_gone_goes_after_some_seconds(bus: Bus) -> None:
    await show(bus, "gone", ShownServer(url="http://z:1", slots=2, leased=0, waiting=0))
    entry = await bus.last(lease_stream(bus.subjects), f"$KV.{bus.subjects.leases_bucket}.environments.gone")
    assert entry is not None
    assert entry.headers[TTL] == "10s"


async def test_a_status_has_the_environment_servers(
    bus: Bus, nats_url: str, hive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await show(bus, "one", ShownServer(url="http://z:1", slots=2, leased=1, waiting=0))
    parser = Parser()
    status.add_arguments(parser)
    for more, shown in ([], "  http://z:1: 1 of 2 slots leased\n"), (["--json"], '"url": "http://z:1"'):
        arguments = parser.parse_args(["--nats", nats_url, "--hive", hive, *more])
        assert await asyncio.to_thread(status.run, arguments) == 0
        assert shown in capsys.readouterr().out


async def test_a_hive_without_environment_servers_shows_none(bus: Bus) -> None:
    assert await shown_servers(bus) == []
