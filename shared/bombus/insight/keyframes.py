"""Keyframes of a log: its state every few thousand events, from which the state at any position is soon folded."""

import sqlite3
import zlib
from contextlib import aclosing

import msgspec

from bombus.bus.follow import read_event
from bombus.errors import NewerEvent
from bombus.insight.record import Moment
from bombus.replay.source import NotOnLog, Source

EVENTS_APART = 2_048
BYTES_MAX = 256 << 20  # compressed, in a temporary file
# How many bytes of a state can be encoded while one event is folded: a large state is kept less often.
BYTES_PER_EVENT = 2_048


class Keyframes:
    """Keeps the states of a log in a temporary file. Once it is full, every second one is removed."""

    def __init__(self, first: Moment, events_apart: int = EVENTS_APART, bytes_max: int = BYTES_MAX) -> None:
        self._apart = events_apart
        self._bytes_max = bytes_max
        self._decode = msgspec.msgpack.Decoder(type(first)).decode
        self._kept = sqlite3.connect("", isolation_level=None)  # an empty name means a temporary file
        self._kept.execute("CREATE TABLE keyframes (position INTEGER PRIMARY KEY, body BLOB)")
        self.bytes = 0
        self.next = 0  # the position from which on the next one is due
        self.keep(first)

    def __len__(self) -> int:
        return int(self._kept.execute("SELECT count(*) FROM keyframes").fetchone()[0])

    def keep(self, moment: Moment) -> None:
        encoded = moment.encode()
        body = zlib.compress(encoded, 1)
        self._kept.execute("INSERT OR REPLACE INTO keyframes VALUES (?, ?)", (moment.position, body))
        self.bytes += len(body)
        if self.bytes > self._bytes_max:
            self._thin_out()
        self.next = moment.position + max(self._apart, len(encoded) // BYTES_PER_EVENT)

    def _thin_out(self) -> None:
        """Remove every second keyframe, but neither the first nor the newest, and keep fewer from now on."""
        self._kept.execute(
            "DELETE FROM keyframes WHERE position IN (SELECT position FROM"
            " (SELECT position, row_number() OVER (ORDER BY position DESC) AS n FROM keyframes) WHERE n % 2 = 0)"
            " AND position > (SELECT min(position) FROM keyframes)"
        )
        self._apart *= 2
        self.bytes = int(self._kept.execute("SELECT sum(length(body)) FROM keyframes").fetchone()[0])

    def before(self, position: int) -> Moment:
        """Return the newest state that is kept of `position` or before. Raises `NotOnLog`."""
        query = "SELECT body FROM keyframes WHERE position <= ? ORDER BY position DESC LIMIT 1"
        found = self._kept.execute(query, (position,)).fetchone()
        if found is None:
            raise NotOnLog(f"there is no state at event {position}: the log begins later")
        return self._decode(zlib.decompress(found[0]))

    def close(self) -> None:
        self._kept.close()


async def moment_at(source: Source, keyframes: Keyframes, position: int) -> Moment:
    """Return the state at `position`, folded from the nearest keyframe. Raises what `Source.in_order` raises."""
    moment = keyframes.before(position)
    if moment.position < position:
        async with aclosing(source.in_order(moment.position, position)) as messages:
            async for stored in messages:
                try:
                    moment.fold(stored.seq, read_event(stored), stored.written_ns)
                except NewerEvent:
                    if not source.running:
                        raise
        moment.position = position
    return moment
