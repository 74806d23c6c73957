import asyncio
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import nats
import pytest

from bombus.bus import TRACEPARENT, BlobMissing, Blobs, Bus, EmbeddedServer, Reader
from bombus.bus.connection import _close
from bombus.bus.server import find_server
from bombus.config.streams import StreamLimits
from bombus.errors import BusUnavailable, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.machine.process import free_port
from tests.conftest import SMALL_STREAMS, freeze, kill, thaw
from tests.patience import PATIENCE_S, until

MB = 1 << 20


async def test_a_message_is_read_back_as_it_was_published(bus: Bus) -> None:
    stream = bus.subjects.calls_stream
    subject = bus.subjects.call("e", "episode")
    ack = await bus.publisher.publish(subject, b"\x00\r\nbody", msg_id="c1", headers={TRACEPARENT: "00-ab-cd-01"})
    for stored in (await bus.get(stream, ack.seq), await bus.last(stream)):
        assert stored is not None
        assert (stored.seq, stored.subject, stored.data) == (1, subject, b"\x00\r\nbody")
        assert stored.headers[TRACEPARENT] == "00-ab-cd-01"
    direct, led = await bus.get(stream, 1), await bus.last(stream)
    async with Reader(bus, stream) as reader:
        [read] = await reader.read()
    assert led is not None
    assert read.time_ns == direct.time_ns == led.time_ns


async def test_the_last_message_of_an_empty_stream_is_none(bus: Bus) -> None:
    assert await bus.last(bus.subjects.events_stream) is None


async def test_many_messages_are_returned_in_the_requested_order(bus: Bus) -> None:
    subject = bus.subjects.call("e", "episode")
    await asyncio.gather(*[await bus.publisher.submit(subject, b"%d" % n * 1000, msg_id=str(n)) for n in range(200)])
    wanted = [7, 200, 1, 7, *range(1, 201)]
    found = await bus.get_many(bus.subjects.calls_stream, wanted)
    assert [stored.seq for stored in found] == wanted
    assert found[1].data == b"199" * 1000
    assert await bus.get_many(bus.subjects.calls_stream, []) == []


async def test_messages_that_follow_one_another_are_read_with_one_request(bus: Bus) -> None:
    subject = bus.subjects.call("e", "episode")
    await asyncio.gather(*[await bus.publisher.submit(subject, b"%d" % n, msg_id=str(n)) for n in range(1, 101)])
    sent = bus.client.stats["out_msgs"]
    found = await bus.get_many(bus.subjects.calls_stream, [*range(2, 50), 60, *range(71, 101)])
    assert [int(stored.data) for stored in found] == [*range(2, 50), 60, *range(71, 101)]
    assert bus.client.stats["out_msgs"] == sent + 3


async def test_a_run_that_does_not_fit_into_one_answer_is_read_to_its_end(bus: Bus) -> None:
    subject, size = bus.subjects.call("e", "episode"), 3 << 20
    for n in range(4):
        await bus.publisher.publish(subject, bytes([n]) * size, msg_id=str(n))
    found = await bus.get_many(bus.subjects.calls_stream, range(1, 5))
    assert [(stored.data[0], len(stored.data)) for stored in found] == [(n, size) for n in range(4)]


