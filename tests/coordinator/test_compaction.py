"""Compaction of the log (R12): a hive works on through many times its log, and nothing is removed that is needed."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from bombus.bus import Blobs, Bus, StreamState, snapshots
from bombus.bus.follow import Follower, read_event
from bombus.cli import main
from bombus.config.streams import StreamLimits
from bombus.errors import BusUnavailable, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import FOLD, Hive
from bombus.hive.status.text import render_status
from bombus.replay import upkeep
from bombus.replay.segments import FolderSource, archived_up_to, segments
from bombus.replay.source import BusSource, state_at
from bombus_coordinator import compaction
from bombus_coordinator.compaction import Compaction, Cut, cut_of, usable
from bombus_coordinator.preparing import Preparation, Prepared, prepare
from bombus_coordinator.recovery import Fold
from bombus_coordinator.shell import Coordinator, Housekeeping
from bombus_coordinator.snapshotter import SnapshotPace, Snapshotter
from tests.bus.test_snapshots import folded, put
from tests.conftest import MB
from tests.coordinator.test_shell import ENGINE, boot, claim, leading
from tests.effort import effort
from tests.patience import PATIENCE_S

EVENTS_BYTES_MAX = 2 * MB
LIMITS = StreamLimits(
    inbox_bytes_max=64 * MB,
    events_bytes_max=EVENTS_BYTES_MAX,
    calls_bytes_max=MB,
    ops_bytes_max=MB,
    trajectories_bytes_max=MB,
    blobs_bytes_max=64 * MB,
)
SNAPSHOTS_MAX = 2 * snapshots.PARTS + snapshots.KEPT + 2 + 1  # needed, held by a compaction, stored and not yet pruned
METADATA = {"note": "x" * (16 << 10)}
WAIT_S = 60.0
_numbers = itertools.count()


@pytest.fixture
async def small(nats_url: str, hive: str) -> AsyncIterator[Bus]:
    """Yield a hive whose log is full after some 120 episodes."""
    async with await Bus.connect(nats_url, hive, name="test") as bus:
        await bus.ensure_streams(LIMITS)
        yield bus


def quick(url: str, archive: Path | None = None) -> Compaction:
    return Compaction(url=url, archive=archive, period_s=0.1, retry_s=0.1)


@asynccontextmanager
async def compacting(bus: Bus, settings: Compaction) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(bus, housekeeping=Housekeeping(compaction=settings))
    task = asyncio.create_task(coordinator.lead())
    try:
        await coordinator.leading.wait()
        yield coordinator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def play_one(bus: Bus, name: str) -> str:
    """Play an episode with a lot of metadata, and wait while the hive has no room for it. Returns its id."""
    async with asyncio.timeout(WAIT_S):
        while (episode := await claimed(bus, name)) is None:
            await asyncio.sleep(0.05)
    result = inbox.EpisodeResult(episode=episode, task="t", reward=1.0, metadata=METADATA)
    end = inbox.End(id=f"end-{name}", engine=ENGINE, client="c1", results=(result,))
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await bus.inbox.request(end, WAIT_S)
                return episode
            except BusUnavailable:
                pass  # the log is full until it is compacted


async def claimed(bus: Bus, name: str) -> str | None:
    """Claim an episode. Returns None while the hive refuses new work for want of storage."""
    try:
        asked = claim(name, wait_s=5.0)
        granted = await bus.inbox.request(msgspec.structs.replace(asked, id=f"{asked.id}-{next(_numbers)}"), WAIT_S)
    except Refused as refused:
        if "Storage is nearly full" in refused.why:
            return None
        raise
    except BusUnavailable:
        return None
    assert isinstance(granted, inbox.Granted)
    return granted.episodes[0]


async def play_many(bus: Bus, count: int, stem: str = "k") -> list[str]:
    return [await play_one(bus, f"{stem}{number}") for number in range(count)]


async def first_event(bus: Bus) -> int:
    return (await bus.state(bus.subjects.events_stream)).first_seq


async def last_event(bus: Bus) -> int:
    return (await bus.state(bus.subjects.events_stream)).last_seq


async def until_compacted(bus: Bus, beyond: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while await first_event(bus) <= beyond:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[Follower]:
    follower = Follower(bus)
    task = asyncio.create_task(follower.run())
    try:
        await follower.caught_up()
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_status_says(bus: Bus, text: str) -> None:
    async with following(bus) as follower:
        await follower.wait_for(lambda hive: text in render_status(hive), WAIT_S)


async def until_status_is_clean(bus: Bus) -> None:
    async with following(bus) as follower:
        await follower.wait_for(lambda hive: not hive.uncompacted, WAIT_S)


# ---- where to cut, and which snapshots to keep ------------------------------------------------------------------


def log_of_size(fill: float, first: int = 1, messages: int = 1000) -> StreamState:
    return StreamState(first, first + messages - 1, messages, int(fill * 1_000_000), 1_000_000, 1)


def test_the_cut_is_at_the_oldest_snapshot_that_leaves_as_much_as_is_to_be_kept() -> None:
    positions = [100, 300, 500, 700, 900]
    assert cut_of(log_of_size(0.8), positions) == Cut(700, 900)
    assert cut_of(log_of_size(0.6), positions) == Cut(500, 700)
    assert cut_of(log_of_size(0.8), [100, 200, 300]) == Cut(200, 300), "the newest but one, if none leaves so little"
    assert cut_of(log_of_size(0.9), [500]) is None


def test_snapshots_are_usable_if_they_are_good_and_something_is_before_them() -> None:
    assert usable(log_of_size(0.9), [500, 700], damaged={500}) == [700]
    assert usable(log_of_size(0.9, first=500), [499, 500, 700]) == [700], "the log begins at 500 already"
    assert usable(log_of_size(0.9), [500, 5000]) == [500], "one of them is of another log"


def test_a_few_snapshots_are_kept_spread_over_the_log_however_long_it_is() -> None:
    kept: list[int] = []
    most = 0
    for position in range(20, 100_000, 20):
        kept = snapshots.needed([*kept, position], 1, position)
        most = max(most, len(kept))
        edges = [0, *kept]
        gaps = [later - earlier for earlier, later in itertools.pairwise(edges)]
        assert max(gaps) <= max(20, position // snapshots.PARTS + 20)
    assert most <= 2 * snapshots.PARTS + snapshots.KEPT
    assert snapshots.needed(kept, 50_000, 100_000)[0] == min(each for each in kept if each >= 49_999)


def test_a_snapshot_is_due_after_many_events_and_after_few_large_ones() -> None:
    pace = SnapshotPace(every=100)
    pace.note(50, log_of_size(0.1, messages=60))
    assert not pace.is_due(60)
    assert pace.is_due(150)
    pace.wrote(40_000)
    assert not pace.is_due(61)
    pace.wrote(20_000)
    assert pace.is_due(62), "with what was there since the last one, a sixteenth of the stream"


def test_a_snapshot_that_could_not_be_stored_can_be_asked_for_without_another_event() -> None:
    pace = SnapshotPace(every=100)
    pace.ask()
    assert pace.is_due(60)
    pace.took(60)
    assert not pace.is_due(60), "it is on its way"
    pace.ask()
    assert pace.is_due(60), "it was not stored"
    pace.took(60)
    pace.stored(60)
    pace.ask()
    assert not pace.is_due(60)
    assert pace.is_due(61)


# ---- a hive with a small log ------------------------------------------------------------------------------------


async def test_a_hive_works_on_through_many_times_the_size_of_its_log(
    small: Bus, nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "archive"
    async with compacting(small, quick(nats_url, archive)) as coordinator:
        await boot(small, batch_size=10_000)
        ended = await play_many(small, effort(150, 400))
        await until_compacted(small)
        assert list(coordinator.core.hive.engine(ENGINE).pool) == ended
        state = await small.state(small.subjects.events_stream)
        assert state.last_seq * 8 << 10 > effort(1, 3) * EVENTS_BYTES_MAX
        assert 0 < len(await snapshots.positions(small)) <= SNAPSHOTS_MAX
    with FolderSource.open(archive, None) as source:
        assert (await source.base(), (await source.end()).seq >= state.first_seq) == ((Hive(), 0), True)
        archived = await state_at(source, state.first_seq)
    assert archived == (await snapshots.load(small, state.first_seq)).hive, "the archive ends in the log's beginning"
    await check_readers(small, nats_url, archive, capsys)


async def check_readers(bus: Bus, url: str, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that reads the beginning of a log reads that of a compacted one, and the folder of its archives."""
    first = (await upkeep.check(BusSource(bus, "the log"))).first
    assert first > 1
    where = ["--nats", url, "--hive", bus.subjects.hive]
    exported = archive.parent / "rest.bombuslog"
    for words in (
        ["log", "check", *where],
        ["log", "export", str(exported), *where],
        ["replay", "timeline", *where],
        ["replay", "timeline", "--log", str(exported)],
        ["replay", "timeline", "--log", str(archive)],
        ["replay", "state", "--at", str(first + 5), *where],
        ["replay", "state", "--at", "5", "--log", str(archive)],
        ["status", *where],
    ):
        assert await asyncio.to_thread(main, words) == 0, (words, capsys.readouterr().err)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["replay", "state", "--at", "5", *where]) == 1
    assert "compacted" in capsys.readouterr().err
    starts: list[int] = []
    every = Follower(bus, lambda position, event: None, lambda position, hive: starts.append(position))
    task = asyncio.create_task(every.run())
    await every.caught_up()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert starts[0] in (first - 1, first), "the terminal begins at the first event that is kept"
    assert every.hive == await folded_from_start(bus)


