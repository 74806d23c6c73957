"""Check that events can be removed from the log, and archive them, in a separate process next to the leader.

Folding a large part of the log takes seconds of CPU time and enough memory for a second state, and the leader can spare
neither. The process reads a `Preparation` from stdin and writes a `Prepared` to stdout. It removes nothing.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from bombus import faults, logs
from bombus.bus import BlobMissing, Bus, Reader, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import BombusError, LogCorrupted
from bombus.faults import Point
from bombus.hive.state import FOLD
from bombus.machine.process import die_with_parent
from bombus.replay.segments import archive_part, archived_up_to, remove_drafts
from bombus.replay.upkeep import LogCheck, load_snapshot

_SEND = msgspec.json.Encoder().encode
_BY_HAND = "; `bombus log compact` removes the oldest events without checking or archiving them"


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What to prepare: the removal of the events before the snapshot at event `cut`. A later snapshot is at event
    `until`.

    `archive` is the folder in which the events are archived, or "" for no archive.
    """

    url: str
    hive: str
    cut: int
    until: int
    archive: str = ""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a preparation. `why` is the reason why the events may not be removed, or "" if they may be.

    `damaged` lists the positions of snapshots that cannot be used; `gone` is true if a snapshot no longer exists.
    """

    why: str = ""
    damaged: tuple[int, ...] = ()
    gone: bool = False


async def prepare(wanted: Preparation) -> Prepared:
    """Check both snapshots against the fold of the log, archive the events to remove, and return the outcome."""
    archive = Path(wanted.archive) if wanted.archive else None
    try:
        async with await Bus.connect(wanted.url, wanted.hive, name="compaction") as bus:
            faulty = {position: why for position in (wanted.cut, wanted.until) if (why := await _fault(bus, position))}
            if faulty:
                return Prepared(why="; ".join(faulty.values()), damaged=tuple(faulty))
            archived = await _archived(bus, archive) if archive is not None else 0
            base = await _verified(bus, wanted, archived)
            faults.reached(Point.COMPACTION_VERIFIED)
            if archive is not None and archived < wanted.cut:
                await archive_part(bus, archive, (base.hive, base.position), wanted.cut)
                faults.reached(Point.COMPACTION_ARCHIVED)
    except BlobMissing as error:
        return Prepared(why=str(error), gone=True)
    except OSError as error:
        return Prepared(why=f"the archive cannot be written: {error}")
    except (BombusError, ValueError) as error:
        return Prepared(why=str(error))
    return Prepared()


async def _fault(bus: Bus, position: int) -> str:
    """Return why nothing may be removed before this snapshot, or "" if it is good. Raises `BlobMissing` if it is
    gone."""
    try:
        snapshot = await snapshots.load(bus, position)
    except BlobMissing:
        raise
    except LogCorrupted:
        return f"the snapshot at event {position} is damaged"
    return "" if snapshot.fold == FOLD else f"another version of bombus made the snapshot at event {position}"


async def _archived(bus: Bus, archive: Path) -> int:
    """Return the position up to which the log is archived. Raises `OSError` if the archive is not writable."""
    archive.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_drafts(archive, bus.subjects.hive)
    probe = archive / f".writable-{os.getpid()}"
    probe.write_bytes(b"")
    probe.unlink()
    return await archived_up_to(bus, archive)


async def _verified(bus: Bus, wanted: Preparation, archived: int) -> Snapshot:
    """Fold the log up to event `until`, and compare both snapshots with the fold. Return the state at which the archive
    continues.

    Raises `LogCorrupted` if a snapshot does not match, or if any of the events to remove cannot be folded.
    """
    first = (await bus.state(bus.subjects.events_stream)).first_seq
    start = await snapshots.oldest(bus)
    if start.position > min(max(first, archived), wanted.cut - 1):
        raise LogCorrupted(f"the log begins at event {first}, and the state before it cannot be read{_BY_HAND}")
    check = LogCheck(start)
    base = snapshots.encode(start)
    async with Reader(bus, bus.subjects.events_stream, check.position + 1) as reader:
        while check.position < wanted.until:
            for stored in await reader.read():
                if check.position == wanted.until:
                    break
                check.take(stored)
                if stored.seq in (wanted.cut, wanted.until):
                    await _compare(bus, check, start.fold)
                if stored.seq == archived:
                    base = snapshots.encode(msgspec.structs.replace(start, position=archived, hive=check.hive))
    return snapshots.decode(base)


async def _compare(bus: Bus, check: LogCheck, begun_by: int) -> None:
    """Compare a check of the log with the snapshot at its position. `begun_by` is the version that made the snapshot at
    which the check began."""
    snapshot = await load_snapshot(bus, check.position)
    if snapshot.fold != FOLD:
        raise LogCorrupted(f"another version of bombus has since written the snapshot at event {check.position}")
    try:
        check.compare(snapshot)
    except LogCorrupted as error:
        if begun_by == FOLD:
            raise
        raise LogCorrupted(f"{error}; another version made the snapshot that the fold began at{_BY_HAND}") from error


def main() -> None:
    """Read a `Preparation` from stdin, carry it out, and write a `Prepared` to stdout."""
    die_with_parent()
    os.nice(10)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Preparation)
    logs.configure("compaction", hive=wanted.hive)
    sys.stdout.buffer.write(_SEND(asyncio.run(_until_sigterm(wanted))))


async def _until_sigterm(wanted: Preparation) -> Prepared:
    preparing = asyncio.ensure_future(prepare(wanted))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, preparing.cancel)
    try:
        return await preparing
    except asyncio.CancelledError:
        sys.exit("ended before the log was checked and archived")


if __name__ == "__main__":
    main()
