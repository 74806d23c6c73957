"""The coordinator's shell: read the inbox in order, append the decisions, then send the replies (log.md R1 to R5)."""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec

from bombus import telemetry
from bombus.bus import (
    EPOCH,
    INBOX,
    INBOX_DIGEST,
    REPLY,
    TRACEPARENT,
    Bus,
    MessagePlace,
    Outgoing,
    Reader,
    Stored,
    StreamFull,
    append,
    log_id,
    snapshots,
)
from bombus.bus.snapshots import Snapshot
from bombus.config.parts import MetricsOptions
from bombus.config.streams import AS_THEY_ARE, StreamLimits
from bombus.errors import BombusError, BusUnavailable, Deposed, StreamEndLost
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.bounded import trim
from bombus.hive.describe import line_of
from bombus.hive.pauses import TICK_NS
from bombus.hive.state import FOLD
from bombus.machine.metrics import metrics_server
from bombus.task_groups import settled
from bombus_coordinator import compaction, grouping, lost_ends, releasing, retention, storage
from bombus_coordinator.compaction import Compaction
from bombus_coordinator.core import Core, PendingDecision
from bombus_coordinator.lease import Lease
from bombus_coordinator.metrics import CoordinatorMetrics
from bombus_coordinator.recovery import Fold, Overtaken, check_compacted, stand_by
from bombus_coordinator.rules.decision import CommandReply, Decision
from bombus_coordinator.snapshotter import EVENTS, Snapshotter

log = logging.getLogger(__name__)

GROUP_MAX = 512  # maximum number of inbox messages decided in one append
REPLIES_MAX = 100_000  # maximum number of commands that await an answer
GATHER_S = 0.1  # how long calls wait to be noted together with later calls
TICK_S = TICK_NS / 1e9
TRIM_S = 10.0
RETRY_S = 1.0
WHY_CHARS_MAX = 500
EVENT_BYTES = 300  # approximate bytes that subject and headers add to an event


class Undecidable(BombusError):
    """Raised when a bug in the coordinator prevented a decision on an inbox message. The state in memory may be
    inconsistent."""


class Housekeeping(msgspec.Struct, frozen=True, kw_only=True):
    """How a leader maintains the bus. `disk` is a folder on the bus's disk, whose free space is watched.

    Without `compaction` the log keeps all of its events. With `raise_level` a new leader raises the log's feature level
    to its own. `metrics` says where this process, leading or not, serves its
    metrics.
    """

    trim_s: float = TRIM_S
    snapshot_events: int = EVENTS
    disk: Path | None = None
    compaction: Compaction | None = None
    metrics: MetricsOptions = MetricsOptions()
    raise_level: bool = False


class Memory(msgspec.Struct):
    """What a process remembers from one term as leader to the next.

    `dead_letters` maps the sequence of each inbox message that could not be decided to the reason why. `log_end` is the
    position of an event that the log had before it lost its end, or 0 if the log has not lost its end.
    """

    dead_letters: dict[int, str] = {}
    log_end: int = 0
    metrics: CoordinatorMetrics = msgspec.field(default_factory=CoordinatorMetrics)


