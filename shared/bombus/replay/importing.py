"""Creates a hive from an exported log. Messages keep their sequence numbers, so that all references stay valid (R6)."""

import asyncio
import os
import re
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from bombus.bus import Blobs, Bus, EmbeddedServer, PubAck, snapshots
from bombus.bus.follow import read_event
from bombus.bus.headers import EXPECTED_LAST, INBOX, MSG_ID, TIME
from bombus.bus.server import lock_folder
from bombus.bus.streams import limited_streams
from bombus.config.streams import StreamLimits
from bombus.errors import LogCorrupted
from bombus.hive.events import kind_of
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import decode_record
from bombus.hive.shares import IMPORTED
from bombus.hive.state import Hive
from bombus.private import private_folder
from bombus.replay import upkeep
from bombus.replay.archive import FileSource
from bombus.replay.export import bodies_held_by, calls_held_by, calls_of
from bombus.replay.running import BadUsage
from bombus.replay.source import CALLS, OPS, RECORDS_AT_ONCE, TRAJECTORIES, BusSource, ReadProgress

DRAFT = ".nats-import"
IN_FLIGHT_MAX = 1_000
SKIPPED_AT_ONCE = 100_000
NOBODY = "-"  # no engine has this name
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

ImportProgress = Callable[[str, int, int], None]  # called with the activity, the position, and the last position


async def import_log(source: FileSource, data: Path, limits: StreamLimits, progress: ImportProgress) -> upkeep.Checked:
    """Create the hive of an exported log in a data folder that has no log. The hive appears there only after it was
    verified.

    Raises `BadUsage` if the folder has a log, `LogCorrupted` if the file is damaged or lacks data that the hive still
    needs, `NewerEvent` if a newer release wrote the file, `BusUnavailable` or `OSError`.
    """
    place = data / "nats"
    if place.exists():
        raise BadUsage(
            f"{data} has a log already, and an import replaces nothing: name a new folder with --data, or move {place} "
            "away first"
        )
    log = await _read(source, partial(progress, "reading event"))
    async with _drafted(place) as draft, _serving(draft, source.hive) as bus:
        await bus.ensure_streams(limits)
        await _Writer(source, bus, log).write(progress)
        return await upkeep.check(BusSource(bus, str(data)), partial(progress, "checking event"))


class _ReadLog(msgspec.Struct):
    """The state that an exported log folds to. The log begins after event `base`; its last call is at `last_call`."""

    hive: Hive
    base: int
    last_call: int

    @property
    def last_parts(self) -> dict[str, int]:
        """Return, for each stream of bodies, the position up to which messages may have been purged."""
        of_models = [below for engine in self.hive.engines.values() for below in engine.clients.released.values()]
        of_holders = self.hive.released_of_holders().values()
        released = {
            OPS: max([self.hive.released, *of_models]),
            TRAJECTORIES: max([self.hive.trajectories_released, *of_holders]),
        }
        return {stream: below - 1 for stream, below in released.items()}


async def _read(source: FileSource, progress: ReadProgress) -> _ReadLog:
    """Fold the log, and check that the file has the calls that are still needed, before anything is written."""
    hive, base = await source.base()
    end = (await source.end()).seq
    seqs = [ref.seq for ref in calls_held_by(hive)] + [engine.newest_call for engine in hive.engines.values()]
    last_call = max(seqs, default=0)
    async with aclosing(source.events(base)) as events:
        async for entry in events:
            evolve(hive, entry.event)
            last_call = max([last_call, *(ref.seq for ref in calls_of(entry.event))])
            progress(entry.seq, end)
    held = calls_held_by(hive)
    for start in range(0, len(held), RECORDS_AT_ONCE):
        await source.records(held[start : start + RECORDS_AT_ONCE])
    return _ReadLog(hive, base, last_call)


# ---- the folder ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _drafted(folder: Path) -> AsyncIterator[Path]:
    """Yield the name of a folder that becomes `folder` on success, and is removed otherwise.

    The draft of a killed import is removed first. Raises `BusUnavailable` while another import is running.
    """
    made = not folder.parent.exists()
    draft = private_folder(folder.parent) / DRAFT
    if draft.exists():
        lock_folder(draft).close()
        shutil.rmtree(draft)
    try:
        yield draft
        await asyncio.to_thread(os.sync)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if made:
            with suppress(OSError):  # after a successful import it is not empty
                folder.parent.rmdir()


@asynccontextmanager
async def _serving(folder: Path, hive: str) -> AsyncIterator[Bus]:
    server = EmbeddedServer(folder)
    try:
        await asyncio.to_thread(server.start)
        async with await Bus.connect(server.url, hive, name="import") as bus:
            yield bus
    finally:
        server.stop()


# ---- the streams --------------------------------------------------------------------------------------------------


