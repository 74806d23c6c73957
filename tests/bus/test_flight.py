import asyncio
import random

import pytest

from bombus.bus import EPOCH, INBOX, Bus, EmbeddedServer, Outgoing, Reader, ServerRefused, StreamLimits, fly
from bombus.bus.flight import legs
from bombus.bus.headers import MSG_ID
from bombus.errors import BusUnavailable, Code, Deposed, LogCorrupted, Refused
from bombus.hive.events import HIVE
from tests.conftest import SMALL_STREAMS


def outgoing(bus: Bus, name: str, epoch: int = 1, body: bytes = b"event") -> Outgoing:
    return Outgoing(bus.subjects.event("e", "x"), body, f"{epoch}.{name}", {EPOCH: str(epoch), INBOX: "7"})


def decisions(bus: Bus, *sizes: int, epoch: int = 1, name: str = "") -> list[list[Outgoing]]:
    return [[outgoing(bus, f"{name}{d}.{n}", epoch) for n in range(size)] for d, size in enumerate(sizes)]


def opening(bus: Bus, epoch: int, leader: str = "") -> list[list[Outgoing]]:
    """The flight that opens an epoch."""
    subject = bus.subjects.event(HIVE, "epoch.opened")
    return [[Outgoing(subject, leader.encode(), f"{epoch}.opened", {EPOCH: str(epoch), INBOX: "7"})]]


async def ids(bus: Bus) -> list[str]:
    """The message ids of the whole event log, without their author's prefix."""
    state = await bus.state(bus.subjects.events_stream)
    found: list[str] = []
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while len(found) < state.messages:
            found += [stored.headers[MSG_ID].partition(".")[2] for stored in await reader.read()]
    return found


def url_of(bus: Bus) -> str:
    return str(bus.client.connected_url.geturl())


def flat(flight: list[list[Outgoing]]) -> list[str]:
    return [event.msg_id for decision in flight for event in decision]


async def test_a_flight_with_batches_in_its_middle_lands_in_order(bus: Bus) -> None:
    flight = decisions(bus, 1, 3, 1, 2, 1000, 1)
    assert await fly(bus, flight, 0) == 1008
    assert await ids(bus) == flat(flight)
    stored = await bus.get(bus.subjects.events_stream, 3)
    assert (stored.headers[EPOCH], stored.headers[INBOX], stored.data) == ("1", "7", b"event")


async def test_flights_follow_one_another(bus: Bus) -> None:
    assert await fly(bus, decisions(bus, 2, 1, name="a"), 0) == 3
    assert await fly(bus, [], 3) == 3
    assert await fly(bus, [[]], 3) == 3
    assert await fly(bus, decisions(bus, 1, 2, name="b"), 3) == 6


async def test_the_same_flight_again_is_recognised(bus: Bus) -> None:
    flight = decisions(bus, 1, 3, 1)
    assert await fly(bus, flight, 0) == 5
    assert await fly(bus, flight, 0) == 5
    assert await ids(bus) == flat(flight)


@pytest.mark.parametrize("landed", [1, 2, 3])
async def test_a_flight_that_landed_in_part_is_completed(bus: Bus, landed: int) -> None:
    flight = decisions(bus, 1, 3, 2, 1)
    await fly(bus, flight[:landed], 0)
    assert await fly(bus, flight, 0) == 7
    assert await ids(bus) == flat(flight)


async def test_a_higher_epoch_on_the_log_deposes(bus: Bus) -> None:
    await fly(bus, opening(bus, 1), 0)
    await fly(bus, opening(bus, 2), 1)
    with pytest.raises(Deposed, match="epoch 2"):
        await fly(bus, decisions(bus, 1, 2, name="late"), 1)
    assert len(await ids(bus)) == 2


@pytest.mark.parametrize("written_by_another", range(8))
async def test_no_event_of_a_deposed_coordinator_lands_wherever_the_log_ends(bus: Bus, written_by_another: int) -> None:
    """An expected sequence in the middle of a flight may hold by accident; the fence of the epoch does not."""
    await fly(bus, opening(bus, 1), 0)
    last = await fly(bus, decisions(bus, 1, 1, name="old"), 1)
    async with await Bus.connect(url_of(bus), bus.subjects.hive) as other:
        last = await fly(other, opening(other, 2), last)
        last = await fly(other, decisions(other, *[1] * written_by_another, epoch=2), last)
    with pytest.raises(Deposed, match="epoch 2"):
        await fly(bus, decisions(bus, 1, 1, 2, 1, 1, 1, name="late"), 3)
    assert len(await ids(bus)) == last == 4 + written_by_another