class Coordinator:
    """Leads one hive from `lead()` until cancelled or deposed. To lead again, create a new instance.

    With a `lease`, the coordinator makes decisions only while it holds the lease; without a lease, it does so until
    another coordinator opens an epoch.
    """

    def __init__(
        self,
        bus: Bus,
        leader: str = "",
        lease: Lease | None = None,
        housekeeping: Housekeeping | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.bus = bus
        self.leader = leader or f"coordinator-{secrets.token_hex(4)}"
        self.core = Core()
        self.leading = asyncio.Event()
        self._lease = lease
        self._housekeeping = housekeeping or Housekeeping()
        self._snapshots = Snapshotter(bus, self._housekeeping.snapshot_events)
        self._last = 0  # sequence of the last stored event
        self._event_id = ""  # message id of the last stored event
        self._answered = MessagePlace()  # the inbox message that the last event answers
        self._deciding: dict[int, Stored] = {}  # the messages that are being decided, by sequence
        self._consumed = 0  # everything up to this inbox sequence is decided and stored
        self._newest_consumed: Stored | None = None  # the message at that sequence, if this leader decided it
        self._is_stored = True  # whether everything in the core's state is on the log
        self._reply_to: dict[str, tuple[str, str]] = {}  # by command: its reply subject, and its trace
        self._patient = {bus.subjects.inbox(ev.kind_of(kind)) for kind in (inbox.CallRecorded, inbox.Touch)}
        self._memory = Memory() if memory is None else memory

    async def lead(self, fold: Fold | None = None) -> None:
        """Take over from `fold` (by default from a snapshot) and make decisions until cancelled.

        Raises `Deposed` once another coordinator leads, `LogCorrupted` if the log is damaged, and `Undecidable` for a
        message that must become a dead letter.
        """
        while not await self._take_over(fold or await Fold.begin(self.bus)):
            log.info("another leader was still at work; folding again")
            fold = None
        self.leading.set()
        self._memory.metrics.leading = True
        log.info("leading from event %d", self._last, extra={"epoch": self.core.hive.epoch})
        upkeep = self._housekeeping
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._trim())
            tasks.create_task(self._look_for_calls())
            tasks.create_task(retention.run(self.bus, lambda: self.core.hive, lambda: self._consumed, upkeep.trim_s))
            for bodies in (releasing.OPERATIONS, releasing.TRAJECTORIES):
                tasks.create_task(
                    releasing.run(self.bus, lambda: self.core.hive, lambda: self._consumed, upkeep.trim_s, bodies)
                )
            tasks.create_task(grouping.run(self.bus, lambda: self.core.hive))
            tasks.create_task(storage.watch(self.bus, lambda: self.core.hive, upkeep.disk))
            if upkeep.compaction is not None:
                tasks.create_task(compaction.run(self.bus, upkeep.compaction, lambda: self.core.hive, self._snapshots))
            tasks.create_task(self._serve())
            if self._lease is not None:
                tasks.create_task(self._lease.keep())

    async def leave(self) -> None:
        """Store a snapshot after `lead()` has ended, so that the next leader has less to fold."""
        led = self.leading.is_set() and self._is_stored
        await self._snapshots.stop(self._snapshot() if led else None)

    async def _take_over(self, fold: Fold) -> bool:
        """Fold to the log's end and open the next epoch. Return False if the old leader wrote to the log or compacted
        it in the meantime.

        Raises `Deposed` if another coordinator has opened that epoch, and `LogCorrupted` if the log has a gap.
        """
        try:
            await fold.catch_up(self.bus)
        except Overtaken:
            await check_compacted(self.bus, fold)
            return False
        self._snapshots.pace.note(fold.snapshot, await self.bus.state(self.bus.subjects.events_stream))
        found = await lost_ends.find(self.bus, fold, self._memory.log_end)
        self._last, self._event_id = fold.position, fold.event_id
        self._answered = fold.answered
        self.core = Core(fold.hive, self.bus.publisher.message_bytes_max)
        self.core.live.began_after, self.core.live.inherited = fold.position, found.inherited
        wanted = self.core.hive.epoch + 1
        try:
            await self._open_epoch(found)
        except Deposed:
            newest = await self.bus.last(self.bus.subjects.events_stream)
            if newest is not None and int(newest.headers[EPOCH]) >= wanted:
                raise
            return False
        return True

    async def _open_epoch(self, found: lost_ends.FoundStreams) -> None:
        """Append `epoch.opened` on its own. If another leader has written in the meantime, the fence refuses the event
        (R4).

        Then record what streams have lost, if anything; the inbox is then read from another place (R6).
        """
        subjects = self.bus.subjects
        shared = [await self.bus.state(each) for each in (subjects.calls_stream, subjects.trajectories_stream)]
        sizes = [max(0, each.max_bytes) for each in shared]
        await self._append_own([self.core.open_epoch(self.leader, *sizes, raise_level=self._housekeeping.raise_level)])
        self._answered = found.answered
        self._consumed = self._memory.metrics.consumed = found.answered.seq
        if found.lost:
            await self._append_own([self.core.note_lost(found.lost)])
            for lost in found.lost:
                log.error("the hive continues without what was lost: %s", line_of(lost))
            await snapshots.prune(self.bus, self._last)
            self._memory.log_end = 0
        await self._append_own(self.core.recover())

    async def _append_own(self, decisions: Iterable[Decision]) -> None:
        """Append decisions that no message caused."""
        await self._append([(PendingDecision(decision, self._answered.seq), "") for decision in decisions])

    async def _may_decide(self) -> None:
        """Wait while the lease is lost. Raises `Deposed`, but only if the log has a higher epoch (R4)."""
        while self._lease is not None and not self._lease.held:
            newest = await self._newest()
            if newest is not None and int(newest.headers[EPOCH]) > self.core.hive.epoch:
                raise Deposed(f"epoch {newest.headers[EPOCH]} is open, ours was {self.core.hive.epoch}")
            await self._lease.wait(RETRY_S)

    def _snapshot(self) -> Snapshot:
        """Return the state as a snapshot. Call this only between appends, when the core's state matches the log."""
        return Snapshot(
            fold=FOLD,
            position=self._last,
            event_id=self._event_id,
            answered=self._answered.seq,
            hive=self.core.hive,
        )

    # ---- deciding ----

    async def _serve(self) -> None:
        place = self._answered
        async with Reader(self.bus, self.bus.subjects.inbox_stream, place.seq + 1, after=place) as reader:
            while True:
                group = await self._read_group(reader)
                await self._may_decide()
                await self._decide(group)
                if self._snapshots.is_due(self._last):
                    self._snapshots.take(self._snapshot())

    async def _read_group(self, reader: Reader) -> list[Stored]:
        """Return the messages that have arrived. If they are only calls and touches, wait a moment for more of them.

        No client waits for the event that notes calls, and one event can note many calls. Gathering calls saves
        headers, which take about 200 bytes per event, more than a call itself.
        """
        group = await reader.read(GROUP_MAX)
        if not self._are_patient(group):
            return group
        try:
            async with asyncio.timeout(GATHER_S):
                while len(group) < GROUP_MAX:
                    arrived = await reader.read(GROUP_MAX - len(group))
                    group = group + arrived
                    if not self._are_patient(arrived):
                        break
        except TimeoutError:
            pass
        return group

    def _are_patient(self, group: Sequence[Stored]) -> bool:
        return all(each.subject in self._patient for each in group)

    async def _decide(self, group: Sequence[Stored]) -> None:
        """Decide the messages one by one, append all events together, then send all replies (R3)."""
        began = perf_counter()
        pending: list[tuple[PendingDecision, str]] = []  # each with its message's trace
        self._is_stored = False
        self._deciding = {stored.seq: stored for stored in group}
        for stored in group:
            try:
                message = inbox.decode_message(stored.data)
            except msgspec.MsgspecError as error:
                # Any client with access may publish nonsense. It must not stop the hive.
                log.warning("inbox message %d cannot be decoded and is skipped: %s", stored.seq, error)
                continue
            trace = stored.headers.get(TRACEPARENT, "")
            about: telemetry.Attributes = {"bombus.message": ev.kind_of(message), "bombus.engine": message.engine}
            with telemetry.span("coordinator.decide", trace, about, "CONSUMER") as span:
                reply_to = stored.headers.get(REPLY, "")
                if reply_to:
                    self._note_reply_to(message.id, reply_to, span.traceparent)
                pending += [(each, self._trace_of(each, span.traceparent)) for each in self._decided(message, stored)]
        pending += [(each, "") for each in self.core.flush()]
        await self._append(pending)
        self._consumed, self._newest_consumed = group[-1].seq, group[-1]
        self._is_stored = True
        metrics = self._memory.metrics
        metrics.consumed = self._consumed
        metrics.messages += len(group)
        metrics.decisions.observe(perf_counter() - began)
        await self._reply([reply for each, _ in pending for reply in each.decision.replies])

    def _decided(self, message: inbox.AnyMessage, stored: Stored) -> list[PendingDecision]:
        why = self._memory.dead_letters.get(stored.seq)
        if why is not None:
            return list(self.core.dead_letter(message, stored.seq, stored.time_ns, why))
        try:
            return list(self.core.receive(message, stored.seq, stored.time_ns))
        except Exception as error:  # whatever went wrong, later messages must still be read
            log.exception("inbox message %d could not be decided: %s", stored.seq, ev.kind_of(message))
            self._memory.dead_letters[stored.seq] = f"{type(error).__name__}: {error}"[:WHY_CHARS_MAX]
            raise Undecidable(f"inbox message {stored.seq}: {self._memory.dead_letters[stored.seq]}") from error

    def _note_reply_to(self, command: str, reply_to: str, trace: str) -> None:
        self._reply_to[command] = reply_to, trace
        trim(self._reply_to, REPLIES_MAX)

    def _trace_of(self, pending: PendingDecision, trace: str) -> str:
        """Return the trace of a decision: that of the command which it answers, such as a claim that had to wait."""
        for reply in pending.decision.replies:
            _, its_own = self._reply_to.get(reply.command, ("", ""))
            if its_own:
                return its_own
        return trace

    async def _append(self, pending: Sequence[tuple[PendingDecision, str]]) -> None:
        """Append decisions. While the bus is away or the log is full, wait and retry: nothing is lost.

        The log may stay full for a long time, so in that case tell clients not to wait for an answer.
        """
        outgoing: list[list[Outgoing]] = []
        seq = self._last
        for each, trace in pending:
            events: list[Outgoing] = []
            if each.answers != self._answered.seq and each.decision.events:
                self._answered = self._deciding[each.answers].place
            for event, body in zip(each.decision.events, each.bodies or map(ev.encode_event, each.decision.events)):
                seq += 1
                events.append(self._outgoing(event, body, seq, trace))
            if events:
                outgoing.append(events)
        if not outgoing:
            if any(each.decision.replies for each, _ in pending):
                await self._check_leading()
            return
        while True:
            try:
                before, self._last = self._last, await append(self.bus, outgoing, self._last)
                self._memory.metrics.events += self._last - before
                self._event_id = log_id(self.bus, outgoing[-1][-1])
                self._snapshots.pace.wrote(sum(len(each.body) + EVENT_BYTES for events in outgoing for each in events))
                return
            except StreamFull as error:  # raised after many retries
                log.warning("decisions are waiting for the log: %s", error)
                await self.bus.inbox.say_undecided(str(error))
            except BusUnavailable as error:
                log.warning("decisions are waiting for the log: %s", error)
                await asyncio.sleep(RETRY_S)

    def _outgoing(self, event: ev.Event, body: bytes, seq: int, trace: str) -> Outgoing:
        epoch = self.core.hive.epoch
        headers = {EPOCH: str(epoch), INBOX: str(self._answered.seq)}
        if self._answered.digest:
            headers[INBOX_DIGEST] = self._answered.digest
        if trace:
            headers[TRACEPARENT] = trace
        return Outgoing(
            subject=self.bus.subjects.event(event.engine, ev.kind_of(event)),
            body=body,
            msg_id=f"{epoch}.{seq}",
            headers=headers,
        )

    async def _check_leading(self) -> None:
        """Raise `Deposed` unless the last event is ours. The fence does not protect refusals, since they write no event
        (R3)."""
        newest = await self._newest()
        if newest is None or newest.seq != self._last:
            raise Deposed(f"the log ends at {newest.seq if newest else 0}, not at our event {self._last}")

    async def _newest(self) -> Stored | None:
        """Return the log's last event, waiting for as long as the bus is away."""
        while True:
            try:
                return await self.bus.last(self.bus.subjects.events_stream)
            except BusUnavailable as error:
                log.warning("decisions are waiting for the log: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _reply(self, replies: Sequence[CommandReply]) -> None:
        for reply in replies:
            subject, _ = self._reply_to.pop(reply.command, ("", ""))
            if subject:
                await self.bus.answer(subject, msgspec.structs.replace(reply.answer, position=self._last))

    # ---- in the background ----

    async def _tick(self) -> None:
        """Send the time to the inbox. Ticks are the only way in which the core learns the time (R5)."""
        stream, subject = self.bus.subjects.inbox_stream, self.bus.subjects.inbox(ev.kind_of(inbox.Tick))
        epoch = self.core.hive.epoch
        count = 0
        while True:
            await self._may_decide()
            count += 1
            try:
                before = await self.bus.last(stream, subject)
                await self.bus.inbox.send(
                    inbox.Tick(
                        id=f"tick-{epoch}-{count}",
                        answered=self._consumed,
                        log_end=self._last,
                        after_ns=self.core.live.now_ns if before is None else before.time_ns,
                    )
                )
            except BusUnavailable as error:
                log.warning("the coordinator could not send its tick, and will try again: %s", error)
            await asyncio.sleep(TICK_S)

    async def _trim(self) -> None:
        """Remove inbox messages that were decided a while ago (R12).

        Raises `StreamEndLost` if the stream went back, since the sequences of these messages then belong to messages
        that are not decided yet.
        """
        stream = self.bus.subjects.inbox_stream
        decided: Stored | None = None
        while True:
            below, decided = decided, self._newest_consumed
            await asyncio.sleep(self._housekeeping.trim_s)
            if below is None or below is decided:
                continue
            try:
                if not await self.bus.is_kept(stream, below.place):
                    raise StreamEndLost(stream, below.seq)
                await self.bus.purge_below(stream, below.seq)
            except BusUnavailable as error:
                log.warning("the inbox could not be trimmed: %s", error)

    async def _look_for_calls(self) -> None:
        """After a reconnection, raise `StreamEndLost` if needed calls are gone. Losses in other streams are detected by
        their readers."""
        back = asyncio.Event()
        stop_listening = self.bus.on_reconnect(back.set)
        try:
            while True:
                await back.wait()
                back.clear()
                try:
                    if lost := await lost_ends.lost_calls(self.bus, self.core.hive):
                        raise StreamEndLost(self.bus.subjects.calls_stream, lost.known)
                except BusUnavailable as error:
                    log.warning("could not check whether calls are lost: %s", error)
                    back.set()
        finally:
            stop_listening()


async def run(
    url: str, hive: str, name: str = "", upkeep: Housekeeping | None = None, limits: StreamLimits = AS_THEY_ARE
) -> None:
    """Apply `limits` to the hive's streams. Then stand by and lead until cancelled; a leader that is deposed stands by
    again."""
    telemetry.configure("coordinator")
    leader = name or f"coordinator-{secrets.token_hex(4)}"
    async with await Bus.connect(url, hive, name="coordinator") as bus:
        await bus.ensure_streams(limits)
        await bus.hand_out_replica_key()
        lease = Lease(bus, leader)
        memory = Memory()
        upkeep = upkeep or Housekeeping()
        exposed = partial(memory.metrics.exposed, bus, upkeep.disk)
        async with metrics_server(bus, upkeep.metrics, exposed):
            while True:
                await _lead_once(Coordinator(bus, leader, lease, upkeep, memory), lease, memory)


async def _lead_once(coordinator: Coordinator, lease: Lease, memory: Memory) -> None:
    """Stand by, then lead. Return when deposed, when a message could not be decided, when a stream has lost its end, or
    when the bus is away for a long time.

    Raises `LogCorrupted` if the log is damaged, and `BusUnavailable` if the bus has been closed.
    """
    bus = coordinator.bus
    try:
        with settled():
            await coordinator.lead(await stand_by(bus, lease))
    except* Deposed as group:
        log.warning("deposed, standing by: %s", group.exceptions[0])
    except* Undecidable as group:
        log.error("folding the log again, to make a message a dead letter: %s", group.exceptions[0])
    except* StreamEndLost as group:
        for error in group.exceptions:
            log.error("folding the log again: %s", error)
            if isinstance(error, StreamEndLost) and error.stream == bus.subjects.events_stream:
                memory.log_end = max(memory.log_end, error.known)
    except* BusUnavailable as group:
        if bus.is_closed:
            raise
        log.warning("standing by until the bus is back: %s", group.exceptions[0])
        await asyncio.sleep(RETRY_S)
    finally:
        memory.metrics.leading = False
        await lease.release()
        await coordinator.leave()
