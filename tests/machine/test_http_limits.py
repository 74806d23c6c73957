"""What a client can take of our HTTP server before its request is there, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bombus.machine.http_limits import DEFAULTS, HUNG_UP, GatheringTransport, HttpLimits
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from tests.patience import PATIENCE_S

SHORT = HttpLimits(head_s=0.2, body_s=0.4)
HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\n"


class Echo:
    """Answers with the number of bytes that the body had.

    `/slow` waits for `go` first, `/gone` until its client leaves, and `/left` until the server's future says so.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.cut_off = 0
        self.go = asyncio.Event()
        self.gone = asyncio.Event()
        self.begun = asyncio.Semaphore(0)  # released by each request, before its body is there
        self.busy = asyncio.Semaphore(0)  # released by each request that waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        self.begun.release()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.cut_off += 1
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/slow":
            self.busy.release()
            await self.go.wait()
        elif scope["path"] == "/gone":
            self.busy.release()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
        elif scope["path"] == "/left":
            self.busy.release()
            await scope["extensions"][HUNG_UP]
            self.gone.set()
        self.answered += 1
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Return the status and body of the next answer; status 0 when the connection is closed without one."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        return int(head.split(b" ")[1]), await self.reader.readexactly(length)

    async def closed(self) -> None:
        """Wait until the server has closed the connection."""
        try:
            while await asyncio.wait_for(self.reader.read(1 << 16), PATIENCE_S):
                pass
        except ConnectionError:
            pass


class Served:
    def __init__(self, app: Echo, port: int) -> None:
        self.app, self.port = app, port
        self.wires: list[Wire] = []

    async def connect(self) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port))
        self.wires.append(wire)
        return wire

    async def get(self) -> str:
        async with httpx.AsyncClient() as client:
            return (await client.post(f"http://127.0.0.1:{self.port}/x", content=b"four")).text


@asynccontextmanager
async def serving(limits: HttpLimits = DEFAULTS) -> AsyncIterator[Served]:
    app = Echo()
    with listen("127.0.0.1", 0) as bound:
        async with http_server(app, bound, 1.0, limits=limits):
            served = Served(app, bound.getsockname()[1])
            try:
                yield served
            finally:
                app.go.set()
                for wire in served.wires:
                    wire.writer.transport.abort()


async def refused(wire: Wire) -> tuple[int, dict[str, Any]]:
    status, body = await wire.answer()
    return status, json.loads(body or b"{}")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"u" * 200_000 + b" HTTP/1.1\r\nhost: h\r\n\r\n",
        HEAD + b"x-long: " + b"v" * 200_000 + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: v\r\n" % index for index in range(20_000)) + b"\r\n",
        HEAD + b"x-" + b"n" * 200_000 + b": v\r\n\r\n",
    ],
    ids=["url", "value", "many", "name"],
)
async def test_a_head_over_the_limit_is_a_431_that_says_it(head: bytes) -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(head)
        status, answer = await refused(wire)
        assert status == 431
        assert answer["code"] == "too_large"
        assert "65536 bytes" in answer["detail"]
        assert served.app.answered == 0
        assert await served.get() == "4"


async def test_a_head_of_just_under_the_limit_is_read_also_with_a_large_body_in_one_piece() -> None:
    async with serving() as served:
        wire = await served.connect()
        body = b"b" * 300_000
        await wire.send(HEAD + b"x: " + b"v" * 65_000 + b"\r\ncontent-length: 300000\r\n\r\n" + body)
        assert await wire.answer() == (200, b"300000")


@pytest.mark.parametrize("start", [HEAD + b"x: ", HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: "])
async def test_headers_and_trailers_without_an_end_are_cut_off(start: bytes) -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(start)
        answer = asyncio.create_task(wire.answer())
        while not answer.done():
            await wire.send(b"v" * 65_536)
        assert (await answer)[0] == 431
        await wire.closed()
        assert served.app.cut_off == start.count(b"chunked")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD, HEAD + b"x: y\r\n"])
async def test_a_head_that_does_not_come_to_an_end_is_a_408(sent: bytes) -> None:
    async with serving(SHORT) as served:
        wire = await served.connect()
        await wire.send(sent)
        status, answer = await refused(wire)
        assert (status, answer["code"]) == (408, "timeout")
        assert "limit of 0.2 s" in answer["detail"]
        await wire.closed()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 10\r\n\r\n12345",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
    ],
)
async def test_a_body_that_does_not_come_to_an_end_is_a_408(sent: bytes) -> None:
    async with serving(SHORT) as served:
        wire = await served.connect()
        await wire.send(sent)
        status, answer = await refused(wire)
        assert status == 408
        assert "body" in answer["detail"]
        await wire.closed()
        assert (served.app.answered, served.app.cut_off) == (0, 1)


