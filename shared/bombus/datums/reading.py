"""Read the calls of episodes back from the log."""

from collections.abc import Sequence
from typing import Protocol

from bombus.bus import Bus
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, CallRef, decode_record

ANCESTORS_MAX = 4096


class CallReader(Protocol):
    """A source of call records: the bus, or an archived log (`bombus.replay.source.Source`)."""

    async def records(self, refs: Sequence[CallRef]) -> Sequence[CallRecord]:
        """Return the records that these references point to, in order. Raises `LogCorrupted` if a record is gone or
        does not match its reference."""
        ...


class BusCallReader:
    """Reads the calls of a running hive."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        stored = await self._bus.get_many(self._bus.subjects.calls_stream, [ref.seq for ref in refs])
        return [decode_record(message.data, ref) for ref, message in zip(refs, stored, strict=True)]


async def ancestors(calls: CallReader, records: Sequence[CallRecord]) -> tuple[CallRecord, ...]:
    """Read those ancestors of an episode's calls that do not belong to the episode themselves (they were cut off, or
    came late).

    Raises `LogCorrupted` if one of them cannot be read, or if there are more than `ANCESTORS_MAX`.
    """
    have = {record.id for record in records}
    context: list[CallRecord] = []
    frontier: Sequence[CallRecord] = records
    while wanted := {record.parent for record in frontier if record.parent and record.parent.id not in have}:
        if len(context) + len(wanted) > ANCESTORS_MAX:
            raise LogCorrupted(f"an episode has calls with more than {ANCESTORS_MAX} ancestors outside the episode")
        frontier = list((await read_calls(calls, sorted(wanted, key=lambda ref: ref.seq))).values())
        context += frontier
        have |= {record.id for record in frontier}
    return tuple(context)


async def read_calls(calls: CallReader, refs: Sequence[CallRef]) -> dict[CallRef, CallRecord]:
    return dict(zip(refs, await calls.records(refs), strict=True))
