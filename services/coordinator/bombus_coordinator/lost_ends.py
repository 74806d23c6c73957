"""Find what streams have lost, either in a power cut or because an older copy of a stream was restored (R6).

Streams refer to each other: an event names the inbox message that it answers, and identifies calls by sequence and
digest; a tick and a snapshot each name an event. A message that is named but missing was lost.
"""

import logging

import msgspec

from bombus.bus import Bus, MessagePlace, ServerRefused, snapshots
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.events import StreamWentBack
from bombus.hive.records import CallRef, decode_record
from bombus.hive.state import Hive
from bombus.replay.export import calls_held_by
from bombus_coordinator.recovery import Fold

log = logging.getLogger(__name__)

INBOX, EVENTS, CALLS = "inbox", "events", "calls"


class FoundStreams(msgspec.Struct, frozen=True):
    """What was found in the streams. Continue after inbox message `answered`; those up to `inherited` were already in
    the inbox."""

    answered: MessagePlace
    inherited: int
    lost: tuple[StreamWentBack, ...]


async def find(bus: Bus, fold: Fold, log_end: int = 0) -> FoundStreams:
    """Compare the streams with the fold of the whole log, which is known to have reached event `log_end` at some time.

    A loss that the log has already recorded is not returned again.
    """
    lost: list[StreamWentBack] = []
    hive = fold.hive
    known = max([log_end, *await snapshots.positions(bus)])
    if known > fold.position:
        lost.append(StreamWentBack(at_ns=hive.now_ns, what=EVENTS, known=known, kept=fold.position))
    answered = fold.answered
    if not await bus.is_kept(bus.subjects.inbox_stream, answered):
        answered = await answered_and_kept(bus, fold.position)
        lost.append(StreamWentBack(at_ns=hive.now_ns, what=INBOX, known=fold.answered.seq, kept=answered.seq))
    if calls := await lost_calls(bus, hive):
        lost.append(calls)
    inherited = (await bus.state(bus.subjects.inbox_stream)).last_seq
    return FoundStreams(answered, inherited, tuple(lost))


async def answered_and_kept(bus: Bus, position: int) -> MessagePlace:
    """Return the newest inbox message that still exists and that an event answers.

    `position` is the position of the last event; the inbox message that it answers is gone. The answered sequences rise
    from event to event, except where the log says that the inbox went back: the search begins at the last such place.
    If no answered message still exists, return the place before the first inbox message that exists.
    """
    events, stream = bus.subjects.events_stream, bus.subjects.inbox_stream
    first = (await bus.state(events)).first_seq
    went_back = await bus.last(events, bus.subjects.event(ev.HIVE, ev.kind_of(StreamWentBack)))
    low, high = first - 1, position
    if went_back is not None and went_back.seq >= first:
        if await bus.is_kept(stream, went_back.answers):
            low = went_back.seq
        else:
            high = went_back.seq
    while high - low > 1:
        middle = (low + high) // 2
        if await bus.is_kept(stream, (await bus.get(events, middle)).answers):
            low = middle
        else:
            high = middle
    if low >= first:
        return (await bus.get(events, low)).answers
    return MessagePlace((await bus.state(stream)).first_seq - 1)


async def lost_calls(bus: Bus, hive: Hive) -> StreamWentBack | None:
    """Return what was lost if calls that are still needed are gone and the log does not say so yet, or None
    otherwise."""
    first = (await bus.state(bus.subjects.calls_stream)).first_seq  # earlier calls were purged, not lost
    refs = sorted({ref for ref in calls_held_by(hive) if ref.seq >= first}, key=lambda ref: ref.seq)
    said = hive.went_back.get(CALLS)
    if not refs or (said is not None and said.known == refs[-1].seq) or await _is_kept(bus, refs[-1]):
        return None
    low, high = -1, len(refs) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await _is_kept(bus, refs[middle]) else (low, middle)
    kept = refs[low].seq if low >= 0 else 0
    count = len(refs) - high
    return StreamWentBack(at_ns=hive.now_ns, what=CALLS, known=refs[-1].seq, kept=kept, needed=count)


async def _is_kept(bus: Bus, ref: CallRef) -> bool:
    try:
        decode_record((await bus.get(bus.subjects.calls_stream, ref.seq)).data, ref)
    except (LogCorrupted, ServerRefused):  # ServerRefused: any client may publish a nonsensical sequence
        return False
    return True
