"""A log as one file: byte for byte what the bus had, whole or refused."""

import gzip
from pathlib import Path

import msgspec
import pytest

from bombus.bus import Bus, Stored, snapshots
from bombus.cli import main
from bombus.errors import LogCorrupted
from bombus.hive import inbox
from bombus.hive.events import NotedCall, decode_event
from bombus.hive.records import (
    BodyRef,
    CallRecord,
    CallRef,
    Choice,
    SamplingParams,
    digest,
    encode_record,
    pack_logprobs,
    pack_tokens,
)
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.replay.archive import FORMAT, ArchiveHeader, FileSource, pack
from bombus.replay.export import calls_of, export
from bombus.replay.logged_run import read_run
from bombus.replay.source import BusSource, NotOnLog, Source, state_at
from tests.bus.test_snapshots import folded, two_snapshots
from tests.coordinator.test_shell import ENGINE, boot, claim, end, leading, log_of
from tests.logs.facts import TINY, recorded


async def all_of(source: Source, after: int = 0) -> list[Stored]:
    return [stored async for stored in source.stored(after)]


async def record_call(bus: Bus, episode: str, name: str, parent: CallRef | None = None, note: bool = True) -> CallRef:
    """Record a call as a gateway does; with `note`, tell the coordinator too."""
    record = CallRecord(
        id=name,
        engine=ENGINE,
        run=1,
        episode=episode,
        parent=parent,
        prompt_tail=pack_tokens([1, 2]),
        prompt_tokens=2,
        choices=(Choice(tokens=pack_tokens([3]), logprobs=pack_logprobs([-1.0])),),
        sampling=SamplingParams(),
    )
    body = encode_record(record)
    ack = await bus.publisher.publish(bus.subjects.call(ENGINE, ""), body, msg_id=name)
    ref = CallRef(ack.seq, name, digest(body))
    if note:
        call = NotedCall(episode, ref, 2, 1, 0, 0)
        await bus.inbox.send(inbox.CallRecorded(id=f"recorded-{name}", engine=ENGINE, run=1, call=call))
    return ref


async def one_episode(bus: Bus) -> list[CallRef]:
    """Play an episode of two noted calls to its end, and leave another one open. Returns the calls."""
    async with leading(bus):
        await boot(bus, batch_size=100)
        granted = await bus.inbox.request(claim("k"))
        assert isinstance(granted, inbox.Granted)
        (episode,) = granted.episodes
        unheard = await record_call(bus, episode, "unheard", note=False)
        refs = [await record_call(bus, episode, "one", unheard)]
        refs.append(await record_call(bus, episode, "two", refs[0]))
        await bus.inbox.request(end(episode, 1.0))
        await bus.inbox.request(claim("open"))
    return [unheard, *refs]


async def test_an_archive_has_every_byte_of_the_log_and_its_calls(bus: Bus, tmp_path: Path) -> None:
    refs = await one_episode(bus)
    path = tmp_path / "a.bombuslog"
    written = await export(BusSource(bus, "the bus"), path)
    stored = await log_of(bus)
    assert (written.events, written.calls, written.calls_gone) == (len(stored), 3, 0)
    with FileSource.open(path) as source:
        assert await all_of(source) == stored
        assert source.hive == bus.subjects.hive
        assert [record.id for record in await source.records(refs)] == ["unheard", "one", "two"]
        assert await state_at(source, len(stored)) == await folded(bus)
    assert [each.name for each in tmp_path.iterdir()] == ["a.bombuslog"], "no draft is left over"


async def test_an_archive_can_be_exported_again(bus: Bus, tmp_path: Path) -> None:
    await one_episode(bus)
    first, second = tmp_path / "first", tmp_path / "second"
    await export(BusSource(bus, "the bus"), first)
    with FileSource.open(first) as source:
        await export(source, second)
    assert first.read_bytes() == second.read_bytes()


async def test_a_log_with_a_gap_is_not_exported(bus: Bus, tmp_path: Path) -> None:
    await one_episode(bus)
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    third = await bus.get(bus.subjects.events_stream, 3)
    await bus.purge_below(bus.subjects.events_stream, 4, third.subject)
    with pytest.raises(LogCorrupted, match="event 4 follows 2"):
        await export(BusSource(bus, "the bus"), tmp_path / "a.bombuslog")
    assert list(tmp_path.iterdir()) == []


async def test_an_archive_that_exists_is_not_replaced(bus: Bus, tmp_path: Path) -> None:
    await one_episode(bus)
    path = tmp_path / "a.bombuslog"
    await export(BusSource(bus, "the bus"), path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="not replaced"):
        await export(BusSource(bus, "the bus"), path, with_calls=False)
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], before)


async def test_an_export_without_calls_has_no_text_and_no_tokens(bus: Bus, tmp_path: Path) -> None:
    refs = await one_episode(bus)
    path = tmp_path / "a.bombuslog"
    assert (await export(BusSource(bus, "the bus"), path, with_calls=False)).calls == 0
    with FileSource.open(path) as source, pytest.raises(LogCorrupted, match="call one"):
        await source.records(refs[1:])


async def test_calls_that_the_hive_no_longer_has_are_counted(bus: Bus, tmp_path: Path) -> None:
    refs = await one_episode(bus)
    await bus.purge_below(bus.subjects.calls_stream, refs[1].seq)
    path = tmp_path / "a.bombuslog"
    written = await export(BusSource(bus, "the bus"), path)
    assert (written.calls, written.calls_gone) == (2, 1)