async def folded_from_start(bus: Bus) -> Hive:
    fold = await Fold.begin(bus)
    await fold.catch_up(bus)
    return fold.hive


async def test_where_compaction_is_switched_off_the_log_keeps_everything(small: Bus) -> None:
    await filled(small)
    async with leading(small):
        await play_many(small, 5, "more")
    assert await first_event(small) == 1


# ---- faults -----------------------------------------------------------------------------------------------------


async def filled(bus: Bus) -> None:
    """Fill the log beyond the mark, with just four snapshots."""
    async with leading(bus) as coordinator:
        await boot(bus, batch_size=10_000)
        await play_many(bus, 100)
    await coordinator.leave()
    for position in await snapshots.positions(bus):
        await Blobs(bus).delete(f"snapshot-{position:016d}")
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    for position in (50, 125, 150, newest.seq):
        await put(bus, position)


async def test_where_the_archive_cannot_be_written_nothing_is_removed_and_status_says_so(
    small: Bus, nats_url: str, tmp_path: Path
) -> None:
    await filled(small)
    in_the_way = tmp_path / "archive"
    in_the_way.write_text("a file where the folder should be")
    async with compacting(small, quick(nats_url, in_the_way)):
        await until_status_says(small, "the archive cannot be written")
        assert await first_event(small) == 1
        in_the_way.unlink()
        await until_compacted(small)
        await until_status_is_clean(small)
    assert [segment.first for segment in segments(in_the_way, small.subjects.hive)] == [1]


