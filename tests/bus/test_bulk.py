import asyncio
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from urllib.parse import urlparse

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from bombus.bus import EPOCH, INBOX, Bus, EmbeddedServer, Reader, Stored
from bombus.bus.bulk import BulkStopped, StreamRange, read_bulk
from bombus.bus_address import without_login
from bombus.hive import events as ev
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus_coordinator.recovery import Fold
from tests.conftest import kill
from tests.patience import PATIENCE_S

MANY = 12_000
CREDIT_BYTES = 9 << 20


async def fill(bus: Bus, bodies: list[bytes], headers: dict[str, str] | None = None, first: int = 1) -> None:
    subject = bus.subjects.call("e", "x")
    acks = [
        await bus.publisher.submit(subject, body, msg_id=f"m{n}", headers=headers, timeout_s=60)
        for n, body in enumerate(bodies, start=first)
    ]
    await asyncio.gather(*acks)


async def calls_range(bus: Bus, first: int, last: int, name: str = "bulk") -> StreamRange:
    """Make a consumer for a range of the calls stream."""
    stream = bus.subjects.calls_stream
    await bus.client.jsm().add_consumer(
        stream,
        ConsumerConfig(
            name=name,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
        ),
    )
    return StreamRange(stream, name, bus.new_inbox(), first, last, CREDIT_BYTES)


async def read(bus: Bus, wanted: StreamRange) -> list[Stored]:
    async with asyncio.timeout(PATIENCE_S), aclosing(read_bulk(bus.client.connected_url, wanted)) as groups:
        return [stored async for group in groups for stored in group]


async def read_stream(bus: Bus, last: int, start_seq: int = 1) -> list[Stored]:
    """Read up to message `last` with a `Reader`."""
    found: list[Stored] = []
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.calls_stream, start_seq) as reader:
        while not found or found[-1].seq < last:
            found += await reader.read()
    return found


def numbers(found: list[Stored]) -> list[int]:
    return [stored.seq for stored in found]


async def test_a_range_is_read_completely_in_order_and_without_its_neighbours(bus: Bus) -> None:
    await fill(bus, [b"%d" % n for n in range(1, MANY + 1)])
    found = await read(bus, await calls_range(bus, 3, MANY - 2))
    assert numbers(found) == list(range(3, MANY - 1))
    assert [stored.data for stored in found] == [b"%d" % n for n in range(3, MANY - 1)]
    assert found == sorted(found, key=lambda stored: stored.time_ns)
    assert {stored.subject for stored in found} == {bus.subjects.call("e", "x")}


async def test_messages_equal_those_that_a_reader_returns(bus: Bus) -> None:
    await fill(bus, [b"", b"\r\n", b"HMSG a 1 b 2 3\r\n"] * 3, headers={"traceparent": "00-a-b: c-01", "Empty": ""})
    await bus.client.publish(bus.subjects.call("e", "y"), b"without headers")
    await bus.client.flush()
    fast = await read(bus, await calls_range(bus, 1, 10))
    assert fast == await read_stream(bus, 10)
    assert fast[0].headers["traceparent"] == "00-a-b: c-01"
    assert [stored.headers.get("Nats-Msg-Id", "") for stored in fast] == [*(f"m{n}" for n in range(1, 10)), ""]


async def test_empty_and_largest_messages_are_read_completely(bus: Bus) -> None:
    largest = bus.publisher.message_bytes_max
    bodies = [os.urandom(size) for size in (0, largest, 1, largest, 3_000_000, 0, 700_000, largest, 5)]
    await fill(bus, bodies)
    assert [stored.data for stored in await read(bus, await calls_range(bus, 1, len(bodies)))] == bodies


async def test_a_slow_caller_outlives_the_expiry_of_the_requests(bus: Bus) -> None:
    await fill(bus, [b"x"] * 30)
    found: list[Stored] = []
    wanted = await calls_range(bus, 1, 40)
    async with asyncio.timeout(PATIENCE_S), aclosing(read_bulk(bus.client.connected_url, wanted)) as groups:
        async for group in groups:
            found += group
            if found[-1].seq == 30:
                await asyncio.sleep(2.2)  # a request lives for two seconds
                await fill(bus, [b"x"] * 10, first=31)
    assert numbers(found) == list(range(1, 41))


async def test_a_range_that_ends_after_the_stream_times_out(bus: Bus) -> None:
    await fill(bus, [b"x"] * 10)
    with pytest.raises(TimeoutError):
        await read(bus, await calls_range(bus, 1, 11))


async def test_a_gap_stops_it(bus: Bus) -> None:
    await fill(bus, [b"x"] * 10)
    wanted = await calls_range(bus, 3, 10)
    await bus.purge_below(bus.subjects.calls_stream, 5)
    with pytest.raises(BulkStopped, match="5 came, but 3 was expected"):
        await read(bus, wanted)


