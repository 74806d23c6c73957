"""Where a log comes from: a hive that runs, the data folder of one that was stopped, or an archive."""

import argparse
import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bombus.bus import EPOCH, INBOX, Blobs, Bus, EmbeddedServer, Reader, ServerRefused, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.wire import STREAM_NOT_FOUND
from bombus.cli import DEFAULT_NATS, URL_FILE
from bombus.errors import BombusError, LogCorrupted
from bombus.hive.events import AnyEvent
from bombus.hive.records import CallRecord, CallRef, decode_record
from bombus.hive.state import Hive, evolve

CONNECT_S = 10.0
NATS_PORT = 4222
PROBE_S = 2.0  # for the hive that may run on a data folder
RECORDS_AT_ONCE = 256
STORE_BYTES_MAX = 1 << 50  # streams reserve their limits; a server that only reads must not be refused for want of disk


class NotOnLog(BombusError):
    """What was asked for is not on this log; the sentence says what is."""


class Logged(msgspec.Struct, frozen=True):
    """An event and what its message says of it. `time_ns` is the server's clock, `answers` an inbox sequence (R2)."""

    seq: int
    time_ns: int
    event: AnyEvent
    epoch: int
    answers: int


class End(msgspec.Struct, frozen=True):
    """The last event of a log; of an empty one the position that it begins behind."""

    seq: int
    time_ns: int


class Source(ABC):
    """A log that can be read as often as one likes. `title` says where it lies, `hive` whose it is."""

    title: str
    hive: str

    @abstractmethod
    async def base(self) -> tuple[Hive, int]:
        """The state before the first event that is kept, and its position; a blank one at 0 for a whole log."""

    @abstractmethod
    async def end(self) -> End:
        """Where reading ends. What a running hive adds later is not read."""

    @abstractmethod
    def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        """The messages of the events behind `after`, up to and with `until` (by default, the end), in order."""

    @abstractmethod
    async def bodies(self, refs: Sequence[CallRef]) -> list[bytes | None]:
        """What is stored where these calls were, in their order; None for what is gone."""

    @abstractmethod
    async def blob(self, name: str) -> bytes:
        """A large object: a tokenizer. Raises `BlobMissing`."""

    async def events(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Logged, None]:
        """The events behind `after` and, when the log was compacted, behind its base. Raises `LogCorrupted`."""
        last = (await self.base())[1]
        last = max(last, after)
        async with aclosing(self.stored(last, until)) as messages:
            async for stored in messages:
                if stored.seq != last + 1:
                    raise LogCorrupted(f"{self.title}: event {stored.seq} follows {last}, some between are missing")
                last = stored.seq
                yield logged(stored)

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        """The records of these calls, in their order, each checked by its digest. Raises `LogCorrupted`."""
        found: list[CallRecord] = []
        for start in range(0, len(refs), RECORDS_AT_ONCE):
            part = refs[start : start + RECORDS_AT_ONCE]
            for ref, body in zip(part, await self.bodies(part), strict=True):
                if body is None:
                    raise LogCorrupted(f"call {ref.id} at {ref.seq} is not kept any more in {self.title}")
                found.append(decode_record(body, ref))
        return found


def logged(stored: Stored) -> Logged:
    """Raises `LogCorrupted` for an event that this version cannot read."""
    headers = stored.headers
    epoch, answers = int(headers.get(EPOCH, 0)), int(headers.get(INBOX, 0))
    return Logged(stored.seq, stored.time_ns, read_event(stored), epoch, answers)


async def state_at(source: Source, seq: int) -> Hive:
    """The fold of everything up to event `seq`. Raises `NotOnLog` for a position that the log does not reach."""
    hive, position = await source.base()
    await check_position(source, seq)
    if seq > position:
        async for entry in source.events(position, seq):
            evolve(hive, entry.event)
    return hive


async def check_position(source: Source, seq: int) -> None:
    """Raises `NotOnLog` when the state at `seq` cannot be known."""
    _, first = await source.base()
    end = (await source.end()).seq
    if seq > end:
        raise NotOnLog(f"there is no event {seq}: {source.title} ends at {end}")
    if seq < first:
        raise NotOnLog(f"what was before event {first} was compacted: {source.title} can be read from {first} to {end}")


