import asyncio

import pytest

from bombus.bus import AckLost, Bus, EmbeddedServer, ServerRefused, WrongSequence
from bombus.bus.headers import EXPECTED_LAST
from bombus.bus.publisher import Publisher
from bombus.bus.reader import Reader
from bombus.bus.window import Window
from bombus.bus.wire import STREAM_FULL, ApiError, error_of
from bombus.config.streams import STREAMS, StreamLimits
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.subjects import Subjects
from tests.conftest import freeze, kill, thaw
from tests.patience import PATIENCE_S


async def test_messages_of_one_task_are_stored_in_the_order_of_its_calls(bus: Bus) -> None:
    subject = bus.subjects.inbox("x")
    window = Window(4096, 32 << 20)
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", window=window)
    await publisher.open()
    futures = [await publisher.submit(subject, b"%d" % n, msg_id=str(n)) for n in range(3000)]
    acks = await asyncio.gather(*futures)
    assert [ack.seq for ack in acks] == list(range(1, 3001))
    assert window.messages == 0
    publisher.close()


async def test_a_message_id_is_stored_once_and_the_second_ack_says_so(bus: Bus) -> None:
    subject = bus.subjects.inbox("x")
    first = await bus.publisher.publish(subject, b"1", msg_id="same")
    second = await bus.publisher.publish(subject, b"1", msg_id="same")
    assert (first.seq, first.duplicate) == (1, False)
    assert (second.seq, second.duplicate) == (1, True)


async def test_a_wrong_expected_sequence_raises_wrong_sequence(bus: Bus) -> None:
    subject = bus.subjects.event("e", "x")
    await bus.publisher.publish(subject, b"1", msg_id="1", headers={EXPECTED_LAST: "0"})
    with pytest.raises(WrongSequence):
        await bus.publisher.publish(subject, b"2", msg_id="2", headers={EXPECTED_LAST: "0"})
    await bus.publisher.publish(subject, b"2", msg_id="2", headers={EXPECTED_LAST: "1"})


async def test_a_full_stream_refuses_and_says_that_it_is_full(nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, hive) as bus:
        await bus.ensure_streams(StreamLimits(calls_bytes_max=200_000))
        subject = bus.subjects.call("e", "x")
        futures = [await bus.publisher.submit(subject, b"x" * 20_000, msg_id=str(n)) for n in range(20)]
        with pytest.raises(BusUnavailable, match=r"stream is full .* raise its limit with --calls-bytes-max"):
            await asyncio.gather(*futures)
        await asyncio.gather(*futures, return_exceptions=True)
        state = await bus.state(bus.subjects.calls_stream)
        stored = state.messages
        assert 7 <= stored <= 9
        assert 0.7 < state.fill <= 1.0
        await bus.purge_below(bus.subjects.calls_stream, stored + 1)
        assert (await bus.state(bus.subjects.calls_stream)).fill == 0.0
        assert (await bus.publisher.publish(subject, b"x", msg_id="again")).seq == stored + 1


async def test_a_message_over_the_server_s_limit_is_refused_before_it_is_sent(bus: Bus) -> None:
    with pytest.raises(Refused) as caught:
        await bus.publisher.publish(bus.subjects.call("e", "x"), bytes(8 << 20), msg_id="1")
    assert caught.value.code is Code.TOO_LARGE
    largest = bytes((8 << 20) - 4096)
    ack = await bus.publisher.publish(bus.subjects.call("e", "x"), largest, msg_id="1")
    assert len((await bus.get(bus.subjects.calls_stream, ack.seq)).data) == len(largest)
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        assert len((await reader.read())[0].data) == len(largest)


async def test_publishing_to_a_subject_without_a_stream_times_out(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="no stream accepts"):
        await bus.publisher.publish("bombus.nobody.inbox.x", b"", msg_id="1", timeout_s=0.2)


async def test_any_other_refusal_of_the_server_is_raised_unchanged(bus: Bus) -> None:
    with pytest.raises(ServerRefused, match="expected stream does not match"):
        await bus.publisher.publish(bus.subjects.inbox("x"), b"", msg_id="1", headers={"Nats-Expected-Stream": "other"})


async def test_a_full_window_refuses_instead_of_growing(crashing: tuple[EmbeddedServer, Bus]) -> None:
    server, bus = crashing
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", window=Window(10, 1 << 20), room_wait_s=0.1)
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
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", repeat_after_s=0.1)
    await publisher.open()
    sent_before = bus.client.stats["out_msgs"]
    await freeze(server)
    future = await publisher.submit(bus.subjects.inbox("x"), b"once", msg_id="1")
    async with asyncio.timeout(PATIENCE_S):
        while bus.client.stats["out_msgs"] < sent_before + 3:
            await asyncio.sleep(0.01)
    thaw(server)
    assert (await future).seq == 1
    assert (await bus.publisher.publish(bus.subjects.inbox("x"), b"", msg_id="2")).seq == 2
    publisher.close()


async def test_messages_in_flight_when_the_server_is_killed_are_stored_once(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    subject = bus.subjects.call("e", "x")
    futures = []
    for n in range(3000):
        futures.append(await bus.publisher.submit(subject, b"x" * 100, msg_id=str(n)))
        if n == 1500:
            kill(server)
            await asyncio.to_thread(server.start)
    acks = await asyncio.gather(*futures)
    assert len({ack.seq for ack in acks}) == 3000
    assert (await bus.state(bus.subjects.calls_stream)).messages == 3000


async def test_a_message_submitted_once_fails_as_soon_as_the_connection_breaks(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    await freeze(server)
    future = await bus.publisher.submit(bus.subjects.inbox("x"), b"", msg_id="1", timeout_s=30, repeat=False)
    kill(server)
    with pytest.raises(AckLost):
        await asyncio.wait_for(future, 20)
    with pytest.raises(BusUnavailable):
        await (await bus.publisher.submit(bus.subjects.inbox("x"), b"", msg_id="1", repeat=False))


async def test_a_cancelled_message_gives_its_room_back(bus: Bus) -> None:
    window = Window(10, 1 << 20)
    publisher = Publisher(bus.client, f"{bus.new_inbox()}.ack", window=window)
    await publisher.open()
    future = await publisher.submit("bombus.nobody.inbox.x", b"", msg_id="1")
    future.cancel()
    await publisher.publish(bus.subjects.inbox("x"), b"", msg_id="2")
    async with asyncio.timeout(PATIENCE_S):
        while window.messages:
            await asyncio.sleep(0.01)
    publisher.close()


@pytest.mark.parametrize("stream", STREAMS)
def test_a_full_stream_names_the_flag_that_raises_its_limit(stream: str) -> None:
    subjects = Subjects("h")
    subject = {
        "inbox": subjects.inbox("tick"),
        "events": subjects.event("main", "engine.started"),
        "calls": subjects.call("main", "main-1-1"),
        "ops": subjects.operation("main", "m"),
        "trajectories": subjects.trajectory("main", ""),
        "blobs": "$O.bucket.C.x",
    }[stream]
    error = error_of(ApiError(code=503, err_code=STREAM_FULL, description="full"), subject)
    assert f"raise its limit with --{stream}-bytes-max of" in str(error)
