"""Reads a long part of a stream fast, over its own connection and with a dedicated parser.

nats-py spends some 10 us on a message with headers, and this module under 2. This module handles only the plain case
and stops at anything else; the caller then reads on from there in the usual way. So it can only make reading faster,
never wrong.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from urllib.parse import ParseResult

import msgspec

from bombus.bus.requests import JETSTREAM_API
from bombus.bus.wire import NO_HEADERS, LazyHeaders, Stored, parse_headers
from bombus.machine.certificates import trusted

CREDIT_MESSAGES = 10_000  # messages in each of two requests
EXPIRES_S = 2.0
HEARTBEAT_S = 0.5
SILENCE_S = 2.0
CHUNK_BYTES = 512 << 10  # parsed in one go, which takes some milliseconds
_PORT = 4222
_NS = 1_000_000_000


class BulkStopped(Exception):
    """Raised if something unexpected arrives, which the error message names. Everything read before it is valid."""


class StreamRange(msgspec.Struct, frozen=True):
    """The messages `first` to `last` of a stream, read from a pull consumer that begins at `first` and needs no
    acknowledgements.

    `inbox` is a subject that nothing else uses; `credit_bytes` is the byte limit of one request.
    """

    stream: str
    consumer: str
    inbox: str
    first: int
    last: int
    credit_bytes: int
    api_prefix: str = JETSTREAM_API


async def read_bulk(server: ParseResult, wanted: StreamRange) -> AsyncGenerator[list[Stored], None]:
    """Yield every message of the range, in order, in groups that take some milliseconds to parse.

    Raises `BulkStopped` or `OSError` if it cannot read to the end: because of a gap, an error, two seconds without a
    message, or a server that requires more than a password and TLS.
    """
    try:
        reader, writer = await _open(server)
        try:
            puller = _Puller(writer, wanted)
            while not puller.done:
                async with asyncio.timeout(SILENCE_S):
                    group = await _next_group(reader, puller)
                yield group
        finally:
            writer.close()
    except (ValueError, IndexError) as error:
        raise BulkStopped(f"not the protocol that we know: {error}") from error


async def _next_group(reader: asyncio.StreamReader, puller: "_Puller") -> list[Stored]:
    while True:
        puller.request_more()
        await asyncio.sleep(0)  # lets other tasks run: a read whose data is already there does not
        chunk = await reader.read(CHUNK_BYTES)
        if not chunk:
            raise BulkStopped("the server closed the connection")
        group = puller.feed(chunk)
        if group:
            return group


async def _open(server: ParseResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and log in. As in nats-py, a user name without a password is a token."""
    if server.scheme not in ("nats", "tls") or server.hostname is None:
        raise BulkStopped(f"only connections without websockets can be read in bulk, but this is {server.scheme}")
    options = {"verbose": False, "pedantic": False, "lang": "python", "version": "1", "protocol": 1, "headers": True}
    if server.password is not None:
        options |= {"user": server.username, "pass": server.password}
    elif server.username is not None:
        options |= {"auth_token": server.username}
    async with asyncio.timeout(SILENCE_S):
        reader, writer = await asyncio.open_connection(server.hostname, server.port or _PORT, limit=CHUNK_BYTES)
        try:
            info = await reader.readline()
            if not info.startswith(b"INFO "):
                raise BulkStopped(f"the server expects a different greeting: {info[:20]!r}")
            if server.scheme == "tls" or json.loads(info[5:]).get("tls_required"):
                await writer.start_tls(trusted(), server_hostname=server.hostname)
            writer.write(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
            answer = await reader.readline()
            if answer != b"PONG\r\n":
                raise BulkStopped(f"the server refused the connection: {answer!r}")
        except BaseException:
            writer.close()
            raise
    return reader, writer


class _Puller:
    """Requests messages and parses what arrives."""

    def __init__(self, writer: asyncio.StreamWriter, wanted: StreamRange) -> None:
        self._write = writer.write
        self._range = wanted
        self._next = wanted.first
        self._credit = 0  # messages requested that have been neither delivered nor given back
        self._ack_head = 0  # length of a reply subject before the message's sequence; always the same
        self._pieces: list[bytes] = []  # the beginning of an incomplete message
        self._have = 0
        self._need = 0
        self._write(f"SUB {wanted.inbox} 1\r\n".encode())

    @property
    def done(self) -> bool:
        return self._next > self._range.last

    def request_more(self) -> None:
        """Keep two requests in flight, without requesting messages beyond the range."""
        wanted = self._range
        while self._credit <= CREDIT_MESSAGES and (left := wanted.last + 1 - self._next - self._credit) > 0:
            request = {
                "batch": min(left, CREDIT_MESSAGES),
                "max_bytes": wanted.credit_bytes,
                "expires": int(EXPIRES_S * _NS),
                "idle_heartbeat": int(HEARTBEAT_S * _NS),
            }
            body = json.dumps(request)
            subject = f"{wanted.api_prefix}.CONSUMER.MSG.NEXT.{wanted.stream}.{wanted.consumer}"
            self._write(f"PUB {subject} {wanted.inbox} {len(body)}\r\n{body}\r\n".encode())
            self._credit += min(left, CREDIT_MESSAGES)

    def feed(self, chunk: bytes) -> list[Stored]:
        """Return the messages that `chunk` completes. Raises `BulkStopped`, `ValueError` or `IndexError`."""
        self._pieces.append(chunk)
        self._have += len(chunk)
        if self._have < self._need:
            return []
        data = b"".join(self._pieces)
        group: list[Stored] = []
        at = self._take(data, group)
        self._pieces = [data[at:]]
        self._have = len(data) - at
        self._credit -= len(group)
        return group

    def _take(self, data: bytes, group: list[Stored]) -> int:
        """Append the messages in `data` to `group`. Return the offset of the first incomplete message."""
        find, seq, ack_head, complete_up_to, at = data.find, self._next, self._ack_head, len(data) - 2, 0
        self._need = 0
        # Search for a single byte; searching for two takes twice as long.
        while (line_end := find(b"\n", at) - 1) >= 0:
            words = data[at:line_end].split(b" ")
            if words[0] != b"HMSG" and words[0] != b"MSG":
                self._on_line(data[at:line_end])
                at = line_end + 2
                continue
            start = line_end + 2
            end = start + int(words[-1])
            if end > complete_up_to:
                self._need = end + 2 - at
                break
            if len(words) == 6:  # HMSG <subject> <sid> <reply> <bytes of headers> <bytes>
                body = start + int(words[4])
            elif len(words) == 5 and words[0] == b"MSG":  # MSG <subject> <sid> <reply> <bytes>
                body = start
            else:
                self._on_status(data[start:end])
                at = end + 2
                continue
            if not ack_head:
                ack_head = self._ack_head = self._ack_head_of(words[3])
            ack = words[3][ack_head:].split(b".")  # sequence in the stream, sequence in the consumer, time, ...
            if int(ack[0]) != seq:
                raise BulkStopped(f"{ack[0].decode()} came, but {seq} was expected")
            headers = LazyHeaders(data[start:body]) if body > start else NO_HEADERS
            group.append(Stored(seq, words[1].decode(), data[body:end], headers, int(ack[2])))
            seq += 1
            at = end + 2
        self._next = seq
        return at

    def _ack_head_of(self, reply: bytes) -> int:
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>...; newer servers have <domain>.<account> after ACK.
        own = f".{self._range.stream}.{self._range.consumer}.1.".encode()
        at = reply.find(own)
        if not reply.startswith(b"$JS.ACK.") or at < 0:
            raise BulkStopped(f"a message of another consumer: {reply!r}")
        return at + len(own)

    def _on_line(self, line: bytes) -> None:
        if line == b"PING":
            self._write(b"PONG\r\n")
        elif line != b"+OK" and line != b"PONG" and not line.startswith(b"INFO "):
            raise BulkStopped(line.decode("utf-8", "replace"))

    def _on_status(self, head: bytes) -> None:
        status = head[len(b"NATS/1.0 ") :].partition(b"\r\n")[0]
        if status.startswith(b"100"):  # heartbeat
            return
        unused = parse_headers(head).get("Nats-Pending-Messages")
        if status[:3] not in (b"404", b"408", b"409") or unused is None:
            raise BulkStopped(f"status {status.decode('utf-8', 'replace')}")
        self._credit -= int(unused)  # the request has reached its time or byte limit
