"""A service's connection to the bus. Readers, appends and large objects have their own modules."""

import asyncio
import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from nats.errors import Error

from bombus.bus.accounts import RECOGNIZING, answer_subjects, api_prefix
from bombus.bus.headers import EXPECTED_LAST_OF_SUBJECT, check_size
from bombus.bus.inbox_client import InboxClient
from bombus.bus.lean_nats import LeanClient, allow_websockets
from bombus.bus.publisher import Publisher
from bombus.bus.requests import ApiCall, Requests
from bombus.bus.streams import (
    changes_of,
    lease_stream,
    limited_streams,
    secret_stream,
    stream_configs,
)
from bombus.bus.syncing import Syncing
from bombus.bus.window import Window
from bombus.bus.wire import (
    NAME_IN_USE,
    NO_HEADERS,
    NO_MESSAGE,
    EpochFence,
    MessagePlace,
    ServerRefused,
    Stored,
    StreamState,
    WrongSequence,
    decode_config,
    decode_get,
    decode_info,
    decode_purge,
    stored_from_direct,
    stored_from_get,
)
from bombus.bus_address import BusUser, check_bus_address, user_of, without_login
from bombus.config.streams import AS_THEY_ARE, PAYLOAD_BYTES, StreamLimits, limit_flag
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.figures import byte_size
from bombus.hive.generation import replica_key
from bombus.hive.inbox import Answer, Refusal, encode_answer
from bombus.hive.subjects import REPLICA_KEY, SIGNING_SECRET, Subjects

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.1
LOOK_AGAIN_S = 0.02
LOOK_S = 1.0  # how long a closed port may take to refuse a connection
DEFAULT_PORT = 4222
PENDING_BYTES_MAX = 8 << 20
GET_MESSAGES_IN_FLIGHT = 64
GET_BYTES_IN_FLIGHT = 16 << 20  # well below the 64 MB that the server buffers before it cuts off a connection
GET_BYTES_FIRST = GET_BYTES_IN_FLIGHT // 4  # assumed size of each message until the first has arrived
GET_ROOM_S = 60.0  # how long to wait for other readers' messages to arrive
GETS_WAITING_MAX = 10_000
SECRET_BYTES = 32
PAYLOAD_BYTES_MIN = 64 << 10  # with less, not even headers, events and snapshots fit
STREAMS_WAIT_S = 60.0  # how long to wait for another service to create the streams
SECRET_ATTEMPTS = 40
REPLICA_KEY_AGAIN_S = 1.0
REPLICA_KEY_ANSWER_S = 2.0
ANSWER_PREFIXES = ("_INBOX.", "_R_.")  # of clients, and of the server for requests from another account
_SAFE_SUBJECT = re.compile(r"^[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*\Z")
_NOT_IN_A_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


