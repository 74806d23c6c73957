import asyncio

import pytest

from bombus.bus import AckLost, Bus, EmbeddedServer, ServerRefused, StreamLimits, WrongSequence
from bombus.bus.headers import EXPECTED_LAST
from bombus.bus.publisher import Publisher
from bombus.bus.reader import Reader
from bombus.errors import BusUnavailable, Code, Refused
from tests.conftest import freeze, thaw


async def test_messages_of_one_task_are_stored_in_the_order_of_its_calls(bus: Bus) -> None:
    subject = bus.subjects.inbox("x")
    futures = [await bus.publisher.submit(subject, b"%d" % n, msg_id=str(n)) for n in range(3000)]
    acks = await asyncio.gather(*futures)
    assert [ack.seq for ack in acks] == list(range(1, 3001))
    assert bus.publisher.in_flight == 0


async def test_a_message_id_is_stored_once_and_the_second_ack_says_so(bus: Bus) -> None:
    subject = bus.subjects.inbox("x")
    first = await bus.publish(subject, b"1", msg_id="same")
    second = await bus.publish(subject, b"1", msg_id="same")
    assert (first.seq, first.duplicate) == (1, False)
    assert (second.seq, second.duplicate) == (1, True)


async def test_a_wrong_expected_sequence_is_an_error_of_its_own(bus: Bus) -> None:
    subject = bus.subjects.event("e", "x")
    await bus.publish(subject, b"1", msg_id="1", headers={EXPECTED_LAST: "0"})
    with pytest.raises(WrongSequence):
        await bus.publish(subject, b"2", msg_id="2", headers={EXPECTED_LAST: "0"})
    await bus.publish(subject, b"2", msg_id="2", headers={EXPECTED_LAST: "1"})


async def test_a_full_stream_refuses_and_says_that_it_is_full(nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, hive) as bus:
        await bus.ensure_streams(StreamLimits(calls_bytes_max=200_000))
        subject = bus.subjects.call("e", "x")
        futures = [await bus.publisher.submit(subject, b"x" * 20_000, msg_id=str(n)) for n in range(20)]
        with pytest.raises(BusUnavailable, match="stream is full"):
            await asyncio.gather(*futures)
        await bus.publisher.settle(5)
        stored = (await bus.state(bus.subjects.calls_stream)).messages
        assert 7 <= stored <= 9
        assert 0.7 < await bus.stream_fill(bus.subjects.calls_stream) <= 1.0
        await bus.purge_below(bus.subjects.calls_stream, stored + 1)
        assert await bus.stream_fill(bus.subjects.calls_stream) == 0.0
        assert (await bus.publish(subject, b"x", msg_id="again")).seq == stored + 1


async def test_a_message_over_the_server_s_limit_is_refused_before_it_is_sent(bus: Bus) -> None:
    with pytest.raises(Refused) as caught:
        await bus.publish(bus.subjects.call("e", "x"), bytes(8 << 20), msg_id="1")
    assert caught.value.code is Code.TOO_LARGE
    largest = bytes((8 << 20) - 4096)
    ack = await bus.publish(bus.subjects.call("e", "x"), largest, msg_id="1")
    assert len((await bus.get(bus.subjects.calls_stream, ack.seq)).data) == len(largest)
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        assert len((await reader.read())[0].data) == len(largest)


async def test_a_subject_without_a_stream_fails_after_its_time(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="no stream takes"):
        await bus.publish("bombus.nobody.inbox.x", b"", msg_id="1", timeout_s=0.2)


async def test_a_server_s_refusal_for_any_other_reason_is_shown_as_it_is(bus: Bus) -> None:
    with pytest.raises(ServerRefused, match="expected stream does not match"):
        await bus.publish(bus.subjects.inbox("x"), b"", msg_id="1", headers={"Nats-Expected-Stream": "other"})


async def test_a_full_window_refuses_rather_than_grows(crashing: tuple[EmbeddedServer, Bus]) -> None:
    server, bus = crashing
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", messages_max=10, room_wait_s=0.1)
    await publisher.open()
    await freeze(server)
    subject = bus.subjects.inbox("x")
    futures = [await publisher.submit(subject, b"", msg_id=str(n)) for n in range(10)]
    with pytest.raises(BusUnavailable, match="10 messages"):
        await publisher.submit(subject, b"", msg_id="one too many")
    thaw(server)
    await asyncio.gather(*futures)
    assert (await publisher.publish(subject, b"", msg_id="now there is room")).seq == 11
    publisher.close()


async def test_a_repeat_after_silence_is_not_stored_twice(crashing: tuple[EmbeddedServer, Bus]) -> None:
    server, bus = crashing
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", again_after_s=0.1)
    await publisher.open()
    sent_before = bus.client.stats["out_msgs"]
    await freeze(server)
    future = await publisher.submit(bus.subjects.inbox("x"), b"once", msg_id="1")
    async with asyncio.timeout(5):
        while bus.client.stats["out_msgs"] < sent_before + 3:
            await asyncio.sleep(0.01)
    thaw(server)
    assert (await future).seq == 1
    assert (await bus.publish(bus.subjects.inbox("x"), b"", msg_id="2")).seq == 2
    publisher.close()


async def test_what_is_in_flight_when_the_server_is_killed_is_stored_once(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    subject = bus.subjects.call("e", "x")
    futures = []
    for n in range(3000):
        futures.append(await bus.publisher.submit(subject, b"x" * 100, msg_id=str(n)))
        if n == 1500:
            server.kill()
            await asyncio.to_thread(server.start)
    acks = await asyncio.gather(*futures)
    assert len({ack.seq for ack in acks}) == 3000
    assert (await bus.state(bus.subjects.calls_stream)).messages == 3000


async def test_what_goes_out_once_fails_as_soon_as_the_connection_breaks(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    await freeze(server)
    future = await bus.publisher.submit(bus.subjects.inbox("x"), b"", msg_id="1", again=False, timeout_s=30)
    server.kill()
    with pytest.raises(AckLost):
        await asyncio.wait_for(future, 5)
    with pytest.raises(BusUnavailable):
        await (await bus.publisher.submit(bus.subjects.inbox("x"), b"", msg_id="1", again=False))


async def test_a_caller_that_gives_up_gives_its_room_back(bus: Bus) -> None:
    future = await bus.publisher.submit("bombus.nobody.inbox.x", b"", msg_id="1")
    future.cancel()
    await bus.publish(bus.subjects.inbox("x"), b"", msg_id="2")
    async with asyncio.timeout(5):
        while bus.publisher.in_flight:
            await asyncio.sleep(0.01)