class BusSource(Source):
    """A log on a NATS server."""

    def __init__(self, bus: Bus, title: str) -> None:
        self.title = title
        self.hive = bus.subjects.hive
        self.bus = bus
        self._end: End | None = None

    async def base(self) -> tuple[Hive, int]:
        start = await snapshots.start_of(self.bus, from_first=True)
        return start.hive, start.position

    async def end(self) -> End:
        if self._end is None:
            newest = await self.bus.last(self.bus.subjects.events_stream)
            self._end = End(newest.seq, newest.time_ns) if newest else End((await self.base())[1], 0)
        return self._end

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        end = (await self.end()).seq
        last = end if until is None else min(until, end)
        if after >= last:
            return
        async with Reader(self.bus, self.bus.subjects.events_stream, after + 1) as reader:
            async for stored in reader:
                yield stored
                if stored.seq >= last:
                    return

    async def bodies(self, refs: Sequence[CallRef]) -> list[bytes | None]:
        stream = self.bus.subjects.calls_stream
        try:
            return [stored.data for stored in await self.bus.get_many(stream, [ref.seq for ref in refs])]
        except LogCorrupted:  # one of them at least is gone: ask for each alone
            return [await self._body(ref.seq) for ref in refs]

    async def _body(self, seq: int) -> bytes | None:
        try:
            return (await self.bus.get(self.bus.subjects.calls_stream, seq)).data
        except LogCorrupted:
            return None

    async def blob(self, name: str) -> bytes:
        return await Blobs(self.bus).get(name)


# ---- opening one ------------------------------------------------------------------------------------------------


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Which log to read; see `open_source`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--nats", metavar="URL", help="the log of a hive that runs (default: $BOMBUS_NATS)")
    where.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="a hive's data folder, running or stopped (default: .bombus, if it is here)",
    )
    where.add_argument("--log", metavar="FILE", type=Path, help="an archive, made by `bombus log export`")
    parser.add_argument(
        "--hive", metavar="NAME", help="which one, on a bus that has several (default: $BOMBUS_HIVE, or main)"
    )


@asynccontextmanager
async def open_source(arguments: argparse.Namespace) -> AsyncIterator[Source]:
    """The log that the command line names. Raises `NotOnLog` when there is none, `BusUnavailable`."""
    hive = arguments.hive or os.environ.get("BOMBUS_HIVE", "main")
    url = arguments.nats or os.environ.get("BOMBUS_NATS", "")
    if arguments.log is not None:
        from bombus.replay.archive import FileSource

        with FileSource.open(arguments.log) as archive:
            yield archive
    elif arguments.data is not None or (not url and URL_FILE.parent.is_dir()):
        data = arguments.data or URL_FILE.parent
        async with _on_folder(data, arguments.hive) as source:
            yield source
    else:
        async with _on_bus(url or DEFAULT_NATS, hive, f"hive {hive}") as source:
            yield source


@asynccontextmanager
async def _on_bus(url: str, hive: str, title: str, timeout_s: float = CONNECT_S) -> AsyncIterator[BusSource]:
    async with await Bus.connect(url, hive, name="replay", timeout_s=timeout_s) as bus:
        try:
            await bus.state(bus.subjects.events_stream)
        except ServerRefused as refused:
            if refused.err_code != STREAM_NOT_FOUND:
                raise
            raise NotOnLog(f"there is no hive {hive} at this bus; name yours with --hive") from refused
        yield BusSource(bus, title)


@asynccontextmanager
async def _on_folder(data: Path, hive: str | None) -> AsyncIterator[BusSource]:
    """The bus of the hive that runs there, else a server of our own on its files for as long as they are read."""
    running = data / URL_FILE.name
    if running.is_file():
        url = running.read_text().strip()
        if await _still_runs(data, url):
            async with _on_bus(url, hive or "main", f"the log in {data}") as source:
                yield source
            return
    name = _hive_in(data, hive)
    with _served(data / "nats") as server:
        await asyncio.to_thread(server.start)
        async with _on_bus(server.url, name, f"the log in {data}") as source:
            yield source


async def _still_runs(data: Path, url: str) -> bool:
    """Whether the bus at a folder's address is that folder's: a hive that was killed leaves its address behind, and
    ports are used again. An external bus is known by its address alone."""
    ours = data / "nats" / "nats-server.conf"
    expected = re.search(r"^server_name: (\S+)$", ours.read_text(), re.MULTILINE) if ours.is_file() else None
    for server in url.split(","):
        place = urlsplit(server)
        try:
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_connection(place.hostname, place.port or NATS_PORT)
                with closing(writer):
                    greeting = await reader.readline()
        except (OSError, TimeoutError):
            continue
        name = re.search(rb'"server_name":"([^"]*)"', greeting)
        if greeting.startswith(b"INFO ") and (expected is None or (name and name[1].decode() == expected[1])):
            return True
    return False


@contextmanager
def _served(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder, store_bytes_max=STORE_BYTES_MAX)
    try:
        yield server
    finally:
        server.stop()


def _hive_in(data: Path, wanted: str | None) -> str:
    """The name of the hive whose log is in a data folder."""
    streams = (data / "nats" / "jetstream" / "jetstream").glob("*/streams/BOMBUS_*_events")
    names = sorted(stream.name.removeprefix("BOMBUS_").removesuffix("_events") for stream in streams)
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    if not names:
        raise NotOnLog(f"{data} holds no log: name the folder that `bombus up --data-dir` was given")
    if wanted is None:
        raise NotOnLog(f"{data} holds several hives: choose one of {', '.join(names)} with --hive")
    raise NotOnLog(f"{data} holds no hive {wanted}, but {', '.join(names)}")
