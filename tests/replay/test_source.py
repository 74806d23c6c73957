"""Logs on a bus, in a data folder with or without a running hive, and in an archive."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.errors import BusUnavailable, LogCorrupted
from bombus.hive.events import EpochOpened
from bombus.hive.records import CallRef
from bombus.hive.state import Hive
from bombus.replay.export import export
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.source import BusSource, NotOnLog, Source, state_at
from tests.bus.test_snapshots import folded, two_snapshots
from tests.conftest import SMALL_STREAMS, kill
from tests.coordinator.test_shell import boot, leading, log_of
from tests.logs.facts import TINY, recorded
from tests.replay.test_archive import one_episode


@asynccontextmanager
async def opened(*words: str) -> AsyncIterator[Source]:
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    async with open_source(parser.parse_args(words)) as source:
        yield source


async def test_events_come_in_order_with_the_headers_of_their_messages(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
    source = BusSource(bus, "the bus")
    entries = [entry async for entry in source.events()]
    stored = await log_of(bus)
    assert [entry.seq for entry in entries] == list(range(1, len(stored) + 1))
    assert [entry.time_ns for entry in entries] == [each.time_ns for each in stored]
    assert isinstance(entries[0].event, EpochOpened)
    assert {entry.epoch for entry in entries} == {1}
    assert [entry.answers for entry in entries] == [int(each.headers["Bombus-Inbox"]) for each in stored]
    assert [entry.seq async for entry in source.events(2, 4)] == [3, 4]
    assert [entry.seq async for entry in source.events(len(stored))] == []


async def test_an_empty_log_has_an_empty_state(bus: Bus) -> None:
    source = BusSource(bus, "the bus")
    assert (await source.end()).seq == 0
    assert await state_at(source, 0) == Hive()
    assert [entry async for entry in source.events()] == []


async def test_a_replay_that_a_compaction_overtakes_skips_nothing_and_says_so(bus: Bus, tmp_path: Path) -> None:
    await two_snapshots(bus)
    source = BusSource(bus, "the bus")
    assert (await source.base())[1] == 0
    await bus.purge_below(bus.subjects.events_stream, 8)
    with pytest.raises(NotOnLog, match="compacted during the read and now begins at event 8: run it again"):
        [entry async for entry in source.events()]
    with pytest.raises(NotOnLog, match="run it again"):
        await export(source, tmp_path / "log.bombuslog")
    again = BusSource(bus, "the bus")
    assert [entry.seq async for entry in again.events(0, 9)] == [9]


async def test_the_state_at_any_position_is_the_fold_up_to_there(bus: Bus) -> None:
    await one_episode(bus)
    source = BusSource(bus, "the bus")
    end = (await source.end()).seq
    for seq in (0, 1, end // 2, end):
        assert await state_at(source, seq) == await folded(bus, seq)
    with pytest.raises(NotOnLog, match=f"no event {end + 1}: the bus ends at {end}"):
        await state_at(source, end + 1)


async def test_a_compacted_log_begins_at_its_snapshot(bus: Bus) -> None:
    everything = await two_snapshots(bus)
    await bus.purge_below(bus.subjects.events_stream, 8)
    source = BusSource(bus, "the bus")
    entries = [entry.seq async for entry in source.events()]
    assert entries[0] == 9
    assert await state_at(source, entries[-1]) == everything
    with pytest.raises(NotOnLog, match="can be read from 8 to"):
        await state_at(source, 3)


async def test_calls_are_checked_and_those_that_are_gone_are_named(bus: Bus) -> None:
    _, one, two = await one_episode(bus)
    source = BusSource(bus, "the bus")
    assert [record.id for record in await source.records([two, one, two])] == ["two", "one", "two"]
    with pytest.raises(LogCorrupted, match="digest of the stored record differs"):
        await source.records([CallRef(one.seq, "one", two.digest)])
    await bus.purge_below(bus.subjects.calls_stream, two.seq)
    with pytest.raises(LogCorrupted, match="call one at"):
        await source.records([two, one])


async def test_a_hive_that_is_not_on_the_bus_is_refused_by_name(bus: Bus, nats_url: str) -> None:
    with pytest.raises(NotOnLog, match="no hive elsewhere"):
        async with opened("--nats", nats_url, "--hive", "elsewhere"):
            pass
    async with opened("--nats", nats_url, "--hive", bus.subjects.hive) as source:
        assert source.hive == bus.subjects.hive


@pytest.fixture
async def data(tmp_path: Path) -> AsyncIterator[tuple[Path, EmbeddedServer]]:
    """A data folder whose hive has written three events, and its server, which still runs."""
    server = EmbeddedServer(tmp_path / "nats")
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "main") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            async with leading(bus):
                await boot(bus)
        (tmp_path / "nats-url").write_text(server.url)
        yield tmp_path, server
    finally:
        server.stop()


async def test_the_folder_of_a_running_hive_is_read_over_its_bus(data: tuple[Path, EmbeddedServer]) -> None:
    folder, server = data
    async with opened("--data", str(folder)) as source:
        running = (await source.end()).seq
    assert running > 0
    assert server.pid is not None
    assert not list(folder.glob("nats/nats-server_*.ports"))[1:], "no second server was started"


async def test_the_folder_of_a_stopped_hive_is_served_while_it_is_read(
    data: tuple[Path, EmbeddedServer],
) -> None:
    folder, server = data
    async with opened("--data", str(folder)) as source:
        running = await state_at(source, (await source.end()).seq)
    kill(server)  # its address is left behind, as by a crash
    async with opened("--data", str(folder)) as source:
        assert await state_at(source, (await source.end()).seq) == running
        assert source.title == f"the log in {folder}"
    with pytest.raises(NotOnLog, match="has no hive other; its hives are main"):
        async with opened("--data", str(folder), "--hive", "other"):
            pass
    with pytest.raises(BusUnavailable):
        await Bus.connect(server.url, "main", timeout_s=0.5)


async def test_an_address_that_another_bus_uses_now_is_not_taken_for_the_folders_own(
    data: tuple[Path, EmbeddedServer], nats_url: str
) -> None:
    folder, server = data
    server.stop()
    (folder / "nats-url").write_text(nats_url)
    async with opened("--data", str(folder)) as source:
        assert (await source.end()).seq > 0, "that bus has no hive of this name"


async def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotOnLog, match="has no log"):
        async with opened("--data", str(tmp_path)):
            pass
    with pytest.raises(NotOnLog, match="there is no file"):
        async with opened("--log", str(tmp_path / "none")):
            pass


async def test_a_folder_above_that_of_a_hive_is_refused_with_the_one_to_name(
    data: tuple[Path, EmbeddedServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    above = tmp_path_factory.mktemp("above")
    (above / "hive").symlink_to(data[0])
    with pytest.raises(NotOnLog, match=f"use --data {above}/hive$"):
        async with opened("--data", str(above)):
            pass


async def test_an_archive_is_a_source_like_any_other() -> None:
    async with opened("--log", str(TINY)) as source:
        end = (await source.end()).seq
        assert end == recorded(TINY)["events"]
        assert [entry.seq async for entry in source.events(end - 3)] == [end - 2, end - 1, end]
        assert [entry.seq async for entry in source.events(3, 5)] == [4, 5]