class _Writer:
    """Writes all streams of a hive. The events come last, because they refer to messages in the other streams."""

    def __init__(self, source: FileSource, bus: Bus, log: _ReadLog) -> None:
        self._source = source
        self._bus = bus
        self._log = log

    async def write(self, progress: ImportProgress) -> None:
        for name, body in self._source.all_blobs():
            await Blobs(self._bus).put(name, body)
        if self._source.header.base:
            await snapshots.store(self._bus, self._source.header.base, self._log.base)
        await self._write_calls(partial(progress, "writing call"))
        await self._write_bodies(partial(progress, "writing body"))
        answered = await self._write_events(partial(progress, "writing event"))
        # The inbox continues after the last message that was answered, as if it had been trimmed up to there.
        await self._bus.purge_below(self._bus.subjects.inbox_stream, answered + 1)

    async def _write_calls(self, progress: ReadProgress) -> None:
        subjects, end = self._bus.subjects, self._log.last_call
        async with _writing(self._bus, subjects.calls_stream, subjects.call(NOBODY, ""), end, progress) as stream:
            for seq, body in self._source.all_messages(CALLS):
                record = decode_record(body)
                await stream.put(seq, subjects.call(record.engine, IMPORTED), body, {MSG_ID: record.id})

    async def _write_bodies(self, progress: ReadProgress) -> None:
        """Write the bodies of operations and rollout groups that may still be needed."""
        subjects = self._bus.subjects
        skipped = {OPS: subjects.operation(NOBODY, ""), TRAJECTORIES: subjects.trajectory(NOBODY, "")}
        held = list(bodies_held_by(self._log.hive, subjects))
        for name, end in self._log.last_parts.items():
            wanted = {seq: subject for stream, subject, body in held if stream == name for seq in body.seqs}
            async with _writing(self._bus, limited_streams(subjects)[name], skipped[name], end, progress) as writer:
                for seq, body in self._source.all_messages(name):
                    if seq in wanted:
                        await writer.put(seq, wanted[seq], body, {MSG_ID: f"import.{seq}"})

    async def _write_events(self, progress: ReadProgress) -> int:
        """Write the events, and return the number of the inbox message that the last event answers."""
        subjects, answered, end = self._bus.subjects, 0, (await self._source.end()).seq
        async with (
            _writing(self._bus, subjects.events_stream, subjects.event(NOBODY, NOBODY), end, progress) as stream,
            aclosing(self._source.in_order(self._log.base)) as events,
        ):
            async for stored in events:
                own = {name: value for name, value in stored.headers.items() if not name.startswith("Nats-")}
                headers = {MSG_ID: stored.headers.get(MSG_ID, f"import.{stored.seq}"), TIME: str(stored.written_ns)}
                event = read_event(stored)
                await stream.put(stored.seq, subjects.event(event.engine, kind_of(event)), stored.data, own | headers)
                answered = int(stored.headers.get(INBOX, 0))
        return answered


@asynccontextmanager
async def _writing(
    bus: Bus, stream: str, skipped: str, end: int, progress: ReadProgress
) -> AsyncIterator["_StreamWriter"]:
    """Yield a writer for an empty stream. Afterwards the stream continues at `end + 1`, or at a later number if
    messages beyond `end` were written."""
    writer = _StreamWriter(bus, stream, skipped, lambda position: progress(position, end))
    try:
        yield writer
        await writer.skip_to(end + 1)
        await writer.flush()
    finally:
        writer.forget()


class _StreamWriter:
    """Writes messages into an empty stream, each at a given sequence number. Numbers in between stay empty.

    To skip a number, a message is stored on the subject `skipped` and removed later.
    """

    def __init__(self, bus: Bus, stream: str, skipped: str, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._bus = bus
        self._stream = stream
        self._skipped = skipped
        self._next = 1
        self._sent: deque[asyncio.Future[PubAck]] = deque()

    async def put(self, seq: int, subject: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Write a message. Raises `LogCorrupted` if the subject is invalid or `seq` is already used."""
        if not _SUBJECT.fullmatch(subject):
            raise LogCorrupted(f"message {seq} names an engine that cannot exist: its subject would be {subject!r}")
        await self.skip_to(seq)
        if seq != self._next:
            raise LogCorrupted(f"message {seq} on {subject} is in the file twice")
        await self._send(subject, body, headers)

    async def skip_to(self, seq: int) -> None:
        """Leave the sequence numbers before `seq` empty."""
        if self._next == 1 and seq > 1:
            await self._bus.purge_below(self._stream, seq)  # makes an empty stream begin at `seq`
            self._next = seq
        while self._next < seq:
            await self._send(self._skipped, b"", {MSG_ID: f"skipped.{self._next}"})
            if self._next % SKIPPED_AT_ONCE == 0:
                await self.flush()

    async def flush(self) -> None:
        """Wait until all messages are stored, then remove the messages on the subject `skipped`."""
        while self._sent:
            await self._sent.popleft()
        await self._bus.purge_below(self._stream, self._next, self._skipped)

    def forget(self) -> None:
        """Stop waiting for acknowledgements."""
        for ack in self._sent:
            ack.cancel()

    async def _send(self, subject: str, body: bytes, headers: Mapping[str, str]) -> None:
        fenced = {**headers, EXPECTED_LAST: str(self._next - 1)}
        publisher, msg_id = self._bus.publisher, headers[MSG_ID]
        self._sent.append(
            await publisher.submit(subject, body, msg_id=msg_id, headers=fenced, repeat=False, synced=False)
        )
        self._progress(self._next)
        self._next += 1
        if len(self._sent) > IN_FLIGHT_MAX:
            await self._sent.popleft()
