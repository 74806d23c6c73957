"""Check that events can be removed from the log, and archive them: a process of its own, beside the leader.

Folding a large part of the log takes seconds of computing and the memory of a second state, neither of which the leader
has to spare. The process reads what is wanted from stdin and writes to stdout what came of it. It removes nothing.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from bombus import faults, logs
from bombus.bus import BlobMissing, Bus, Reader, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import BombusError, LogCorrupted
from bombus.faults import Point
from bombus.hive.state import FOLD
from bombus.host.process import die_with_parent
from bombus.replay.segments import archive_part, archived_up_to
from bombus.replay.upkeep import LogCheck, load_snapshot

_SEND = msgspec.json.Encoder().encode


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """The events before the snapshot at event `cut` are to be removed; that at `until` is a later one.

    `archive` is the folder in which they are kept, "" for none.
    """

    url: str
    hive: str
    cut: int
    until: int
    archive: str = ""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a preparation. `why` says why nothing may be removed, "" if it may.

    `damaged` are the positions of snapshots that cannot be used; `gone`: one is not there any more.
    """

    why: str = ""
    damaged: tuple[int, ...] = ()
    gone: bool = False


async def prepare(wanted: Preparation) -> Prepared:
    """Return whether both snapshots are the fold of the log, and what is to be removed is archived."""
    archive = Path(wanted.archive) if wanted.archive else None
    try:
        async with await Bus.connect(wanted.url, wanted.hive, name="compaction") as bus:
            damaged = tuple([position for position in (wanted.cut, wanted.until) if not await _is_good(bus, position)])
            if damaged:
                which = " and ".join(map(str, damaged))
                return Prepared(why=f"the snapshot at event {which} is damaged", damaged=damaged)
            archived = await _archived(bus, archive) if archive is not None else 0
            base = await _verified(bus, wanted, archived)
            faults.reached(Point.COMPACTION_VERIFIED)
            if archive is not None and base.position < wanted.cut:
                await archive_part(bus, archive, (base.hive, base.position), wanted.cut)
                faults.reached(Point.COMPACTION_ARCHIVED)
    except BlobMissing as error:
        return Prepared(why=str(error), gone=True)
    except OSError as error:
        return Prepared(why=f"the archive cannot be written: {error}")
    except (BombusError, ValueError) as error:
        return Prepared(why=str(error))
    return Prepared()


async def _is_good(bus: Bus, position: int) -> bool:
    try:
        await snapshots.load(bus, position)
        return True
    except BlobMissing:
        raise
    except LogCorrupted:
        return False


async def _archived(bus: Bus, archive: Path) -> int:
    """Return up to where the log is archived. Raises `OSError` when nothing can be written there."""
    archive.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = archive / f".writable-{os.getpid()}"
    probe.write_bytes(b"")
    probe.unlink()
    return await archived_up_to(bus, archive)


async def _verified(bus: Bus, wanted: Preparation, archived: int) -> Snapshot:
    """Fold the log up to event `until`, and compare both snapshots. Return the state at which the archive goes on.

    Raises `LogCorrupted`.
    """
    start = await snapshots.start_of(bus, from_first=True)
    check = LogCheck(start)
    base = snapshots.encode(start)
    async with Reader(bus, bus.subjects.events_stream, check.position + 1) as reader:
        while check.position < wanted.until:
            for stored in await reader.read():
                if stored.seq > wanted.until:
                    break
                check.take(stored)
                if stored.seq in (wanted.cut, wanted.until):
                    _compare(check, await load_snapshot(bus, stored.seq))
                if stored.seq == archived and archived > start.position:
                    base = snapshots.encode(msgspec.structs.replace(start, position=archived, hive=check.hive))
    return snapshots.decode(base)


def _compare(check: LogCheck, snapshot: Snapshot) -> None:
    if snapshot.fold != FOLD:
        raise LogCorrupted(f"another version wrote the snapshot at event {snapshot.position}")
    check.compare(snapshot)


def main() -> None:
    """Do what stdin says."""
    die_with_parent()
    os.nice(10)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Preparation)
    logs.configure("compaction", hive=wanted.hive)
    sys.stdout.buffer.write(_SEND(asyncio.run(prepare(wanted))))


if __name__ == "__main__":
    main()
