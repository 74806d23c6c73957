import asyncio
import logging

import pytest

from bombus.bus import Bus, EmbeddedServer, MessagePlace, Reader, ServerRefused, Stored
from bombus.errors import StreamEndLost
from tests.conftest import kill
from tests.patience import PATIENCE_S


async def fill(bus: Bus, count: int, size: int = 100) -> None:
    subject = bus.subjects.call("e", "x")
    acks = [await bus.publisher.submit(subject, bytes(size), msg_id=str(n), timeout_s=30) for n in range(count)]
    await asyncio.gather(*acks)


async def take(reader: Reader, count: int, at_once: int = 5_000) -> list[Stored]:
    found: list[Stored] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += await reader.read(min(at_once, count - len(found)))
    return found


async def test_a_stream_is_read_completely_over_many_requests(bus: Bus) -> None:
    await fill(bus, 23_000, size=10)
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        found = await take(reader, 23_000)
    assert [stored.seq for stored in found] == list(range(1, 23_001))
    assert found == sorted(found, key=lambda stored: stored.time_ns)


async def test_large_messages_are_read_completely_over_many_requests(bus: Bus) -> None:
    await fill(bus, 40, size=1_200_000)
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        found = await take(reader, 40, at_once=1)
    assert [stored.seq for stored in found] == list(range(1, 41))


async def test_a_reader_starts_at_its_start_sequence(bus: Bus) -> None:
    await fill(bus, 10)
    async with Reader(bus, bus.subjects.calls_stream, start_seq=8) as reader:
        assert [stored.seq for stored in await take(reader, 3)] == [8, 9, 10]


async def test_a_purged_beginning_is_skipped(bus: Bus) -> None:
    await fill(bus, 10)
    await bus.purge_below(bus.subjects.calls_stream, 7)
    async with Reader(bus, bus.subjects.calls_stream, start_seq=2) as reader:
        assert [stored.seq for stored in await take(reader, 4)] == [7, 8, 9, 10]


async def test_only_subjects_that_match_the_filter_are_read(bus: Bus) -> None:
    for n in range(6):
        await bus.publisher.publish(bus.subjects.event("one" if n % 2 else "other", "x"), b"", msg_id=str(n))
    only = bus.subjects.event("one", "*")
    async with Reader(bus, bus.subjects.events_stream, filter_subject=only) as reader:
        assert [stored.seq for stored in await take(reader, 3)] == [2, 4, 6]


async def test_a_message_reaches_a_waiting_reader(bus: Bus) -> None:
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        for n in range(1, 4):
            reading = asyncio.create_task(reader.read())
            await bus.publisher.publish(bus.subjects.call("e", "x"), b"", msg_id=str(n))
            assert [stored.seq for stored in await asyncio.wait_for(reading, PATIENCE_S)] == [n]


async def test_a_read_that_is_given_up_loses_nothing(bus: Bus) -> None:
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.05)
        await fill(bus, 3)
        assert [stored.seq for stored in await take(reader, 3)] == [1, 2, 3]


async def test_a_reader_outlives_the_expiry_of_its_requests_without_a_new_consumer(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 2.6)
        await fill(bus, 1)
        assert [stored.seq for stored in await take(reader, 1)] == [1]
        assert "a new consumer" not in caplog.text


async def test_a_consumer_that_vanishes_is_made_again_after_the_last_message(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    stream = bus.subjects.calls_stream
    await fill(bus, 5)
    async with Reader(bus, stream) as reader:
        assert len(await take(reader, 5)) == 5
        await delete_consumers(bus, stream)
        await bus.publisher.publish(bus.subjects.call("e", "x"), b"", msg_id="after")
        assert [stored.seq for stored in await take(reader, 1)] == [6]
        assert caplog.text.count("a new consumer") == 1


async def test_a_closed_reader_leaves_no_consumer(bus: Bus) -> None:
    stream = bus.subjects.calls_stream
    await fill(bus, 1)
    async with Reader(bus, stream) as reader:
        await take(reader, 1)
        assert len(await bus.client.jsm().consumers_info(stream)) == 1
    async with asyncio.timeout(PATIENCE_S):
        while await bus.client.jsm().consumers_info(stream):
            pass


async def test_a_position_after_the_end_of_the_log_is_a_corrupted_log(bus: Bus) -> None:
    await fill(bus, 3)
    async with Reader(bus, bus.subjects.calls_stream, start_seq=5) as reader:
        with pytest.raises(StreamEndLost, match="message 4 is gone"):
            await reader.read()
    async with Reader(bus, bus.subjects.calls_stream, start_seq=4) as reader:
        reading = asyncio.create_task(reader.read())
        await bus.publisher.publish(bus.subjects.call("e", "x"), b"", msg_id="next")
        assert (await reading)[0].seq == 4


async def test_a_reader_that_has_read_nothing_yet_knows_the_message_that_it_begins_after(bus: Bus) -> None:
    stream = bus.subjects.calls_stream
    await fill(bus, 3)
    place = (await bus.get(stream, 2)).place
    async with Reader(bus, stream, start_seq=3, after=place) as reader:
        assert [stored.seq for stored in await take(reader, 1)] == [3]
    other = MessagePlace(2, (await bus.get(stream, 1)).place.digest)
    async with Reader(bus, stream, start_seq=3, after=other) as reader:
        with pytest.raises(StreamEndLost, match="message 2 is gone or is a different one"):
            await reader.read()


async def test_reading_a_stream_that_does_not_exist_raises(bus: Bus) -> None:
    async with Reader(bus, "nothing") as reader:
        with pytest.raises(ServerRefused, match="stream not found"):
            await reader.read()


async def test_what_is_read_ahead_is_bounded(bus: Bus) -> None:
    await fill(bus, 30_000, size=1)
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        await take(reader, 1, at_once=1)
        before = -1
        while (delivered := await delivered_of(bus, bus.subjects.calls_stream)) != before:  # until it reads no further
            before = delivered
            await asyncio.sleep(0.2)
        ahead = await reader.read(30_000)
        assert len(ahead) <= 15_000
        rest = await take(reader, 29_999 - len(ahead))
        assert [stored.seq for stored in [*ahead, *rest]] == list(range(2, 30_001))


async def test_every_message_is_read_once_and_in_order_across_crashes_of_the_server(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, writer = crashing

    def crash() -> None:
        kill(server)
        server.start()

    count = 6_000
    async with await Bus.connect(server.url, "h") as watcher:
        async with Reader(watcher, writer.subjects.calls_stream) as reader:
            filling = asyncio.create_task(fill(writer, count, size=500))
            found: list[Stored] = []
            for stop in (1_000, 2_500, 4_000):
                found += await take(reader, stop - len(found))
                await asyncio.to_thread(crash)
            found += await take(reader, count - len(found))
            await filling
        assert [stored.seq for stored in found] == list(range(1, count + 1))
        assert {stored.headers["Nats-Msg-Id"] for stored in found} == {str(n) for n in range(count)}


async def delivered_of(bus: Bus, stream: str) -> int:
    """Return how many messages the server has delivered to the stream's consumers."""
    return sum(consumer.delivered.consumer_seq for consumer in await bus.client.jsm().consumers_info(stream))


async def delete_consumers(bus: Bus, stream: str) -> None:
    manager = bus.client.jsm()
    for consumer in await manager.consumers_info(stream):
        await manager.delete_consumer(stream, consumer.name)
