"""Publishes into streams: one inbox receives all acknowledgements, the window is bounded, and a message that is resent
keeps its id.

This uses neither nats-py's `publish_async`, which loses failures and leaks its slots, nor its `publish`, which costs a
task and a timer for each message (bench/bus.py measures them).
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    OutboundBufferLimitError,
)

from bombus.bus.headers import MSG_ID, check_size
from bombus.bus.syncing import Syncing
from bombus.bus.window import Window
from bombus.bus.wire import AckLost, NotNow, PubAck, ack_of
from bombus.errors import BombusError, BusUnavailable, Code, Refused

logger = logging.getLogger(__name__)

MESSAGES_MAX = 4096  # the most messages in flight
BYTES_MAX = 32 << 20
SWEEP_S = 0.1
HEADER_ROOM_BYTES = 4096  # reserved for headers that are not known yet
_OVERHEAD_BYTES = 256
_NO_RESPONDER = "no stream accepts this subject, or its stream has no leader now"


class _Entry(msgspec.Struct, eq=False):
    """A message that waits for its acknowledgement. `failure` is why the last attempt was not acknowledged, if
    known."""

    subject: str
    body: bytes
    headers: dict[str, str]
    reply: str
    future: asyncio.Future[PubAck]
    size: int
    sent_at: float
    begun_at: float
    timeout_s: float
    repeat: bool
    synced: bool
    failure: BombusError | None = None

    @property
    def late(self) -> BombusError:
        """The error to raise when the message has waited too long."""
        why = f"{self.subject}: no acknowledgement within {self.timeout_s:g} s"
        return BusUnavailable(why) if self.failure is None else self.failure


class Publisher:
    """Publishes over one connection, whose owner calls `connection_lost` and `connection_back`."""

    def __init__(
        self,
        client: Any,
        inbox: str,
        *,
        window: Window | None = None,
        repeat_after_s: float = 2.0,
        room_wait_s: float = 5.0,
    ) -> None:
        self._client = client
        self.syncing: Syncing | None = None  # set by the owner: acknowledgements wait for its syncs
        self._repeat_after_s = repeat_after_s
        self._room_wait_s = room_wait_s
        self._prefix = f"{inbox}."
        self._window = window or Window(MESSAGES_MAX, BYTES_MAX)
        self._waiting: dict[int, _Entry] = {}
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._resending: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        await self._client.receive(f"{self._prefix}*", self._on_ack)

    async def publish(  # noqa: PLR0913 - the options of a message
        self,
        subject: str,
        body: bytes,
        *,
        msg_id: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        synced: bool = True,
    ) -> PubAck:
        """Store one message and return its position. It is resent under `msg_id` until it is acknowledged.

        With `--durability power`, it is on the disk when this returns, unless `synced` is false.

        Raises `BusUnavailable` if there is no acknowledgement within `timeout_s` or the stream is full, `WrongSequence`
        if the stream is not at the sequence that `headers` expect, and `Refused` if the message is over the server's
        size limit.
        """
        stored = self.submit(subject, body, msg_id=msg_id, headers=headers, timeout_s=timeout_s, synced=synced)
        return await (await stored)

    async def submit(  # noqa: PLR0913 - the options of a message
        self,
        subject: str,
        body: bytes,
        *,
        msg_id: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        repeat: bool = True,
        synced: bool = True,
    ) -> asyncio.Future[PubAck]:
        """Send as `publish` does, but return a future for the acknowledgement, so that many can be in flight at the
        same time.

        Messages that one task submits are sent in order. This waits only for room in the window. Without `repeat` a
        message is sent only once: the future fails with `AckLost` as soon as the connection breaks.
        """
        headers = {MSG_ID: msg_id, **(headers or {})}
        check_size(self._client.max_payload, subject, body, headers)
        size = len(body) + _OVERHEAD_BYTES
        if not self._window.try_acquire(size):
            await self._window.acquire(size, min(timeout_s, self._room_wait_s))
            check_size(self._client.max_payload, subject, body, headers)  # we may be connected to another server by now
        token = self._next
        self._next = token + 1
        now = self._loop.time()
        entry = self._waiting[token] = _Entry(
            subject=subject,
            body=body,
            headers=headers,
            reply=f"{self._prefix}{token}",
            future=self._loop.create_future(),
            size=size,
            sent_at=now,
            begun_at=now,
            timeout_s=timeout_s,
            repeat=repeat,
            synced=synced,
        )
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)
        if self._client.is_connected:
            await self._send(token, entry)
        elif not repeat or self._closed:
            self._finish(token, entry, BusUnavailable(f"{subject}: the bus is not connected"))
        return entry.future

    async def send_without_ack(self, subject: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send without waiting for an acknowledgement. An atomic batch gets only one, for its last message."""
        check_size(self._client.max_payload, subject, body, headers)
        try:
            await self._client.publish(subject, body, headers=headers)
        except (ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError) as error:
            raise AckLost(f"{subject}: the bus is not connected") from error

    @property
    def message_bytes_max(self) -> int:
        """Return the largest body that can be published now, in bytes: the server's limit less room for headers.

        The limit is that of the server to which the client last connected.
        """
        return int(self._client.max_payload) - HEADER_ROOM_BYTES

    def check(self, body: bytes) -> None:
        """Raise `Refused` if `body`, together with headers that are not known yet, may exceed the server's limit."""
        if len(body) > self.message_bytes_max:
            raise Refused(
                Code.TOO_LARGE,
                f"a message of {len(body)} bytes exceeds the bus's limit of {self._client.max_payload}, of which "
                f"{HEADER_ROOM_BYTES} are for headers: send less at a time, or raise the server's max_payload",
            )

    def connection_lost(self) -> None:
        for token, entry in list(self._waiting.items()):
            if not entry.repeat:
                self._finish(token, entry, AckLost(f"{entry.subject}: the connection broke"))

    def connection_back(self) -> None:
        """Resend every waiting message, in order: the message may never have been sent, or its acknowledgement lost."""
        self._resend(list(self._waiting.items()))

    def close(self) -> None:
        """Fail every message that is still waiting."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._resending is not None:
            self._resending.cancel()
        for token, entry in list(self._waiting.items()):
            self._finish(token, entry, BusUnavailable(f"{entry.subject}: the bus was closed"))

    async def _send(self, token: int, entry: _Entry) -> None:
        try:
            await self._client.publish_short(entry.subject, entry.body, entry.reply, entry.headers)
        except OutboundBufferLimitError:
            pass  # the connection has just been lost: `connection_back` resends the message
        except (ConnectionClosedError, ConnectionDrainingError):
            self._finish(token, entry, BusUnavailable(f"{entry.subject}: the bus is closed"))

    def _on_ack(self, subject: str, _reply: str, body: bytes, _head: bytes) -> None:
        token = int(subject[len(self._prefix) :])
        entry = self._waiting.get(token)
        if entry is None:
            return  # we have given up on the message, or a resend was acknowledged too
        result = ack_of(body, entry.subject) if body else NotNow(f"{entry.subject}: {_NO_RESPONDER}")
        if isinstance(result, AckLost) and entry.repeat:
            entry.failure = result  # an earlier attempt may still be acknowledged
        elif isinstance(result, NotNow) and entry.repeat:
            entry.failure = result
            entry.sent_at = self._loop.time() - self._repeat_after_s  # the next sweep resends the message
        elif entry.synced and isinstance(result, PubAck) and self.syncing is not None and self.syncing.needed:
            entry.sent_at = math.inf  # resent only if the connection breaks
            self.syncing.after(partial(self._synced, token, entry, result))
        else:
            self._finish(token, entry, result)

    def _synced(self, token: int, entry: _Entry, ack: PubAck, failure: BombusError | None) -> None:
        if failure is None:
            self._finish(token, entry, ack)
        else:  # what was stored may be gone: it is resent once the connection is back
            entry.failure, entry.sent_at = failure, self._loop.time()

    def _finish(self, token: int, entry: _Entry, result: PubAck | BombusError) -> None:
        if self._waiting.pop(token, None) is None:
            return
        self._window.release(entry.size)
        if entry.future.done():
            return  # the caller gave up
        if isinstance(result, PubAck):
            entry.future.set_result(result)
        else:
            entry.future.set_exception(result)

    def _sweep(self) -> None:
        self._timer = None
        now = self._loop.time()
        late: list[tuple[int, _Entry]] = []
        for token, entry in list(self._waiting.items()):
            if entry.future.cancelled():
                self._finish(token, entry, BusUnavailable("cancelled"))
            elif entry.begun_at + entry.timeout_s <= now:
                self._finish(token, entry, entry.late)
            elif entry.repeat and now - entry.sent_at >= self._repeat_after_s:
                late.append((token, entry))
        if late and self._client.is_connected:
            self._resend(late)
        if self._waiting:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _resend(self, entries: list[tuple[int, _Entry]]) -> None:
        if not entries or self._closed or (self._resending is not None and not self._resending.done()):
            return  # the next sweep finds the entries again
        now = self._loop.time()
        for _, entry in entries:
            entry.sent_at = now
        self._resending = self._loop.create_task(self._send_again(entries))

    async def _send_again(self, entries: list[tuple[int, _Entry]]) -> None:
        logger.info("publishing %d messages again", len(entries))
        for token, entry in entries:
            if token not in self._waiting:
                continue
            try:  # by now we may be connected to another server, or to one with another limit
                check_size(self._client.max_payload, entry.subject, entry.body, entry.headers)
            except Refused as refused:
                self._finish(token, entry, refused)
            else:
                await self._send(token, entry)
