"""Write a log as an archive."""

import gzip
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from bombus.bus import BlobMissing, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.snapshots import Snapshot
from bombus.datums.differences import DIFFERENCES, object_name
from bombus.durable import make_durable
from bombus.hive import events as ev
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import BodyRef, CallRef, decode_record, digest
from bombus.hive.state import FOLD, Hive
from bombus.hive.steps import checkpoints
from bombus.hive.subjects import Subjects
from bombus.replay.archive import (
    FORMAT,
    ArchiveFrame,
    ArchiveHeader,
    BlobFrame,
    CallFrame,
    EventFrame,
    PartFrame,
    Trailer,
    pack,
)
from bombus.replay.source import OPS, TRAJECTORIES, ReadProgress, Source

log = logging.getLogger(__name__)

EVENTS_AT_ONCE = 500  # number of events whose calls are read together


async def export(
    source: Source, path: Path, with_calls: bool = True, progress: ReadProgress = lambda position, end: None
) -> Trailer:
    """Write the log to `path`, which appears only once it is complete.

    Raises `LogCorrupted` (also for a missing event), `NotOnLog` if the log was compacted during the export,
    `FileExistsError` or `BusUnavailable`.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
                trailer = await _Writer(source, packed, with_calls, progress).write()
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            raise FileExistsError(f"{path} already exists and is not replaced")
        draft.replace(path)
        make_durable(path.parent)
    finally:
        draft.unlink(missing_ok=True)
    return trailer


class _Writer:
    def __init__(self, source: Source, file: gzip.GzipFile, with_calls: bool, progress: ReadProgress) -> None:
        self._source = source
        self._state = Hive()
        self._file = file
        self._with_calls = with_calls
        self._progress = progress
        self._calls: set[int] = set()  # sequence numbers of calls that have been written or are gone
        self._blobs: set[str] = set()
        self._gone = 0
        self._events = 0
        self._groups = 0

    async def write(self) -> Trailer:
        state, position = await self._source.base()
        self._state = state
        end = await self._source.end()
        base = Snapshot(fold=FOLD, position=position, event_id="", answered=0, hive=state)
        self._put(
            ArchiveHeader(
                format=FORMAT,
                bombus=version("bombus"),
                hive=self._source.hive,
                last=end.seq,
                last_ns=end.time_ns,
                base=snapshots.encode(base) if position else b"",
            )
        )
        if self._with_calls:
            await self._write_references(calls_held_by(state), _tokenizers_of(state))
        batch: list[Stored] = []
        async for stored in self._source.in_order(position):
            batch.append(stored)
            if len(batch) == EVENTS_AT_ONCE:
                await self._write_batch(batch)
                batch = []
                self._progress(stored.seq, end.seq)
        await self._write_batch(batch)
        if self._with_calls:
            await self._write_bodies()
        trailer = Trailer(self._events, len(self._calls) - self._gone, len(self._blobs), self._gone, self._groups)
        self._put(trailer)
        return trailer

    async def _write_batch(self, batch: Sequence[Stored]) -> None:
        refs: list[CallRef] = []
        objects: list[str] = []
        for stored in batch:
            self._put(EventFrame(stored.seq, stored.written_ns, stored.subject, dict(stored.headers), stored.data))
            self._events += 1
            event = read_event(stored)
            if self._with_calls:
                evolve(self._state, event)
            refs += calls_of(event)
            if isinstance(event, ev.GroupsPushed):
                self._groups += len(event.groups)
            if isinstance(event, ev.WeightsReady) and event.weights.tokenizer:
                objects.append(event.weights.tokenizer)
            if isinstance(event, ev.StepCompleted):
                objects.append(object_name(event.engine, event.step))
        if self._with_calls:
            await self._write_references(refs, objects)

    async def _write_references(self, refs: Sequence[CallRef], objects: Sequence[str]) -> None:
        """Write the calls that have not been written yet, the calls that they extend, and the named
        objects: tokenizers and `StepDifferences`."""
        while wanted := {ref.seq: ref for ref in refs if ref.seq not in self._calls}:
            self._calls |= wanted.keys()
            bodies = await self._source.bodies(list(wanted.values()))
            refs = []
            for ref, body in zip(wanted.values(), bodies, strict=True):
                if body is None or digest(body) != ref.digest:
                    self._gone += 1
                    continue
                self._put(CallFrame(ref.seq, body))
                parent = decode_record(body, ref).parent
                refs += [parent] if parent is not None else []
        for name in dict.fromkeys(objects):
            if name not in self._blobs:
                self._blobs.add(name)
                try:
                    self._put(BlobFrame(name, await self._source.blob(name)))
                except BlobMissing as missing:
                    if not name.startswith(DIFFERENCES):
                        log.warning("%s: tokens will be shown as numbers", missing)

    async def _write_bodies(self) -> None:
        """Write the bodies that may still be needed at the end of the log. Lost bodies are left out."""
        for stream, _, body in bodies_held_by(self._state, Subjects(self._source.hive)):
            for seq, data in zip(body.seqs, await self._source.messages(stream, body.seqs), strict=True):
                if data is not None:
                    self._put(PartFrame(stream, seq, data))

    def _put(self, frame: ArchiveHeader | ArchiveFrame) -> None:
        self._file.write(pack(frame))


def calls_of(event: ev.AnyEvent) -> list[CallRef]:
    """Return every call that an event names."""
    match event:
        case ev.CallsNoted():
            return [call.ref for call in event.calls]
        case ev.EpisodeEnded():
            return [ref for outcome in event.outcomes for ref in outcome.calls]
        case ev.BatchReady():
            return [ref for group in event.groups for episode in group.episodes for ref in episode.calls]
        case _:
            return []


def calls_held_by(hive: Hive) -> list[CallRef]:
    """Return the calls that may still be trained on.

    These are the calls of the open episodes, of the pool, of the outstanding batch, and of the steps since each
    engine's newest checkpoint.
    """
    refs: list[CallRef] = []
    for engine in hive.engines.values():
        refs += (call.ref for episode in engine.open.values() for call in episode.calls)
        refs += (ref for completed in engine.pool.values() for ref in completed.calls)
        refs += calls_of(engine.batch) if engine.batch is not None else []
        newest = checkpoints(engine.steps)[:1]
        saved = newest[0].step if newest else 0
        refs += (ref for step in engine.steps if step.done and step.batch.step > saved for ref in calls_of(step.batch))
    return refs


def bodies_held_by(hive: Hive, subjects: Subjects) -> Iterator[tuple[Literal["ops", "trajectories"], str, BodyRef]]:
    """Yield the stream, subject and reference of each operation's or rollout group's body that may still be needed."""
    for engine in hive.engines.values():
        for name, model in engine.clients.models.items():
            yield from ((OPS, subjects.operation(engine.name, name), body) for body in model.needed())
    for engine_name, holder, body in hive.bodies_needed():
        yield TRAJECTORIES, subjects.trajectory(engine_name, holder), body


def _tokenizers_of(hive: Hive) -> list[str]:
    ready = [engine.weights for engine in hive.engines.values() if engine.weights is not None]
    return [event.weights.tokenizer for event in ready if event.weights.tokenizer]
