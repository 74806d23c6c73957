"""Messages over the server's `max_payload` are refused to their sender, headers included, and the connection stays."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from bombus.bus import EPOCH, REPLY, TRACEPARENT, Blobs, Bus, Outgoing, append
from bombus.errors import Code, Refused
from bombus.hive import inbox
from tests.bus.outside_nats import DEFAULT_PAYLOAD_BYTES, outside_nats
from tests.conftest import SMALL_STREAMS, kill

MB = 1 << 20
SENTENCE = r"are over the 8388608 bytes that the NATS server takes in one message \(its max_payload\)"


async def check_connected(bus: Bus) -> None:
    """Check that the connection was never broken."""
    ack = await bus.publisher.publish(bus.subjects.call("e", "x"), b"after", msg_id="after")
    assert (await bus.get(bus.subjects.calls_stream, ack.seq)).data == b"after"
    assert bus.client.stats["reconnects"] == 0


async def test_headers_count_against_the_limit_and_the_connection_stays(bus: Bus) -> None:
    for body, headers in ((bytes(8 * MB - 5000), {TRACEPARENT: "0" * 5000}), (b"", {TRACEPARENT: "ü" * 5 * MB})):
        with pytest.raises(Refused, match=SENTENCE) as caught:
            await bus.publisher.publish(bus.subjects.call("e", "x"), body, msg_id="1", headers=headers, timeout_s=5)
        assert caught.value.code is Code.TOO_LARGE
    with pytest.raises(Refused, match=SENTENCE):
        await bus.inbox.request(inbox.Start(id="1"), traceparent="0" * 9 * MB)
    with pytest.raises(Refused, match=SENTENCE):
        await bus.publisher.send_without_ack(bus.subjects.inbox("x"), b"", {TRACEPARENT: "0" * 9 * MB})
    await check_connected(bus)


async def test_a_message_of_exactly_the_limit_is_stored_and_one_byte_more_is_refused(bus: Bus) -> None:
    headers = {TRACEPARENT: "ü" * 50}
    block = len("NATS/1.0\r\nNats-Msg-Id: 1\r\ntraceparent: \r\n\r\n") + 100
    largest = bytes(8 * MB - block)
    subject = bus.subjects.call("e", "x")
    with pytest.raises(Refused, match=f"{len(largest) + 1} bytes and {block} bytes of headers"):
        await bus.publisher.publish(subject, largest + b"1", msg_id="1", headers=headers)
    ack = await bus.publisher.publish(subject, largest, msg_id="1", headers=headers)
    assert len((await bus.get(bus.subjects.calls_stream, ack.seq)).data) == len(largest)
    await check_connected(bus)


async def test_an_event_over_the_limit_is_refused_and_the_log_goes_on(bus: Bus) -> None:
    def event(number: int, size: int, trace: int = 1) -> Outgoing:
        headers = {EPOCH: "1", TRACEPARENT: "0" * trace}
        return Outgoing(bus.subjects.event("e", "x"), bytes(size), str(number), headers)

    for decision in ([event(1, 8 * MB)], [event(1, 1), event(2, 8 * MB)], [event(1, 1, trace=9 * MB)]):
        with pytest.raises(Refused, match="max_payload"):
            await append(bus, [decision], 0)
    assert await append(bus, [[event(1, 1), event(2, 1)]], 0) == 2
    await check_connected(bus)


async def test_a_request_and_an_answer_over_the_limit_are_refused_to_who_asks(bus: Bus) -> None:
    with pytest.raises(Refused, match=SENTENCE):
        await bus.requests.request("$JS.API.INFO", bytes(9 * MB), timeout_s=5)
    asking = asyncio.create_task(bus.inbox.request(inbox.Start(id="1"), timeout_s=5))
    while (command := await bus.last(bus.subjects.inbox_stream)) is None:
        await asyncio.sleep(0.01)
    episodes = tuple(f"{number:0>1000}" for number in range(9000))
    answer = inbox.Granted(run=1, episodes=episodes, claimed_ns=0, discard_timeout_s=1, version=0)
    await bus.answer(command.headers[REPLY], answer)
    with pytest.raises(Refused, match=f"the answer: .* {SENTENCE}"):
        await asking
    await check_connected(bus)


async def test_a_server_with_the_default_limit_stores_objects_in_smaller_chunks_and_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with outside_nats(tmp_path) as server, await Bus.connect(server.url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        assert bus.publisher.message_bytes_max < DEFAULT_PAYLOAD_BYTES
        data = os.urandom(3 * MB + 5)
        await Blobs(bus).put("weights", data)
        assert await Blobs(bus).get("weights") == data
        with pytest.raises(Refused, match="over the 1048576 bytes"):
            await bus.publisher.publish(bus.subjects.call("e", "x"), bytes(MB), msg_id="1")
        await check_connected(bus)
    (warning,) = [record.getMessage() for record in caplog.records if "max_payload" in record.getMessage()]
    assert warning.startswith(
        "the NATS server takes messages of up to 1.0 MB (its max_payload), but bombus expects 8.4 MB"
    )


async def test_a_server_whose_limit_is_too_small_for_anything_is_refused_at_once(tmp_path: Path) -> None:
    async with outside_nats(tmp_path, payload=8192) as server:
        with pytest.raises(Refused, match=r"takes messages of up to 8192 bytes .* at least 65536"):
            await Bus.connect(server.url, "h")


async def test_messages_that_wait_for_a_server_which_comes_back_with_a_smaller_limit_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with outside_nats(tmp_path, payload=8 * MB) as server, await Bus.connect(server.url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        kill(server)
        subject = bus.subjects.call("e", "x")
        large = await bus.publisher.submit(subject, bytes(2 * MB), msg_id="large", timeout_s=30)
        headers = {TRACEPARENT: "0" * MB}
        long = await bus.publisher.submit(subject, b"", msg_id="long", headers=headers, timeout_s=30)
        small = await bus.publisher.submit(subject, b"small", msg_id="small", timeout_s=30)
        server.payload = None
        await asyncio.to_thread(server.start)
        assert (await small).seq == 1
        for refused in (large, long):
            with pytest.raises(Refused, match="over the 1048576 bytes"):
                await refused
        assert bus.client.stats["reconnects"] == 1
    assert any("takes messages of up to 1.0 MB" in record.getMessage() for record in caplog.records)
