import asyncio
import random

import pytest

from bombus.bus import EPOCH, INBOX, Bus, EmbeddedServer, Outgoing, Reader, ServerRefused, append
from bombus.bus.append import plan_steps
from bombus.bus.headers import MSG_ID
from bombus.config.streams import StreamLimits
from bombus.errors import BusUnavailable, Code, Deposed, Refused, StreamEndLost
from bombus.hive.events import HIVE
from tests.conftest import SMALL_STREAMS, kill


def outgoing(bus: Bus, name: str, epoch: int = 1, body: bytes = b"event") -> Outgoing:
    return Outgoing(bus.subjects.event("e", "x"), body, f"{epoch}.{name}", {EPOCH: str(epoch), INBOX: "7"})


def decisions(bus: Bus, *sizes: int, epoch: int = 1, name: str = "") -> list[list[Outgoing]]:
    return [[outgoing(bus, f"{name}{d}.{n}", epoch) for n in range(size)] for d, size in enumerate(sizes)]


def opening(bus: Bus, epoch: int, leader: str = "") -> list[list[Outgoing]]:
    """Return the append that opens an epoch."""
    subject = bus.subjects.event(HIVE, "epoch.opened")
    return [[Outgoing(subject, leader.encode(), f"{epoch}.opened", {EPOCH: str(epoch), INBOX: "7"})]]


async def ids(bus: Bus) -> list[str]:
    """Return the message ids of the whole event log, without the prefix of their connection."""
    state = await bus.state(bus.subjects.events_stream)
    found: list[str] = []
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while len(found) < state.messages:
            found += [stored.headers[MSG_ID].partition(".")[2] for stored in await reader.read()]
    return found


def url_of(bus: Bus) -> str:
    return str(bus.client.connected_url.geturl())


def ids_of(decided: list[list[Outgoing]]) -> list[str]:
    return [event.msg_id for decision in decided for event in decision]


async def test_an_append_with_batches_in_its_middle_is_stored_in_order(bus: Bus) -> None:
    decided = decisions(bus, 1, 3, 1, 2, 1000, 1)
    assert await append(bus, decided, 0) == 1008
    assert await ids(bus) == ids_of(decided)
    stored = await bus.get(bus.subjects.events_stream, 3)
    assert (stored.headers[EPOCH], stored.headers[INBOX], stored.data) == ("1", "7", b"event")


async def test_appends_follow_one_another(bus: Bus) -> None:
    assert await append(bus, decisions(bus, 2, 1, name="a"), 0) == 3
    assert await append(bus, [], 3) == 3
    assert await append(bus, [[]], 3) == 3
    assert await append(bus, decisions(bus, 1, 2, name="b"), 3) == 6


async def test_the_same_append_again_is_recognised(bus: Bus) -> None:
    decided = decisions(bus, 1, 3, 1)
    assert await append(bus, decided, 0) == 5
    assert await append(bus, decided, 0) == 5
    assert await ids(bus) == ids_of(decided)


@pytest.mark.parametrize("stored", [1, 2, 3])
async def test_an_append_that_was_stored_in_part_is_completed(bus: Bus, stored: int) -> None:
    decided = decisions(bus, 1, 3, 2, 1)
    await append(bus, decided[:stored], 0)
    assert await append(bus, decided, 0) == 7
    assert await ids(bus) == ids_of(decided)


async def test_a_higher_epoch_on_the_log_deposes(bus: Bus) -> None:
    await append(bus, opening(bus, 1), 0)
    await append(bus, opening(bus, 2), 1)
    with pytest.raises(Deposed, match="epoch 2"):
        await append(bus, decisions(bus, 1, 2, name="late"), 1)
    assert len(await ids(bus)) == 2


@pytest.mark.parametrize("written_by_another", range(8))
async def test_r2_no_event_of_a_deposed_coordinator_is_stored_wherever_the_log_ends(
    bus: Bus, written_by_another: int
) -> None:
    """An expected sequence in the middle of an append may match by accident; the fence of the epoch does not."""
    await append(bus, opening(bus, 1), 0)
    last = await append(bus, decisions(bus, 1, 1, name="old"), 1)
    async with await Bus.connect(url_of(bus), bus.subjects.hive) as other:
        last = await append(other, opening(other, 2), last)
        last = await append(other, decisions(other, *[1] * written_by_another, epoch=2), last)
    with pytest.raises(Deposed, match="epoch 2"):
        await append(bus, decisions(bus, 1, 1, 2, 1, 1, 1, name="late"), 3)
    assert len(await ids(bus)) == last == 4 + written_by_another