async def test_behind_a_damaged_snapshot_nothing_is_removed_until_there_are_two_good_ones(
    small: Bus, nats_url: str
) -> None:
    await filled(small)
    *older, cut, newest = await snapshots.positions(small)
    for position in older:
        await Blobs(small).delete(f"snapshot-{position:016d}")
    await Blobs(small).put(f"snapshot-{cut:016d}", b"rubbish")
    async with compacting(small, quick(nats_url)):
        await until_status_says(small, f"the snapshot at event {cut} is damaged")
        assert await first_event(small) == 1
        await until_status_says(small, "needs 2 good snapshots")
        await play_many(small, 20, "more")
        await until_compacted(small)
    assert await first_event(small) >= newest


async def test_behind_a_snapshot_that_is_not_the_fold_nothing_is_ever_removed(small: Bus, nats_url: str) -> None:
    await filled(small)
    other = await folded(small, 150)
    other.engines[ENGINE].counters.trained += 1
    await put(small, 150, hive=other)
    async with compacting(small, quick(nats_url)):
        await until_status_says(small, "event 150 is not the fold of the log")
        assert await first_event(small) == 1


async def test_a_snapshot_of_another_version_is_passed_over_for_others(small: Bus, nats_url: str) -> None:
    await filled(small)
    await put(small, 125, fold=FOLD - 1)
    async with compacting(small, quick(nats_url)):
        await until_compacted(small)
        await until_status_is_clean(small)
    assert await first_event(small) >= 150


