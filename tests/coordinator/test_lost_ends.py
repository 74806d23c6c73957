"""R6: a stream that lost its end, in a power cut or to an older copy, is noticed, told on the log, and gone on with."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import NotedCall
from bombus.replay.source import BusSource
from bombus.replay.upkeep import check
from bombus_coordinator import shell
from bombus_coordinator.shell import Housekeeping
from tests.conftest import SMALL_STREAMS
from tests.coordinator.test_shell import ENGINE, boot, claim, end, leading, log_of
from tests.patience import PATIENCE_S
from tests.replay.test_archive import record_call


class Store:
    """A server of one test, whose streams can be copied, and put back as they were."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(folder / "nats", store_bytes_max=100 << 40)
        self.server.start()
        self._copies = folder / "copies"

    def _folder(self, stream: str) -> Path:
        return next((self.server.data_dir / "jetstream").rglob(f"streams/{stream}"))

    def copy(self, *streams: str) -> None:
        """Copy streams as they are now on the disk."""
        self.server.stop()
        for stream in streams:
            shutil.copytree(self._folder(stream), self._copies / stream)
        self.server.start()

    def put_back(self, *streams: str) -> None:
        """Begin again with these streams as they were copied, and the others as they are now."""
        self.server.stop()
        for stream in streams:
            folder = self._folder(stream)
            shutil.rmtree(folder)
            shutil.copytree(self._copies / stream, folder)
        self.server.start()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.server.stop(timeout_s=2)


@pytest.fixture
async def bus(store: Store) -> AsyncIterator[Bus]:
    async with await Bus.connect(store.server.url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        yield bus


async def restarted(bus: Bus, change: Callable[[], None]) -> None:
    """Wait until the server was restarted with other streams."""
    back = asyncio.Event()
    stop_listening = bus.on_reconnect(back.set)
    await asyncio.to_thread(change)
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    stop_listening()


async def told(bus: Bus) -> list[ev.StreamWentBack]:
    events = [ev.decode_event(stored.data) for stored in await log_of(bus)]
    return [event for event in events if isinstance(event, ev.StreamWentBack)]


async def grant(bus: Bus, name: str) -> str:
    granted = await bus.inbox.request(claim(name), timeout_s=PATIENCE_S)
    assert isinstance(granted, inbox.Granted)
    return granted.episodes[0]


async def note(bus: Bus, episode: str, number: int) -> None:
    """Store a call and report it, as a gateway does."""
    ref = await record_call(bus, episode, f"call-{number}", note=False)
    call = NotedCall(episode, ref, prompt_tokens=2, completion_tokens=1, oldest=0, newest=0)
    await bus.inbox.send(inbox.CallRecorded(id=call.ref.id, engine=ENGINE, run=1, call=call))


@pytest.mark.parametrize("refilled", [0, 60], ids=["shorter", "refilled beyond its old end"])
async def test_r6_what_comes_after_the_lost_end_of_the_inbox_is_decided_and_the_loss_is_told(
    store: Store, bus: Bus, refilled: int
) -> None:
    stream = bus.subjects.inbox_stream
    async with leading(bus):
        await boot(bus, batch_size=100)
        episode = await grant(bus, "kept")
    await restarted(bus, lambda: store.copy(stream))
    async with leading(bus):
        for number in range(20):
            await grant(bus, f"lost-{number}")
    known = (await log_of(bus))[-1].answers
    await restarted(bus, lambda: store.put_back(stream))
    cut = (await bus.state(stream)).last_seq
    assert cut < known.seq
    for number in range(refilled):
        await note(bus, episode, number)
    with pytest.raises(LogCorrupted, match="inbox has lost its end"):
        await check(BusSource(bus, "the log"))
    async with leading(bus) as coordinator:
        await note(bus, episode, refilled)
        await bus.inbox.request(end(episode, 1.0), timeout_s=PATIENCE_S)
        engine = coordinator.core.hive.engine(ENGINE)
        assert len(engine.pool[episode].calls) == refilled + 1, "every call acknowledged after the cut counts"
        assert len(engine.open) == 20, "and what the log has is not decided again"
    (event,) = await told(bus)
    assert (event.what, event.known) == ("inbox", known.seq)
    assert event.kept <= cut
    await check(BusSource(bus, "the log"))


async def test_r6_an_inbox_that_is_empty_again_is_read_from_its_beginning(store: Store, bus: Bus) -> None:
    stream = bus.subjects.inbox_stream
    await restarted(bus, lambda: store.copy(stream))
    async with leading(bus):
        await boot(bus, batch_size=100)
        await grant(bus, "before")
    await restarted(bus, lambda: store.put_back(stream))
    async with leading(bus) as coordinator:
        await grant(bus, "after")
        assert len(coordinator.core.hive.engine(ENGINE).open) == 2
    assert [(event.what, event.kept) for event in await told(bus)] == [("inbox", 0)]


async def test_r6_a_leader_at_work_sees_that_the_inbox_and_the_log_went_back_and_goes_on_by_itself(
    store: Store, bus: Bus
) -> None:
    """The server's machine loses its power, and the coordinator's does not."""
    inbox_stream, events_stream = bus.subjects.inbox_stream, bus.subjects.events_stream
    leader = asyncio.create_task(shell.run(store.server.url, "h", upkeep=Housekeeping(trim_s=0.01)))
    try:
        await boot(bus, batch_size=100)
        await grant(bus, "kept")
        await restarted(bus, lambda: store.copy(inbox_stream, events_stream))
        await grant(bus, "lost")
        await restarted(bus, lambda: store.put_back(inbox_stream))
        await grant(bus, "after the loss of the inbox")
        assert [event.what for event in await told(bus)] == ["inbox"]
        await restarted(bus, lambda: store.put_back(events_stream))
        await grant(bus, "after the loss of the log")
        assert {event.what for event in await told(bus)} >= {"events"}
    finally:
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)


async def test_r6_calls_that_are_gone_are_counted_once_by_the_leader_that_is_at_work(store: Store, bus: Bus) -> None:
    stream = bus.subjects.calls_stream
    async with leading(bus):
        await boot(bus, batch_size=100)
        episode = await grant(bus, "e")
        await note(bus, episode, 0)
    await restarted(bus, lambda: store.copy(stream))
    leader = asyncio.create_task(shell.run(store.server.url, "h"))
    try:
        for number in range(1, 4):
            await note(bus, episode, number)
        await bus.inbox.request(end(episode, 1.0), timeout_s=PATIENCE_S)
        for _ in range(2):
            await restarted(bus, lambda: store.put_back(stream))
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await told(bus)):
                    await asyncio.sleep(0.02)
        assert [(event.what, event.kept, event.known, event.needed) for event in found] == [("calls", 1, 4, 3)]
    finally:
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)
