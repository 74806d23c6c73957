"""Snapshots: recovery loads the newest good one and folds the log after it; one that does not fit is skipped (R6)."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from bombus.bus import Blobs, Bus, snapshots
from bombus.bus.follow import Follower
from bombus.bus.headers import MSG_ID
from bombus.bus.snapshots import Snapshot
from bombus.errors import LogCorrupted
from bombus.hive import inbox
from bombus.hive.events import decode_event
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import FOLD, Hive
from bombus_coordinator.recovery import Fold
from bombus_coordinator.shell import Coordinator, Housekeeping
from tests.coordinator.test_core_properties import run
from tests.coordinator.test_shell import ENGINE, boot, claim, end, leading, log_of
from tests.patience import PATIENCE_S


async def play(bus: Bus, first: int, count: int) -> None:
    """Claim and end this many episodes."""
    for number in range(first, first + count):
        granted = await bus.inbox.request(claim(f"k{number}"))
        assert isinstance(granted, inbox.Granted)
        await bus.inbox.request(end(granted.episodes[0], 1.0))


async def folded(bus: Bus, until: int | None = None) -> Hive:
    """Fold the log from its first event, without any snapshot."""
    hive = Hive()
    for stored in await log_of(bus):
        if until is None or stored.seq <= until:
            evolve(hive, decode_event(stored.data))
    return hive


async def save(bus: Bus, body: bytes, position: int) -> None:
    """Store an encoded snapshot and remove others, as a coordinator does."""
    await snapshots.store(bus, body, position)
    await snapshots.prune(bus, position)


async def put(bus: Bus, position: int, **changes: object) -> Snapshot:
    """Store the snapshot that a coordinator would have taken at this position, with `changes`."""
    stored = await bus.get(bus.subjects.events_stream, position)
    honest = Snapshot(
        fold=FOLD,
        position=position,
        event_id=stored.headers[MSG_ID],
        answered=int(stored.headers["Bombus-Inbox"]),
        hive=await folded(bus, position),
    )
    snapshot = msgspec.structs.replace(honest, **changes)
    await save(bus, snapshots.encode(snapshot), position)
    return snapshot


def test_a_snapshot_holds_the_whole_state_in_its_order() -> None:
    for seed in range(60):
        hive = run(seed, steps=300).fold
        snapshot = Snapshot(fold=FOLD, position=7, event_id="e", answered=3, hive=hive)
        back = snapshots.decode(snapshots.encode(snapshot))
        assert back == snapshot
        for name, engine in hive.engines.items():  # equal dicts may still differ in their order
            again = back.hive.engines[name]
            for field in ("open", "pool", "by_task", "closed", "commands"):
                assert list(getattr(again, field)) == list(getattr(engine, field)), field


def test_bytes_that_are_not_a_snapshot_raise() -> None:
    good = snapshots.encode(Snapshot(fold=FOLD, position=0, event_id="", answered=0, hive=Hive()))
    for bad in (b"", b"nonsense", good[:-1], good + b"\x00", good.replace(b"hive", b"hi\xffe")):
        with pytest.raises(LogCorrupted):
            snapshots.decode(bad)


async def test_without_a_snapshot_the_fold_begins_at_the_first_event(bus: Bus) -> None:
    assert (await snapshots.start_of(bus)).position == 0
    async with leading(bus):
        await boot(bus)
    assert (await Fold.begin(bus)).position == 0


async def test_a_leader_takes_snapshots_while_it_leads_and_one_when_it_leaves(bus: Bus) -> None:
    coordinator = Coordinator(bus, housekeeping=Housekeeping(snapshot_events=10))
    task = asyncio.create_task(coordinator.lead())
    await boot(bus, batch_size=1000)
    await play(bus, 0, 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await coordinator.leave()
    kept = await snapshots.positions(bus)
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    assert snapshots.KEPT <= len(kept) <= 2 * snapshots.PARTS + snapshots.KEPT
    assert kept[-1] == newest.seq
    for position in kept:
        assert (await snapshots.load(bus, position)).hive == await folded(bus, position)


async def test_leaders_that_all_die_early_still_leave_a_snapshot(bus: Bus) -> None:
    """Each takes over from a standby's fold and writes fewer events than there are between two snapshots."""
    for reign in range(4):
        fold = await Fold.begin(bus)
        await fold.catch_up(bus)
        coordinator = Coordinator(bus, housekeeping=Housekeeping(snapshot_events=16))
        task = asyncio.create_task(coordinator.lead(fold))
        await coordinator.leading.wait()
        if reign == 0:
            await boot(bus, batch_size=1000)
        await play(bus, 4 * reign, 2)
        if reign == 3:
            async with asyncio.timeout(PATIENCE_S):
                while not await snapshots.positions(bus):
                    await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_recovery_is_a_snapshot_and_the_events_after_it(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
        await put(bus, 12)
        await play(bus, 5, 3)
    fold = await Fold.begin(bus)
    assert fold.position == 12
    await fold.catch_up(bus)
    assert fold.hive == await folded(bus)
    async with leading(bus) as second:  # and the inbox continues where the log says
        await play(bus, 8, 1)
        assert second.core.hive == await folded(bus)


async def test_a_snapshot_that_does_not_fit_is_skipped_for_the_one_before(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
    await put(bus, 8)
    good = await put(bus, 14)
    ahead = msgspec.structs.replace(good, position=10_000)
    of_another_log = msgspec.structs.replace(good, event_id="another log's")
    of_another_fold = msgspec.structs.replace(good, fold=FOLD + 1)
    for position, bad in ((10_000, ahead), (14, ahead), (14, of_another_log), (14, of_another_fold)):
        await Blobs(bus).put(f"snapshot-{position:016d}", snapshots.encode(bad))
        start = await snapshots.start_of(bus)
        assert start.position == (14 if position > 14 else 8)
        assert start.hive == await folded(bus, start.position)
        if position > 14:
            await Blobs(bus).delete(f"snapshot-{position:016d}")


async def test_a_damaged_snapshot_is_skipped_and_two_damaged_ones_cost_only_time(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
    await put(bus, 8)
    await save(bus, b"rubbish", 14)
    assert (await snapshots.start_of(bus)).position == 8
    await save(bus, b"rubbish", 8)
    assert (await snapshots.start_of(bus)).position == 0


async def test_a_snapshot_of_another_shape_is_passed_over(bus: Bus) -> None:
    """A field of the state had another type in a version before."""
    async with leading(bus):
        await boot(bus)
    await put(bus, 2)
    shape = msgspec.to_builtins(await put(bus, 4), builtin_types=(bytes,))
    shape["hive"]["engines"][ENGINE]["left"] = {"run": 1}
    await Blobs(bus).put(f"snapshot-{4:016d}", b"bombus snapshot\n" + msgspec.msgpack.encode(shape))
    assert (await snapshots.start_of(bus)).position == 2


@asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[Follower]:
    follower = Follower(bus)
    task = asyncio.create_task(follower.run())
    try:
        await follower.caught_up(20)
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_followers_and_leaders_of_a_compacted_log_begin_at_a_snapshot(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
        before = await folded(bus)
    await put(bus, 8)
    await put(bus, 14)
    await bus.purge_below(bus.subjects.events_stream, 8)
    async with following(bus) as follower:
        assert follower.hive == before
    async with leading(bus) as coordinator:
        assert coordinator.core.hive.engine(ENGINE).pool == before.engine(ENGINE).pool
    await save(bus, b"rubbish", 14)
    async with following(bus) as follower:
        assert follower.hive.engine(ENGINE).pool == before.engine(ENGINE).pool


async def test_a_follower_is_caught_up_when_the_newest_snapshot_is_that_of_the_last_event(bus: Bus) -> None:
    everything = await two_snapshots(bus)
    newest = await bus.last(bus.subjects.events_stream)
    assert newest is not None
    await put(bus, newest.seq)
    async with following(bus) as follower:
        assert follower.hive == everything


async def test_a_compacted_log_without_a_good_snapshot_is_not_treated_as_new(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
    await save(bus, b"rubbish", 14)
    await bus.purge_below(bus.subjects.events_stream, 8)
    with pytest.raises(LogCorrupted, match="begins at 8"):
        await snapshots.start_of(bus)
    with pytest.raises(LogCorrupted):
        await Coordinator(bus).lead()


class Watcher:
    """Follow every event that is kept, as the terminal does, to the end of the log."""

    def __init__(self, bus: Bus) -> None:
        self.starts: list[tuple[int, Hive]] = []
        self.seen: list[int] = []
        self.follower = Follower(bus, self._on_event, self.on_start)

    def _on_event(self, position: int, event: object) -> None:
        self.seen.append(position)

    def on_start(self, position: int, hive: Hive) -> None:
        self.starts.append((position, hive))

    async def watch(self) -> None:
        task = asyncio.create_task(self.follower.run())
        await self.follower.caught_up(20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def two_snapshots(bus: Bus) -> Hive:
    """Make a log of more than 14 events with snapshots at 8 and 14, and return its fold."""
    async with leading(bus):
        await boot(bus, batch_size=1000)
        await play(bus, 0, 5)
    await put(bus, 8)
    await put(bus, 14)
    return await folded(bus)


async def test_a_follower_of_every_event_gets_the_state_before_the_first_one(bus: Bus) -> None:
    everything = await two_snapshots(bus)
    every = Watcher(bus)
    await every.watch()
    assert every.starts == [(0, Hive())]
    assert every.seen == list(range(1, every.follower.position + 1))
    await bus.purge_below(bus.subjects.events_stream, 8)
    rest = Watcher(bus)
    await rest.watch()
    assert rest.starts == [(8, (await snapshots.load(bus, 8)).hive)]
    assert rest.seen == every.seen[8:]
    assert rest.follower.hive == every.follower.hive == everything


class CompactedMeanwhile(Watcher):
    """The log is compacted after the follower has its first state and before it reads further."""

    def __init__(self, bus: Bus, url: str) -> None:
        super().__init__(bus)
        self._url, self._hive = url, bus.subjects.hive

    def on_start(self, position: int, hive: Hive) -> None:
        super().on_start(position, hive)
        if len(self.starts) == 1:
            thread = threading.Thread(target=asyncio.run, args=(self._compact(),))
            thread.start()
            thread.join()

    async def _compact(self) -> None:
        async with await Bus.connect(self._url, self._hive) as bus:
            await bus.purge_below(bus.subjects.events_stream, 8)


async def test_a_follower_overtaken_by_a_compaction_continues_from_a_snapshot(bus: Bus, nats_url: str) -> None:
    everything = await two_snapshots(bus)
    watcher = CompactedMeanwhile(bus, nats_url)
    await watcher.watch()
    assert [position for position, _ in watcher.starts] == [0, 8]
    assert watcher.follower.hive == everything


async def test_snapshots_of_a_longer_log_do_not_push_out_those_of_this_one(bus: Bus) -> None:
    async with leading(bus):
        await boot(bus)
    foreign = Snapshot(fold=FOLD, position=0, event_id="of another log", answered=0, hive=Hive())
    for position in (100_000, 200_000):
        body = snapshots.encode(msgspec.structs.replace(foreign, position=position))
        await Blobs(bus).put(f"snapshot-{position:016d}", body)
    for position in (2, 4, 6):
        await put(bus, position)
    assert await snapshots.positions(bus) == [2, 4, 6]
    assert (await snapshots.start_of(bus)).position == 6
