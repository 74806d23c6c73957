"""The state of the bus's server: streams with fences and duplicate detection, the lease, snapshots, a clock."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from bombus.bus.append import Outgoing
from bombus.bus.headers import MSG_ID
from bombus.bus.snapshots import needed
from bombus.bus.wire import MessagePlace, NotNow, PubAck, ServerRefused, Stored, StreamState, WrongSequence
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Event
from tests.sim.loop import Future, Loop

SECOND = 1_000_000_000
BEGIN_NS = 1_000 * SECOND
EPOCH_OPENED, TICK = "epoch.opened", "tick"
INBOX_STREAM, EVENTS_STREAM, CALLS_STREAM, OPS_STREAM = "inbox", "events", "calls", "ops"
TRAJECTORIES_STREAM = "trajectories"
WINDOW_S = {INBOX_STREAM: 120, EVENTS_STREAM: 600, CALLS_STREAM: 120, OPS_STREAM: 120, TRAJECTORIES_STREAM: 120}


class Message:
    """A stored message. Its readers share the decoded content."""

    __slots__ = ("body", "content", "headers", "msg_id", "seq", "subject", "time_ns")

    def __init__(self, seq: int, put: Outgoing, time_ns: int, content: object) -> None:
        self.seq = seq
        self.subject = put.subject
        self.body = put.body
        self.msg_id = put.msg_id
        self.headers: Mapping[str, str] = put.headers
        self.time_ns = time_ns
        self.content = content

    @property
    def stored(self) -> Stored:
        return Stored(self.seq, self.subject, self.body, {**self.headers, MSG_ID: self.msg_id}, self.time_ns)

    @property
    def event(self) -> Event:
        assert isinstance(self.content, Event)
        return self.content

    @property
    def message(self) -> inbox.AnyMessage:
        assert isinstance(self.content, inbox.Message)
        return self.content  # type: ignore[return-value]


def _decode(stream: str, body: bytes) -> object:
    match stream:
        case "inbox":
            return inbox.decode_message(body)
        case "events":
            return ev.decode_event(body)
    return body


SIZE = 100  # of each stream


class Stream:
    def __init__(self, server: "Server", name: str) -> None:
        self.name = name
        self.messages: list[Message] = []
        self.first_seq = 1
        self.used = 0  # of 100, above which nothing is stored
        self.watchers: list[Callable[[Sequence[Message]], None]] = []
        self.waiting: list[Future[None]] = []
        self._server = server
        self._ids: dict[str, tuple[int, int]] = {}
        self._newest: dict[str, Message] = {}  # by subject

    @property
    def last_seq(self) -> int:
        return len(self.messages)

    def append(self, puts: Sequence[Outgoing], last: int | None = None, opened: int | None = None) -> PubAck:
        """Store all of these messages or none. `last` and `opened` are the fences of append.py."""
        now_ns = self._server.now_ns
        duplicates = [seq for put in puts if (seq := self._stored_before(put.msg_id, now_ns))]
        is_repeat = bool(duplicates) and len(puts) == 1
        if not is_repeat or self._server.fence_first:
            self._check_fences(last, opened)
        if is_repeat:
            return PubAck(duplicates[0], True)
        if duplicates:
            raise ServerRefused(self.name, 400, 10201, "a duplicate within a batch")
        if self.used >= SIZE:
            raise NotNow(f"{self.name} is full")
        stored: list[Message] = []
        for put in puts:
            message = Message(self.last_seq + 1, put, now_ns, _decode(self.name, put.body))
            self.messages.append(message)
            self._ids[put.msg_id] = (message.seq, now_ns)
            self._newest[put.subject] = message
            stored.append(message)
        for watcher in self.watchers:
            watcher(stored)
        self._wake()
        return PubAck(self.last_seq, False)

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.set(None)

    def _check_fences(self, last: int | None, opened: int | None) -> None:
        if last is not None and last != self.last_seq:
            raise WrongSequence(f"{self.name} ends at {self.last_seq}, not at {last}")
        newest = self._newest.get(EPOCH_OPENED)
        if opened is not None and opened != (newest.seq if newest is not None else 0):
            raise WrongSequence(f"another epoch than that at {opened} was opened last")

    def last(self, subject: str = "") -> Message | None:
        if subject:
            return self._newest.get(subject)
        return self.messages[-1] if self.messages else None

    def get(self, seq: int) -> Message:
        if not self.first_seq <= seq <= self.last_seq:
            raise LogCorrupted(f"{self.name} has no message {seq}")
        return self.messages[seq - 1]

    def keeps(self, place: MessagePlace) -> bool:
        """Return whether this message is there, or was purged."""
        if place.seq < self.first_seq:
            return True
        return place.seq <= self.last_seq and self.messages[place.seq - 1].stored.place == place

    def lose(self, count: int) -> list[Message]:
        """Lose up to so many messages at the end, as in a power cut, and return them. Purged ones are not there."""
        cut = max(self.first_seq - 1, self.last_seq - count)
        lost, self.messages = self.messages[cut:], self.messages[:cut]
        self._ids = {msg_id: found for msg_id, found in self._ids.items() if found[0] <= cut}
        self._newest = {message.subject: message for message in self.messages}
        self._wake()
        return lost

    def purge_below(self, seq: int) -> None:
        self.first_seq = max(self.first_seq, min(seq, self.last_seq + 1))

    def _stored_before(self, msg_id: str, now_ns: int) -> int:
        found = self._ids.get(msg_id)
        if found is None or now_ns - found[1] > WINDOW_S[self.name] * SECOND:
            return 0
        return found[0]


class Lease(msgspec.Struct):
    holder: str
    seq: int
    until_ns: int


class Server:
    """With `fence_first`, an expected sequence is checked before duplicates are, as on one replica.

    Only with `operations` there is a stream for them: without, seeds keep their draws.
    """

    def __init__(self, loop: Loop, fence_first: bool, replicas: int, without: Collection[str] = ()) -> None:
        self.replicas = replicas
        self.fence_first = fence_first
        self.streams = {name: Stream(self, name) for name in WINDOW_S if name not in without}
        self.lease: Lease | None = None
        self.snapshots: dict[int, bytes] = {}
        self.damaged: set[int] = set()
        self.events_max = 0  # the size of the log, in events; 0: it is not compacted
        self.cut_at = 0  # a leader has verified its snapshots and may remove the events before this one
        self.jump_ns = 0
        self.loses_ends = False  # of its inbox
        self._loop = loop
        self._lease_seq = 0

    @property
    def now_ns(self) -> int:
        return BEGIN_NS + int(self._loop.now_s * 1e9) + self.jump_ns

    def read_lease(self) -> Lease | None:
        if self.lease is not None and self.lease.until_ns <= self.now_ns:
            self.lease = None
        return self.lease

    def write_lease(self, holder: str, expected: int, ttl_s: float) -> int:
        found = self.read_lease()
        if (found.seq if found is not None else 0) != expected:
            raise WrongSequence("the lease is another's")
        self._lease_seq += 1
        self.lease = Lease(holder, self._lease_seq, self.now_ns + int(ttl_s * 1e9))
        return self._lease_seq

    @property
    def events_state(self) -> StreamState:
        """Return the log's state, in which each event takes one byte."""
        events = self.streams[EVENTS_STREAM]
        size = events.last_seq - events.first_seq + 1
        return StreamState(events.first_seq, events.last_seq, size, size, self.events_max, self.replicas)

    def put_snapshot(self, position: int, body: bytes, held: Collection[int] = ()) -> None:
        """Store a snapshot; in a hive that compacts its log, remove those that are not needed, as `prune` does."""
        self.snapshots[position] = body
        self.damaged.discard(position)
        if self.events_max:
            events = self.events_state
            kept = needed(sorted(self.snapshots), events.first_seq, max(events.last_seq, position))
            for unused in {*self.snapshots} - {*kept} - {*held}:
                del self.snapshots[unused]

    def damage_snapshot(self) -> str:
        """Damage the newest snapshot, unless it is the last good one of a log that has lost its beginning or soon will.

        Two that are damaged after they were verified, and before the log is cut behind them, are more than it survives.
        """
        first = max(self.streams[EVENTS_STREAM].first_seq, self.cut_at)
        good = [position for position in self.snapshots if position not in self.damaged and position >= first - 1]
        if not good or (len(good) == 1 and first > 1):
            return ""
        self.damaged.add(max(good))
        return f"at {max(good)}"

    def get_snapshot(self, position: int) -> bytes:
        """Return a snapshot. The object store detects damage by its digest."""
        if position not in self.snapshots or position in self.damaged:
            raise LogCorrupted(f"the snapshot at {position} is damaged")
        return self.snapshots[position]
