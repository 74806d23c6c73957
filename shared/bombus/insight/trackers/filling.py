"""Fills trackers from the ledgers of runs: each row once, whatever is killed, and whatever a tracker does.

`bombus track --follow` folds a hive's log into rows, adds them to the ledgers of runs, and has a thread for each
tracker that the job of a run names.
"""

import asyncio
import itertools
import logging
import threading
import time
from pathlib import Path

import msgspec

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.cli import NotInstalled
from bombus.config.job import Tracker
from bombus.errors import BombusError, in_one_line
from bombus.hive import events as ev
from bombus.hive.state import Hive
from bombus.insight.trackers.adapters import ADAPTERS, continues, is_installed
from bombus.insight.trackers.ledger import InUse, Ledger
from bombus.insight.trackers.rows import Noted, TrackedRows, sample_of, tracked
from bombus.private import private_folder, write_private
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.source import BusSource, Source

log = logging.getLogger(__name__)

COMPLETE = "complete"  # a file with the last step that a tracker had when it was closed
RETRY_S, RETRY_S_MAX = 1.0, 300.0  # until a tracker that failed is tried again
APPEND_RETRY_S = 2.0  # until a row is written again that could not be, as on a full disk
CLOSE_S = 15.0  # time for trackers to be closed when this process ends


def fill(ledger: Ledger, tracker: Tracker, ask: bool = False) -> int:
    """Give a tracker the rows that it lacks, until the ledger ends. Return how many were written.

    A tracker that was closed with all rows is left alone; with `ask`, one that continues runs is asked all the same.
    Raises `NotInstalled`, or whatever the tracker's package raises.
    """
    if not is_installed(tracker):
        raise NotInstalled(tracker, "trackers")
    folder = private_folder(ledger.folder / tracker)
    complete = folder / COMPLETE
    had = int(complete.read_text()) if complete.is_file() and not (ask and continues(tracker)) else 0
    if not any(row.step > had for row in ledger.rows()):
        return 0
    complete.unlink(missing_ok=True)
    written = 0
    with ADAPTERS[tracker](ledger.run, folder) as (last, write):
        for row in ledger.rows():
            if row.step > last:
                write(row)
                written += 1
    write_private(complete, str(ledger.last))
    return written


def keep_filled(ledger: Ledger, tracker: Tracker, stopping: threading.Event) -> None:
    """Fill a tracker until the ledger ends. One that fails is tried again, after longer and longer pauses, until
    `stopping` is set: then the next process to read the log gives it the rest. Nothing else waits."""
    pause_s, told = RETRY_S, ""
    while True:
        try:
            fill(ledger, tracker)
            return
        except Exception as error:  # packages of others raise what they like, and a run must not suffer from it
            why = str(error) if isinstance(error, NotInstalled) else in_one_line(error)
        level = logging.DEBUG if why == told else logging.WARNING
        log.log(level, "run %s is not written to %s now, and is not affected: %s", ledger.run.name, tracker, why)
        told = why
        if stopping.wait(pause_s):
            return
        pause_s = min(2 * pause_s, RETRY_S_MAX)


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
                        await write_row(self._ledger(noted.series), self._source, noted)
                    elif (opened := self._open.pop(noted.series.name, None)) is not None:
                        threading.Thread(target=_close, args=opened).start()  # waited for when the process ends
                    break
                except (OSError, InUse) as error:
                    log.log(level, "steps of %s wait to be written to trackers: %s", noted.series.name, error)
                    await asyncio.sleep(APPEND_RETRY_S)

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


async def write_row(ledger: Ledger, source: Source, noted: Noted) -> None:
    """Add a row to a ledger that lacks it. It has no samples if their calls are not kept, or not in an archive."""
    if (row := noted.row) is not None and row.step > ledger.last:
        try:
            records = await source.records([call for _, _, call in noted.sampled])
            shown = zip(noted.sampled, records, strict=True)
            row = msgspec.structs.replace(row, samples=tuple(sample_of(*each[:2], record) for each, record in shown))
        except BombusError as error:
            log.info("a step has no samples: %s", error)
        ledger.append(row)