class Bus:
    """A connection to the bus of one hive, created by `Bus.connect`.

    It reconnects for as long as it takes; calls that cannot wait for the reconnection raise `BusUnavailable`.
    `publisher` publishes into streams, `inbox` sends facts and commands to the coordinator, `requests` sends requests
    to the server, and `syncing` waits until what is stored would survive a power cut.
    """

    def __init__(self, client: Any, subjects: Subjects, inbox: str, user: BusUser | None = None) -> None:
        self.subjects = subjects
        self.token = inbox.rsplit(".", 1)[1]  # unique to this connection
        self.epoch_fence: EpochFence | None = None  # kept between appends
        self._user = user
        self._client = client
        self._inbox = inbox
        self._inboxes = 0
        self._getting = Window(GET_MESSAGES_IN_FLIGHT, GET_BYTES_IN_FLIGHT, GETS_WAITING_MAX)
        self.requests = Requests(client, f"{inbox}.api", api_prefix=api_prefix(user))
        self.syncing = Syncing(client, self.requests)
        self.publisher = Publisher(client, f"{inbox}.ack")
        self.publisher.syncing = self.syncing
        self.inbox = InboxClient(client, self.publisher, subjects, f"{inbox}.ask")
        self._on_reconnect: set[Callable[[], None]] = {
            self.publisher.connection_back,
            self.requests.connection_back,
            self.inbox.connection_back,
        }

    @classmethod
    async def connect(
        cls, url: str, hive: str, name: str = "bombus", timeout_s: float = 10.0, *, patient: bool = True
    ) -> Self:
        """Connect to `url` (several servers are separated by commas). `name` is shown in the server's monitoring.

        Raises `BusUnavailable` if no server answers within `timeout_s`, or, unless `patient`, immediately if nothing
        listens at the address. Raises `Refused` if the server accepts only tiny messages or the URL cannot be read, and
        `ValueError` for a bad hive name.
        """
        check_bus_address(url)
        subjects = Subjects(hive)
        if not patient:
            await _look_for_server(url)
        token = secrets.token_hex(8)
        user = user_of(url, hive)
        prefix = answer_subjects(hive, user or _NOT_IN_A_TOKEN.sub("-", name))
        client = LeanClient(is_tls=url.startswith("tls://"))
        errors = _ErrorLog()
        made: list[Bus] = []  # contains the bus created below, once the client is connected

        async def disconnected() -> None:
            for bus in made:
                bus._connection_lost()

        async def reconnected() -> None:
            errors.forget()
            _tell_small_payload(client.max_payload)
            for bus in made:
                bus._connection_back()

        async def closed() -> None:
            for bus in made:
                bus._connection_closed()

        allow_websockets(url)
        connecting = asyncio.create_task(
            _connect(
                client,
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
        )
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(connecting)
        except BaseException as error:
            await _end(connecting)
            await _close(client)
            if not isinstance(error, (TimeoutError, OSError, Error)):
                raise
            raise BusUnavailable(
                f"no NATS server at {without_login(url)} accepted the connection within {timeout_s:g} s "
                f"({errors.last or error}); is it running, and are the user and password right?"
            ) from error
        await _check_payload(client)
        _tell_small_payload(client.max_payload)
        bus = cls(client, subjects, f"{prefix}.{token}", user)
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
        """Whether the connection was closed, by us or by a server that refuses to let us reconnect."""
        return bool(self._client.is_closed)

    async def close(self) -> None:
        """Close immediately. Messages still waiting for an acknowledgement fail with `BusUnavailable`."""
        self.publisher.close()
        await _close(self._client)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def answer(self, reply: str, answer: Answer) -> None:
        """Send an answer to `reply`, the subject in a request's `Bombus-Reply` header.

        The answer is delivered at most once; a client that misses it repeats its request. An answer over the server's
        size limit is replaced by a refusal that says so. A subject that could be a stream's gets no answer: we may
        write where the caller may not.
        """
        if not _SAFE_SUBJECT.match(reply) or not reply.startswith(ANSWER_PREFIXES):
            logger.warning("a command asks for its answer at %r, where no answers go", reply[:100])
            return
        try:
            await self._client.publish(reply, self._answer_that_fits(answer))
        except Error as error:
            logger.warning("an answer was lost (%s); its command will be sent again", error or type(error).__name__)

    def _answer_that_fits(self, answer: Answer) -> bytes:
        body = encode_answer(answer)
        try:
            check_size(self._client.max_payload, "the answer", body, NO_HEADERS)
        except Refused as refused:
            return encode_answer(Refusal(position=answer.position, code=refused.code, why=refused.why))
        return body

    async def own_address(self) -> str:
        """Return the address from which this machine reaches the bus. Raises `BusUnavailable` if the bus cannot be
        reached."""
        server = self._client.connected_url
        if server is None:
            raise BusUnavailable("the bus is not connected")
        try:
            async with asyncio.timeout(LOOK_S):
                _, writer = await asyncio.open_connection(server.hostname, server.port or DEFAULT_PORT)
        except OSError as error:
            raise BusUnavailable(f"the bus cannot be reached at {server.hostname}: {error}") from error
        writer.close()
        return str(writer.get_extra_info("sockname")[0])

    # ---- streams ----------------------------------------------------------------------------------------------

    async def ensure_streams(self, limits: StreamLimits = AS_THEY_ARE) -> None:
        """Create the hive's streams and buckets, and apply any `limits` that are given to existing ones.

        Several services may do this at the same time. Raises `BusUnavailable` if the servers lack the storage for the
        limits or are too few for the replicas, and `Refused` if a stream holds more than its new limit, or if replicas
        are requested from a single server.
        """
        for config in stream_configs(self.subjects, limits):
            name = config["name"]
            changes = changes_of(self.subjects, name, limits)
            if not await self._create(config) and changes:
                await self._change(name, changes)

    async def until_streams_exist(self, timeout_s: float = STREAMS_WAIT_S) -> None:
        """Wait until a coordinator or `bombus up` has made the streams. Raises `BusUnavailable` after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self.state(secret_stream(self.subjects))  # created second to last
                return
            except (BusUnavailable, ServerRefused) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise BusUnavailable(
                        f"hive {self.subjects.hive} has no streams after {timeout_s:g} s ({error}): "
                        "is a coordinator running?"
                    ) from error
            await asyncio.sleep(0.2)

    async def _change(self, stream: str, changes: Mapping[str, int]) -> None:
        info = await self.requests.api(ApiCall(f"stream {stream}", f"STREAM.INFO.{stream}", decode_config))
        before = {name: info.config.get(name) for name in changes}
        if before == changes:
            return
        limit = changes.get("max_bytes", info.state.bytes)
        if limit < info.state.bytes:
            flag = next(limit_flag(short) for short, name in limited_streams(self.subjects).items() if name == stream)
            raise Refused(
                Code.BAD_CONFIG,
                f"{flag} {limit} is refused: stream {stream} holds {info.state.bytes} bytes, and none are dropped",
            )
        body = json.dumps({**info.config, **changes}).encode()
        await self.requests.api(ApiCall(f"stream {stream}", f"STREAM.UPDATE.{stream}", decode_info, body))
        logger.info("stream %s was changed from %s to %s", stream, before, dict(changes))

    async def ensure_leases(self) -> None:
        """Create only the bucket of leases. It holds nothing that could be lost, so it may be recreated at any time."""
        replicas = (await self.state(self.subjects.events_stream)).replicas
        for config in stream_configs(self.subjects, StreamLimits(replicas=replicas)):
            if config["name"] == lease_stream(self.subjects):
                await self._create(config)

    async def _create(self, config: Mapping[str, Any]) -> bool:
        """Create a stream. Return False if its name is in use."""
        name, body = config["name"], json.dumps(config).encode()
        call = ApiCall(f"stream {name}", f"STREAM.CREATE.{name}", decode_info, body, accept=NAME_IN_USE)
        reply = await self.requests.api(call)
        return reply.error is None

    async def state(self, stream: str) -> StreamState:
        """Return the first and last sequence, size and limit of a stream, read from its leader."""
        reply = await self.requests.api(ApiCall(f"stream {stream}", f"STREAM.INFO.{stream}", decode_info))
        return reply.stream_state

    async def limited_states(self) -> dict[str, StreamState]:
        """Return the state of each stream whose size the operator sets, by its short name, such as `events`."""
        return {short: await self.state(name) for short, name in limited_streams(self.subjects).items()}

    async def purge_below(self, stream: str, seq: int, subject: str = ">") -> int:
        """Remove every message (on `subject`) before `seq`. Return how many were removed."""
        if seq <= 1:
            return 0  # the server takes a purge without a position to mean everything
        only = {} if subject == ">" else {"filter": subject}  # a filter makes a purge much slower
        body = json.dumps({"seq": seq, **only}).encode()
        call = ApiCall(f"purge of {stream}", f"STREAM.PURGE.{stream}", decode_purge, body)
        return (await self.requests.api(call)).purged

    async def last(self, stream: str, subject: str = ">") -> Stored | None:
        """Return the last message of a stream, or of a subject in it.

        It is read from the leader, so every acknowledged message is seen.
        """
        return await self._leader_get(stream, {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Stored:
        """Return the message at `seq`. Raises `LogCorrupted` if there is none."""
        answer = await self.requests.request(f"{self.requests.api_prefix}.DIRECT.GET.{stream}", b'{"seq":%d}' % seq)
        if answer.headers is not None and "Nats-Sequence" in answer.headers:
            return stored_from_direct(answer)
        # A replica that lags may not have the message yet, so ask the leader.
        stored = await self._leader_get(stream, {"seq": seq})
        if stored is None:
            raise LogCorrupted(f"{stream} has no message at {seq}")
        return stored

    async def is_kept(self, stream: str, place: MessagePlace) -> bool:
        """Return whether a stream still has a message, or has purged it. In either case, the stream has not lost its
        end."""
        state = await self.state(stream)
        if not state.first_seq <= place.seq <= state.last_seq:
            return place.seq < state.first_seq
        try:
            return not place.digest or (await self.get(stream, place.seq)).place == place
        except LogCorrupted:
            return False

    async def get_many(self, stream: str, seqs: Sequence[int]) -> list[Stored]:
        """Return the messages at `seqs`, in that order, with many requests in flight. Raises the same errors as `get`.

        Messages that follow one another are read with one request. All readers on this connection share one limit on
        what is in flight.
        """
        found: dict[int, Stored] = {}
        wanted = deque(_runs(seqs))
        running: set[asyncio.Task[tuple[range, list[Stored]]]] = set()
        largest = 1
        try:
            while wanted or running:
                while wanted:
                    run = wanted[0]
                    size = largest if found and len(run) == 1 else max(GET_BYTES_FIRST, largest)
                    if not self._getting.try_acquire(size):
                        if running:
                            break
                        await self._getting.acquire(size, GET_ROOM_S)
                    running.add(self._start_get(stream, wanted.popleft(), size))
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    run, messages = task.result()
                    found |= {stored.seq: stored for stored in messages}
                    largest = max(largest, *(len(stored.data) for stored in messages))
                    if rest := run[len(messages) :]:
                        wanted.append(rest)
            return [found[seq] for seq in seqs]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start_get(self, stream: str, run: range, size: int) -> asyncio.Task[tuple[range, list[Stored]]]:
        """Get messages for which `size` bytes of the window were acquired, and then release those bytes."""
        task = asyncio.create_task(self._get_run(stream, run, size))
        task.add_done_callback(lambda _: self._getting.release(size))
        return task

    async def _get_run(self, stream: str, run: range, size: int) -> tuple[range, list[Stored]]:
        """Return a run of sequences, and the messages at the first of them: as many as fit into `size` bytes, and at
        least one."""
        messages: list[Stored] = []
        if len(run) > 1:
            body = b'{"seq":%d,"batch":%d,"max_bytes":%d}' % (run.start, len(run), size)
            for answer in await self.requests.request_batch(f"{self.requests.api_prefix}.DIRECT.GET.{stream}", body):
                stored = stored_from_direct(answer)
                if stored.seq == run.start + len(messages):
                    messages.append(stored)
        return run, messages or [await self.get(stream, run.start)]

    async def secret(self, name: str) -> bytes:
        """Return the hive's secret `name`: 32 random bytes, created by the first caller.

        If the secret was deleted from its bucket, the next caller creates a new one.
        """
        subject = f"$KV.{self.subjects.secrets_bucket}.{name}"
        if not _SAFE_SUBJECT.match(name):
            raise ValueError(f"{name!r} is not a valid name for a secret")
        for _ in range(SECRET_ATTEMPTS):
            stored = await self.last(secret_stream(self.subjects), subject)
            if stored is not None and stored.data:  # a deleted key has an empty value
                await self.syncing.wait()  # another caller may have just created it
                return stored.data
            try:
                await self.publisher.publish(
                    subject,
                    secrets.token_bytes(SECRET_BYTES),
                    msg_id=secrets.token_hex(8),
                    headers={EXPECTED_LAST_OF_SUBJECT: str(stored.seq) if stored is not None else "0"},
                )
            except WrongSequence:
                await asyncio.sleep(0.05)  # another caller was first; on three replicas, theirs may not be readable yet
        raise BusUnavailable(f"the secret {name} could be neither read nor created")

    async def hand_out_replica_key(self) -> None:
        """Write the key for replicas where services read it that may not read the secret behind it."""
        subject, key = f"$KV.{self.subjects.secrets_bucket}.{REPLICA_KEY}", await self._derived_replica_key()
        for _ in range(SECRET_ATTEMPTS):
            stored = await self.last(secret_stream(self.subjects), subject)
            if stored is not None and stored.data == key.encode():
                return
            try:
                expected = {EXPECTED_LAST_OF_SUBJECT: str(stored.seq) if stored is not None else "0"}
                await self.publisher.publish(subject, key.encode(), msg_id=secrets.token_hex(8), headers=expected)
            except WrongSequence:
                await asyncio.sleep(0.05)  # another service was first
        raise BusUnavailable("the key for replicas could not be written")

    async def replica_key(self) -> str:
        """Return the key by which replicas recognize gateways.

        The logins of trainers and replicas can read only this key. They wait until a coordinator or gateway has written
        it.
        """
        if self._user not in RECOGNIZING:
            return await self._derived_replica_key()
        stream = secret_stream(self.subjects)
        call = f"{self.requests.api_prefix}.DIRECT.GET.{stream}.$KV.{self.subjects.secrets_bucket}.{REPLICA_KEY}"
        level = logging.WARNING
        while True:
            try:
                answer = await self.requests.request(call, timeout_s=REPLICA_KEY_ANSWER_S)
            except BusUnavailable:
                # Until `bombus init` is run again after an upgrade, this login may read the secret instead.
                return await self._derived_replica_key()
            if "Nats-Sequence" in (answer.headers or {}):
                return answer.data.decode()
            logger.log(level, "waiting for a coordinator or gateway of this release to write the key for replicas")
            level = logging.DEBUG
            await asyncio.sleep(REPLICA_KEY_AGAIN_S)

    async def _derived_replica_key(self) -> str:
        return replica_key(await self.secret(SIGNING_SECRET))

    # ---- for the other modules of this package ------------------------------------------------------------------

    def new_inbox(self) -> str:
        """Return a subject that nothing else uses."""
        self._inboxes += 1
        return f"{self._inbox}.{self._inboxes}"

    @property
    def client(self) -> Any:
        """nats-py's client, for calls that this class has no method for."""
        return self._client

    def on_reconnect(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` after each reconnection and when the connection closes. Return a function that ends the
        subscription."""
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
        self.syncing.connection_lost()

    def _connection_back(self) -> None:
        logger.warning("the bus is back")
        for notify in list(self._on_reconnect):
            notify()

    def _connection_closed(self) -> None:
        self.syncing.connection_lost()
        self.publisher.close()
        for notify in list(self._on_reconnect):
            notify()


class _ErrorLog:
    """Logs the connection's errors. An error that repeats, for instance with each attempt to reconnect, is logged as a
    warning only once."""

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
        """Log every error as a warning again, now that the connection is back."""
        self._logged.clear()


def _runs(seqs: Iterable[int]) -> Iterator[range]:
    """Yield the sequences as runs without gaps."""
    run = range(0)
    for seq in sorted(set(seqs)):
        if run and seq != run.stop:
            yield run
            run = range(0)
        run = range(run.start if run else seq, seq + 1)
    if run:
        yield run


async def _look_for_server(url: str) -> None:
    """Raise `BusUnavailable` if nothing listens on any of these servers' ports."""
    for each in url.split(","):
        parts = urlsplit(each if "//" in each else f"//{each}")
        try:
            async with asyncio.timeout(LOOK_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_PORT)
            writer.close()
        except ConnectionRefusedError:
            continue
        except OSError:  # such as a name that cannot be resolved yet: the client will find out
            pass
        return
    raise BusUnavailable(f"no NATS server listens at {without_login(url)}")


async def _connect(client: Any, **options: Any) -> None:
    await client.connect(**options)
    while not client.is_connected:  # nats-py also returns if the server has closed the connection without a message
        await asyncio.sleep(LOOK_AGAIN_S)


async def _close(client: Any) -> None:
    with suppress(OSError, RuntimeError):  # for data that had not been sent when the connection was lost; uvloop's
        await client.close()
    await _end(client._reconnection_task)


async def _end(task: asyncio.Task[Any] | None) -> None:
    """Cancel one of the client's tasks, repeatedly until it ends.

    If an attempt to connect fails just as it is cancelled, the cancellation is lost (`asyncio.wait_for` in Python
    3.11). The client would then run forever and keep its process from ending.
    """
    if task is asyncio.current_task():
        return
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)


async def _check_payload(client: LeanClient) -> None:
    """Raise `Refused`, and close the client, if the server accepts only tiny messages."""
    if client.max_payload < PAYLOAD_BYTES_MIN:
        await _close(client)
        raise Refused(
            Code.BAD_CONFIG,
            f"the NATS server takes messages of up to {client.max_payload} bytes (its max_payload), but bombus "
            f"needs at least {PAYLOAD_BYTES_MIN}: set max_payload: {PAYLOAD_BYTES} in its configuration",
        )


def _tell_small_payload(limit: int) -> None:
    if limit < PAYLOAD_BYTES:
        logger.warning(
            "the NATS server takes messages of up to %s (its max_payload), but bombus expects %s: larger "
            "calls and batches are refused until max_payload: %d is in the server's configuration",
            byte_size(limit),
            byte_size(PAYLOAD_BYTES),
            PAYLOAD_BYTES,
        )