async def prepared(bus: Bus, url: str, cut: int, until: int, archive: Path | None = None) -> Prepared:
    folder = "" if archive is None else str(archive)
    return await prepare(Preparation(url=url, hive=bus.subjects.hive, cut=cut, until=until, archive=folder))


async def test_nothing_is_removed_that_was_not_folded_because_the_logs_beginning_is_damaged(
    small: Bus, nats_url: str, tmp_path: Path
) -> None:
    await filled(small)
    await small.purge_below(small.subjects.events_stream, 50)
    await Blobs(small).put(f"snapshot-{50:016d}", b"rubbish")
    found = await prepared(small, nats_url, 125, 150, tmp_path)
    assert "the state before it cannot be read" in found.why
    assert segments(tmp_path, small.subjects.hive) == []


async def test_what_is_archived_is_not_archived_again(small: Bus, nats_url: str, tmp_path: Path) -> None:
    await filled(small)
    assert await prepared(small, nats_url, 150, await last_event(small), tmp_path) == Prepared()
    assert await prepared(small, nats_url, 50, 125, tmp_path) == Prepared()
    assert [(each.first, each.last) for each in segments(tmp_path, small.subjects.hive)] == [(1, 150)]


async def test_a_snapshot_that_is_held_while_another_is_being_stored_is_kept(small: Bus) -> None:
    await filled(small)
    *_, newest = await snapshots.positions(small)
    await Blobs(small).put(f"snapshot-{140:016d}", b"one that a compaction is about to use")
    taking = Snapshotter(small)
    taking.take(await snapshots.load(small, newest))
    await asyncio.sleep(0)
    taking.held = {140}
    await taking.stop(None)
    assert 140 in await snapshots.positions(small)
    taking.held = ()
    taking.take(await snapshots.load(small, newest))
    await taking.stop(None)
    assert 140 not in await snapshots.positions(small)


async def test_what_follows_a_snapshot_of_another_version_is_verified_and_archived(
    small: Bus, nats_url: str, tmp_path: Path
) -> None:
    await filled(small)
    await put(small, 50, fold=FOLD - 1)
    await small.purge_below(small.subjects.events_stream, 50)
    assert await prepared(small, nats_url, 150, await last_event(small), tmp_path) == Prepared()
    (segment,) = segments(tmp_path, small.subjects.hive)
    assert (segment.first, segment.last) == (51, 150)


async def test_where_another_versions_beginning_makes_another_state_it_is_said_what_to_do(
    small: Bus, nats_url: str
) -> None:
    await filled(small)
    await put(small, 50, fold=FOLD - 1, hive=Hive(epoch=1))
    await small.purge_below(small.subjects.events_stream, 50)
    found = await prepared(small, nats_url, 125, 150)
    assert "another version made the snapshot that the fold began at" in found.why
    assert "bombus log compact" in found.why


