import asyncio
import random
from pathlib import Path

import pytest

from bombus.bus import EPOCH, INBOX, Bus, EmbeddedServer, Outgoing, Reader, ServerRefused, StreamLimits, fly
from bombus.bus.headers import MSG_ID
from bombus.errors import BusUnavailable, Code, Deposed, LogCorrupted, Refused
from tests.conftest import SMALL_STREAMS


def outgoing(bus: Bus, name: str, epoch: int = 1, body: bytes = b"event") -> Outgoing:
    return Outgoing(bus.subjects.event("e", "x"), body, f"{epoch}.{name}", {EPOCH: str(epoch), INBOX: "7"})


def decisions(bus: Bus, *sizes: int, epoch: int = 1, name: str = "") -> list[list[Outgoing]]:
    return [[outgoing(bus, f"{name}{d}.{n}", epoch) for n in range(size)] for d, size in enumerate(sizes)]


async def ids(bus: Bus) -> list[str]:
    """The message ids of the whole event log."""
    state = await bus.state(bus.subjects.events_stream)
    found: list[str] = []
    async with Reader(bus, bus.subjects.events_stream) as reader:
        while len(found) < state.messages:
            found += [stored.headers[MSG_ID] for stored in await reader.read()]
    return found


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
    await fly(bus, decisions(bus, 1), 0)
    await fly(bus, decisions(bus, 1, epoch=2), 1)
    with pytest.raises(Deposed, match="epoch 2"):
        await fly(bus, decisions(bus, 1, 2, name="late"), 1)
    assert len(await ids(bus)) == 2


@pytest.mark.parametrize("written_by_another", range(1, 8))
async def test_no_event_of_a_deposed_coordinator_lands_wherever_the_log_ends(bus: Bus, written_by_another: int) -> None:
    """An expected sequence in the middle of a flight may hold by accident; the message id before it does not."""
    await fly(bus, decisions(bus, 1, name="old"), 0)
    await fly(bus, decisions(bus, *[1] * written_by_another, epoch=2), 1)
    with pytest.raises(Deposed, match="epoch 2"):
        await fly(bus, decisions(bus, 1, 1, 2, 1, 1, 1, name="late"), 1)
    assert len(await ids(bus)) == 1 + written_by_another


async def test_of_two_who_open_the_same_epoch_one_is_deposed(bus: Bus) -> None:
    results = await asyncio.gather(
        fly(bus, decisions(bus, 1, name="me"), 0),
        fly(bus, decisions(bus, 1, name="you"), 0),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["Deposed", "int"]
    assert len(await ids(bus)) == 1


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


async def test_what_the_server_declines_every_time_is_raised(bus: Bus) -> None:
    wrong = Outgoing(
        bus.subjects.event("e", "x"), b"", "1", {EPOCH: "1", "Nats-Expected-Stream": bus.subjects.inbox_stream}
    )
    with pytest.raises(ServerRefused):
        await fly(bus, [[wrong]], 0)


async def test_flights_over_crashes_of_the_server_leave_every_event_once_and_in_order(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    chance = random.Random(4)
    flown: list[str] = []
    async with await Bus.connect(server.url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)

        def crash() -> None:
            server.kill()
            server.start()

        last = 0
        crashing: asyncio.Task[None] | None = None
        for number in range(120):
            flight = decisions(bus, *chance.choices([1, 2, 9], k=chance.randint(1, 12)), name=f"{number}.")
            if number % 40 == 10:
                crashing = asyncio.create_task(asyncio.to_thread(crash))
            last = await fly(bus, flight, last)
            flown += flat(flight)
            assert last == len(flown)
        assert crashing is not None
        await crashing
        assert await ids(bus) == flown
    server.stop()
