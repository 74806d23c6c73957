"""`--durability power`: what is acknowledged is on the disk, however many wait, and never after a sync has failed."""

import asyncio
import errno
import os
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.bus import Bus, EmbeddedServer, Outgoing, Reader, append
from bombus.bus.follow import Follower
from bombus.bus.headers import EPOCH, INBOX
from bombus.bus.streams import secret_stream
from bombus.bus.syncer import StoreChanges, SyncFailed
from bombus.bus.syncing import SYNC
from bombus.errors import BusUnavailable, StreamEndLost
from bombus.hive import events as ev
from tests.conftest import SMALL_STREAMS, kill
from tests.patience import PATIENCE_S, until


class Gate:
    """Syncs of files that wait while it is shut. It notes which were synced."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.synced: list[str] = []
        self.begun = 0
        self.failure: OSError | None = None
        self.meanwhile: list[Callable[[], object]] = []  # what happens during the next sync

    def sync(self, descriptor: int) -> None:
        self.begun += 1
        self.open.wait(PATIENCE_S)
        while self.meanwhile:
            self.meanwhile.pop()()
        if self.failure is not None:
            raise self.failure
        os.fsync(descriptor)
        self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@asynccontextmanager
async def synced_by(gate: Gate, folder: Path) -> AsyncIterator[tuple[EmbeddedServer, Bus]]:
    server = EmbeddedServer(folder, store_bytes_max=100 << 40, power=True, sync=gate.sync)
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            await bus.syncing.wait()
            yield server, bus
    finally:
        gate.open.set()
        await asyncio.to_thread(server.stop, 2.0)


def publishing(bus: Bus, name: str) -> "asyncio.Task[object]":
    publish = bus.publisher.publish(bus.subjects.call("main", ""), name.encode(), msg_id=name, timeout_s=PATIENCE_S)
    return asyncio.create_task(publish)


async def stored(bus: Bus, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await bus.state(bus.subjects.calls_stream)).last_seq < count:
            await asyncio.sleep(0)


async def stored_and_delivered(bus: Bus, new: Outgoing) -> None:
    """Store an event, and return when those who follow the log over this connection have read it."""
    headers = new.headers
    ack = bus.publisher.submit(new.subject, new.body, msg_id=new.msg_id, headers=headers, repeat=False, synced=False)
    await (await ack)
    async with Reader(bus, bus.subjects.events_stream) as reader:
        async with asyncio.timeout(PATIENCE_S):
            while (await reader.read())[-1].data != new.body:
                pass


def event(seq: int) -> Outgoing:
    body = ev.encode_event(ev.EpochOpened(epoch=seq, leader="l"))
    return Outgoing("bombus.h.event.hive.epoch.opened", body, f"1.{seq}", {EPOCH: "1", INBOX: "0"})


async def test_an_acknowledgement_waits_for_a_sync_that_began_after_its_message_was_stored(
    gate: Gate, tmp_path: Path
) -> None:
    async with synced_by(gate, tmp_path) as (_, bus):
        gate.open.clear()
        begun = gate.begun
        first = publishing(bus, "first")
        await until(lambda: gate.begun > begun)
        late = [publishing(bus, f"late-{number}") for number in range(50)]
        await stored(bus, 51)
        assert not first.done()
        gate.synced.clear()
        gate.open.set()
        await asyncio.gather(first, *late)
        blocks = [path for path in gate.synced if path.endswith("calls/msgs/1.blk")]
        assert len(blocks) == 2, "one sync for the first, which had begun, and one for all the others"


async def test_one_message_on_a_quiet_bus_is_synced_at_once_and_only_what_has_changed(
    gate: Gate, tmp_path: Path
) -> None:
    async with synced_by(gate, tmp_path) as (_, bus):
        await publishing(bus, "makes the block")
        gate.synced.clear()
        await publishing(bus, "one")
        assert [Path(path).name for path in gate.synced] == ["1.blk"]


async def test_what_gets_another_name_during_a_sync_is_synced_under_it_before_the_answer(
    gate: Gate, tmp_path: Path
) -> None:
    async with synced_by(gate, tmp_path) as (_, bus):
        await publishing(bus, "makes the block")
        folder = next(tmp_path.rglob("BOMBUS_h_calls/msgs"))
        (folder / "before").write_bytes(b"x")
        await bus.syncing.wait()
        gate.synced.clear()
        gate.meanwhile.append(lambda: (folder / "before").rename(folder / "after"))
        await publishing(bus, "one")
        assert {str(folder), str(folder / "after")} <= {*gate.synced}


async def test_an_append_returns_and_followers_fold_only_what_is_synced(gate: Gate, tmp_path: Path) -> None:
    async with synced_by(gate, tmp_path) as (_, bus):
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        assert await append(bus, [[event(1)]], 0) == 1
        await follower.wait_position(1, PATIENCE_S)
        gate.open.clear()
        appending = asyncio.create_task(append(bus, [[event(2)]], 1))
        async with asyncio.timeout(PATIENCE_S):
            while (await bus.state(bus.subjects.events_stream)).last_seq < 2:
                await asyncio.sleep(0)
        await bus.last(bus.subjects.events_stream)
        assert not appending.done()
        assert follower.position == 1
        gate.open.set()
        assert await appending == 2
        await follower.wait_position(2, PATIENCE_S)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_followers_do_not_fold_what_they_had_read_ahead_and_the_stream_has_lost(
    gate: Gate, tmp_path: Path
) -> None:
    async with synced_by(gate, tmp_path) as (server, bus):
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        assert await append(bus, [[event(1)]], 0) == 1
        await follower.wait_position(1, PATIENCE_S)
        gate.open.clear()
        await stored_and_delivered(bus, event(2))
        folder = next(tmp_path.rglob("streams/BOMBUS_h_events"))
        shutil.copytree(folder, tmp_path / "copy")
        await stored_and_delivered(bus, event(3))
        await asyncio.to_thread(kill, server)
        shutil.rmtree(folder)
        (tmp_path / "copy").rename(folder)
        gate.open.set()
        await asyncio.to_thread(server.start)
        with pytest.raises(StreamEndLost):
            await asyncio.wait_for(following, PATIENCE_S)
        assert follower.position == 2


async def test_after_a_sync_that_failed_nothing_is_acknowledged_and_the_server_says_why(
    gate: Gate, tmp_path: Path
) -> None:
    async with synced_by(gate, tmp_path) as (server, bus):
        gate.failure = OSError(errno.EIO, os.strerror(errno.EIO))
        lost = publishing(bus, "lost")
        await until(lambda: server.sync_failure)
        assert "Input/output error" in server.sync_failure
        assert "restart this machine" in server.sync_failure
        gate.failure = None
        after = bus.publisher.publish(bus.subjects.call("main", ""), b"after", msg_id="after", timeout_s=0.5)
        with pytest.raises(BusUnavailable):
            await after
        assert not lost.done()
        lost.cancel()


async def test_what_was_stored_but_not_synced_is_sent_again_when_the_server_is_back(gate: Gate, tmp_path: Path) -> None:
    async with synced_by(gate, tmp_path) as (server, bus):
        gate.open.clear()
        waiting = [publishing(bus, f"m{number}") for number in range(5)]
        appending = asyncio.create_task(append(bus, [[event(1)]], 0))
        await stored(bus, 5)
        await asyncio.to_thread(kill, server)
        gate.open.set()
        await asyncio.to_thread(server.start)
        await asyncio.gather(*waiting)
        assert await appending == 1
        assert (await bus.state(bus.subjects.calls_stream)).messages == 5


async def test_a_secret_is_returned_only_once_it_is_synced(gate: Gate, tmp_path: Path) -> None:
    async with synced_by(gate, tmp_path) as (server, bus), await Bus.connect(server.url, "h") as other:
        gate.open.clear()
        creating = asyncio.create_task(bus.secret("keys"))
        async with asyncio.timeout(PATIENCE_S):
            while await other.last(secret_stream(bus.subjects)) is None:
                await asyncio.sleep(0)
        reading = asyncio.create_task(other.secret("keys"))
        for _ in range(3):
            await other.last(secret_stream(bus.subjects))
        assert not creating.done()
        assert not reading.done()
        gate.open.set()
        assert await creating == await reading


async def test_a_server_without_power_acknowledges_without_a_sync(gate: Gate, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, store_bytes_max=100 << 40, sync=gate.sync)
    await asyncio.to_thread(server.start)
    async with await Bus.connect(server.url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        await publishing(bus, "one")
        assert not bus.syncing.needed
    await asyncio.to_thread(server.stop)
    assert gate.begun == 0


def _made(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "new" / "below").mkdir()
    (folder / "new" / "below" / "file").write_bytes(b"x")


def _moved(folder: Path) -> None:
    (folder / "old").rename(folder / "moved")
    (folder / "moved" / "file").write_bytes(b"y")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda folder: (folder / "old" / "file").write_bytes(b"y"), {"old/file"}),
        (lambda folder: (folder / "old" / "file").unlink(), {"old"}),
        (lambda folder: (folder / "old" / "file").rename(folder / "old" / "other"), {"old", "old/other"}),
        (_made, {".", "new", "new/below", "new/below/file"}),
        (_moved, {".", "moved", "moved/file"}),
    ],
    ids=["written", "removed", "renamed", "folders made", "folder moved"],
)
def test_what_changes_in_a_store_is_known(change: Callable[[Path], object], changed: set[str], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_bytes(b"x")
    changes = StoreChanges(tmp_path)
    assert {os.path.relpath(path, tmp_path) for path in changes.take()} == {".", "old", "old/file"}
    assert changes.take() == set()
    change(tmp_path)
    assert {os.path.relpath(path, tmp_path) for path in changes.take()} >= changed
    changes.close()


def test_more_changes_than_the_kernel_notes_are_all_known(tmp_path: Path) -> None:
    names = [tmp_path / str(number) for number in range(2)]
    changes = StoreChanges(tmp_path)
    changes.take()
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with names[0].open("wb", 0) as first, names[1].open("wb", 0) as second:
        for _ in range(most):
            first.write(b"x")
            second.write(b"x")
    (tmp_path / "after").write_bytes(b"x")
    assert changes.look()
    assert changes.moved, "one of those that are not known may be another name"
    assert {Path(path).name for path in changes.take()} >= {"0", "1", "after"}
    changes.close()


async def test_requests_that_cannot_be_read_are_ignored_and_others_answered(gate: Gate, tmp_path: Path) -> None:
    async with synced_by(gate, tmp_path) as (server, bus):
        for body in (b"x", b"\r\nMSG bombus-sync 1\r\n"):
            await bus.client.publish(SYNC, body, reply="nobody")
        await bus.client.publish(SYNC, b"")  # says not where to answer
        await publishing(bus, "one")
        assert server.sync_failure == ""


def test_a_folder_that_cannot_be_read_is_a_sync_that_failed(tmp_path: Path) -> None:
    changes = StoreChanges(tmp_path)
    (tmp_path / "new").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(SyncFailed, match="Too many open files"):
            changes.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    changes.close()