async def test_a_deposed_leader_removes_nothing(small: Bus, nats_url: str) -> None:
    await filled(small)
    async with leading(small):
        pass
    task = asyncio.create_task(compaction.run(small, quick(nats_url), lambda: Hive(epoch=1), Snapshotter(small)))
    await asyncio.wait({task}, timeout=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await first_event(small) == 1


async def test_a_leader_whose_fold_was_overtaken_by_a_compaction_folds_again(small: Bus) -> None:
    fold = await Fold.begin(small)
    await filled(small)
    await small.purge_below(small.subjects.events_stream, 125)
    coordinator = Coordinator(small)
    task = asyncio.create_task(coordinator.lead(fold))
    await asyncio.wait({task, asyncio.create_task(coordinator.leading.wait())}, return_when="FIRST_COMPLETED")
    assert coordinator.leading.is_set()
    assert len(coordinator.core.hive.engine(ENGINE).pool) == 100
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_log_with_a_gap_is_not_folded_again_and_again(small: Bus) -> None:
    async with leading(small):
        await boot(small)
    third = await small.get(small.subjects.events_stream, 3)
    await small.purge_below(small.subjects.events_stream, 4, third.subject)
    with pytest.raises(LogCorrupted, match="event 3 is missing"):
        async with asyncio.timeout(PATIENCE_S):
            await Coordinator(small).lead()


async def test_the_archive_of_another_log_is_not_continued(small: Bus, nats_url: str, tmp_path: Path) -> None:
    await filled(small)
    async with compacting(small, quick(nats_url, tmp_path)):
        await until_compacted(small)
    (segment,) = segments(tmp_path, small.subjects.hive)
    name = f"{small.subjects.hive}-{1:016d}-{segment.last + 1:016d}.bombuslog"
    segment.path.rename(tmp_path / name)
    with pytest.raises(Refused, match="another log"):
        await archived_up_to(small, tmp_path)


# ---- processes that are killed ------------------------------------------------------------------------------------

LEADER = """
import asyncio, sys
from pathlib import Path
from bombus_coordinator.compaction import Compaction
from bombus_coordinator.shell import Housekeeping, run
url, hive, archive = sys.argv[1:]
compaction = Compaction(url=url, archive=Path(archive), period_s=0.1, retry_s=0.1)
asyncio.run(run(url, hive, "leader", Housekeeping(compaction=compaction)))
"""


@contextmanager
def leader(url: str, hive: str, archive: Path, **faults: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a leader as a process of its own, with kill points."""
    process = subprocess.Popen([sys.executable, "-c", LEADER, url, hive, str(archive)], env={**os.environ, **faults})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def check_complete(bus: Bus, archive: Path) -> None:
    """The archive and the log together are the whole log, each part is valid, and all episodes are there."""
    await until_compacted(bus)
    state = await bus.state(bus.subjects.events_stream)
    found = segments(archive, bus.subjects.hive)
    assert found[0].first == 1
    assert all(later.first == earlier.last + 1 for earlier, later in itertools.pairwise(found))
    assert found[-1].last >= state.first_seq
    verified = await upkeep.check(BusSource(bus, "the log"))
    with FolderSource.open(archive, bus.subjects.hive) as source:
        hive = await state_at(source, state.first_seq)
    async with following(bus) as follower:
        for stored in [await bus.get(bus.subjects.events_stream, verified.first + n) for n in range(3)]:
            evolve(hive, read_event(stored))
        assert hive == await folded_at(bus, verified.first + 2)
        assert len(follower.hive.engine(ENGINE).pool) == 100


async def folded_at(bus: Bus, position: int) -> Hive:
    start = await snapshots.start_of(bus, from_first=True)
    for seq in range(start.position + 1, position + 1):
        evolve(start.hive, read_event(await bus.get(bus.subjects.events_stream, seq)))
    return start.hive


@pytest.mark.parametrize("point", ["compaction.purging", "compaction.purged"])
async def test_a_leader_killed_around_the_purge_is_followed_by_one_that_finishes_it(
    small: Bus, nats_url: str, tmp_path: Path, point: str
) -> None:
    await filled(small)
    archive = tmp_path / "archive"
    with leader(nats_url, small.subjects.hive, archive, BOMBUS_KILL_AT=point) as process:
        assert await asyncio.to_thread(process.wait, WAIT_S) == -signal.SIGKILL
    assert [segment.first for segment in segments(archive, small.subjects.hive)] == [1]
    with leader(nats_url, small.subjects.hive, archive):
        await check_complete(small, archive)


@pytest.mark.parametrize("point", ["compaction.verified", "compaction.archived"])
async def test_a_leader_killed_while_it_verifies_or_archives_is_followed_by_one_that_finishes_it(
    small: Bus, nats_url: str, tmp_path: Path, point: str
) -> None:
    await filled(small)
    archive = tmp_path / "archive"
    with leader(nats_url, small.subjects.hive, archive, BOMBUS_STOP_AT=point) as process:
        preparing = await stopped_child(process)
    assert await first_event(small) == 1
    preparing.kill()
    with leader(nats_url, small.subjects.hive, archive):
        await check_complete(small, archive)


async def stopped_child(process: subprocess.Popen[bytes]) -> psutil.Process:
    async with asyncio.timeout(WAIT_S):
        while True:
            for child in psutil.Process(process.pid).children():
                if child.status() == psutil.STATUS_STOPPED:
                    return child
            await asyncio.sleep(0.02)


async def test_a_process_that_dies_while_it_verifies_costs_an_attempt(
    small: Bus, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(small)
    archive = tmp_path / "archive"
    async with compacting(small, quick(nats_url, archive)):
        monkeypatch.setenv("BOMBUS_KILL_AT", "compaction.verified")
        await until_status_says(small, "ended with code -9")
        assert await first_event(small) == 1
        monkeypatch.delenv("BOMBUS_KILL_AT")
        await check_complete(small, archive)


async def test_an_archive_that_was_cut_off_is_written_again(small: Bus, nats_url: str, tmp_path: Path) -> None:
    """A machine that loses its power leaves a draft, which is no archive and is removed. Those of others stay."""
    await filled(small)
    draft, other = (
        tmp_path / f".{hive}-{1:016d}-{125:016d}.bombuslog-a1b2_c3d" for hive in (small.subjects.hive, "other")
    )
    for path in (draft, other):
        path.write_bytes(b"half an archive")
    async with compacting(small, quick(nats_url, tmp_path)):
        await check_complete(small, tmp_path)
    assert (draft.exists(), other.exists()) == (False, True)


async def test_a_process_that_cannot_be_started_or_gives_no_answer_costs_an_attempt(
    small: Bus, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(small)
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    async with compacting(small, quick(nats_url)) as coordinator:
        monkeypatch.setenv("TOO_LONG", "x" * (1 << 20))
        await until_status_says(small, "cannot be started")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.delenv("TOO_LONG")
        await until_status_says(small, "gave no answer")
        monkeypatch.undo()
        await until_compacted(small)
        assert coordinator.leading.is_set()


async def test_a_preparation_that_is_ended_removes_its_draft(small: Bus, nats_url: str, tmp_path: Path) -> None:
    await filled(small)
    wanted = Preparation(url=nats_url, hive=small.subjects.hive, cut=125, until=150, archive=str(tmp_path))
    ended = await ended_at_its_draft(wanted)
    while left := [*tmp_path.glob("*.bombuslog")]:  # it was done before the signal came: once more
        left[0].unlink()
        ended = await ended_at_its_draft(wanted)
    assert (ended, list(tmp_path.iterdir())) == (1, [])


async def ended_at_its_draft(wanted: Preparation) -> int | None:
    """Start a preparation, end it once it has a draft of its archive, and return its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", Preparation.__module__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(wanted))
    process.stdin.close()
    async with asyncio.timeout(WAIT_S):
        while not list(Path(wanted.archive).glob(".*bombuslog-*")):
            await asyncio.sleep(0)
    await compaction.end(process, WAIT_S)
    return process.returncode


async def test_a_process_that_ignores_sigterm_is_killed_and_one_that_does_not_end_at_once_is_left() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    await compaction.end(process, 0.0)
    assert process.returncode is None, "it was not waited for"
    assert await process.wait() == -signal.SIGKILL
