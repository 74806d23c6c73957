"""The records of a batch, which are read while it is sent."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from bombus.bus import Bus
from bombus.bus.large.parts import PART_BYTES_MAX, Parts
from bombus.errors import LogCorrupted
from bombus.hive import inbox
from bombus.hive.records import BodyRef, digest
from bombus.hive.trajectories.queue import QueuedGroup
from bombus_gateway.atropos.scored_data import read_scored_data, record_of
from bombus_gateway.rollout_groups.reading import AHEAD_BYTES, AT_ONCE_MAX, RecordReader
from tests.gateway.rollout_groups.test_routes import TRAINER, group
from tests.gateway.swarm_hive import ENGINE, PlayedHive, played_hive
from tests.patience import PATIENCE_S


@pytest.fixture
async def hive(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


class Stored:
    """Bodies that are told by their first sequence, and of which those of `lost` are gone."""

    def __init__(self, *lost: int) -> None:
        self.asked: list[int] = []
        self.lost = lost

    async def fetch(self, ref: BodyRef) -> bytes:
        self.asked.append(ref.first)
        if ref.first in self.lost:
            raise LogCorrupted(f"there is nothing at {ref.first}")
        return b"%d" % ref.first


def refs(*sizes: int) -> list[BodyRef]:
    return [BodyRef(seqs=(number,), size=size, digest=b"") for number, size in enumerate(sizes)]


async def everything(reader: RecordReader) -> list[bytes]:
    found = []
    while (record := await reader.next()) is not None:
        found.append(record)
    return found


async def test_records_come_in_order_and_only_some_are_read_before_they_are_taken() -> None:
    stored = Stored()
    reader = RecordReader(stored.fetch, refs(*[AHEAD_BYTES // 4] * 9), lambda _: None)
    await reader.begin()
    assert stored.asked == [0, 1, 2, 3]
    assert await reader.next() == b"0"
    await asyncio.sleep(0)
    assert stored.asked == [0, 1, 2, 3, 4]
    assert await everything(reader) == [b"%d" % number for number in range(1, 9)]


async def test_a_record_larger_than_what_is_read_ahead_is_read_alone() -> None:
    stored = Stored()
    reader = RecordReader(stored.fetch, refs(AHEAD_BYTES + 1, 1, 1), lambda _: None)
    await reader.begin()
    assert stored.asked == [0]
    assert await everything(reader) == [b"0", b"1", b"2"]


async def test_small_records_are_read_some_at_once() -> None:
    stored = Stored()
    reader = RecordReader(stored.fetch, refs(*[1] * 100), lambda _: None)
    await reader.begin()
    assert len(stored.asked) == AT_ONCE_MAX
    assert len(await everything(reader)) == 100


async def test_another_thread_takes_them_too() -> None:
    reader = RecordReader(Stored().fetch, refs(1, 1, 1), lambda _: None)
    assert await asyncio.to_thread(lambda: [*reader.in_thread()]) == [b"0", b"1", b"2"]


async def test_one_that_is_gone_is_told_whenever_it_is_found() -> None:
    told: list[BodyRef] = []
    given = refs(1, AHEAD_BYTES, 1)
    reader = RecordReader(Stored(0).fetch, given, told.append)
    with pytest.raises(LogCorrupted):
        await reader.begin()
    assert await reader.next() is None  # it reads no more
    reader = RecordReader(Stored(2).fetch, given, told.append)
    await reader.begin()
    assert [await reader.next(), await reader.next()] == [b"0", b"1"]
    with pytest.raises(LogCorrupted):
        await reader.next()
    assert told == [given[0], given[2]]


async def test_a_batch_is_cut_off_where_a_group_is_gone_and_then_made_without_it(hive: PlayedHive, bus: Bus) -> None:
    """The first groups are sent already when it is found, and their answer cannot be a refusal any more."""
    assert (await hive.http.post("/register", json=TRAINER)).status_code == 200
    assert (await hive.http.post("/scored_data", json=group() | {"images": "a" * 1000})).status_code == 200
    gone = BodyRef(seqs=(1,), size=AHEAD_BYTES, digest=digest(b"another"))
    pushed = QueuedGroup(environment=None, sequences=2, tokens=6, longest=3, body=gone)
    await bus.inbox.request(inbox.PushGroups(id="1", engine=ENGINE, groups=(pushed,), key="a"))
    await hive.gateway.follower.wait_for(lambda _: len(hive.engine.trajectories.queue.groups) == 2, PATIENCE_S)
    with pytest.raises(LogCorrupted):  # after the first group: a server closes the connection then
        await hive.http.get("/batch")
    assert (await hive.http.get("/batch")).json() == {"batch": None}  # the other group waits for one in its place
    assert len(hive.engine.trajectories.queue.groups) == 1
    assert (await hive.http.post("/scored_data", json=group() | {"images": "b" * 1000})).status_code == 200
    whole = await hive.http.get("/batch")
    assert [each["images"] for each in whole.json()["batch"]] == ["a" * 1000, "b" * 1000]


async def test_batches_are_written_while_there_are_fewer_threads_than_clients(hive: PlayedHive, bus: Bus) -> None:
    """Reading a large record takes a thread, too: those that wait for records must not be the same ones."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    count = AT_ONCE_MAX + 2  # more than are read ahead
    assert (await hive.http.post("/register", json=TRAINER | {"batch_size": 2 * count})).status_code == 200
    row = [7] * 90_000
    record = record_of(read_scored_data(msgspec.json.encode(group() | {"tokens": [row, row], "masks": [row, row]})))
    assert len(record) > PART_BYTES_MAX
    parts = Parts(bus, bus.subjects.trajectories_stream)
    for number in range(count):
        body = await parts.store(bus.subjects.trajectory(ENGINE, ""), record)
        pushed = QueuedGroup(environment=None, sequences=2, tokens=180_000, longest=90_000, body=body)
        await bus.inbox.request(inbox.PushGroups(id=f"{number}", engine=ENGINE, groups=(pushed,), key=f"{number}"))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as clients:
        asked = [clients.create_task(hive.http.get("/batch?after=0")) for _ in range(3)]
    assert {(each.result().status_code, len(each.result().json()["batch"])) for each in asked} == {(200, count)}
