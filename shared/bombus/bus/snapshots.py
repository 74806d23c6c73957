"""Snapshots of a hive's state in the object store. Recovery loads the newest usable one and folds the events after it.

A snapshot identifies its last event by sequence and message id. If that event is not on the log (because the log was
recreated, or lost its end in a power cut), the snapshot is not used (R6).
"""

import logging
import re
from collections.abc import AsyncIterator, Collection, Sequence

import msgspec

from bombus.bus import Blobs, Bus
from bombus.bus.headers import MSG_ID
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.levels import check_level
from bombus.hive.state import FOLD, Hive

log = logging.getLogger(__name__)

KEPT = 2  # number of the newest snapshots that are kept: recovery begins at one of them (R12)
PARTS = 3  # number of parts of the log, each with a snapshot at which a compaction can stop
_PREFIX = "snapshot-"
_NUMBER = re.compile(r"[0-9]{16}")
_MAGIC = b"bombus snapshot\n"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A stored state: `hive` is the fold of all events up to `position`, as computed by version `fold` of `evolve`.

    `event_id` is the message id of the event at `position`, and `answered` the inbox sequence that this event answers.
    """

    fold: int
    position: int
    event_id: str
    answered: int
    hive: Hive


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode(snapshot: Snapshot) -> bytes:
    return _MAGIC + _encoder.encode(snapshot)


def decode(body: bytes) -> Snapshot:
    """Decode a snapshot. Raises `LogCorrupted` when this version cannot read it."""
    if not body.startswith(_MAGIC):
        raise LogCorrupted("this is not a snapshot of a hive")
    try:
        return decoded(_decoder.decode, memoryview(body)[len(_MAGIC) :])
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"the snapshot cannot be read by this version: {error}") from error


async def store(bus: Bus, body: bytes, position: int) -> None:
    """Store an encoded snapshot."""
    await Blobs(bus).put(_name(position), body)


async def prune(bus: Bus, newest: int = 0, held: Collection[int] = ()) -> None:
    """Remove the snapshots that are neither needed nor held, including those left from an earlier, longer log.

    The log reaches at least to event `newest`.
    """
    found = await positions(bus)
    events = await bus.state(bus.subjects.events_stream)  # read second, so that no listed snapshot is newer
    for unused in {*found} - {*needed(found, events.first_seq, max(events.last_seq, newest))} - {*held}:
        await Blobs(bus).delete(_name(unused))


def needed(positions: Sequence[int], first: int, last: int) -> list[int]:
    """Return which of the snapshots at the sorted `positions` to keep for a log of the events `first` to `last`.

    They are the newest `KEPT`, the oldest from which all later events can be folded, and enough of those in between for
    each of the `PARTS` parts of the log to have one: never more than `2 * PARTS + KEPT`.
    """
    own = [position for position in positions if first - 1 <= position <= last]
    apart = (last - first + 1) // PARTS
    begins = 0 if first == 1 else None  # a log that still has its first event needs no snapshot
    kept: list[int] = []
    for number, position in enumerate(own):
        before = kept[-1] if kept else begins
        is_newest = number >= len(own) - KEPT
        if is_newest or before is None or own[number + 1] - before > apart:
            kept.append(position)
    return kept


async def positions(bus: Bus) -> list[int]:
    """Return the positions of the log's snapshots, oldest first, including damaged ones."""
    numbers = (name.removeprefix(_PREFIX) for name in await Blobs(bus).names(_PREFIX))
    return sorted(int(number) for number in numbers if _NUMBER.fullmatch(number))


async def load(bus: Bus, position: int) -> Snapshot:
    """Load the snapshot at `position`.

    Raises `LogCorrupted` if it is missing or damaged, or belongs to another log, and `NewerLevel`.
    """
    snapshot = decode(await Blobs(bus).get(_name(position)))
    stream = bus.subjects.events_stream
    state = await bus.state(stream)
    if snapshot.position != position:
        raise LogCorrupted(f"it is a snapshot of event {snapshot.position}")
    if position > state.last_seq:
        raise LogCorrupted(f"it is ahead of the log, which ends at {state.last_seq}")
    if position < state.first_seq - 1:
        raise LogCorrupted(f"the log begins too far after it, at event {state.first_seq}")
    if position >= state.first_seq and (await bus.get(stream, position)).headers.get(MSG_ID) != snapshot.event_id:
        raise LogCorrupted(f"event {position} in this log is a different event")
    check_level(snapshot.hive.level)
    return snapshot


async def start_of(bus: Bus, from_first: bool = False) -> Snapshot:
    """Return the state at which to start folding: the newest snapshot that fits this log, or an empty one.

    With `from_first`, return the state before the first event that is kept. A snapshot from another version of the fold
    is used only if the log no longer has its very first event. Raises `LogCorrupted` if the log begins after all
    readable snapshots, or `BusUnavailable`.
    """
    begins_at = (await bus.state(bus.subjects.events_stream)).first_seq
    compacted = begins_at > 1
    if from_first and not compacted:
        return _empty()
    other_version: Snapshot | None = None
    found = await positions(bus)
    async for snapshot in _readable(bus, found if from_first else found[::-1]):
        if snapshot.fold == FOLD:
            return snapshot
        other_version = other_version or snapshot
    if not compacted:
        return _empty()
    if other_version is None:
        raise _unreadable(bus, begins_at)
    log.warning("the snapshot at event %d was made by another version of bombus", other_version.position)
    return other_version


async def oldest(bus: Bus) -> Snapshot:
    """Return the state before the first event that is kept, whichever version stored it.

    It is empty if the log still has its very first event, and a later state if the oldest snapshot cannot be read.
    Raises `LogCorrupted` if no snapshot can be read, or `BusUnavailable`.
    """
    begins_at = (await bus.state(bus.subjects.events_stream)).first_seq
    if begins_at <= 1:
        return _empty()
    async for snapshot in _readable(bus, await positions(bus)):
        return snapshot
    raise _unreadable(bus, begins_at)


async def _readable(bus: Bus, positions: Sequence[int]) -> AsyncIterator[Snapshot]:
    """Yield the snapshots at these positions that can be read and fit this log."""
    for position in positions:
        try:
            yield await load(bus, position)
        except LogCorrupted as error:
            log.warning("the snapshot at event %d is skipped: %s", position, error)


def _empty() -> Snapshot:
    return Snapshot(fold=FOLD, position=0, event_id="", answered=0, hive=Hive())


def _unreadable(bus: Bus, begins_at: int) -> LogCorrupted:
    return LogCorrupted(
        f"the event log of hive {bus.subjects.hive} begins at {begins_at}, but no snapshot of what came before it can "
        "be read: restore the bus's data from a backup"
    )


def _name(position: int) -> str:
    return f"{_PREFIX}{position:016d}"