async def test_several_lost_messages_are_one_error(bus: Bus) -> None:
    """Requests that fail at the same time leave no task behind whose error nobody has seen."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    for _ in range(20):
        with pytest.raises(LogCorrupted, match="has no message at"):
            await bus.get_many(bus.subjects.calls_stream, range(1001, 1099, 2))
    gc.collect()
    assert unseen == []


async def test_many_readers_of_large_messages_do_not_overwhelm_their_connection(bus: Bus) -> None:
    """The server cuts off a connection for which it holds more than 64 MB."""
    subject, size = bus.subjects.call("e", "episode"), 6 << 20
    for n in range(8):
        await bus.publisher.publish(subject, b"x" * size, msg_id=str(n))
    found = await asyncio.gather(*[bus.get_many(bus.subjects.calls_stream, range(1, 9)) for _ in range(6)])
    assert [[len(stored.data) for stored in each] for each in found] == [[size] * 8] * 6
    assert bus.client.stats["reconnects"] == 0


async def test_a_reader_that_is_cancelled_gives_its_room_back(bus: Bus) -> None:
    subject = bus.subjects.call("e", "episode")
    for n in range(4):
        await bus.publisher.publish(subject, b"x" * (7 << 20), msg_id=str(n))
    for turns in range(6):
        reading = asyncio.create_task(bus.get_many(bus.subjects.calls_stream, range(1, 5)))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
    async with asyncio.timeout(PATIENCE_S):
        assert len(await bus.get_many(bus.subjects.calls_stream, range(1, 5))) == 4


async def test_a_missing_sequence_is_a_corrupted_log(bus: Bus) -> None:
    await bus.publisher.publish(bus.subjects.call("e", "x"), b"1", msg_id="1")
    with pytest.raises(LogCorrupted, match="at 2"):
        await bus.get(bus.subjects.calls_stream, 2)
    with pytest.raises(LogCorrupted, match="at 3"):
        await bus.get_many(bus.subjects.calls_stream, [1, 3])
    with pytest.raises(LogCorrupted, match="at 2"):
        await bus.get_many(bus.subjects.calls_stream, range(1, 4))


async def test_purging_below_a_position_keeps_the_messages_from_it_on(bus: Bus) -> None:
    subject = bus.subjects.call("e", "x")
    for n in range(5):
        await bus.publisher.publish(subject, b"x", msg_id=str(n))
    stream = bus.subjects.calls_stream
    assert await bus.purge_below(stream, 4) == 3
    assert await bus.purge_below(stream, 1) == 0
    state = await bus.state(stream)
    assert (state.first_seq, state.last_seq) == (4, 5)
    assert (await bus.get(stream, 4)).seq == 4
    with pytest.raises(LogCorrupted):
        await bus.get(stream, 3)


async def test_many_services_ensure_the_streams_at_once_and_update_their_limits(nats_url: str, hive: str) -> None:
    buses = [await Bus.connect(nats_url, hive, name=f"service/{n}") for n in range(5)]
    await asyncio.gather(*(bus.ensure_streams(SMALL_STREAMS) for bus in buses))
    stream = buses[0].subjects.calls_stream
    await buses[0].publisher.publish(buses[0].subjects.call("e", "x"), b"kept", msg_id="1")
    larger = StreamLimits(calls_bytes_max=65 * MB)
    await asyncio.gather(*(bus.ensure_streams(larger) for bus in buses))
    state = await buses[0].state(stream)
    assert (state.max_bytes, state.messages) == (65 * MB, 1)
    await buses[1].ensure_streams()  # a service without limits keeps those that an operator has set
    assert (await buses[0].state(stream)).max_bytes == 65 * MB
    await asyncio.gather(*(bus.close() for bus in buses))


async def test_a_limit_that_is_given_changes_its_stream_alone_and_messages_stay(bus: Bus) -> None:
    await bus.publisher.publish(bus.subjects.call("e", "x"), b"kept", msg_id="1")
    before = await bus.limited_states()
    assert {state.max_bytes for state in before.values()} == {64 * MB}
    await bus.ensure_streams(StreamLimits(calls_bytes_max=MB))
    after = await bus.limited_states()
    assert {name: state.max_bytes // MB for name, state in after.items()} == {
        "inbox": 64,
        "events": 64,
        "calls": 1,
        "ops": 64,
        "trajectories": 64,
        "blobs": 64,
    }
    assert (await bus.get(bus.subjects.calls_stream, 1)).data == b"kept"


async def test_a_limit_below_what_a_stream_holds_is_refused_by_the_name_of_its_flag(bus: Bus) -> None:
    for number in range(3):
        await bus.publisher.publish(bus.subjects.call("e", "x"), bytes(MB), msg_id=str(number))
    with pytest.raises(Refused, match=r"--calls-bytes-max 2097152 is refused: stream \S+ holds 314\d{4} bytes"):
        await bus.ensure_streams(StreamLimits(calls_bytes_max=2 * MB))
    assert (await bus.state(bus.subjects.calls_stream)).max_bytes == 64 * MB


async def test_one_server_alone_refuses_three_replicas_at_once_and_by_the_name_of_the_flag(
    nats_url: str, hive: str, bus: Bus
) -> None:
    with pytest.raises(Refused, match="--stream-replicas is refused, because this NATS server is not in a cluster"):
        await bus.ensure_streams(StreamLimits(replicas=3))
    async with await Bus.connect(nats_url, f"{hive}-new") as other, asyncio.timeout(PATIENCE_S):
        with pytest.raises(Refused, match="--stream-replicas is refused"):
            await other.ensure_streams(StreamLimits(replicas=3))


async def test_limits_over_the_servers_storage_are_refused_by_the_names_of_the_flags(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match=r"too little storage left .* lower them \(--inbox-bytes-max"):
        await bus.ensure_streams(StreamLimits(calls_bytes_max=1 << 50))


async def test_a_service_waits_for_the_streams_and_says_what_makes_them(nats_url: str, hive: str) -> None:
    async with await Bus.connect(nats_url, hive) as bus:
        with pytest.raises(BusUnavailable, match=r"has no streams after 0 s .* is a coordinator running\?"):
            await bus.until_streams_exist(timeout_s=0)
        waiting = asyncio.create_task(bus.until_streams_exist())
        await bus.ensure_streams(SMALL_STREAMS)
        await waiting


async def test_two_hives_on_one_server_are_separate(nats_url: str, hive: str) -> None:
    async with (
        await Bus.connect(nats_url, hive) as one,
        await Bus.connect(nats_url, f"{hive}x") as other,
    ):
        await asyncio.gather(one.ensure_streams(SMALL_STREAMS), other.ensure_streams(SMALL_STREAMS))
        await one.inbox.send(inbox.Tick(id="t"))
        await Blobs(one).put("b", b"one")
        assert await other.last(other.subjects.inbox_stream) is None
        with pytest.raises(BlobMissing):
            await Blobs(other).get("b")
        assert await one.secret("key") != await other.secret("key")
        # The same message id in another hive is another message.
        assert await other.inbox.send(inbox.Tick(id="t")) == 1


async def test_a_secret_is_the_same_for_concurrent_callers_and_made_anew_after_it_was_deleted(
    nats_url: str, hive: str, bus: Bus
) -> None:
    others = [await Bus.connect(nats_url, hive) for _ in range(4)]
    found = await asyncio.gather(*(one.secret("keys") for one in [bus, *others]))
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert await bus.secret("other") != found[0]
    async with await nats.connect(nats_url) as operator:
        bucket = await operator.jetstream().key_value(bus.subjects.secrets_bucket)
        await bucket.delete("keys")
    anew = await asyncio.gather(*(one.secret("keys") for one in [bus, *others]))
    assert len(set(anew)) == 1
    assert anew[0] not in (b"", found[0])
    await asyncio.gather(*(one.close() for one in others))


async def test_connecting_without_a_server_raises_with_advice(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    server.stop()  # its port is free again
    with pytest.raises(BusUnavailable, match="is it running"):
        await Bus.connect(server.url.replace("//", "//me:secret@"), "h", timeout_s=0.3)


async def test_a_server_that_hangs_up_on_us_is_no_connection() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","max_payload":8388608}\r\n')
        await reader.readline()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BusUnavailable, match="accepted the connection"):
            await Bus.connect(url, "hive", timeout_s=0.5)


async def test_connecting_ends_although_an_attempt_hides_its_cancellation(tmp_path: Path) -> None:
    """Of attempts that a server refuses at once, some fail in the moment in which their time is over."""
    port = free_port()
    (tmp_path / "nats.conf").write_text(
        f'port: {port}\nhost: "127.0.0.1"\njetstream {{ store_dir: "{tmp_path}/js" }}\n'
        "authorization { user: me, password: right }\n"
    )
    command = [str(find_server()), "--config", str(tmp_path / "nats.conf")]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)

    async def refused(timeout_s: float) -> None:
        with pytest.raises(BusUnavailable, match="accepted the connection"):
            await Bus.connect(f"nats://me:wrong@127.0.0.1:{port}", "hive", timeout_s=timeout_s)

    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(5):
                await asyncio.gather(*[refused(0.2 + n / 100) for n in range(40)])
    finally:
        server.terminate()
        await server.wait()


async def test_every_operation_on_a_closed_bus_raises(nats_url: str, hive: str) -> None:
    bus = await Bus.connect(nats_url, hive)
    await bus.ensure_streams(SMALL_STREAMS)
    reader = Reader(bus, bus.subjects.inbox_stream)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    await bus.close()
    assert bus.is_closed
    for attempt in (reading, bus.state(bus.subjects.inbox_stream), bus.inbox.send(inbox.Tick(id="1"))):
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(attempt, 20)
    await reader.close()


async def test_waiting_for_a_frozen_server_ends_after_the_timeout(crashing: tuple[EmbeddedServer, Bus]) -> None:
    server, bus = crashing
    await freeze(server)
    with pytest.raises(BusUnavailable, match="within"):
        await bus.publisher.publish(bus.subjects.inbox("x"), b"", msg_id="1", timeout_s=0.3)
    with pytest.raises(BusUnavailable, match="within"):
        await bus.requests.request("$JS.API.INFO", timeout_s=0.3)
    thaw(server)
    assert (await bus.publisher.publish(bus.subjects.inbox("x"), b"", msg_id="1")).seq == 1


async def test_a_bus_that_is_closed_while_it_reconnects_leaves_nothing_behind(
    crashing: tuple[EmbeddedServer, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that fails in the moment in which it is cancelled hides that from the client, as `wait_for` does."""
    server, bus = crashing
    attempts = asyncio.Event()
    hidden = 0

    async def fail(_: object) -> None:
        nonlocal hidden
        attempts.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            hidden += 1
            raise ConnectionRefusedError from None

    monkeypatch.setattr(bus.client, "_connect_to_server", fail)
    kill(server)
    await asyncio.wait_for(attempts.wait(), PATIENCE_S)
    await asyncio.wait_for(bus.close(), PATIENCE_S)
    assert hidden
    assert bus.client._reconnection_task.done()


