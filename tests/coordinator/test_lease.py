"""Leases, standbys and takeovers on a real bus (rules R3 and R4)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bombus.bus import EPOCH, Bus, EmbeddedServer
from bombus.bus.streams import lease_stream
from bombus.errors import Deposed
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus_coordinator import shell
from bombus_coordinator.lease import Lease
from bombus_coordinator.shell import Coordinator
from tests.conftest import SMALL_STREAMS, freeze, thaw
from tests.coordinator.test_shell import boot, claim, log_of

WAIT_S = 20.0


@asynccontextmanager
async def running(url: str, hive: str, *names: str) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Run coordinators as their command does, each with its own connection."""
    tasks = {name: asyncio.create_task(shell.run(url, hive, name)) for name in names}
    try:
        yield tasks
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def epochs(bus: Bus) -> list[str]:
    """Return the leader of each epoch, in order."""
    events = [ev.decode_event(stored.data) for stored in await log_of(bus)]
    return [event.leader for event in events if isinstance(event, ev.EpochOpened)]


async def opened(bus: Bus, count: int) -> list[str]:
    """Wait until this many epochs are on the log."""
    async with asyncio.timeout(WAIT_S):
        while len(leaders := await epochs(bus)) < count:
            await asyncio.sleep(0.02)
    return leaders


async def test_only_one_of_many_has_the_lease(bus: Bus) -> None:
    leases = [Lease(bus, name) for name in "abc"]
    taken = [await lease.acquire() for lease in leases]
    assert taken == [True, False, False]
    assert await leases[0].acquire(), "its holder renews it"
    assert [lease.held for lease in leases] == [True, False, False]


async def test_a_released_lease_can_be_taken_at_once(bus: Bus) -> None:
    first, second = Lease(bus, "a"), Lease(bus, "b")
    assert await first.acquire()
    await first.release()
    assert not first.held
    assert await second.acquire()


async def test_a_lease_that_is_not_renewed_is_free_after_its_time_and_not_before(bus: Bus) -> None:
    first, second = Lease(bus, "a"), Lease(bus, "b")
    assert await first.acquire()
    async with asyncio.timeout(WAIT_S):
        while not await second.acquire():
            pass
    assert not first.held, "its holder gave it up before another could have it"
    assert not await first.acquire()


async def test_a_restart_under_the_same_name_does_not_wait_for_its_own_lease(bus: Bus) -> None:
    assert await Lease(bus, "a").acquire()
    assert await Lease(bus, "a").acquire()
    assert not await Lease(bus, "b").acquire()


async def test_a_deleted_bucket_is_made_anew(bus: Bus) -> None:
    lease = Lease(bus, "a")
    assert await lease.acquire()
    await bus.requests.request(f"$JS.API.STREAM.DELETE.{lease_stream(bus.subjects)}")
    async with asyncio.timeout(WAIT_S):
        while not await lease.acquire():
            pass


async def test_r4_a_standby_leads_when_the_leader_stops(bus: Bus, nats_url: str) -> None:
    async with running(nats_url, bus.subjects.hive, "a", "b") as tasks:
        (first,) = await opened(bus, 1)
        second = "b" if first == "a" else "a"
        tasks[first].cancel()
        assert await opened(bus, 2) == [first, second]
        await boot(bus)
        assert isinstance(await bus.inbox.request(claim("k")), inbox.Granted)


async def test_r4_a_leader_that_was_cut_off_finds_itself_deposed_and_stands_by(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    """Its lease expires while it is cut off. When it is back, another leads, and it writes nothing."""
    _, bus = crashing
    async with await Bus.connect(bus.client.connected_url.geturl(), "h", name="old") as old:
        lease = Lease(old, "old")
        assert await lease.acquire()
        leader = Coordinator(old, "old", lease)
        leading = asyncio.create_task(leader.lead())
        await leader.leading.wait()
        await old.purge_below(lease_stream(old.subjects), 1 << 40)  # removed before its time
        async with running(bus.client.connected_url.geturl(), "h", "new"):
            assert await opened(bus, 2) == ["old", "new"]
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(leading, WAIT_S)
            assert raised.group_contains(Deposed)
            written = [int(stored.headers[EPOCH]) for stored in await log_of(bus)]
            assert written == sorted(written)


async def test_r4_a_server_that_hangs_beyond_the_lease_deposes_nobody(tmp_path: object) -> None:
    """The lease serves liveness: a leader that finds no other epoch on the log afterwards continues."""
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    server = EmbeddedServer(tmp_path / "nats")
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            async with running(server.url, "h", "only"):
                await opened(bus, 1)
                await freeze(server)
                await asyncio.sleep(2.5)  # longer than the lease
                thaw(server)
                await boot(bus)
                assert isinstance(await bus.inbox.request(claim("k"), timeout_s=WAIT_S), inbox.Granted)
                assert await epochs(bus) == ["only"]
    finally:
        server.stop(timeout_s=2)


async def test_two_coordinators_that_both_believe_they_lead_make_one_log(bus: Bus, nats_url: str) -> None:
    """The bucket of leases is deleted repeatedly while clients work."""
    done: list[str] = []

    async def client(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            granted = await bus.inbox.request(claim(f"{name}-{number}", name, wait_s=2), timeout_s=60)
            assert isinstance(granted, inbox.Granted)
            (episode,) = granted.episodes
            result = inbox.EpisodeResult(episode=episode, task="t", reward=1.0)
            end = inbox.End(id=f"end-{episode}", engine="main", client=name, results=(result,))
            assert isinstance(await bus.inbox.request(end, timeout_s=60), inbox.Done)
            done.append(episode)

    stop = asyncio.Event()
    async with running(nats_url, bus.subjects.hive, "a", "b", "c"):
        await boot(bus, batch_size=10_000)
        async with asyncio.TaskGroup() as clients:
            for name in ("x", "y", "z"):
                clients.create_task(client(name))
            seen = len(await epochs(bus))
            for _ in range(4):
                await bus.requests.request(f"$JS.API.STREAM.DELETE.{lease_stream(bus.subjects)}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(3.0):  # the leader itself may be the first to make it anew
                        seen = len(await opened(bus, seen + 1))
            stop.set()
        stored = await log_of(bus)
    assert len(done) > 10
    assert len(done) == len(set(done)), "no episode was granted twice"
    opened_epochs = [int(each.headers[EPOCH]) for each in stored]
    assert opened_epochs == sorted(opened_epochs), "no leader writes into another's epoch"
    ended = [
        outcome.episode
        for each in stored
        if isinstance(event := ev.decode_event(each.data), ev.EpisodeEnded)
        for outcome in event.outcomes
    ]
    assert sorted(ended) == sorted(done), "each end that was acknowledged is on the log, once"