async def test_of_two_who_open_the_same_epoch_with_the_same_id_one_is_deposed(bus: Bus) -> None:
    async with await Bus.connect(url_of(bus), bus.subjects.hive) as other:
        results = await asyncio.gather(
            fly(bus, opening(bus, 1, "me"), 0), fly(other, opening(other, 1, "you"), 0), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["Deposed", "int"]
    assert len(await ids(bus)) == 1


async def test_two_coordinators_over_one_connection_do_not_take_each_other_s_events_for_their_own(bus: Bus) -> None:
    await fly(bus, opening(bus, 1, "me"), 0)
    with pytest.raises(Deposed, match="not ours"):
        await fly(bus, opening(bus, 1, "you"), 0)


async def test_a_log_shorter_than_what_was_acknowledged_is_corrupted(bus: Bus) -> None:
    await fly(bus, decisions(bus, 1), 0)
    with pytest.raises(LogCorrupted, match="ends at 1"):
        await fly(bus, decisions(bus, 1, name="b"), 5)


async def test_a_flight_into_a_full_log_lands_in_part_and_can_be_flown_again(nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, hive) as bus:
        await bus.ensure_streams(StreamLimits(events_bytes_max=50_000))
        flight = [[outgoing(bus, str(n), body=b"x" * 10_000)] for n in range(7)]
        with pytest.raises(BusUnavailable, match="is full"):
            await fly(bus, flight, 0, timeout_s=0.2)
        assert 1 <= len(await ids(bus)) < 7
        await bus.ensure_streams(SMALL_STREAMS)
        assert await fly(bus, flight, 0) == 7
        assert await ids(bus) == flat(flight)


async def test_an_event_that_is_too_large_is_refused_and_its_decision_does_not_land(bus: Bus) -> None:
    small, large = outgoing(bus, "small"), outgoing(bus, "large", body=bytes(9 << 20))
    with pytest.raises(Refused) as caught:
        await fly(bus, [[outgoing(bus, "first")], [small, large]], 0)
    assert caught.value.code is Code.TOO_LARGE
    assert await ids(bus) == ["1.first"]


async def test_a_decision_over_the_server_s_limit_of_a_batch_is_a_bug(bus: Bus) -> None:
    with pytest.raises(ValueError, match="1001"):
        await fly(bus, decisions(bus, 1001), 0)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 1, 2, 1), (2, 2), (1, 600, 500, 1), (1000, 1), (1,)])
def test_legs_keep_the_order_and_never_cut_a_decision(sizes: tuple[int, ...]) -> None:
    flight = [[Outgoing("s", b"", f"{d}.{n}", {}) for n in range(size)] for d, size in enumerate(sizes)]
    ends = {sum(sizes[: n + 1]) for n in range(len(sizes))}
    for chained in (True, False):
        cut = legs(flight, chained)
        items = [item for leg in cut for item in leg]
        assert [event for item in items for event in item] == [event for each in flight for event in each]
        assert all(len(item) <= 1_000 for item in items)
        landed = 0
        for item in items:
            landed += len(item)
            assert landed in ends
        assert len(cut) == (1 if chained else len(items))


def test_on_one_replica_single_events_go_as_they_are_and_the_rest_in_one_batch() -> None:
    flight = [[Outgoing("s", b"", f"{d}.{n}", {}) for n in range(size)] for d, size in enumerate((1, 2, 1, 3, 1))]
    assert [len(item) for item in legs(flight, chained=True)[0]] == [1, 6, 1]
    assert [[len(item) for item in leg] for leg in legs(flight, chained=False)] == [[8]]


async def test_what_the_server_declines_every_time_is_raised(bus: Bus) -> None:
    wrong = Outgoing(
        bus.subjects.event("e", "x"), b"", "1", {EPOCH: "1", "Nats-Expected-Stream": bus.subjects.inbox_stream}
    )
    with pytest.raises(ServerRefused):
        await fly(bus, [[wrong]], 0)


async def test_flights_over_crashes_of_the_server_leave_every_event_once_and_in_order(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    chance = random.Random(4)
    flown: list[str] = []

    def crash() -> None:
        server.kill()
        server.start()

    last = 0
    crash_under_way: asyncio.Task[None] | None = None
    for number in range(120):
        flight = decisions(bus, *chance.choices([1, 2, 9], k=chance.randint(1, 12)), name=f"{number}.")
        if number % 40 == 10:
            crash_under_way = asyncio.create_task(asyncio.to_thread(crash))
        last = await fly(bus, flight, last)
        flown += flat(flight)
        assert last == len(flown)
    assert crash_under_way is not None
    await crash_under_way
    assert await ids(bus) == flown