async def test_a_command_does_not_wait_for_a_server_whose_port_is_closed() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"nats://bombus:secret@127.0.0.1:{closed.getsockname()[1]}"
        async with asyncio.timeout(5):
            with pytest.raises(BusUnavailable, match=r"no NATS server listens at nats://127\.0\.0\.1"):
                await Bus.connect(url, "h", patient=False)


_BY_WEBSOCKET = """
import asyncio, sys
from bombus.bus import Bus

async def main():
    assert "aiohttp" not in sys.modules
    async with await Bus.connect(sys.argv[1], "main"):
        print("connected")

asyncio.run(main())
"""


async def test_a_server_is_reached_by_websocket(tmp_path: Path) -> None:
    tcp, web = free_port(), free_port()
    config = tmp_path / "nats.conf"
    config.write_text(
        f'port: {tcp}\nhost: "127.0.0.1"\njetstream {{ store_dir: "{tmp_path}/js" }}\n'
        f'websocket {{ port: {web}, host: "127.0.0.1", no_tls: true }}\n'
    )
    command = [str(find_server()), "--config", str(config)]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: _listens(web))
        asked = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _BY_WEBSOCKET,
            f"ws://127.0.0.1:{web}",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asked.communicate()
        assert (asked.returncode, out.decode().split()) == (0, ["connected"]), err.decode()
    finally:
        server.terminate()
        await server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_connection_that_was_lost_with_unsent_data_is_closed_without_an_error() -> None:
    class Lost:
        _reconnection_task = None

        async def close(self) -> None:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")  # as uvloop's does

    await _close(Lost())
