"""`bombus log verify` and `bombus log compact`: is the log what it should be, and what of it may go."""

from collections.abc import Callable

import msgspec

from bombus.bus import EPOCH, INBOX, Bus, Reader, Stored, snapshots
from bombus.bus.follow import read_event
from bombus.bus.snapshots import KEPT, Snapshot
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive.records import CallRef, decode_record
from bombus.hive.state import FOLD, Hive, evolve

CALLS_AT_ONCE = 1_000
Progress = Callable[[int, int], None]  # the position that was reached, and the log's end


class Verified(msgspec.Struct, frozen=True):
    """Events `first` to `last` were folded. `agreed` and `other_fold` are positions of snapshots on the way."""

    first: int
    last: int
    epochs: int
    agreed: tuple[int, ...]
    other_fold: tuple[int, ...]
    calls: int


async def verify(bus: Bus, progress: Progress = lambda position, end: None) -> Verified:
    """Fold from the first event that is kept, compare with each snapshot on the way, read the calls still needed.

    Raises `LogCorrupted` at the first thing that is wrong: an event that cannot be read, a gap, an epoch or an inbox
    position that goes backwards, a snapshot that cannot be read or is not the fold of what is before it, a call of an
    open episode, of the pool or of the outstanding batch that is not what its reference says.
    """
    newest = await bus.last(bus.subjects.events_stream)
    end = 0 if newest is None else newest.seq
    kept = [await _load(bus, position) for position in await snapshots.positions(bus)]
    check = _Check(await snapshots.start_of(bus, from_first=True))
    first = check.position + 1
    waiting = {snapshot.position: snapshot for snapshot in kept if first <= snapshot.position <= end}
    async with Reader(bus, bus.subjects.events_stream, first) as reader:
        while check.position < end:
            for stored in await reader.read():
                if stored.seq <= end:
                    check.take(stored)
                if stored.seq in waiting:
                    check.compare(waiting[stored.seq])
            progress(check.position, end)
    refs = sorted(_needed(check.hive), key=lambda ref: ref.seq)
    for start in range(0, len(refs), CALLS_AT_ONCE):
        some = refs[start : start + CALLS_AT_ONCE]
        for ref, stored in zip(some, await bus.get_many(bus.subjects.calls_stream, [ref.seq for ref in some])):
            decode_record(stored.data, ref)
    other = tuple(position for position, snapshot in waiting.items() if snapshot.fold != FOLD)
    agreed = tuple(position for position in waiting if position not in other)
    return Verified(first, end, check.epochs, agreed, other, len(refs))


def _needed(hive: Hive) -> set[CallRef]:
    """The calls that are still to be trained, or may be."""
    refs: set[CallRef] = set()
    for engine in hive.engines.values():
        refs.update(call.ref for episode in engine.open.values() for call in episode.calls)
        refs.update(ref for completed in engine.pool.values() for ref in completed.calls)
        if engine.batch is not None:
            refs.update(ref for group in engine.batch.groups for episode in group.episodes for ref in episode.calls)
    return refs


class _Check:
    def __init__(self, start: Snapshot) -> None:
        self.hive: Hive = start.hive
        self.position = start.position
        self.epochs = 0
        self._epoch = start.hive.epoch
        self._answered = start.answered

    def take(self, stored: Stored) -> None:
        if stored.seq != self.position + 1:
            raise LogCorrupted(f"event {self.position + 1} is missing: the log goes on at {stored.seq}")
        event = read_event(stored)
        evolve(self.hive, event)
        self.position = stored.seq
        epoch, answered = int(stored.headers[EPOCH]), int(stored.headers[INBOX])
        if epoch < self._epoch or epoch != self.hive.epoch:
            raise LogCorrupted(f"event {stored.seq} is of epoch {epoch}, inside epoch {self.hive.epoch}")
        if answered < self._answered:
            raise LogCorrupted(f"event {stored.seq} answers inbox message {answered}, after {self._answered}")
        self.epochs += epoch > self._epoch
        self._epoch, self._answered = epoch, answered

    def compare(self, snapshot: Snapshot) -> None:
        if snapshot.fold == FOLD and snapshot.hive != self.hive:
            raise LogCorrupted(f"the snapshot at event {self.position} is not the fold of the log up to there")


async def _load(bus: Bus, position: int) -> Snapshot:
    try:
        return await snapshots.load(bus, position)
    except LogCorrupted as error:
        raise LogCorrupted(f"the snapshot at event {position}: {error}") from error


async def compact(bus: Bus) -> int:
    """Remove the events before the older of the two newest snapshots; returns how many those were.

    What is left can be verified from there, and survives the loss of the newer snapshot. Raises `Refused` when there
    are not two good ones yet, `LogCorrupted` when one is damaged.
    """
    found = (await snapshots.positions(bus))[-KEPT:]
    if len(found) < KEPT:
        raise Refused(
            Code.NO_SNAPSHOT,
            f"nothing was removed: {len(found)} of {KEPT} snapshots are there. A coordinator leaves one when it stops "
            "in order, and after every 20,000 events",
        )
    for position in found:
        if (await _load(bus, position)).fold != FOLD:
            raise Refused(
                Code.NO_SNAPSHOT,
                f"the snapshot at event {position} is another version's: compact once this one has left two of its own",
            )
    return await bus.purge_below(bus.subjects.events_stream, found[0])
