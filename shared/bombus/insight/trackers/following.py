"""Follows a hive's log and writes its runs to the trackers that their jobs name: `bombus track --follow`."""

import asyncio
import itertools
import logging
import threading
import time
from pathlib import Path

import msgspec

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BombusError
from bombus.hive import events as ev
from bombus.hive.state import Hive
from bombus.insight.trackers.adapters import ADAPTERS
from bombus.insight.trackers.filling import keep_filled
from bombus.insight.trackers.ledger import InUse, Ledger
from bombus.insight.trackers.rows import Noted, Row, TrackedRows, sample_of, tracked
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.source import BusSource, Source

log = logging.getLogger(__name__)

CLOSE_S = 15.0  # time for trackers to be closed when this process ends
RETRY_S = 2.0  # until a row is written again that could not be, as on a full disk


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
        self._open: dict[str, tuple[Ledger, list[threading.Thread]]] = {}

    def begin(self, position: int, state: Hive) -> None:
        self._rows = TrackedRows(state)

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        for noted in self._rows.note(seq, event):
            self._noted.put_nowait(noted)

    async def write(self) -> None:
        """Write the rows to the ledgers of their runs, from which the trackers are filled."""
        while True:
            noted = await self._noted.get()
            for level in itertools.chain([logging.WARNING], itertools.repeat(logging.DEBUG)):
                try:
                    if noted.row is not None:
                        await write_row(self._ledger(noted.series), self._source, noted, noted.row)
                    elif (opened := self._open.pop(noted.series.name, None)) is not None:
                        threading.Thread(target=_close, args=opened).start()  # waited for when the process ends
                    break
                except (OSError, InUse) as error:
                    log.log(level, "steps of %s wait to be written to trackers: %s", noted.series.name, error)
                    await asyncio.sleep(RETRY_S)

    def _ledger(self, series: RunSeries) -> Ledger:
        if series.name not in self._open:
            ledger = Ledger(self._folder, tracked(self._hive, series))
            log.info("steps of %s are written to %s", series.name, ledger.folder, extra={"engine": series.engine})
            fillers = [
                threading.Thread(target=keep_filled, args=(ledger, name, self._stopping), daemon=True)
                for name in ADAPTERS
                if name in series.job.logging.trackers
            ]
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


def _close(ledger: Ledger, fillers: list[threading.Thread]) -> None:
    """Let the trackers of a run that has ended close it, and then other processes write it."""
    ledger.end()
    for filler in fillers:
        filler.join()
    ledger.close()


async def write_row(ledger: Ledger, source: Source, noted: Noted, row: Row) -> None:
    """Add a row to a ledger that lacks it. It has no samples if their calls are not kept, or not in an archive."""
    if row.step > ledger.last:
        try:
            records = await source.records([call for _, _, call in noted.sampled])
            shown = zip(noted.sampled, records, strict=True)
            row = msgspec.structs.replace(row, samples=tuple(sample_of(*each[:2], record) for each, record in shown))
        except BombusError as error:
            log.info("a step has no samples: %s", error)
        ledger.append(row)