# ---- what a server may send besides messages, from a fake one --------------------------------------------------------

INFO = b'INFO {"server_name":"x","headers":true}\r\n'
WANTED = StreamRange("s", "c", "_INBOX.t", 1, 3, CREDIT_BYTES)


def message(seq: int) -> bytes:
    ack = f"$JS.ACK.s.c.1.{seq}.{seq}.1700000000000000000.0"
    head = b"NATS/1.0\r\nA: b\r\n\r\n"
    return f"HMSG sub 1 {ack} {len(head)} {len(head) + 4}\r\n".encode() + head + b"body\r\n"


def status(head: bytes) -> bytes:
    return f"HMSG {WANTED.inbox} 1 {len(head)} {len(head)}\r\n".encode() + head + b"\r\n"


@asynccontextmanager
async def server_that(
    plays: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(INFO)
            assert (await reader.readline()).startswith(b"CONNECT ")
            assert await reader.readline() == b"PING\r\n"
            writer.write(b"PONG\r\n")
            await plays(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"nats://{host}:{port}"


async def read_from(url: str) -> list[Stored]:
    async with asyncio.timeout(PATIENCE_S), aclosing(read_bulk(urlparse(url), WANTED)) as groups:
        return [stored async for group in groups for stored in group]


async def test_messages_may_arrive_in_any_pieces() -> None:
    stream = b"+OK\r\n" + message(1) + status(b"NATS/1.0 100 Idle Heartbeat\r\n\r\n") + message(2) + INFO + message(3)

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(len(stream)):
            writer.write(stream[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async with server_that(dribble) as url:
        found = await read_from(url)
    assert numbers(found) == [1, 2, 3]
    assert {stored.data for stored in found} == {b"body"}
    assert found[2].headers == {"A": "b"}


async def test_a_ping_is_answered_and_returned_credit_is_requested_again() -> None:
    received: list[bytes] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"}\r\n"))
        writer.write(message(1) + b"PING\r\n")
        received.append(await reader.readuntil(b"PONG\r\n"))
        writer.write(status(b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 2\r\n\r\n"))
        received.append(await reader.readuntil(b"}\r\n"))
        writer.write(message(2) + message(3))

    async with server_that(play) as url:
        assert numbers(await read_from(url)) == [1, 2, 3]
    assert b'"batch": 3' in received[0]
    assert b'"batch": 2' in received[2]


@pytest.mark.parametrize(
    "unusual",
    [
        b"-ERR 'Permissions Violation for Publish to \"a b c\"'\r\n",
        status(b"NATS/1.0 503\r\n\r\n"),
        status(b"NATS/1.0 409 Consumer Deleted\r\n\r\n"),
        message(3),
        message(1),
        b"HMSG sub 1 $JS.ACK.s.other.1.2.2.1.0 2 2\r\n\r\n\r\n",
        b"HMSG sub 1 reply two 2\r\n\r\n\r\n",
        b"HMSG sub 1 $JS.ACK.s.c.1.2 2 2\r\n\r\n\r\n",
        b"",
    ],
)
async def test_anything_unusual_stops_it_after_the_good_messages(unusual: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(message(1))
        await writer.drain()
        await proceed.wait()
        writer.write(unusual)

    proceed = asyncio.Event()
    async with server_that(play) as url, asyncio.timeout(PATIENCE_S):
        groups = read_bulk(urlparse(url), WANTED)
        assert numbers(await anext(groups)) == [1]
        proceed.set()
        with pytest.raises(BulkStopped):
            await anext(groups)


@pytest.mark.parametrize("greeting", [b'INFO {"tls_required":true}\r\n', b"INFO {\r\n", b"HTTP/1.1 400\r\n", b""])
async def test_a_server_that_greets_differently_is_not_read_in_bulk(greeting: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises((BulkStopped, OSError)):
            await read_from(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(BulkStopped, match="websockets"):
        await read_from("ws://127.0.0.1:4222")


# ---- the reader that uses it -------------------------------------------------------------------------------------


async def test_a_reader_reads_a_long_backlog_in_bulk_and_continues_after_it(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    await fill(bus, [b"x"] * MANY)
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.calls_stream, 2) as reader:
        found: list[Stored] = []
        while len(found) < MANY - 1:
            found += await reader.read()
        assert f"read 2 to {MANY} in bulk" in caplog.text
        await bus.publisher.publish(bus.subjects.call("e", "x"), b"new", msg_id="new")
        found += await reader.read()
        assert "a new consumer" not in caplog.text
    assert numbers(found) == list(range(2, MANY + 2))


async def test_a_purged_beginning_is_skipped_in_bulk_too(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    await fill(bus, [b"x"] * MANY)
    await bus.purge_below(bus.subjects.calls_stream, 1_000)
    assert numbers(await read_stream(bus, MANY)) == list(range(1_000, MANY + 1))
    assert f"read 1000 to {MANY} in bulk" in caplog.text


async def test_a_purge_in_the_middle_keeps_the_rest(bus: Bus) -> None:
    await fill(bus, [bytes(2_000)] * MANY)  # more than is read ahead
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.calls_stream) as reader:
        found = await reader.read(1)
        await bus.purge_below(bus.subjects.calls_stream, MANY - 10)
        while found[-1].seq < MANY:
            found += await reader.read()
    assert numbers(found) == sorted(set(numbers(found)))
    assert numbers(found)[-11:] == list(range(MANY - 10, MANY + 1))


async def test_a_server_that_dies_in_the_middle_costs_only_speed(
    crashing: tuple[EmbeddedServer, Bus], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    server, bus = crashing
    await fill(bus, [bytes(2_000)] * MANY)
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.calls_stream) as reader:
        found = await reader.read(1)
        await asyncio.to_thread(kill, server)
        await asyncio.to_thread(server.start)
        while len(found) < MANY:
            found += await reader.read()
    assert "stopped reading in bulk" in caplog.text
    assert numbers(found) == list(range(1, MANY + 1))


@pytest.mark.parametrize(
    ("access", "login"),
    [('{user: me, password: "s3cret"}', "me:s3cret"), ('{token: "t0ken"}', "t0ken")],
)
async def test_a_password_and_a_dead_server_do_not_prevent_bulk_reading(
    tmp_path: Path, access: str, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        await lock(server, access)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            dead = taken.getsockname()[1]
        url = f"nats://127.0.0.1:{dead},{without_login(server.url).replace('//', f'//{login}@')}"
        async with await Bus.connect(url, "h") as bus:
            await bus.ensure_streams()
            await fill(bus, [b"x"] * MANY)
            assert numbers(await read_stream(bus, MANY)) == list(range(1, MANY + 1))
            assert f"read 1 to {MANY} in bulk" in caplog.text
            with pytest.raises(BulkStopped, match="Authorization Violation"):
                await read_from(server.url)
    finally:
        await asyncio.to_thread(server.stop)


async def lock(server: EmbeddedServer, access: str) -> None:
    """Make the running server require another login from now on."""
    config = server.data_dir / "nats-server.conf"
    config.write_text(re.sub(r"^authorization .*$", f"authorization {access}", config.read_text(), flags=re.MULTILINE))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_S):
        log = server.log_path  # written by a thread that reads what the server says, so it may not be there yet
        while not log.exists() or "Reloaded server configuration" not in log.read_text():
            await asyncio.sleep(0.01)


async def test_a_reader_closed_in_the_middle_leaves_no_consumer_and_no_connection(bus: Bus) -> None:
    stream = bus.subjects.calls_stream
    await fill(bus, [bytes(2_000)] * MANY)
    before = len(os.listdir("/proc/self/fd"))
    async with Reader(bus, stream) as reader:
        await reader.read(1)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    async with asyncio.timeout(PATIENCE_S):
        while await bus.client.jsm().consumers_info(stream) or len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)


async def test_a_long_fold_is_correct_and_lets_other_tasks_run(bus: Bus) -> None:
    facts: list[ev.Event] = [ev.EpochOpened(epoch=1, leader="l")]
    for n in range(10_000):
        names = (f"e-0-{n}",)
        facts.append(ev.EpisodeClaimed(engine="e", run=0, claim=f"c{n}", client="x", episodes=names, version=0))
        outcome = ev.Outcome(episode=names[0], task="t", reward=1.0, digest=b"d")
        facts.append(ev.EpisodeEnded(engine="e", run=0, client="x", version=0, outcomes=(outcome,)))
    hive = Hive()
    acks = []
    for n, fact in enumerate(facts, start=1):
        evolve(hive, fact)
        subject = bus.subjects.event(fact.engine, ev.kind_of(fact))
        headers = {EPOCH: "1", INBOX: str(n)}
        acks.append(
            await bus.publisher.submit(subject, ev.encode_event(fact), msg_id=f"e{n}", headers=headers, timeout_s=60)
        )
    await asyncio.gather(*acks)

    late: list[float] = []

    async def tick() -> None:
        while True:
            at = time.perf_counter()
            await asyncio.sleep(0.01)
            late.append(time.perf_counter() - at - 0.01)

    ticking = asyncio.create_task(tick())
    fold = await Fold.begin(bus)
    await fold.catch_up(bus)
    ticking.cancel()
    assert (fold.position, fold.answered.seq, fold.event_id) == (len(facts), len(facts), f"e{len(facts)}")
    assert fold.hive == hive
    assert len(late) > 3
    assert max(late) < 1
