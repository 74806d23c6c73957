"""`GET /events`: the events of a hive as server-sent events, for operators' screens that cannot reach the bus.

The gateway's own fold supplies new events, which are encoded once for all viewers. Only a viewer that is behind reads
the log. Without viewers, nothing is encoded or kept.
"""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import takewhile
from math import isfinite
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Send

from bombus.bus import Reader, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.errors import Code, NewerEvent, Refused
from bombus.hive.events import AnyEvent, Event
from bombus_gateway.context import Gateway

VIEWERS_MAX = 16  # each may have 24 MB of the log read ahead for it while it is behind
RECENT_BYTES_MAX = 1 << 20  # newest events, kept for all viewers
READ_EVENTS = 256  # events of the log that are encoded without a pause, since calls wait meanwhile
QUIET_S = 2.0  # after this time without an event, viewers are told the position
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _Streamed(StreamingResponse):
    """A response that ends its stream as soon as its viewer has gone."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


class EventStream:
    """The stream of a hive's events for any number of viewers, each of which is sent events as fast as it reads."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._follower = gateway.follower
        self._viewers = 0
        self._recent: deque[tuple[int, bytes]] = deque()
        self._recent_bytes = 0
        self._before = 0  # all events after this position are in `_recent`

    async def read(self, request: Request) -> Response:
        """Stream the hive's events from the oldest that is kept, or after `Last-Event-ID` or `?after=`, without end.

        An event's id is its position in the log, and its data is the event as JSON, in which numbers that are not
        finite are strings. The stream starts with `begin`: the state before the first event, as a snapshot in base64,
        or "" if the log has every event. It is left out if the stream resumes where the viewer was. `position` says,
        while nothing happens, how far this gateway has read the log, and whether it is connected to the bus.
        """
        keys = self._gateway.key_ring.keys
        if keys.clients and not keys.admin:
            why = "The events of this hive name what all of its clients do, which its client keys keep apart"
            raise Refused(Code.BAD_KEY, f"{why}: give the hive an admin key, and send it.")
        if self._viewers >= VIEWERS_MAX:
            raise Refused(Code.OVERLOADED, f"{VIEWERS_MAX} viewers read the events here; try again in a moment.")
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) <= 18):
            raise Refused(Code.MALFORMED, f"after: {after[:50]!r} is not the position of an event.")
        return _Streamed(self._events(None if after is None else int(after)))

    async def _events(self, after: int | None) -> AsyncGenerator[bytes, None]:
        bus = self._gateway.bus
        self._enter()
        try:
            position, beginning = await self._begin(after)
            yield beginning + self._position()
            while self._gateway.ready:
                if position < self._before:
                    async with Reader(bus, bus.subjects.events_stream, position + 1) as reader:
                        while position < self._before:
                            batch = await reader.read(READ_EVENTS)
                            if batch[-1].seq != position + len(batch):  # the log was compacted
                                position, beginning = await self._begin(None)
                                yield beginning
                                break
                            position = batch[-1].seq
                            yield b"".join(_frames(batch))
                            await asyncio.sleep(0)
                elif position < self._follower.position:
                    chunk = self._newer(position)
                    position = self._follower.position
                    yield chunk
                else:
                    try:
                        await self._follower.wait_position(position + 1, QUIET_S)
                    except TimeoutError:
                        yield self._position()
        finally:
            self._leave()

    def _enter(self) -> None:
        if not self._viewers:
            self._before = self._follower.position
            self._follower.on_event = self._note
        self._viewers += 1

    def _leave(self) -> None:
        self._viewers -= 1
        if not self._viewers:
            self._follower.on_event = None
            self._forget(self._follower.position)

    def _note(self, position: int, event: AnyEvent) -> None:
        """Keep an event that was just folded. The oldest ones are dropped where there are too many."""
        if position != (self._recent[-1][0] if self._recent else self._before) + 1:  # some were not folded here
            self._forget(position - 1)
        frame = encoded(position, event)
        self._recent.append((position, frame))
        self._recent_bytes += len(frame)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._before, oldest = self._recent.popleft()
            self._recent_bytes -= len(oldest)

    def _forget(self, before: int) -> None:
        self._recent.clear()
        self._recent_bytes, self._before = 0, before

    def _newer(self, position: int) -> bytes:
        """Return the recent events after a position."""
        newest = takewhile(lambda kept: kept[0] > position, reversed(self._recent))
        return b"".join([frame for _, frame in newest][::-1])

    async def _begin(self, after: int | None) -> tuple[int, bytes]:
        """Return the position after which to start and, unless the viewer resumes there, the event that says so."""
        bus = self._gateway.bus
        if after is not None:
            kept = await bus.state(bus.subjects.events_stream)
            if kept.first_seq - 1 <= after <= max(kept.last_seq, self._follower.position):
                return after, b""
        start = await snapshots.start_of(bus, from_first=True)
        state = await asyncio.to_thread(snapshots.encode, start) if start.position else b""
        data = {"position": start.position, "state": b64encode(state).decode()}
        return start.position, b"event: begin\nid: %d\ndata: %b\n\n" % (start.position, msgspec.json.encode(data))

    def _position(self) -> bytes:
        data = {"position": self._follower.position, "bus": self._gateway.bus.is_connected}
        return b"event: position\ndata: %b\n\n" % msgspec.json.encode(data)


def _frames(batch: Sequence[Stored]) -> Iterator[bytes]:
    for stored in batch:
        with suppress(NewerEvent):  # the fold skips it too
            yield encoded(stored.seq, read_event(stored))


def encoded(position: int, event: Event) -> bytes:
    """Return an event as a server-sent event. msgspec writes numbers that are not finite as null."""
    data = msgspec.json.encode(event)
    if b"null" in data:
        data = msgspec.json.encode(_finite(msgspec.to_builtins(event)))
    return b"id: %d\ndata: %b\n\n" % (position, data)


def _finite(value: Any) -> Any:
    """Return a value for JSON, with numbers that are not finite as strings, such as "nan"."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
