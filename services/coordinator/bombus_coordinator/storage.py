"""Watch how full the streams and the disk are, and refuse new work while one of them is nearly full (R12, R20).

A reserve is kept for work in progress: new work is refused while less than the reserve is free. New work is accepted
again only when one and a half times the reserve is free, so that the state does not flap. To make room, data is dropped
only for keys that exceed their share (rules/crowding.py).
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.config.streams import DISK_RESERVE_BYTES, limit_flag
from bombus.errors import BusUnavailable
from bombus.figures import byte_size
from bombus.hive import events as ev
from bombus.hive.inbox import StorageSeen
from bombus.hive.state import ROLLOUT_GROUPS, Hive
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.live import Live

log = logging.getLogger(__name__)

PERIOD_S = 1.0  # short enough that clients find out within two seconds
RESERVE = 0.1  # fraction of a stream
FREE_AGAIN = 1.5  # multiple of the reserve
DISK = "the disk"
INODES = "the disk's inodes"
INODES_RESERVE = 1024
_ADVICE = {
    "inbox": "It is trimmed as soon as the coordinator has caught up.",
    "events": "It is compacted when it is over 60 % full, unless compaction is switched off or fails, which `bombus "
    "status` shows.",
    "calls": "It is trimmed as steps are made.",
    "ops": "It is trimmed as operations are executed and saved, and as sessions end.",
    "trajectories": "It is trimmed as batches are handed out.",
    "blobs": "It holds snapshots of the log, tokenizers, and weights published as objects.",
    DISK: "Free space where the bus keeps its data.",
    INODES: "Remove files where the bus keeps its data: no more files can be created, however many bytes are free.",
}


def is_full(hive: Hive, place: StorageSeen) -> bool:
    """Return whether to refuse new work because this place (a stream or the disk) is full."""
    needed = place.reserve * (FREE_AGAIN if place.what in hive.full else 1.0)
    return place.size - place.used < needed


def seen(hive: Hive, live: Live, place: StorageSeen) -> Decisions:
    full = is_full(hive, place)
    if full == (place.what in hive.full):
        return
    if full:
        is_stream = place.what not in (DISK, INODES)
        name = f"stream {place.what}" if is_stream else place.what
        text = str if place.what == INODES else byte_size
        left = f"only {text(max(0, place.size - place.used))} of {text(place.size)} were left"
        again = f"New work will be accepted once {text(int(FREE_AGAIN * place.reserve))} are free."
        raised = f" Or raise its limit with {limit_flag(place.what)}." if is_stream else ""
        oldest = _oldest_group(hive) if place.what == ROLLOUT_GROUPS else ""
        why = f"Storage is nearly full: {left} of {name}. {again} {_ADVICE.get(place.what, '')}{raised}{oldest}"
        filled = ev.StorageFilled(at_ns=live.now_ns, what=place.what, used=place.used, size=place.size, why=why)
        yield Decision(events=(filled,))
    else:
        freed = ev.StorageFreed(at_ns=live.now_ns, what=place.what, used=place.used, size=place.size)
        yield Decision(events=(freed,))


def _oldest_group(hive: Hive) -> str:
    """Return a sentence about the oldest queued group, which keeps its stream from being trimmed, or "" if no group is
    queued."""
    queued = [
        (group.body.first, engine.name, number, group)
        for engine in hive.engines.values()
        for number, group in engine.trajectories.queue.groups.items()
        if group.body is not None
    ]
    if not queued:
        return ""
    _, engine, number, group = min(queued, key=lambda found: found[0])
    sender = "no environment" if group.environment is None else f"environment {group.environment}"
    which = f"group {number} of engine {engine} ({group.sequences} sequences, of {sender})"
    return (
        f" Nothing that its key stored after {which} is trimmed until a batch takes that group. `bombus status` says "
        "why no batch takes the queued groups; a new /register drops them."
    )


async def watch(
    bus: Bus,
    hive: Callable[[], Hive],
    disk: Path | None = None,
    disk_reserve: int = DISK_RESERVE_BYTES,
    period_s: float = PERIOD_S,
) -> None:
    """Report to the inbox whenever a place (a stream or the disk) becomes full or has room again, until cancelled.
    `disk` is a folder on the server's disk."""
    count = 0
    while True:
        try:
            async for place in _measure(bus, disk, disk_reserve):
                if is_full(hive(), place) != (place.what in hive().full):
                    count += 1
                    await bus.inbox.send(msgspec.structs.replace(place, id=f"storage-{bus.token}-{count}"))
        except (BusUnavailable, ServerRefused) as error:
            log.warning("could not read how full the streams are: %s", error)
        await asyncio.sleep(period_s)


async def _measure(bus: Bus, disk: Path | None, disk_reserve: int) -> AsyncIterator[StorageSeen]:
    if disk is not None:
        usage = shutil.disk_usage(disk)
        yield StorageSeen(id="", what=DISK, used=usage.total - usage.free, size=usage.total, reserve=disk_reserve)
        inodes = os.statvfs(disk)
        if inodes.f_files:  # some file systems do not limit inodes
            reserve = min(INODES_RESERVE, int(RESERVE * inodes.f_files))
            used = inodes.f_files - inodes.f_favail
            yield StorageSeen(id="", what=INODES, used=used, size=inodes.f_files, reserve=reserve)
    for what, state in (await bus.limited_states()).items():
        if state.max_bytes > 0:
            reserve = int(RESERVE * state.max_bytes)
            yield StorageSeen(id="", what=what, used=state.bytes, size=state.max_bytes, reserve=reserve)
