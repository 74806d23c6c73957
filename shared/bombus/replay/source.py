"""A log that can be read any number of times, wherever it is stored."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from bombus.bus import EPOCH, INBOX, Blobs, Bus, Reader, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.streams import limited_streams
from bombus.errors import BombusError, BusUnavailable, LogCorrupted
from bombus.hive.events import AnyEvent, kind_of
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Tick
from bombus.hive.records import CallRecord, CallRef, decode_record
from bombus.hive.state import Hive

RECORDS_AT_ONCE = 256
NEWER_AT_ONCE = 256  # events
SILENCE_S = 30.0  # without an event that is there, until the bus counts as away
# The streams whose messages a log refers to:
CALLS: Final = "calls"
OPS: Final = "ops"
TRAJECTORIES: Final = "trajectories"

ReadProgress = Callable[[int, int], None]  # called with the position reached and the end of the log


class NotOnLog(BombusError):
    """Raised if a log does not have the requested data. The message says what it does have."""


class Logged(msgspec.Struct, frozen=True):
    """An event and some headers of its message. `answers` is the inbox sequence number that the event answers (R2)."""

    seq: int
    time_ns: int
    event: AnyEvent
    epoch: int
    answers: int


class LogEnd(msgspec.Struct, frozen=True):
    """The last event of a log or, if the log is empty, the position after which it starts."""

    seq: int
    time_ns: int


class Source(ABC):
    """A log that can be read any number of times. `title` says where it is stored, and `hive` is the name of its hive.

    `running` says that the hive may still add to it.
    """

    title: str
    hive: str
    running: bool = False

    @abstractmethod
    async def base(self) -> tuple[Hive, int]:
        """Return the state before the first event of the log, and the position of that state. If the log was never
        compacted, this is an empty state at 0."""

    @abstractmethod
    async def end(self) -> LogEnd:
        """Return where reading ends. Events that a running hive adds later are not read."""

    @abstractmethod
    def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        """Yield the messages of the events after `after`, up to and including `until` (default: the end), in order."""

    def newer(self, after: int, last: Stored | None = None) -> AsyncGenerator[list[Stored], None]:
        """Yield what a running hive has added after `after`, up to its present end or without end. `last` is the
        message at `after`, if it is known. Raises `BusUnavailable`, and `StreamEndLost` if the log has lost it."""
        raise NotImplementedError(f"{self.title} is not running")

    @abstractmethod
    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        """Return the messages of `CALLS`, `OPS` or `TRAJECTORIES` with these numbers, in the given order, with None for
        each lost message."""

    async def bodies(self, refs: Sequence[CallRef]) -> list[bytes | None]:
        """Return the stored bytes of these calls, unchecked and in the given order, with None for each call that is
        gone."""
        return await self.messages(CALLS, [ref.seq for ref in refs])

    @abstractmethod
    async def blob(self, name: str) -> bytes:
        """Return a large object, such as a tokenizer. Raises `BlobMissing` if it does not exist."""

    async def events(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Logged, None]:
        """Yield the events after `after` or, in a compacted log, after its base if that is later. Raises the same
        errors as `in_order`."""
        base = (await self.base())[1]
        async with aclosing(self.in_order(max(base, after), until)) as messages:
            async for stored in messages:
                yield logged(stored)

    async def in_order(self, after: int, until: int | None = None) -> AsyncGenerator[Stored, None]:
        """Yield the same messages as `stored`, checking for gaps.

        Raises `LogCorrupted` if an event is missing, and `NotOnLog` if the log was compacted while it was being read.
        """
        last, until = after, (await self.end()).seq if until is None else until
        async with aclosing(self.stored(after, until)) as messages:
            async for stored in messages:
                if stored.seq != last + 1:
                    check_not_compacted(await self.begins_at(), last)
                    raise LogCorrupted(f"{self.title}: event {stored.seq} follows {last}: some in between are missing")
                last = stored.seq
                yield stored
        if last < until:
            check_not_compacted(await self.begins_at(), last)
            raise LogCorrupted(f"{self.title} ends at event {last}, before {until}")

    async def begins_at(self) -> int:
        """Return the number of the log's first event at present: a running hive may remove events while they are being
        read."""
        return (await self.base())[1] + 1

    async def led_ns(self) -> int:
        """Return when a leader last put a tick into the inbox, or 0 if that time is unknown, as in an archive."""
        return 0

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        """Return the records of these calls in order, each checked against its digest. Raises `LogCorrupted` if a call
        is missing or damaged."""
        found: list[CallRecord] = []
        for start in range(0, len(refs), RECORDS_AT_ONCE):
            part = refs[start : start + RECORDS_AT_ONCE]
            for ref, body in zip(part, await self.bodies(part), strict=True):
                if body is None:
                    raise LogCorrupted(f"call {ref.id} at {ref.seq} is no longer kept in {self.title}")
                found.append(decode_record(body, ref))
        return found


def logged(stored: Stored) -> Logged:
    """Decode a message of the log. Raises `LogCorrupted` for an event that this version cannot read."""
    headers = stored.headers
    epoch, answers = int(headers.get(EPOCH, 0)), int(headers.get(INBOX, 0))
    return Logged(stored.seq, stored.written_ns, read_event(stored), epoch, answers)


async def state_at(source: Source, seq: int) -> Hive:
    """Fold everything up to and including event `seq`. Raises `NotOnLog` if the log does not have that position."""
    hive, position = await source.base()
    await check_position(source, seq)
    if seq > position:
        async for entry in source.events(position, seq):
            evolve(hive, entry.event)
    return hive


def no_episode(source: Source, episode: str) -> NotOnLog:
    return NotOnLog(f"{source.title} has no episode {episode}: `bombus replay episodes` lists those that have ended")


async def check_position(source: Source, seq: int) -> None:
    """Raise `NotOnLog` if the state at `seq` cannot be known."""
    _, first = await source.base()
    end = (await source.end()).seq
    if seq > end:
        raise NotOnLog(f"there is no event {seq}: {source.title} ends at {end}")
    if seq < first:
        raise NotOnLog(
            f"everything before event {first} was compacted: {source.title} can be read from {first} to {end}"
        )


def check_not_compacted(begins_at: int, last: int) -> None:
    """Raise `NotOnLog` if a log, which now begins at `begins_at`, was compacted while it was read up to event
    `last`."""
    if begins_at > last + 1:
        raise NotOnLog(f"the log was compacted during the read and now begins at event {begins_at}: run it again")


class BusSource(Source):
    """A log on a NATS server."""

    def __init__(self, bus: Bus, title: str, running: bool = True) -> None:
        self.title = title
        self.hive = bus.subjects.hive
        self.running = running
        self.bus = bus
        self._base: bytes | None = None  # kept encoded, because callers fold events into the state that they receive
        self._end: LogEnd | None = None

    async def base(self) -> tuple[Hive, int]:
        if self._base is None:
            self._base = snapshots.encode(await snapshots.start_of(self.bus, from_first=True))
        start = snapshots.decode(self._base)
        return start.hive, start.position

    async def begins_at(self) -> int:
        return (await self.bus.state(self.bus.subjects.events_stream)).first_seq

    async def led_ns(self) -> int:
        subjects = self.bus.subjects
        tick = await self.bus.last(subjects.inbox_stream, subjects.inbox(kind_of(Tick)))
        return 0 if tick is None else tick.time_ns

    async def end(self) -> LogEnd:
        if self._end is None:
            newest = await self.bus.last(self.bus.subjects.events_stream)
            self._end = LogEnd(newest.seq, newest.written_ns) if newest else LogEnd((await self.base())[1], 0)
        return self._end

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        last = (await self.end()).seq if until is None else until
        if after >= last:
            return
        async with Reader(self.bus, self.bus.subjects.events_stream, after + 1) as reader:
            async for stored in reader:
                yield stored
                if stored.seq >= last:
                    return

    async def newer(self, after: int, last: Stored | None = None) -> AsyncGenerator[list[Stored], None]:
        # A new reader reads what has piled up in bulk, with a fifth of the CPU of messages that arrive one by one.
        stream = self.bus.subjects.events_stream
        if not self.bus.is_connected:
            raise BusUnavailable("the bus is away")
        end = (await self.bus.state(stream)).last_seq
        if end == after:
            return  # a reader would wait for the next event, and for ever if the hive goes on at another address
        async with Reader(self.bus, stream, after + 1, after=None if last is None else last.place) as reader:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        batch = await reader.read(NEWER_AT_ONCE)
                except TimeoutError:
                    raise BusUnavailable(f"no event was read within {SILENCE_S:g} s") from None
                yield batch
                if batch[-1].seq >= end:
                    return

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        name = limited_streams(self.bus.subjects)[stream]
        try:
            return [stored.data for stored in await self.bus.get_many(name, seqs)]
        except LogCorrupted:  # at least one call is gone: read each on its own
            return [await self._message(name, seq) for seq in seqs]

    async def _message(self, stream: str, seq: int) -> bytes | None:
        try:
            return (await self.bus.get(stream, seq)).data
        except LogCorrupted:
            return None

    async def blob(self, name: str) -> bytes:
        return await Blobs(self.bus).get(name)
