"""A small HTTP/1.1 client for a replica's `POST /generate`, which answers with a stream of frames, and `POST
/adapters`.

Connections are kept open and reused. A general HTTP client would cost more than everything else in a call.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bombus.errors import STATUS, BombusError, Code, Refused
from bombus.hive.generation import Fault, Frame, FrameReader, Generate, Tokens, encode_request
from bombus.machine.certificates import trusted

IDLE_CONNECTIONS_MAX = 256  # per replica
ERROR_BYTES_MAX = 4096
CONNECT_S_MAX = 3.0
ADAPTER_S_MAX = 120.0
BAD_KEY = STATUS[Code.BAD_KEY]
NOT_LET_IN = (
    "the replica refuses this gateway's key: one of the two was started with another hive secret or another version "
    "of bombus; restart both"
)

Address = tuple[str, int, bool]  # host, port, and whether it speaks TLS


class ReplicaGone(BombusError):
    """Raised if a replica cannot be reached, stops in the middle of an answer, or refuses a request. Another replica
    may be able to answer."""


class ReplicaBusy(ReplicaGone):
    """Raised if a replica has reached its limit of open requests. The replica is alive and may answer later."""


class Carried(Protocol):
    """A request that is using a connection and waits for its answer."""

    def received(self, body: bytes) -> None: ...
    def completed(self) -> None: ...
    def failed(self, why: str) -> None: ...


class AdapterAnswer:
    """The answer to `POST /adapters`: empty if the adapter is loaded, otherwise the reason why it is not."""

    def __init__(self) -> None:
        self._body = bytearray()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Wait until the adapter is loaded. Raises `Refused` with the replica's reason if it cannot be loaded, or
        `ReplicaGone` if the replica does not answer."""
        await self._done

    @property
    def is_over(self) -> bool:
        return self._done.done() and not self._done.cancelled()

    def received(self, body: bytes) -> None:
        self._body += body[: ERROR_BYTES_MAX - len(self._body)]

    def completed(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def failed(self, why: str) -> None:
        if self._done.done():
            return
        try:
            refusal = _refusals.decode(self._body)
        except msgspec.MsgspecError:
            self._done.set_exception(ReplicaGone(why))
        else:
            code = next((code for code in Code if code == refusal.code), Code.INTERNAL)
            self._done.set_exception(Refused(code, refusal.why))


class _Refusal(msgspec.Struct, frozen=True):
    code: str
    why: str


_refusals = msgspec.json.Decoder(_Refusal)


class Generation:
    """One request and the frames of its answer. Read the answer to its end, or `abort` it."""

    def __init__(
        self, client: "ReplicaClient", address: Address, message: bytes, check: Callable[[Frame], None]
    ) -> None:
        self._client = client
        self._check = check
        self._address = address
        self._message = message
        self._connection: _Connection | None = None
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._waiter: asyncio.Future[None] | None = None
        self._received = False  # true once any part of the answer has arrived
        self._complete = False
        self._failure = ""
        self._may_retry = False

    async def send(self) -> None:
        """Send the request on an idle connection if there is one, or else on a new one. Raises `ReplicaGone` if the
        replica cannot be reached."""
        connection = self._client.idle_connection(self._address)
        self._may_retry = connection is not None
        self._connection = connection or await self._client.connect(self._address)
        self._connection.carry(self, self._message)

    async def frames(self) -> list[Frame]:
        """Wait for frames and return those that have arrived, or an empty list if the answer is complete.

        Tokens of the same choice and version that arrived together are joined into one frame. Raises `ReplicaGone`,
        also for a frame that fails its check, and `Refused` for a request that every replica would refuse.
        """
        while not self._frames and not self._complete:
            if self._failure:
                await self._retry()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        frames, self._frames = together(self._frames), []
        for frame in frames:
            if isinstance(frame, Fault):
                self.abort(frame.why)
                raise _error_of(frame)
            try:
                self._check(frame)
            except ReplicaGone as error:
                self.abort(str(error))
                raise
        return frames

    def abort(self, why: str) -> None:
        """Close the connection, so that the replica stops generating."""
        if not self._complete:
            self._may_retry = False
            if self._connection is not None:
                self._connection.close()
            self.failed(why)

    async def _retry(self) -> None:
        """Resend the request once, on a new connection, since the replica may have closed the idle one."""
        if not self._may_retry or self._received:
            raise ReplicaGone(self._failure)
        self._may_retry = False
        self._failure = ""
        self._connection = await self._client.connect(self._address)
        self._connection.carry(self, self._message)

    # ---- called by the connection -------------------------------------------------------------------------------

    def received(self, body: bytes) -> None:
        self._received = True
        self._frames.extend(self._reader.feed(body))
        self._wake()

    def completed(self) -> None:
        self._complete = True
        self._wake()

    def failed(self, why: str) -> None:
        if not self._complete and not self._failure:
            self._failure = why
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def together(frames: list[Frame]) -> list[Frame]:
    """Join adjacent frames of the same choice and version, unless they have alternatives.

    Malformed frames are left as they are.
    """
    if len(frames) == 1:
        return frames
    out: list[Frame] = []
    for place, group in groupby(frames, _place):
        run = list(group)
        if place is not None and len(run) > 1:
            parts = cast(list[Tokens], run)
            tokens, logprobs = (b"".join([getattr(each, name) for each in parts]) for name in ("tokens", "logprobs"))
            run = [Tokens(choice=place[0], version=place[1], tokens=tokens, logprobs=logprobs)]
        out += run
    return out


def _place(frame: Frame) -> tuple[int, int] | None:
    """Return the choice and version of a frame that can be joined with adjacent frames, or None for any other frame."""
    if not isinstance(frame, Tokens) or frame.top or len(frame.tokens) != len(frame.logprobs) or len(frame.tokens) % 4:
        return None
    return frame.choice, frame.version


def _error_of(fault: Fault) -> Refused | ReplicaGone:
    """Return a `Refused` for a fault that every replica would report, or a `ReplicaGone` for any other fault."""
    code = next((code for code in Code if code == fault.code), Code.INTERNAL)
    if fault.retry and code == Code.OVERLOADED:
        return ReplicaBusy(f"the replica is busy: {fault.why}")
    if fault.retry or code == Code.INTERNAL:
        return ReplicaGone(f"the replica failed: {fault.why}")
    return Refused(code, fault.why)


class _Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self, idle: "list[_Connection]") -> None:
        self.closed = False
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._generation: Carried | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._refusal = bytearray()

    def carry(self, generation: Carried, message: bytes) -> None:
        assert self._transport is not None
        self._generation = generation
        self._parser = httptools.HttpResponseParser(self)
        self._refusal.clear()
        self._transport.write(message)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, why: str) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.failed(why)

    # ---- called by asyncio and the parser -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of asyncio's

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self in self._idle:
            self._idle.remove(self)
        self._fail(f"the replica closed the connection{f': {error}' if error else ''}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError, ValueError) as error:
            self._fail(f"the replica's answer cannot be read: {error}")
            self.close()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal += body[: ERROR_BYTES_MAX - len(self._refusal)]
        elif self._generation is not None:
            self._generation.received(body)

    def on_message_complete(self) -> None:
        generation, self._generation = self._generation, None
        status = self._parser.get_status_code()
        if self._parser.should_keep_alive() and not self.closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(self)
        else:
            self.close()
        if generation is None:
            return
        if status == 200:
            generation.completed()
            return
        if status == BAD_KEY:  # agents should not see the replica's own message
            generation.failed(NOT_LET_IN)
            return
        with suppress(ValueError, msgspec.MsgspecError):  # a proxy in between may have sent something else
            generation.received(bytes(self._refusal))
        generation.failed(f"the replica answered {status}")


@lru_cache(1024)
def _parts_of(url: str) -> tuple[Address, str, str]:
    """Return the address to connect to, the prefix of all paths, and the value of the Host header."""
    where = urlsplit(url)
    is_tls = where.scheme == "https"
    return (where.hostname or "", where.port or (443 if is_tls else 80), is_tls), where.path.rstrip("/"), where.netloc


class ReplicaClient:
    """A client with connections to all replicas that have been used. `key` is the key with which gateways identify
    themselves to replicas."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._idle: defaultdict[Address, list[_Connection]] = defaultdict(list)

    async def generate(self, url: str, request: Generate, check: Callable[[Frame], None]) -> Generation:
        """Send a request to the replica at `url`. Raises `ReplicaGone` if it cannot be reached.

        `check` (an `AnswerCheck`) raises `ReplicaGone` for a wrong frame in the answer.
        """
        address, message = self._post(url, "/generate", "application/msgpack", encode_request(request))
        generation = Generation(self, address, message, check)
        await generation.send()
        return generation

    async def load_adapter(self, url: str, adapter: str, folder: str) -> None:
        """Have the replica at `url` load an adapter, and wait until it is loaded. The replica may have loaded it
        already.

        Raises `Refused` with the replica's reason, or `ReplicaGone` if the replica cannot be reached.
        """
        body = msgspec.json.encode({"address": adapter, "folder": folder})
        address, message = self._post(url, "/adapters", "application/json", body)
        answer = AdapterAnswer()
        connection = await self.connect(address)  # an idle connection may have been closed
        connection.carry(answer, message)
        try:
            async with asyncio.timeout(ADAPTER_S_MAX):
                await answer.wait()
        except TimeoutError:
            raise ReplicaGone(f"the replica at {url} did not load an adapter within {ADAPTER_S_MAX:g} s") from None
        finally:
            if not answer.is_over:
                connection.close()

    def _post(self, url: str, path: str, content_type: str, body: bytes) -> tuple[Address, bytes]:
        """Return the address to which a request is sent, and the request's bytes."""
        address, prefix, host = _parts_of(url)
        head = (
            f"POST {prefix}{path} HTTP/1.1\r\nhost: {host}\r\n"
            f"authorization: Bearer {self._key}\r\n"
            f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return address, head.encode() + body

    def idle_connection(self, address: Address) -> _Connection | None:
        idle = self._idle[address]
        while idle:
            connection = idle.pop()
            if not connection.closed:
                return connection
        return None

    async def connect(self, address: Address) -> _Connection:
        idle = self._idle[address]
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                host, port, is_tls = address
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(idle), host, port, ssl=trusted() if is_tls else None
                )
        except (OSError, TimeoutError) as error:
            raise ReplicaGone(f"no connection to the replica at {address[0]}:{address[1]}: {error}") from error
        return connection

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in [*idle]:
                connection.close()
