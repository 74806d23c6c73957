"""A bus that loses the end of its inbox, as lost_ends.py sees it, and what the hive promises then (R6)."""

from typing import cast

from bombus.bus import Bus, MessagePlace, Stored, StreamState
from bombus.hive import events as ev
from bombus_coordinator.lost_ends import answered_and_kept
from tests.sim.fold import Fold
from tests.sim.link import Link
from tests.sim.server import EVENTS_STREAM, INBOX_STREAM


class Streams:
    """The streams of a simulated server, as `answered_and_kept` asks for them. It takes this for a bus."""

    inbox_stream, events_stream = INBOX_STREAM, EVENTS_STREAM

    def __init__(self, link: Link) -> None:
        self._link = link
        self.subjects = self

    def event(self, engine: str, kind: str) -> str:
        return kind

    async def state(self, stream: str) -> StreamState:
        found = self._link.server.streams[stream]
        return await self._link.call(lambda: StreamState(found.first_seq, found.last_seq, 0, 0, 0, 1))

    async def last(self, stream: str, subject: str) -> Stored | None:
        found = await self._link.last(stream, subject)
        return None if found is None else found.stored

    async def get(self, stream: str, seq: int) -> Stored:
        return (await self._link.call(lambda: self._link.server.streams[stream].get(seq))).stored

    async def is_kept(self, stream: str, place: MessagePlace) -> bool:
        return await self._link.call(lambda: self._link.server.streams[stream].keeps(place))


async def find(link: Link, fold: Fold) -> tuple[MessagePlace, list[ev.StreamWentBack]]:
    """Return the inbox message after which a new leader goes on, and what it says of a loss, as `lost_ends.find`."""
    streams = Streams(link)
    if await streams.is_kept(INBOX_STREAM, fold.place):
        return fold.place, []
    place = await answered_and_kept(cast(Bus, streams), fold.position)
    lost = ev.StreamWentBack(at_ns=fold.hive.now_ns, what="inbox", known=fold.place.seq, kept=place.seq)
    return place, [lost]
