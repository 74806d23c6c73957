"""One service's connection to the bus, and everything it does there besides reading streams and flying decisions."""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from nats.aio.client import Client
from nats.errors import Error

from bombus.bus.asks import Asker
from bombus.bus.headers import EXPECTED_LAST_OF_SUBJECT
from bombus.bus.publisher import Publisher
from bombus.bus.requests import Requests
from bombus.bus.streams import StreamLimits, lease_stream, secret_stream, stream_configs
from bombus.bus.wire import (
    NAME_IN_USE,
    NO_MESSAGE,
    Ground,
    PubAck,
    Stored,
    StreamState,
    WrongSequence,
    decode_get,
    decode_info,
    decode_purge,
    stored_from_direct,
    stored_from_get,
)
from bombus.errors import BusUnavailable, LogCorrupted
from bombus.hive.inbox import Answer, AnyAnswer, Message, encode_answer
from bombus.hive.subjects import Subjects

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX = 8 << 20
GET_MESSAGES_IN_FLIGHT = 64
GET_BYTES_IN_FLIGHT = 24 << 20  # under the 64 MB that the server holds for a connection before it cuts it off
SECRET_BYTES = 32
SECRET_ATTEMPTS = 40
_SAFE_SUBJECT = re.compile(r"^[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*\Z")
_NOT_IN_A_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


