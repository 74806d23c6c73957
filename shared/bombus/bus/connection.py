"""A service's connection to the bus. Readers, appends and large objects have modules of their own."""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from nats.aio.client import Client
from nats.errors import Error

from bombus.bus.headers import EXPECTED_LAST_OF_SUBJECT
from bombus.bus.inbox_client import InboxClient
from bombus.bus.publisher import Publisher
from bombus.bus.requests import ApiCall, Requests
from bombus.bus.streams import StreamLimits, lease_stream, secret_stream, stream_configs
from bombus.bus.wire import (
    NAME_IN_USE,
    NO_MESSAGE,
    EpochFence,
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
from bombus.hive.inbox import Answer, encode_answer
from bombus.hive.subjects import Subjects

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.1
PENDING_BYTES_MAX = 8 << 20
GET_MESSAGES_IN_FLIGHT = 64
GET_BYTES_IN_FLIGHT = 24 << 20  # under the 64 MB that the server holds for a connection before it cuts it off
SECRET_BYTES = 32
SECRET_ATTEMPTS = 40
_SAFE_SUBJECT = re.compile(r"^[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*\Z")
_NOT_IN_A_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


class Bus:
    """A connection to the bus of one hive, made by `Bus.connect`.

    It reconnects for ever; what cannot wait for that raises `BusUnavailable`. `publisher` publishes into streams,
    `inbox` sends facts and commands to the coordinator, `requests` sends requests to the server.
    """

    def __init__(self, client: Any, subjects: Subjects, inbox: str) -> None:
        self.subjects = subjects
        self.token = inbox.rsplit(".", 1)[1]  # unique to this connection
        self.epoch_fence: EpochFence | None = None  # kept here from one append to the next
        self._client = client
        self._inbox = inbox
        self._inboxes = 0
        self.requests = Requests(client, f"{inbox}.api")
        self.publisher = Publisher(client, f"{inbox}.ack")
        self.inbox = InboxClient(client, self.publisher, subjects, f"{inbox}.ask")
        self._on_reconnect: set[Callable[[], None]] = {
            self.publisher.connection_back,
            self.requests.connection_back,
            self.inbox.connection_back,
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
        made: list[Bus] = []  # the bus below, once the client is connected

        async def disconnected() -> None:
            for bus in made:
                bus._connection_lost()

        async def reconnected() -> None:
            errors.forget()
            for bus in made:
                bus._connection_back()

        async def closed() -> None:
            for bus in made:
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
        made.append(bus)
        await bus.publisher.open()
        await bus.requests.open()
        await bus.inbox.open()
        return bus

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed, by us or by a server that does not let us in again."""
        return bool(self._client.is_closed)

    async def close(self) -> None:
        """Close at once. Whatever still waits for an acknowledgement fails with `BusUnavailable`."""
        self.publisher.close()
        await self._client.close()
        await self._end_reconnecting()

    async def _end_reconnecting(self) -> None:
        """Cancel the client's attempts to reconnect until they end.

        An attempt that fails in the moment of its cancellation hides it (`asyncio.wait_for` of Python 3.11), and the
        client would go on for ever, and keep its process from ending.
        """
        task = self._client._reconnection_task
        if task is asyncio.current_task():
            return
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def answer(self, reply: str, answer: Answer) -> None:
        """Send an answer to `reply`, the subject in a request's `Bombus-Reply` header.

        It is delivered at most once; a sender that misses it sends its request again.
        """
        if not _SAFE_SUBJECT.match(reply):
            logger.warning("a command wants its answer at %r, which is not a subject", reply[:100])
            return
        try:
            await self._client.publish(reply, encode_answer(answer))
        except Error as error:
            logger.warning("an answer was lost (%s); its command will be sent again", error or type(error).__name__)

    # ---- streams ----------------------------------------------------------------------------------------------

    async def ensure_streams(self, limits: StreamLimits | None = None) -> None:
        """Create the hive's streams and buckets. Several services may do so at once.

        With `limits`, existing streams are updated to them. Without, existing streams stay as they are and missing ones
        get the defaults. Raises `BusUnavailable` when the server lacks the storage for the limits.
        """
        for config in stream_configs(self.subjects, limits or StreamLimits()):
            if not await self._create(config) and limits is not None:
                name, body = config["name"], json.dumps(config).encode()
                await self.requests.api(ApiCall(f"stream {name}", f"STREAM.UPDATE.{name}", decode_info, body))

    async def ensure_leases(self) -> None:
        """Create only the bucket of leases. It holds nothing that could be lost, so it may be made anew at any time."""
        replicas = (await self.state(self.subjects.events_stream)).replicas
        for config in stream_configs(self.subjects, StreamLimits(replicas=replicas)):
            if config["name"] == lease_stream(self.subjects):
                await self._create(config)

    async def _create(self, config: Mapping[str, Any]) -> bool:
        """Create a stream; return False when one of this name exists."""
        name, body = config["name"], json.dumps(config).encode()
        call = ApiCall(f"stream {name}", f"STREAM.CREATE.{name}", decode_info, body, accept=NAME_IN_USE)
        reply = await self.requests.api(call)
        return reply.error is None

    async def state(self, stream: str) -> StreamState:
        """Return the first and last sequence, size and limit of a stream, read from its leader."""
        reply = await self.requests.api(ApiCall(f"stream {stream}", f"STREAM.INFO.{stream}", decode_info))
        found = reply.state
        return StreamState(
            found.first_seq,
            found.last_seq,
            found.messages,
            found.bytes,
            reply.config.max_bytes,
            reply.config.num_replicas,
        )

    async def purge_below(self, stream: str, seq: int, subject: str = ">") -> int:
        """Remove every message (on `subject`) before `seq`; return how many there were."""
        if seq <= 1:
            return 0  # the server takes a purge without a position as a purge of everything
        only = {} if subject == ">" else {"filter": subject}  # with a filter it takes much longer
        body = json.dumps({"seq": seq, **only}).encode()
        call = ApiCall(f"purge of {stream}", f"STREAM.PURGE.{stream}", decode_purge, body)
        return (await self.requests.api(call)).purged

    async def last(self, stream: str, subject: str = ">") -> Stored | None:
        """Return the last message of a stream, or of a subject in it.

        It is read from the leader, so everything acknowledged is seen.
        """
        return await self._leader_get(stream, {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Stored:
        """Return the message at `seq`. Raises `LogCorrupted` when there is none."""
        answer = await self.requests.request(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":%d}' % seq)
        if answer.headers is not None and "Nats-Sequence" in answer.headers:
            return stored_from_direct(answer)
        # A replica that lags may not have it yet: the leader decides.
        stored = await self._leader_get(stream, {"seq": seq})
        if stored is None:
            raise LogCorrupted(f"{stream} has no message at {seq}")
        return stored

    async def get_many(self, stream: str, seqs: Sequence[int]) -> list[Stored]:
        """Return the messages at `seqs`, in that order, by many requests at once. Raises as `get` does."""
        found: dict[int, Stored] = {}
        wanted = iter(dict.fromkeys(seqs))
        running: set[asyncio.Task[Stored]] = set()
        largest, limit = 1, 3  # few until the first sizes are known
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
        """Return the hive's secret of this name: 32 random bytes, made by the first caller."""
        subject = f"$KV.{self.subjects.secrets_bucket}.{name}"
        if not _SAFE_SUBJECT.match(name):
            raise ValueError(f"{name!r} is not a valid name for a secret")
        for _ in range(SECRET_ATTEMPTS):
            stored = await self.last(secret_stream(self.subjects), subject)
            if stored is not None:
                return stored.data
            try:
                await self.publisher.publish(
                    subject,
                    secrets.token_bytes(SECRET_BYTES),
                    msg_id=secrets.token_hex(8),
                    headers={EXPECTED_LAST_OF_SUBJECT: "0"},
                )
            except WrongSequence:
                await asyncio.sleep(0.05)  # another caller was first; on three replicas theirs may not be readable yet
        raise BusUnavailable(f"the secret {name} could neither be read nor made")

    # ---- for the other modules of this package ------------------------------------------------------------------

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses."""
        self._inboxes += 1
        return f"{self._inbox}.{self._inboxes}"

    @property
    def client(self) -> Any:
        """Return nats-py's client, for what this class has no method for."""
        return self._client

    def on_reconnect(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` after each reconnection and when the connection is closed; return how to stop this."""
        self._on_reconnect.add(notify)
        return lambda: self._on_reconnect.discard(notify)

    async def _leader_get(self, stream: str, which: Mapping[str, object]) -> Stored | None:
        body = json.dumps(which).encode()
        call = ApiCall(f"read from {stream}", f"STREAM.MSG.GET.{stream}", decode_get, body, accept=NO_MESSAGE)
        reply = await self.requests.api(call)
        if reply.error is not None:
            return None
        if reply.message is None:
            raise LogCorrupted(f"{stream} answered a read with neither a message nor an error")
        return stored_from_get(reply.message)

    def _connection_lost(self) -> None:
        if not self._client.is_closed:
            logger.warning("the connection to the bus is lost; reconnecting")
        self.publisher.connection_lost()

    def _connection_back(self) -> None:
        logger.warning("the bus is back")
        for notify in list(self._on_reconnect):
            notify()

    def _connection_closed(self) -> None:
        self.publisher.close()
        for notify in list(self._on_reconnect):
            notify()


class _ErrorLog:
    """Log the connection's errors, and one that repeats itself, as each failed attempt does, as a warning only once."""

    def __init__(self) -> None:
        self.last = ""
        self._logged: set[str] = set()

    async def note(self, error: Exception) -> None:
        self.last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        repeated = self.last in self._logged
        if not repeated and len(self._logged) < 100:
            self._logged.add(self.last)
        logger.log(logging.DEBUG if repeated else logging.WARNING, "nats: %s", self.last)

    def forget(self) -> None:
        """Log every error again, now that the connection is back."""
        self._logged.clear()


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)