async def test_a_byte_now_and_then_keeps_no_request_open() -> None:
    async with serving(SHORT) as served:
        wire = await served.connect()
        await wire.send(HEAD)

        async def trickle() -> None:
            while True:
                await wire.send(b"x: y\r\n")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await wire.answer())[0] == 408
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_line_ends_after_an_answer_keep_no_connection_open() -> None:
    async with serving(SHORT) as served:
        wire = await served.connect()
        await wire.send(HEAD + b"content-length: 0\r\n\r\n")
        assert await wire.answer() == (200, b"0")
        await wire.send(b"\r\n")
        assert (await wire.answer())[0] == 408


async def test_an_answer_may_take_longer_than_its_request() -> None:
    async with serving(SHORT) as served:
        wire = await served.connect()
        await wire.send(HEAD.replace(b"/x", b"/slow") + b"content-length: 1\r\n\r\n1\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wire.answer(), 1.0)
        served.app.go.set()
        assert await wire.answer() == (200, b"1")


async def test_half_sent_requests_make_room_for_whole_ones() -> None:
    async with serving(HttpLimits(connections=20)) as served:
        for _ in range(60):
            await (await served.connect()).send(HEAD)
        assert await asyncio.wait_for(served.get(), PATIENCE_S) == "4"


async def test_connections_that_are_only_kept_make_room_for_those_with_requests() -> None:
    async with serving(HttpLimits(connections=3)) as served:
        kept = [await served.connect() for _ in range(3)]
        for wire in kept:
            await wire.send(HEAD + b"content-length: 0\r\n\r\n")
            assert (await wire.answer())[0] == 200
        assert await asyncio.wait_for(served.get(), PATIENCE_S) == "4"
        await kept[0].closed()


async def test_a_connection_over_the_limit_is_a_503_while_all_others_are_at_work() -> None:
    async with serving(HttpLimits(connections=3)) as served:
        busy = [await served.connect() for _ in range(3)]
        for wire in busy:
            await wire.send(HEAD.replace(b"/x", b"/slow") + b"content-length: 0\r\n\r\n")
        for _ in busy:
            await asyncio.wait_for(served.app.busy.acquire(), PATIENCE_S)
        status, answer = await refused(late := await served.connect())
        assert (status, answer["code"]) == (503, "overloaded")
        await late.closed()
        served.app.go.set()
        for wire in busy:
            assert (await wire.answer())[0] == 200


@pytest.mark.parametrize("path", [b"/gone", b"/left"])
async def test_a_request_with_another_after_it_hears_that_its_client_has_left(
    path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send((HEAD.replace(b"/x", path) + b"content-length: 0\r\n\r\n") * 3)
        await asyncio.wait_for(served.app.busy.acquire(), PATIENCE_S)
        wire.writer.transport.abort()
        await asyncio.wait_for(served.app.gone.wait(), PATIENCE_S)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_leaves_after_a_large_body_is_heard() -> None:
    async with serving() as served:
        for _ in range(5):  # it is all read at once in most of them
            wire = await served.connect()
            await wire.send(HEAD.replace(b"/x", b"/left") + b"content-length: 200000\r\n\r\n")
            await asyncio.wait_for(served.app.begun.acquire(), PATIENCE_S)
            await wire.send(bytes(200_000))
            await asyncio.wait_for(served.app.busy.acquire(), PATIENCE_S)
            wire.writer.transport.abort()
            await asyncio.wait_for(served.app.gone.wait(), PATIENCE_S)
            served.app.gone.clear()


async def test_a_client_that_only_sends_no_more_gets_its_answer() -> None:
    async with serving() as served:
        for _ in range(20):
            wire = await served.connect()
            wire.writer.write(HEAD + b"content-length: 4\r\n\r\nfour")
            wire.writer.write_eof()
            assert (await wire.answer()) == (200, b"4")


class Recorded:
    """A transport that remembers what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


def gathering(recorded: Recorded) -> GatheringTransport:
    return GatheringTransport(cast(asyncio.Transport, recorded), asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_goes_out_together() -> None:
    recorded = Recorded()
    transport = gathering(recorded)
    transport.write(b"head ")
    transport.write(b"body")
    assert recorded.writes == []
    await asyncio.sleep(0)
    transport.write(b"next")
    transport.close()
    await asyncio.sleep(0)
    assert (recorded.writes, recorded.closing) == ([b"head body", b"next"], True)


async def test_no_more_is_gathered_than_a_transport_has_to_know_of() -> None:
    recorded = Recorded()
    transport = gathering(recorded)
    for _ in range(100):
        transport.write(bytes(10_000))
    assert sum(map(len, recorded.writes)) > 900_000
    transport.write(bytes(20_000))
    assert sum(map(len, recorded.writes)) == 1_020_000


async def test_nothing_is_written_to_a_connection_that_was_aborted() -> None:
    recorded = Recorded()
    transport = gathering(recorded)
    transport.write(b"late")
    transport.abort()
    await asyncio.sleep(0)
    assert recorded.writes == []


async def test_a_client_reads_an_answer_in_one_piece() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(HEAD + b"content-length: 4\r\n\r\nfour")
        assert (await wire.reader.read(1 << 16)).endswith(b"\r\n\r\n4")