async def pushed_group(bus: Bus) -> None:
    """Register an outside trainer, and push a group whose body is said to be there."""
    trainer = inbox.RegisterTrainer(
        id="r",
        engine=ENGINE,
        trainer="1",
        batch_size=4,
        max_token_len=8,
        checkpoint_dir="/" + "c" * 4_000,
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=1,
        wandb_group="g",
        wandb_project="p",
    )
    body = BodyRef(seqs=(1,), size=1, digest=digest(b"a"))
    group = QueuedGroup(environment=None, sequences=2, tokens=6, longest=3, body=body)
    async with leading(bus):
        await bus.inbox.request(trainer)
        await bus.inbox.request(inbox.PushGroups(id="p", engine=ENGINE, groups=(group,), key="k"))


async def test_rollout_groups_are_counted_because_the_file_does_not_have_their_tokens(bus: Bus, tmp_path: Path) -> None:
    await pushed_group(bus)
    path = tmp_path / "a.bombuslog"
    assert (await export(BusSource(bus, "the bus"), path)).groups == 1
    with FileSource.open(path) as source:
        assert (await export(source, tmp_path / "b.bombuslog")).groups == 1


async def test_a_run_whose_trainer_is_elsewhere_is_not_one_to_export(bus: Bus) -> None:
    await pushed_group(bus)
    with pytest.raises(NotOnLog, match="main collected rollout groups for an external trainer, which has the weights"):
        await read_run(BusSource(bus, "the bus"))


async def test_the_archive_of_a_compacted_log_has_the_state_that_it_starts_from(bus: Bus, tmp_path: Path) -> None:
    everything = await two_snapshots(bus)
    await bus.purge_below(bus.subjects.events_stream, 8)
    path = tmp_path / "a.bombuslog"
    await export(BusSource(bus, "the bus"), path)
    with FileSource.open(path) as source:
        end = (await source.end()).seq
        assert (await source.base()) == ((await snapshots.load(bus, 8)).hive, 8)
        assert await state_at(source, end) == everything
        with pytest.raises(NotOnLog, match="8 was compacted"):
            await state_at(source, 7)


async def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    body = TINY.read_bytes()
    for length in (0, 10, 500, len(body) // 2, len(body) - 9, len(body) - 1):
        path = tmp_path / f"cut-{length}"
        path.write_bytes(body[:length])
        with (
            pytest.raises((LogCorrupted, NotOnLog), match=r"cut off|is not an archive"),
            FileSource.open(path) as source,
        ):
            await all_of(source)


async def test_a_file_without_its_trailer_is_refused(tmp_path: Path) -> None:
    frames = gzip.decompress(TINY.read_bytes())
    trailer = frames[frames.rindex(b"\xa7trailer") - 5 :]  # after the length of its frame and the size of its array
    path = tmp_path / "cut"
    path.write_bytes(gzip.compress(frames[: -len(trailer)]))
    with FileSource.open(path) as source, pytest.raises(LogCorrupted, match="cut off"):
        await all_of(source)


async def test_a_file_with_a_damaged_byte_is_refused(tmp_path: Path) -> None:
    body = bytearray(TINY.read_bytes())
    body[-6] ^= 1  # in the checksum
    path = tmp_path / "damaged"
    path.write_bytes(body)
    with FileSource.open(path) as source, pytest.raises(LogCorrupted, match="damaged"):
        await all_of(source)


def test_a_newer_format_is_refused_with_advice(tmp_path: Path) -> None:
    newer = ArchiveHeader(format=FORMAT + 1, bombus="9.0.0", hive="main", last=0, last_ns=0)
    body = msgspec.msgpack.decode(pack(newer)[4:]) | {"something": "new"}
    packed = msgspec.msgpack.encode(body)
    path = tmp_path / "newer"
    path.write_bytes(gzip.compress(len(packed).to_bytes(4, "little") + packed))
    with pytest.raises(NotOnLog, match=r"format 3, written by bombus 9\.0\.0.*upgrade bombus"):
        FileSource.open(path).__enter__()


def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "packed").write_bytes(gzip.compress(b"\x05\x00\x00\x00hello"))
    for name in ("text", "packed"):
        with pytest.raises(NotOnLog, match="is not an archive"):
            FileSource.open(tmp_path / name).__enter__()


async def test_every_call_that_an_event_names_is_found() -> None:
    with FileSource.open(TINY) as source:
        events = [decode_event(stored.data) for stored in await all_of(source)]
    named = {kind: [ref for event in events if event.__struct_config__.tag == kind for ref in calls_of(event)]
             for kind in ("calls.noted", "episode.ended", "batch.ready")}  # fmt: skip
    assert set(named["batch.ready"]) < set(named["episode.ended"]) == set(named["calls.noted"])


def test_the_command_reports_what_it_wrote_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "again.bombuslog"
    words = ["log", "export", str(path), "--log", str(TINY)]
    assert main(words) == 0
    facts = recorded(TINY)
    assert f"{facts['events']} events, {facts['calls']} calls" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["log", "export", str(tmp_path / "no/such/folder"), "--log", str(TINY)]) == 2
