"""An exported log becomes a hive again: the same state, every reference in its place, and its run goes on."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.bus import Bus, EmbeddedServer, snapshots
from bombus.bus.large.parts import Parts
from bombus.cli import main
from bombus.errors import BusUnavailable, LogCorrupted
from bombus.hive import inbox
from bombus.hive.records import decode_record
from bombus.hive.shares import IMPORTED
from bombus.replay import upkeep
from bombus.replay.archive import FileSource
from bombus.replay.export import bodies_held_by, export
from bombus.replay.importing import DRAFT, import_log
from bombus.replay.source import BusSource, logged
from tests.bus.test_snapshots import folded, two_snapshots
from tests.conftest import SMALL_STREAMS
from tests.coordinator.test_operations_on_a_bus import SESSIONS, client, trainer
from tests.coordinator.test_shell import boot, claim, end, leading, log_of
from tests.logs.facts import TINY, recorded
from tests.replay.test_archive import one_episode, record_call


def no_progress(what: str, position: int, last: int) -> None:
    pass


async def imported(bus: Bus, folder: Path) -> upkeep.Checked:
    """Export a hive's log and make another hive of it."""
    path = folder / "a.bombuslog"
    await export(BusSource(bus, "the bus"), path)
    with FileSource.open(path) as source:
        return await import_log(source, folder / "hive", SMALL_STREAMS, no_progress)


@asynccontextmanager
async def served(folder: Path, hive: str) -> AsyncIterator[Bus]:
    server = EmbeddedServer(folder / "hive" / "nats")
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, hive, name="again") as bus:
            yield bus
    finally:
        server.stop()


async def test_r6_a_hive_of_an_exported_log_has_its_state_and_its_calls_and_goes_on(bus: Bus, tmp_path: Path) -> None:
    async with leading(bus):
        await boot(bus, batch_size=100)
        granted = await bus.inbox.request(claim("k"))
        assert isinstance(granted, inbox.Granted)
        (episode,) = granted.episodes
        for number in range(3):
            await record_call(bus, "elsewhere", f"unheard-{number}", note=False)
        refs = [await record_call(bus, episode, "one")]
        await record_call(bus, "elsewhere", "late", note=False)
        refs.append(await record_call(bus, episode, "two", refs[0]))
        assert isinstance(await bus.inbox.request(end(episode, 1.0)), inbox.Done)
        await record_call(bus, "elsewhere", "last", note=False)
        await bus.inbox.request(claim("open"))
    verified = await imported(bus, tmp_path)
    before = await log_of(bus)
    assert (verified.last, verified.calls) == (before[-1].seq, 2)
    async with served(tmp_path, bus.subjects.hive) as again:
        assert await folded(again) == await folded(bus)
        after = await log_of(again)
        assert [each.data for each in after] == [each.data for each in before]
        assert [logged(each) for each in after] == [logged(each) for each in before], "times and epochs too"
        stored = [await again.get(again.subjects.calls_stream, ref.seq) for ref in refs]
        assert [decode_record(each.data, ref).id for each, ref in zip(stored, refs)] == ["one", "two"]
        assert [each.subject for each in stored] == [again.subjects.call("main", IMPORTED)] * 2, "one subject for all"
        assert (await again.state(again.subjects.calls_stream)).messages == 2
        async with leading(again):
            granted = await again.inbox.request(claim("new", "c2"))
            assert isinstance(granted, inbox.Granted)
            third = await record_call(again, granted.episodes[0], "three")
            assert third.seq > refs[-1].seq
            assert isinstance(await again.inbox.request(end(granted.episodes[0], 0.0, "c2")), inbox.Done)
        assert not (await folded(again)).went_back, "nothing was lost"
        assert (await upkeep.check(BusSource(again, "the log"))).calls == 3
        newest = await again.last(again.subjects.events_stream)
        assert newest is not None
        assert newest.answers.seq > before[-1].answers.seq