class Bus:
    """Made by `Bus.connect`. Reconnects for ever; what cannot wait for that raises `BusUnavailable`."""

    def __init__(self, client: Any, subjects: Subjects, inbox: str) -> None:
        self.subjects = subjects
        self.token = inbox.rsplit(".", 1)[1]  # unlike any other connection's
        self.ground: Ground | None = None  # kept here between flights
        self._client = client
        self._inbox = inbox
        self._inboxes = 0
        self.requests = Requests(client, f"{inbox}.api")
        self.publisher = Publisher(client, f"{inbox}.ack")
        self._asker = Asker(client, self.publisher, subjects, f"{inbox}.ask")
        self._on_back: set[Callable[[], None]] = {
            self.publisher.connection_back,
            self.requests.connection_back,
            self._asker.connection_back,
        }

    @classmethod
    async def connect(cls, url: str, hive: str, name: str = "bombus", timeout_s: float = 10.0) -> Self:
        """Connect to `url` (several servers with commas between). `name` shows in the server's monitoring.

        Raises `BusUnavailable` when no server answers within `timeout_s`, `ValueError` for a bad hive name.
        """
        subjects = Subjects(hive)
        token = secrets.token_hex(8)
        prefix = f"_INBOX.{hive}.{_NOT_IN_A_TOKEN.sub('-', name)}"
        client = Client()
        errors = _ErrorLog()
        held: list[Bus] = []

        async def disconnected() -> None:
            for bus in held:
                bus._connection_lost()

        async def reconnected() -> None:
            errors.forget()
            for bus in held:
                bus._connection_back()

        async def closed() -> None:
            for bus in held:
                bus._connection_closed()

        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=url.split(","),
                    name=f"{hive}/{name}",
                    inbox_prefix=prefix,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,
                    pending_size=PENDING_BYTES_MAX,
                    flush_timeout=2.0,
                    error_cb=errors.note,
                    disconnected_cb=disconnected,
                    reconnected_cb=reconnected,
                    closed_cb=closed,
                )
        except BaseException as error:
            await client.close()
            if not isinstance(error, (TimeoutError, OSError, Error)):
                raise
            raise BusUnavailable(
                f"no NATS server at {_without_password(url)} let us in within {timeout_s:g} s "
                f"({errors.last or error}); is it running, and are user and password right?"
            ) from error
        bus = cls(client, subjects, f"{prefix}.{token}")
        held.append(bus)
        await bus.publisher.open()
        await bus.requests.open()
        await bus._asker.open()
        return bus

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def is_closed(self) -> bool:
        """Closed by us, or by a server that will not have us back."""
        return bool(self._client.is_closed)

    async def close(self) -> None:
        """Close at once; whatever still waits for an acknowledgement fails with `BusUnavailable`."""
        self.publisher.close()
        await self._client.close()

    async def drain(self, timeout_s: float = 5.0) -> None:
        """Wait until everything published is acknowledged or `timeout_s` is over, then close."""
        await self.publisher.settle(timeout_s)
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- messages ---------------------------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        body: bytes,
        *,
        msg_id: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> PubAck:
        """See `Publisher.publish`; many in flight at once: `bus.publisher.submit`."""
        return await self.publisher.publish(subject, body, msg_id=msg_id, headers=headers, timeout_s=timeout_s)

    async def send(self, message: Message, *, traceparent: str = "", timeout_s: float = 10.0) -> int:
        """Put a fact into the inbox, once for its id, and return its sequence there."""
        return (await self._asker.send(message, traceparent=traceparent, timeout_s=timeout_s)).seq

    async def send_when_back(self, message: Message, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        """Put a fact into the inbox, however long the bus is away.

        `pause` is awaited after each failed attempt; raising from it gives the fact up.
        """
        while True:
            try:
                await self.send(message)
                return
            except BusUnavailable as error:
                logger.warning("a fact waits for the bus: %s", error)
            if pause is not None:
                await pause()

    async def ask(self, message: Message, timeout_s: float = 10.0, *, traceparent: str = "") -> AnyAnswer:
        """Put a command into the inbox and wait for the coordinator's answer.

        Raises `Refused` when the answer is a refusal, `BusUnavailable` when there is none within `timeout_s`.
        """
        return await self._asker.ask(message, timeout_s, traceparent=traceparent)

    async def answer(self, reply: str, answer: Answer) -> None:
        """Answer a command whose `Bombus-Reply` header is `reply`. At most once: who misses it asks again."""
        if not _SAFE_SUBJECT.match(reply):
            logger.warning("a command wants its answer at %r, which is no subject", reply[:100])
            return
        try:
            await self._client.publish(reply, encode_answer(answer))
        except Error as error:
            logger.warning("an answer was lost (%s); its command will be asked again", error or type(error).__name__)

    # ---- streams ----------------------------------------------------------------------------------------------

    async def ensure_streams(self, limits: StreamLimits | None = None) -> None:
        """Create the hive's streams and buckets. Several services may do it at once.

        With `limits`, streams that exist are brought to them; without, those are left as they are and what is
        missing gets the defaults. Raises `BusUnavailable` when the server lacks the storage for the limits.
        """
        for config in stream_configs(self.subjects, limits or StreamLimits()):
            if not await self._create(config) and limits is not None:
                name, body = config["name"], json.dumps(config).encode()
                await self.requests.api(f"stream {name}", f"STREAM.UPDATE.{name}", decode_info, body)

    async def ensure_leases(self) -> None:
        """Create the bucket of leases alone: it holds nothing that is missed, so it may be made anew at any time."""
        replicas = (await self.state(self.subjects.events_stream)).replicas
        for config in stream_configs(self.subjects, StreamLimits(replicas=replicas)):
            if config["name"] == lease_stream(self.subjects):
                await self._create(config)

    async def _create(self, config: Mapping[str, Any]) -> bool:
        """False when a stream of this name is there."""
        name, body = config["name"], json.dumps(config).encode()
        reply = await self.requests.api(f"stream {name}", f"STREAM.CREATE.{name}", decode_info, body, NAME_IN_USE)
        return reply.error is None

    async def state(self, stream: str) -> StreamState:
        """First and last sequence and fill of a stream, from its leader."""
        reply = await self.requests.api(f"stream {stream}", f"STREAM.INFO.{stream}", decode_info)
        found = reply.state
        return StreamState(
            found.first_seq,
            found.last_seq,
            found.messages,
            found.bytes,
            reply.config.max_bytes,
            reply.config.num_replicas,
        )

    async def stream_fill(self, stream: str) -> float:
        """Fraction of the stream's `max_bytes` that is in use: 0.0 to 1.0."""
        return (await self.state(stream)).fill

    async def purge_below(self, stream: str, seq: int, subject: str = ">") -> int:
        """Remove every message (on `subject`) before `seq`; returns how many those were."""
        if seq <= 1:
            return 0  # the server reads a purge without a position as everything
        only = {} if subject == ">" else {"filter": subject}  # with a filter it takes much longer
        body = json.dumps({"seq": seq, **only}).encode()
        return (await self.requests.api(f"purge of {stream}", f"STREAM.PURGE.{stream}", decode_purge, body)).purged

    async def last(self, stream: str, subject: str = ">") -> Stored | None:
        """The last message of a stream (of a subject in it), read from its leader: what is acknowledged is seen."""
        return await self._leader_get(stream, {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Stored:
        """The message at `seq`. Raises `LogCorrupted` when there is none."""
        answer = await self.requests.ask(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":%d}' % seq)
        if answer.headers is not None and "Nats-Sequence" in answer.headers:
            return stored_from_direct(answer)
        # A replica that lags does not have it yet: the leader decides.
        stored = await self._leader_get(stream, {"seq": seq})
        if stored is None:
            raise LogCorrupted(f"{stream} has no message at {seq}")
        return stored

    async def get_many(self, stream: str, seqs: Sequence[int]) -> list[Stored]:
        """The messages at `seqs`, in that order, many requests in flight. Raises `LogCorrupted` as `get` does."""
        found: dict[int, Stored] = {}
        wanted = iter(dict.fromkeys(seqs))
        running: set[asyncio.Task[Stored]] = set()
        largest, limit = 1, 3  # carefully until the first sizes are known
        try:
            while True:
                while len(running) < limit and (seq := next(wanted, None)) is not None:
                    running.add(asyncio.create_task(self.get(stream, seq)))
                if not running:
                    return [found[seq] for seq in seqs]
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stored = task.result()
                    found[stored.seq] = stored
                    largest = max(largest, len(stored.data))
                limit = max(3, min(GET_MESSAGES_IN_FLIGHT, GET_BYTES_IN_FLIGHT // largest))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def secret(self, name: str) -> bytes:
        """The hive's secret of this name: 32 random bytes, made by whoever asks first."""
        subject = f"$KV.{self.subjects.secrets_bucket}.{name}"
        if not _SAFE_SUBJECT.match(name):
            raise ValueError(f"{name!r} is no name for a secret")
        for _ in range(SECRET_ATTEMPTS):
            stored = await self.last(secret_stream(self.subjects), subject)
            if stored is not None:
                return stored.data
            try:
                await self.publish(
                    subject,
                    secrets.token_bytes(SECRET_BYTES),
                    msg_id=secrets.token_hex(8),
                    headers={EXPECTED_LAST_OF_SUBJECT: "0"},
                )
            except WrongSequence:
                await asyncio.sleep(0.05)  # somebody else is first; on three replicas theirs may still be on its way
        raise BusUnavailable(f"the secret {name} could neither be read nor made")

    async def put_blob(self, name: str, data: bytes) -> None:
        """Store a large object under `name`, in place of an older one."""
        from bombus.bus.blobs import put_blob

        await put_blob(self, name, data)

    async def get_blob(self, name: str) -> bytes:
        """The object of this name, checked against its digest.

        Raises `BlobMissing` when there is none, `LogCorrupted` when its bytes are not those that were stored.
        """
        from bombus.bus.blobs import get_blob

        return await get_blob(self, name)

    async def delete_blob(self, name: str) -> None:
        """Remove the object of this name, if there is one."""
        from bombus.bus.blobs import delete_blob

        await delete_blob(self, name)

    async def blob_names(self, prefix: str) -> list[str]:
        """The names of all objects that begin with `prefix`, sorted."""
        from bombus.bus.blobs import blob_names

        return await blob_names(self, prefix)

    # ---- for readers and flights of this package ----------------------------------------------------------------

    def new_inbox(self) -> str:
        """A subject that nobody else uses."""
        self._inboxes += 1
        return f"{self._inbox}.{self._inboxes}"

    @property
    def message_bytes_max(self) -> int:
        """The largest body that can be published now, in bytes."""
        return self.publisher.message_bytes_max

    @property
    def client(self) -> Any:
        """nats-py's client, for what this class has no method for."""
        return self._client

    def when_back(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` after each reconnection and when the connection is closed; returns how to stop that."""
        self._on_back.add(notify)
        return lambda: self._on_back.discard(notify)

    async def _leader_get(self, stream: str, which: Mapping[str, object]) -> Stored | None:
        reply = await self.requests.api(
            f"read from {stream}", f"STREAM.MSG.GET.{stream}", decode_get, json.dumps(which).encode(), NO_MESSAGE
        )
        if reply.error is not None:
            return None
        if reply.message is None:
            raise LogCorrupted(f"{stream} answered a read with neither a message nor an error")
        return stored_from_get(reply.message)

    def _connection_lost(self) -> None:
        if not self._client.is_closed:
            logger.warning("the bus is gone; reconnecting")
        self.publisher.connection_lost()

    def _connection_back(self) -> None:
        logger.warning("the bus is back")
        for notify in list(self._on_back):
            notify()

    def _connection_closed(self) -> None:
        self.publisher.close()
        for notify in list(self._on_back):
            notify()


class _ErrorLog:
    """Errors of the connection go to logging. One that repeats itself, as each failed attempt does, is said once."""

    def __init__(self) -> None:
        self.last = ""
        self._said: set[str] = set()

    async def note(self, error: Exception) -> None:
        self.last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        again = self.last in self._said
        if not again and len(self._said) < 100:
            self._said.add(self.last)
        logger.log(logging.DEBUG if again else logging.WARNING, "nats: %s", self.last)

    def forget(self) -> None:
        """The connection stands again: what comes now is news."""
        self._said.clear()


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)
