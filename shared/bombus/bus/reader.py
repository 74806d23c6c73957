"""Reads a stream from a given position: every message once, in order, across restarts of the server.

This uses an ephemeral pull consumer without acknowledgements. nats-py's `fetch` costs a timer for each message, and its
ordered consumer drops messages silently. Here messages are requested with credits and arrive by callback, and their
delivery sequence is checked. After any gap, error status or silence, a new consumer continues after the last message
received in order. The new consumer gets a new name: in a cluster, the server that has just died may still own the old
name. `bulk` reads a large backlog.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Self

from nats.errors import Error as NatsError

from bombus.bus.bulk import BulkStopped, StreamRange, read_bulk
from bombus.bus.connection import Bus
from bombus.bus.requests import ApiCall
from bombus.bus.wire import (
    NO_HEADERS,
    LazyHeaders,
    MessagePlace,
    Stored,
    decode_consumer,
    parse_headers,
)
from bombus.errors import BombusError, BusUnavailable, StreamEndLost

logger = logging.getLogger(__name__)

CREDIT_MESSAGES = 5_000
CREDIT_BYTES = 8 << 20  # limit of each request: without it, large messages exceed the server's limit for a connection
EXPIRES_S = 2.0
HEARTBEAT_S = 0.5
SILENCE_S = 2.0
CREATE_S = 0.5  # time limit for creating a consumer, doubled with each attempt up to CREATE_S_MAX
CREATE_S_MAX = 2.0
BULK_MESSAGES = 5_000  # size of a backlog for which a separate connection pays off
INACTIVE_S = 30.0
_PAUSE_S = 0.05
_NS = 1_000_000_000
_MESSAGE_ROOM_BYTES = 64 << 10  # room for the subject, reply and headers of a largest message


class Reader:
    """Reads the messages of `stream` from `start_seq` on, or from the first one that is still kept.

    `after` is the message before `start_seq`, if known. The stream must still have that message, and later the last
    message that was read (R6).

    Use it with `async with`, or call `close`. One task reads at a time. Reading ahead is bounded (15,000 messages, 24
    MB): beyond that, nothing is requested until `read` is called.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        start_seq: int = 1,
        filter_subject: str | None = None,
        after: MessagePlace | None = None,
    ) -> None:
        if start_seq < 1:
            raise ValueError(f"a stream's first sequence is 1, not {start_seq}")
        self.stream = stream
        self._bus = bus
        self._filter = filter_subject
        self._last = start_seq - 1  # the last stream sequence received
        self._before = MessagePlace(self._last) if after is None else after
        self._newest: Stored | None = None  # the last message received, or None before the first
        self.unsure = 0  # messages up to this one arrived over an earlier connection, and may be gone by now
        self._buffer: list[Stored] = []
        self._buffer_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BombusError | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._inbox = bus.new_inbox()
        self._generation = 0
        # The current consumer:
        self._consumer = ""  # its name, or "" while there is none
        self._delivered = 0  # its delivery sequence
        self._credit = 0  # messages requested and not yet delivered
        self._active = False
        self._wake = asyncio.Event()

    async def read(self, max_messages: int = CREDIT_MESSAGES) -> list[Stored]:
        """Wait for at least one message and return those that have arrived, in order. A cancelled read loses nothing.

        Raises `StreamEndLost` if the stream has lost the message that was read last, `BusUnavailable` if the bus was
        closed, and `ServerRefused` if there is no such stream. While the bus is only disconnected, the call waits.
        """
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        while not self._buffer:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._buffer) <= max_messages:
            batch, self._buffer, self._buffer_bytes = self._buffer, [], 0
        else:
            batch = self._buffer[:max_messages]
            del self._buffer[:max_messages]
            self._buffer_bytes -= sum(len(stored.data) for stored in batch)
        if self._wants_more():
            self._wake.set()
        return batch

    async def __aiter__(self) -> AsyncIterator[Stored]:
        while True:
            for stored in await self.read():
                yield stored

    async def close(self) -> None:
        """Stop reading. The server removes the consumer immediately, or after a while if it cannot be reached."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- what arrives -------------------------------------------------------------------------------------------

    def _on_message(self, subject: str, reply: str, data: bytes, head: bytes) -> None:
        if not reply:
            self._on_status(subject, head)
            return
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>; newer servers have
        # <domain>.<account> after ACK.
        tokens = reply.split(".")
        at = 3 if len(tokens) == 9 else 5
        if tokens[at] != self._consumer:
            return  # from a consumer that was abandoned
        self._active = True
        delivered = int(tokens[at + 3])
        if delivered != self._delivered + 1:
            self._give_up(f"delivery {delivered} came after {self._delivered}")
            return
        self._delivered = delivered
        self._credit -= 1
        seq = int(tokens[at + 2])
        if seq > self._last:
            self._last = seq
            headers = LazyHeaders(head) if head else NO_HEADERS
            self._newest = Stored(seq, subject, data, headers, int(tokens[at + 4]))
            self._buffer.append(self._newest)
            self._buffer_bytes += len(data)
            self._notify()
        if self._wants_more():
            self._wake.set()

    def _on_status(self, subject: str, head: bytes) -> None:
        if not subject.endswith(f".{self._generation}") or not self._consumer:
            return
        status = head.partition(b"\r\n")[0].decode().removeprefix("NATS/1.0 ")  # the code, and what it means
        self._active = True
        if status.startswith("100"):  # heartbeat
            return
        unused = parse_headers(head).get("Nats-Pending-Messages")
        if status.startswith(("404", "408", "409")) and unused is not None:
            self._credit -= int(unused)  # the request has reached its limit of time or bytes
            self._wake.set()
            return
        self._give_up(f"status {status}")

    def _connection_back(self) -> None:
        self.unsure = self._last
        self._give_up("a new connection")

    def _give_up(self, why: str) -> None:
        """Stop listening to this consumer; the keeper creates another."""
        if self._consumer:
            logger.info("reader of %s at %d: making a new consumer: %s", self.stream, self._last, why)
        self._consumer = ""
        self._wake.set()

    def _wants_more(self) -> bool:
        return (
            self._credit <= CREDIT_MESSAGES
            and len(self._buffer) < CREDIT_MESSAGES
            and self._buffer_bytes < CREDIT_BYTES
        )

    # ---- the keeper: makes consumers and gives them credit ----------------------------------------------------------

    async def _keep(self) -> None:
        client = self._bus.client
        stop_listening = self._bus.on_reconnect(self._connection_back)
        subscription: Any = None
        try:
            subscription = await client.receive(f"{self._inbox}.*", self._on_message)
            await self._read_backlog()
            while True:
                await self._make_consumer()
                await self._give_credit()
        except BombusError as error:
            self._fail(error)
        except Exception as error:  # nothing awaits the keeper, so `read` must raise the error
            logger.exception("reader of %s", self.stream)
            self._fail(BusUnavailable(f"reader of {self.stream}: {error!r}"))
        finally:
            stop_listening()
            await self._unsubscribe(subscription)

    async def _read_backlog(self) -> None:
        """Read the backlog in bulk if it is large. Wherever the bulk read stops, a consumer continues."""
        server = self._bus.client.connected_url
        if self._filter is not None or server is None:
            return
        try:
            state = await self._bus.state(self.stream)
            first = max(self._last + 1, state.first_seq)
            if state.last_seq - first < BULK_MESSAGES:
                return
            inbox = self._bus.new_inbox()
            await self._create(_flat(inbox), first)
            backlog = StreamRange(
                self.stream,
                _flat(inbox),
                inbox,
                first,
                state.last_seq,
                self._credit_bytes(),
                self._bus.requests.api_prefix,
            )
            try:
                async with aclosing(read_bulk(server, backlog)) as groups:
                    async for group in groups:
                        await self._take(group)
            finally:
                await self._delete(backlog.consumer)
            logger.info("reader of %s: read %d to %d in bulk", self.stream, first, state.last_seq)
        except (BulkStopped, BusUnavailable, OSError) as error:
            logger.info("reader of %s at %d: stopped reading in bulk, because of %r", self.stream, self._last, error)

    async def _take(self, group: list[Stored]) -> None:
        """Append a group to the buffer, and return when there is room for another one."""
        self._newest = group[-1]
        self._last = self._newest.seq
        self._buffer += group
        self._buffer_bytes += sum([len(stored.data) for stored in group])
        self._notify()
        while not self._wants_more():
            self._wake.clear()
            await self._wake.wait()

    async def _make_consumer(self) -> None:
        """Create a consumer that starts after the last message, waiting while the bus cannot be reached.

        Each attempt uses a new name. If a cluster has assigned a consumer to a server that has just died, the
        consumer's name stays taken, and requests to it go unanswered until that server is back.
        """
        timeout_s = CREATE_S
        while True:
            self._generation += 1
            name = f"{_flat(self._inbox)}-{self._generation}"
            try:
                await self._create(name, self._last + 1, timeout_s)
                await self._check_end()
                break
            except BusUnavailable as unavailable:
                if self._bus.is_closed:
                    raise
                level = logging.WARNING if timeout_s == CREATE_S else logging.INFO  # warn only once
                logger.log(level, "reader of %s is waiting: %s", self.stream, unavailable)
                timeout_s = min(2 * timeout_s, CREATE_S_MAX)
                await asyncio.sleep(_PAUSE_S)
        self._delivered = 0
        self._credit = 0
        self._active = True
        self._consumer = name

    async def _create(self, name: str, start_seq: int, timeout_s: float = CREATE_S_MAX) -> None:
        config: dict[str, object] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start_seq,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(INACTIVE_S * _NS),
            "mem_storage": True,
            "num_replicas": 1,
        }
        subject = f"CONSUMER.CREATE.{self.stream}.{name}"
        if self._filter is not None:
            config["filter_subject"] = self._filter
            subject += f".{self._filter}"
        body = json.dumps({"stream_name": self.stream, "config": config}).encode()
        what = f"reader of {self.stream}"
        await self._bus.requests.api(ApiCall(what, subject, decode_consumer, body), timeout_s)

    async def _delete(self, name: str) -> None:
        """Delete a consumer now; the server would otherwise do so later."""
        if self._bus.is_connected:
            await self._bus.client.publish(f"{self._bus.requests.api_prefix}.CONSUMER.DELETE.{self.stream}.{name}")

    async def _check_end(self) -> None:
        """Raise `StreamEndLost` if the stream has lost its end: the server would accept a position beyond the end
        (R6)."""
        place = self._before if self._newest is None else self._newest.place
        if place.seq > 0 and not await self._bus.is_kept(self.stream, place):
            raise StreamEndLost(self.stream, place.seq)

    async def _give_credit(self) -> None:
        """Request messages whenever there is room; return when a new consumer is needed."""
        loop = asyncio.get_running_loop()
        check_at = loop.time() + SILENCE_S
        while self._consumer:
            while self._consumer and self._wants_more():
                await self._pull()
            try:
                async with asyncio.timeout_at(check_at):
                    await self._wake.wait()
                self._wake.clear()
            except TimeoutError:
                if self._credit > 0 and not self._active:
                    self._give_up("silence")
                self._active = False
                check_at = loop.time() + SILENCE_S

    async def _pull(self) -> None:
        request = {
            "batch": CREDIT_MESSAGES,
            "max_bytes": self._credit_bytes(),
            "expires": int(EXPIRES_S * _NS),
            "idle_heartbeat": int(HEARTBEAT_S * _NS),
        }
        self._credit += CREDIT_MESSAGES
        try:
            await self._bus.client.publish(
                f"{self._bus.requests.api_prefix}.CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}",
                json.dumps(request).encode(),
                reply=f"{self._inbox}.{self._generation}",
            )
        except NatsError as error:
            self._give_up(str(error))

    def _credit_bytes(self) -> int:
        return max(CREDIT_BYTES, int(self._bus.client.max_payload) + _MESSAGE_ROOM_BYTES)

    def _fail(self, error: BombusError) -> None:
        self._failure = error
        self._notify()

    def _notify(self) -> None:
        """Wake the task that waits in `read`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _unsubscribe(self, subscription: Any) -> None:
        consumer, self._consumer = self._consumer, ""
        if subscription is None or not self._bus.is_connected:
            return
        await subscription.unsubscribe()
        if consumer:
            await self._delete(consumer)


def _flat(inbox: str) -> str:
    """Return the unique part of an inbox, to be used as a consumer's name."""
    return "-".join(inbox.rsplit(".", 2)[1:])