async def test_of_two_coordinators_that_open_the_same_epoch_with_the_same_id_one_is_deposed(bus: Bus) -> None:
    async with await Bus.connect(url_of(bus), bus.subjects.hive) as other:
        results = await asyncio.gather(
            append(bus, opening(bus, 1, "me"), 0), append(other, opening(other, 1, "you"), 0), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["Deposed", "int"]
    assert len(await ids(bus)) == 1


async def test_two_coordinators_on_one_connection_do_not_mistake_each_other_s_events_for_their_own(bus: Bus) -> None:
    await append(bus, opening(bus, 1, "me"), 0)
    with pytest.raises(Deposed, match="not ours"):
        await append(bus, opening(bus, 1, "you"), 0)


async def test_a_log_shorter_than_the_acknowledged_events_is_corrupted(bus: Bus) -> None:
    await append(bus, decisions(bus, 1), 0)
    with pytest.raises(StreamEndLost, match="message 5 is gone"):
        await append(bus, decisions(bus, 1, name="b"), 5)


async def test_an_append_to_a_full_log_is_stored_in_part_and_can_be_repeated(nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, hive) as bus:
        await bus.ensure_streams(StreamLimits(events_bytes_max=50_000))
        decided = [[outgoing(bus, str(n), body=b"x" * 10_000)] for n in range(7)]
        with pytest.raises(BusUnavailable, match="is full"):
            await append(bus, decided, 0, timeout_s=0.2)
        assert 1 <= len(await ids(bus)) < 7
        await bus.ensure_streams(SMALL_STREAMS)
        assert await append(bus, decided, 0) == 7
        assert await ids(bus) == ids_of(decided)


async def test_an_event_that_is_too_large_is_refused_and_its_decision_is_not_stored(bus: Bus) -> None:
    small, large = outgoing(bus, "small"), outgoing(bus, "large", body=bytes(9 << 20))
    with pytest.raises(Refused) as caught:
        await append(bus, [[outgoing(bus, "first")], [small, large]], 0)
    assert caught.value.code is Code.TOO_LARGE
    assert await ids(bus) == ["1.first"]


async def test_a_decision_over_the_server_s_batch_limit_raises(bus: Bus) -> None:
    with pytest.raises(ValueError, match="1001"):
        await append(bus, decisions(bus, 1001), 0)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 1, 2, 1), (2, 2), (1, 600, 500, 1), (1000, 1), (1,)])
def test_steps_keep_the_order_and_never_cut_a_decision(sizes: tuple[int, ...]) -> None:
    decided = [[Outgoing("s", b"", f"{d}.{n}", {}) for n in range(size)] for d, size in enumerate(sizes)]
    ends = {sum(sizes[: n + 1]) for n in range(len(sizes))}
    for chained in (True, False):
        steps = plan_steps(decided, chained)
        writes = [write for step in steps for write in step]
        assert [event for write in writes for event in write] == [event for each in decided for event in each]
        assert all(len(write) <= 1_000 for write in writes)
        stored = 0
        for write in writes:
            stored += len(write)
            assert stored in ends
        assert len(steps) == (1 if chained else len(writes))


def test_on_one_replica_single_events_are_sent_as_they_are_and_the_rest_in_one_batch() -> None:
    decided = [[Outgoing("s", b"", f"{d}.{n}", {}) for n in range(size)] for d, size in enumerate((1, 2, 1, 3, 1))]
    assert [len(write) for write in plan_steps(decided, chained=True)[0]] == [1, 6, 1]
    assert [[len(write) for write in step] for step in plan_steps(decided, chained=False)] == [[8]]


async def test_a_refusal_that_repeats_is_raised(bus: Bus) -> None:
    wrong = Outgoing(
        bus.subjects.event("e", "x"), b"", "1", {EPOCH: "1", "Nats-Expected-Stream": bus.subjects.inbox_stream}
    )
    with pytest.raises(ServerRefused):
        await append(bus, [[wrong]], 0)


async def test_appends_across_crashes_of_the_server_store_every_event_once_and_in_order(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    chance = random.Random(4)
    expected: list[str] = []

    def crash() -> None:
        kill(server)
        server.start()

    last = 0
    crashing_task: asyncio.Task[None] | None = None
    for number in range(120):
        decided = decisions(bus, *chance.choices([1, 2, 9], k=chance.randint(1, 12)), name=f"{number}.")
        if number % 40 == 10:
            crashing_task = asyncio.create_task(asyncio.to_thread(crash))
        last = await append(bus, decided, last)
        expected += ids_of(decided)
        assert last == len(expected)
    assert crashing_task is not None
    await crashing_task
    assert await ids(bus) == expected
