"""Follows a hive's log and writes its runs to the trackers that their jobs name: `bombus track --follow`."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.job import Tracker
from bombus.errors import BombusError
from bombus.hive import events as ev
from bombus.hive.records import CallRef
from bombus.hive.state import Hive
from bombus.insight.trackers.filling import ADAPTERS, Filler
from bombus.insight.trackers.ledger import InUse, Ledger
from bombus.insight.trackers.rows import Row, ShownSample, TrackedRows, sample_of, tracked
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.source import BusSource, Source

log = logging.getLogger(__name__)

SAMPLES = 4  # of a step
CLOSE_S = 15.0  # time for trackers to be closed when this process ends
RETRY_S = 2.0  # until a row is written again that could not be, as on a full disk


class Noted(msgspec.Struct, frozen=True):
    """A row of a run, with the calls that were sampled for it; or, without a row, the run's end."""

    series: RunSeries
    row: Row | None = None
    sampled: Sequence[tuple[str, float, CallRef]] = ()


async def follow(url: str, hive: str, folder: Path) -> None:
    """Write the runs of a hive to their trackers until cancelled. Raises `LogCorrupted`."""
    async with await Bus.connect(url, hive, name="track") as bus:
        tracking = Tracking(bus.subjects.hive, folder, BusSource(bus, f"hive {hive}"))
        follower = Follower(bus, on_event=tracking.note, on_start=tracking.begin)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follower.run())
                tasks.create_task(tracking.write())
        finally:
            await asyncio.to_thread(tracking.close)


class Tracking:
    """The runs of a hive on their way to the trackers. Rows are folded as events come, and written in order."""

    def __init__(self, hive: str, folder: Path, source: Source) -> None:
        self._hive, self._folder, self._source = hive, folder, source
        self._rows = TrackedRows(Hive())
        self._noted: asyncio.Queue[Noted] = asyncio.Queue()
        self._stopping = threading.Event()
        self._open: dict[str, tuple[Ledger, list[Filler]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, position: int, state: Hive) -> None:
        self._rows = TrackedRows(state)

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        if (found := self._rows.note(seq, event)) is not None:
            series, rows = found
            for row in rows:
                self._noted.put_nowait(Noted(series, row, sampled_of(series, row, series.job.logging.trackers)))
        if isinstance(event, ev.EngineStopped | ev.EngineFailed):
            ended = self._rows.runs.series.get(f"{event.engine}-{event.run}")
            if ended is not None:
                self._noted.put_nowait(Noted(ended))

    async def write(self) -> None:
        """Write the rows to the ledgers of their runs, from which the trackers are filled."""
        while True:
            noted = await self._noted.get()
            for level in itertools.chain([logging.WARNING], itertools.repeat(logging.DEBUG)):
                try:
                    await self._write(noted)
                    break
                except (OSError, InUse) as error:
                    log.log(level, "steps of %s wait to be written to trackers: %s", noted.series.name, error)
                    await asyncio.sleep(RETRY_S)

    async def _write(self, noted: Noted) -> None:
        series = noted.series
        if noted.row is None:
            if (opened := self._open.pop(series.name, None)) is not None:
                task = asyncio.create_task(asyncio.to_thread(_close, *opened))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            return
        ledger = self._ledger(series)
        if noted.row.step > ledger.last:
            samples = await read_samples(self._source, noted.sampled)
            ledger.append(msgspec.structs.replace(noted.row, samples=samples))

    def _ledger(self, series: RunSeries) -> Ledger:
        if series.name not in self._open:
            ledger = Ledger(self._folder, tracked(self._hive, series))
            log.info("steps of %s are written to %s", series.name, ledger.folder, extra={"engine": series.engine})
            names = [name for name in dict.fromkeys(series.job.logging.trackers) if name in ADAPTERS]
            fillers = [Filler(ledger, name, self._stopping) for name in names]
            self._open[series.name] = ledger, fillers
            for filler in fillers:
                filler.start()
        return self._open[series.name][0]

    def close(self) -> None:
        """Close the trackers. What they do not have by now, the next process gives them."""
        self._stopping.set()
        deadline = time.monotonic() + CLOSE_S
        for ledger, _ in self._open.values():
            ledger.end()
        for _, fillers in self._open.values():
            for filler in fillers:
                filler.join(max(0.0, deadline - time.monotonic()))


def _close(ledger: Ledger, fillers: list[Filler]) -> None:
    """Let the trackers of a run that has ended close it, and then other processes write it."""
    ledger.end()
    for filler in fillers:
        filler.join()
    ledger.close()


def sampled_of(series: RunSeries, row: Row, trackers: Collection[Tracker]) -> Sequence[tuple[str, float, CallRef]]:
    """Return the calls whose answers are shown with a run's newest row, if any of the trackers shows them."""
    every, steps = series.job.logging.samples_every, series.steps
    if not every or row.step % every or not ADAPTERS.keys() & set(trackers) or not steps or steps[-1].step != row.step:
        return ()
    return steps[-1].sampled[:SAMPLES]


async def read_samples(source: Source, sampled: Sequence[tuple[str, float, CallRef]]) -> tuple[ShownSample, ...]:
    """Read sampled answers. There are none if the calls are no longer kept, or are not in an archive."""
    try:
        records = await source.records([call for _, _, call in sampled])
    except BombusError as error:
        log.info("a step has no samples: %s", error)
        return ()
    return tuple(sample_of(task, reward, record) for (task, reward, _), record in zip(sampled, records, strict=True))
