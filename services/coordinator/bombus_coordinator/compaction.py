"""Compact the log: when it is over 60 % full, the leader removes its oldest events, keeping two verified snapshots.

Before events are removed, a separate process (`preparing`) folds the log from its first event up to two snapshots,
checks that both match the fold, and writes the events to the archive, if there is one. A leader that has been deposed
without knowing it removes nothing that its successor needs: the removed events all precede a snapshot that any process
can load, and recovery begins at that snapshot or a newer one.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from math import ceil
from pathlib import Path

import msgspec

from bombus import faults
from bombus.bus import EPOCH, Bus, StreamState, snapshots
from bombus.errors import BombusError
from bombus.faults import Point
from bombus.hive.inbox import CompactionTried
from bombus.hive.state import Hive
from bombus.machine.process import PARENT_VARIABLE
from bombus_coordinator.preparing import Preparation, Prepared
from bombus_coordinator.snapshotter import Snapshotter

log = logging.getLogger(__name__)

START = 0.6  # fraction of the stream's size above which events are removed
KEEP = 0.4  # approximate fraction of the stream's size that is kept
PERIOD_S = 10.0
RETRY_S, RETRY_S_MAX = 60.0, 960.0  # delay after a failed attempt; doubles with each further failure
PREPARE_S_MAX = 3600.0
END_S = 2.0  # grace period after SIGTERM, and again after SIGKILL


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """How a leader compacts its log. `url` is the URL of the bus, and `archive` is the folder for the removed
    events."""

    url: str
    archive: Path | None = None
    period_s: float = PERIOD_S
    retry_s: float = RETRY_S


class Cut(msgspec.Struct, frozen=True):
    """What to remove: the events before the snapshot at event `at`. `until` is the event of the next snapshot."""

    at: int
    until: int


def is_long(events: StreamState) -> bool:
    return events.fill > START


def usable(events: StreamState, positions: Sequence[int], damaged: Collection[int] = ()) -> list[int]:
    """Return those snapshots before which events can be removed. `positions` are the snapshots' positions,
    ascending."""
    return [each for each in positions if events.first_seq < each <= events.last_seq and each not in damaged]


def cut_of(events: StreamState, positions: Sequence[int]) -> Cut | None:
    """Return where to cut a log that is too long, given its usable snapshots, or None if there are fewer than two.

    The cut is at the oldest snapshot that leaves no more than `KEEP` of the stream or, if there is none, at the second
    newest.
    """
    if len(positions) < 2:
        return None
    spare = 1 - KEEP * events.max_bytes / events.bytes
    wanted = events.first_seq + ceil(spare * events.messages)
    *older, _ = positions
    number = next((number for number, position in enumerate(older) if position >= wanted), len(older) - 1)
    return Cut(positions[number], positions[number + 1])


async def run(bus: Bus, settings: Compaction, hive: Callable[[], Hive], taking: Snapshotter) -> None:
    """Compact the log whenever it is too long, and send each outcome to the inbox, until cancelled.

    `taking` is the snapshotter.
    """
    compactor = Compactor(bus, settings, hive, taking)
    pause_s = settings.retry_s
    while True:
        await asyncio.sleep(settings.period_s)
        try:
            if await compactor.attempt():
                pause_s = settings.retry_s
                continue
        except BombusError as error:  # not urgent: the leader can work for hours like this
            log.warning("the log could not be compacted: %s", error)
            continue
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S_MAX)


class Compactor:
    """Compacts the log of a hive that this process leads."""

    def __init__(self, bus: Bus, settings: Compaction, hive: Callable[[], Hive], taking: Snapshotter) -> None:
        self._bus = bus
        self._settings = settings
        self._hive = hive
        self._taking = taking
        self._damaged: set[int] = set()

    async def attempt(self) -> bool:
        """Compact the log if it is too long. Return False when a preparation failed."""
        stream = self._bus.subjects.events_stream
        events = await self._bus.state(stream)
        if not is_long(events):
            if self._hive().uncompacted:
                await self._tell(CompactionTried(id=""))
            return True
        positions = usable(events, await snapshots.positions(self._bus), self._damaged)
        cut = cut_of(events, positions)
        if cut is None:
            # While new work is refused, there may be no events to make a snapshot due. The event that records this
            # outcome makes one due.
            self._taking.pace.ask()
            await self._tell(CompactionTried(id="", why=f"it needs 2 good snapshots, but has {len(positions)}"))
            return True
        self._taking.held = {cut.at, cut.until}
        found = await prepared(self._settings, self._bus.subjects.hive, cut)
        if found.gone:
            return True  # storing a newer snapshot removed one of these: choose again
        self._damaged |= set(found.damaged)
        if found.why:
            log.warning("the log is %.0f %% full and was not compacted: %s", 100 * events.fill, found.why)
            await self._tell(CompactionTried(id="", why=found.why))
            return bool(found.damaged)  # if any are damaged, the next attempt uses other snapshots, so it need not wait
        if not await self._leads():
            return False
        faults.reached(Point.COMPACTION_PURGING)
        removed = await self._bus.purge_below(stream, cut.at)
        faults.reached(Point.COMPACTION_PURGED)
        log.info("compacted: %d events before event %d were removed", removed, cut.at)
        await snapshots.prune(self._bus)
        await self._tell(CompactionTried(id="", below=cut.at))
        return True

    async def _leads(self) -> bool:
        newest = await self._bus.last(self._bus.subjects.events_stream)
        return newest is not None and int(newest.headers[EPOCH]) == self._hive().epoch

    async def _tell(self, tried: CompactionTried) -> None:
        if tried.below or tried.why != self._hive().uncompacted:
            await self._bus.inbox.send(msgspec.structs.replace(tried, id=f"compaction-{os.urandom(8).hex()}"))


async def prepared(settings: Compaction, hive: str, cut: Cut) -> Prepared:
    """Have a separate process verify the snapshots and archive the events to remove."""
    wanted = Preparation(
        url=settings.url,
        hive=hive,
        cut=cut.at,
        until=cut.until,
        archive="" if settings.archive is None else str(settings.archive),
    )
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            Preparation.__module__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
    except OSError as error:
        return Prepared(why=f"the process that checks and archives it cannot be started: {error}")
    try:
        async with asyncio.timeout(PREPARE_S_MAX):
            output, _ = await process.communicate(msgspec.json.encode(wanted))
    except TimeoutError:
        return Prepared(why=f"checking and archiving it took more than {PREPARE_S_MAX:.0f} s")
    finally:
        await end(process)
    if process.returncode:
        return Prepared(why=f"the process that checks and archives it ended with code {process.returncode}")
    try:
        return msgspec.json.decode(output, type=Prepared)
    except msgspec.MsgspecError as error:
        return Prepared(why=f"the process that checks and archives it gave no answer: {error}")


async def end(process: asyncio.subprocess.Process, allowed_s: float = END_S) -> None:
    """End a process, giving it time to remove its draft. A process that hangs while writing to a dead disk is not
    waited for."""
    for stop in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        stop()
        try:
            async with asyncio.timeout(allowed_s):
                await process.wait()
        except TimeoutError:
            log.warning("process %d, which checks and archives the log, is still running", process.pid)