async def test_a_compacted_log_goes_on_from_the_state_that_it_starts_from(bus: Bus, tmp_path: Path) -> None:
    everything = await two_snapshots(bus)
    await bus.purge_below(bus.subjects.events_stream, 8)
    verified = await imported(bus, tmp_path)
    assert verified.first == 9
    async with served(tmp_path, bus.subjects.hive) as again:
        assert (await again.state(again.subjects.events_stream)).first_seq == 9
        assert (await snapshots.load(again, 8)).hive == (await snapshots.load(bus, 8)).hive
        async with leading(again) as leader:
            assert leader.core.hive.engine("main").pool == everything.engine("main").pool


async def test_bodies_and_results_of_operations_are_where_the_log_says(bus: Bus, tmp_path: Path) -> None:
    async with leading(bus):
        await asyncio.gather(trainer(bus), *(client(bus, session) for session in SESSIONS))
    verified = await imported(bus, tmp_path)
    held = [body for _, _, body in bodies_held_by(await folded(bus), bus.subjects)]
    assert verified.bodies == len(held) > 0
    async with served(tmp_path, bus.subjects.hive) as again:
        assert [await Parts(again).fetch(body) for body in held] == [await Parts(bus).fetch(body) for body in held]


def test_the_command_makes_a_hive_of_a_released_log_and_replaces_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "again"
    words = ["log", "import", str(TINY), "--data", str(data)]
    assert main([*words, "--blobs-bytes-max", "64MiB"]) == 0
    said = capsys.readouterr().out
    assert f"{recorded(TINY)['events']} events" in said
    assert f"copy them from the old data folder to {data / 'engines'}" in said
    assert f"`bombus up --data-dir {data}`" in said
    assert main(["log", "check", "--data", str(data)]) == 0
    assert main(words) == 2
    assert "has a log already, and an import replaces nothing: name a new folder" in capsys.readouterr().err
    assert [each.name for each in data.iterdir()] == ["nats"], "no draft is left over"


def with_other(old: bytes, new: bytes) -> bytes:
    return gzip.compress(gzip.decompress(TINY.read_bytes()).replace(old, new), compresslevel=1)


BAD: list[tuple[Callable[[], bytes], str]] = [
    (lambda: TINY.read_bytes()[:-100], "was cut off before its end"),
    (lambda: b"no log", "is not an archive of a log"),
    (lambda: with_other(b"\xabbatch.ready", b"\xabbatch.grown"), "newer release.*upgrade bombus"),
    (lambda: with_other(b"\xa6engine\xa4main", b"\xa6engine\xa4m in"), "digest of the stored record differs"),
    (lambda: with_other(b"Bombus-Epoch", b"Bombus-Epech"), "does not say its epoch"),
]


@pytest.mark.parametrize(("body", "why"), BAD)
def test_a_bad_file_leaves_nothing_behind(
    body: Callable[[], bytes], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(body())
    assert main(["log", "import", str(path), "--data", str(tmp_path / "again")]) == 1
    assert re.search(why, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [path]


async def test_a_log_without_the_calls_that_it_still_needs_is_refused(bus: Bus, tmp_path: Path) -> None:
    await one_episode(bus)
    path = tmp_path / "a.bombuslog"
    await export(BusSource(bus, "the bus"), path, with_calls=False)
    with FileSource.open(path) as source, pytest.raises(LogCorrupted, match="call one at 2 is no longer kept in"):
        await import_log(source, tmp_path / "again", SMALL_STREAMS, no_progress)
    assert list(tmp_path.iterdir()) == [path]


async def test_an_import_that_was_ended_can_be_begun_again(bus: Bus, tmp_path: Path) -> None:
    await one_episode(bus)
    killed = EmbeddedServer(tmp_path / "hive" / DRAFT)
    await asyncio.to_thread(killed.start)
    with pytest.raises(BusUnavailable, match="another nats-server is running"):
        await imported(bus, tmp_path)
    killed.stop()  # its folder stays, as that of a process that was killed
    (tmp_path / "a.bombuslog").unlink()
    writing = asyncio.Event()

    def note(what: str, position: int, last: int) -> None:
        if what == "writing event":
            writing.set()

    await export(BusSource(bus, "the bus"), tmp_path / "b.bombuslog")
    with FileSource.open(tmp_path / "b.bombuslog") as source:
        task = asyncio.create_task(import_log(source, tmp_path / "hive", SMALL_STREAMS, note))
        await writing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert list((tmp_path / "hive").iterdir()) == []
    await imported(bus, tmp_path)
