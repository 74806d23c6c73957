"""The coordinator's shell: the inbox in order, decisions into flights, replies after the flight (log.md R1 to R5)."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bombus import telemetry
from bombus.bus import EPOCH, INBOX, REPLY, TRACEPARENT, Bus, Outgoing, Reader, Stored, fly, log_id
from bombus.bus.snapshots import Snapshot
from bombus.errors import BusUnavailable, Deposed
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.state import FOLD, trim
from bombus_coordinator import retention, storage
from bombus_coordinator.core import Core
from bombus_coordinator.decision import Decision, Reply
from bombus_coordinator.lease import Lease
from bombus_coordinator.recovery import Fold, stand_by
from bombus_coordinator.snapshotter import EVENTS, Snapshotter

log = logging.getLogger(__name__)

GROUP_MAX = 512  # inbox messages decided in one flight
REPLIES_MAX = 100_000  # commands whose answer is still owed
TICK_S = 1.0
TRIM_S = 10.0
RETRY_S = 1.0


class Coordinator:
    """Leads one hive from `lead()` until it is cancelled or deposed. A new one is needed to lead again.

    With a `lease` it decides only while it holds that; without, until another opens an epoch. `disk` is a folder on the
    bus's disk, watched for room.
    """

    def __init__(
        self,
        bus: Bus,
        leader: str = "",
        lease: Lease | None = None,
        trim_s: float = TRIM_S,
        snapshot_events: int = EVENTS,
        disk: Path | None = None,
    ) -> None:
        self.bus = bus
        self.leader = leader or f"coordinator-{secrets.token_hex(4)}"
        self.core = Core()
        self.leading = asyncio.Event()
        self._lease = lease
        self._trim_s = trim_s
        self._disk = disk
        self._snapshots = Snapshotter(bus, snapshot_events)
        self._last = 0  # sequence of the last event that landed
        self._event_id = ""  # and its message id
        self._answered = 0  # inbox sequence that the last event answers
        self._consumed = 0  # inbox sequence up to which everything is decided and has landed
        self._landed = True  # whether all that is in the core's state has
        self._reply_to: dict[str, str] = {}

    async def lead(self, fold: Fold | None = None) -> None:
        """Take over from `fold` (or from a snapshot) and decide.

        Raises `Deposed` once another leads, `LogCorrupted` on a damaged log.
        """
        while not await self._take_over(fold or await Fold.begin(self.bus)):
            log.info("the leader before was still writing; folding again")
            fold = None
        self.leading.set()
        log.info("leading from event %d", self._last, extra={"epoch": self.core.hive.epoch})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._trim())
            tasks.create_task(retention.run(self.bus, lambda: self.core.hive, lambda: self._consumed, self._trim_s))
            tasks.create_task(storage.watch(self.bus, lambda: self.core.hive, self._disk))
            tasks.create_task(self._serve())
            if self._lease is not None:
                tasks.create_task(self._lease.keep())

    async def leave(self) -> None:
        """After `lead()` has ended: store a snapshot, which spares the next leader its fold."""
        led = self.leading.is_set() and self._landed
        await self._snapshots.stop(self._snapshot() if led else None)

    async def _take_over(self, fold: Fold) -> bool:
        """Fold to the log's end and open the next epoch. False when the old leader, not deposed yet, wrote in between.

        Raises `Deposed` when somebody else has opened that epoch.
        """
        self._snapshots.note(fold.snapshot)
        await fold.catch_up(self.bus)
        self._last, self._event_id = fold.position, fold.event_id
        self._answered = self._consumed = fold.answered
        self.core = Core(fold.hive)
        wanted = self.core.hive.epoch + 1
        try:
            await self._open_epoch()
        except Deposed:
            newest = await self.bus.last(self.bus.subjects.events_stream)
            if newest is not None and int(newest.headers[EPOCH]) >= wanted:
                raise
            return False
        return True

    async def _open_epoch(self) -> None:
        """A flight of its own: should another leader have written meanwhile, the fence refuses it (R4)."""
        decision = self.core.open_epoch(self.leader)
        await self._land([(decision, self._answered, "")])
        due = [(decision, self._answered, "") for decision in self.core.recover()]
        await self._land(due)

    async def _may_decide(self) -> None:
        """A lost lease pauses; only a higher epoch on the log deposes (R4)."""
        while self._lease is not None and not self._lease.held:
            newest = await self._newest()
            if newest is not None and int(newest.headers[EPOCH]) > self.core.hive.epoch:
                raise Deposed(f"epoch {newest.headers[EPOCH]} is open, ours was {self.core.hive.epoch}")
            await self._lease.wait(RETRY_S)

    def _snapshot(self) -> Snapshot:
        """Only between flights: then the core's state is that of the log."""
        return Snapshot(
            fold=FOLD,
            position=self._last,
            event_id=self._event_id,
            answered=self._answered,
            hive=self.core.hive,
        )

    # ---- deciding ----

    async def _serve(self) -> None:
        async with Reader(self.bus, self.bus.subjects.inbox_stream, start_seq=self._answered + 1) as reader:
            while True:
                group = await reader.read(GROUP_MAX)
                await self._may_decide()
                await self._decide(group)
                if self._snapshots.is_due(self._last):
                    self._snapshots.take(self._snapshot())

    async def _decide(self, group: Sequence[Stored]) -> None:
        """One flight: decide message by message, land all events, then send all replies (R3)."""
        flight: list[tuple[Decision, int, str]] = []
        self._landed = False
        for stored in group:
            try:
                message = inbox.decode_message(stored.data)
            except msgspec.MsgspecError as error:
                # Whoever may publish may publish nonsense: it must not stop the hive.
                log.warning("inbox message %d is not understood and passed over: %s", stored.seq, error)
                continue
            reply_to = stored.headers.get(REPLY, "")
            if reply_to:
                self._owe(message.id, reply_to)
            trace = stored.headers.get(TRACEPARENT, "")
            with telemetry.span(
                "coordinator.decide", trace, kind=inbox.kind_of(message), engine=message.engine
            ) as span:
                for flown in self.core.receive(message, stored.seq, stored.time_ns):
                    flight.append((flown.decision, flown.answers, span.traceparent))
        flight += [(flown.decision, flown.answers, "") for flown in self.core.flush()]
        await self._land(flight)
        self._consumed = group[-1].seq
        self._landed = True
        await self._reply([reply for decision, _, _ in flight for reply in decision.replies])

    def _owe(self, command: str, reply_to: str) -> None:
        self._reply_to[command] = reply_to
        trim(self._reply_to, REPLIES_MAX)

    async def _land(self, flight: Sequence[tuple[Decision, int, str]]) -> None:
        """Append what was decided. While the bus is away or full this waits: the flight is kept, nothing is lost."""
        outgoing: list[list[Outgoing]] = []
        seq = self._last
        for decision, answers, trace in flight:
            landing: list[Outgoing] = []
            for event in decision.events:
                seq += 1
                landing.append(self._outgoing(event, seq, answers, trace))
                self._answered = answers
            if landing:
                outgoing.append(landing)
        if not outgoing:
            if any(decision.replies for decision, _, _ in flight):
                await self._still_leading()
            return
        while True:
            try:
                self._last = await fly(self.bus, outgoing, self._last)
                self._event_id = log_id(self.bus, outgoing[-1][-1])
                return
            except BusUnavailable as error:
                log.warning("decisions wait for the log: %s", error)
                await asyncio.sleep(RETRY_S)

    def _outgoing(self, event: ev.Event, seq: int, answers: int, trace: str) -> Outgoing:
        epoch = self.core.hive.epoch
        headers = {EPOCH: str(epoch), INBOX: str(answers)}
        if trace:
            headers[TRACEPARENT] = trace
        return Outgoing(
            subject=self.bus.subjects.event(event.engine, ev.kind_of(event)),
            body=ev.encode_event(event),
            msg_id=f"{epoch}.{seq}",
            headers=headers,
        )

    async def _still_leading(self) -> None:
        """Refusals make no event, so nothing fences them: look whether the last event is ours (R3)."""
        newest = await self._newest()
        if newest is None or newest.seq != self._last:
            raise Deposed(f"the log ends at {newest.seq if newest else 0}, not at our event {self._last}")

    async def _newest(self) -> Stored | None:
        """The log's last event, however long the bus is away."""
        while True:
            try:
                return await self.bus.last(self.bus.subjects.events_stream)
            except BusUnavailable as error:
                log.warning("decisions wait for the log: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _reply(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            subject = self._reply_to.pop(reply.command, "")
            if subject:
                await self.bus.answer(subject, msgspec.structs.replace(reply.answer, position=self._last))

    # ---- beside it ----

    async def _tick(self) -> None:
        """Time reaches the core through the inbox only (R5)."""
        epoch = self.core.hive.epoch
        count = 0
        while True:
            await self._may_decide()
            count += 1
            try:
                await self.bus.send(inbox.Tick(id=f"tick-{epoch}-{count}", answered=self._consumed))
            except BusUnavailable as error:
                log.warning("the clock waits for the bus: %s", error)
            await asyncio.sleep(TICK_S)

    async def _trim(self) -> None:
        """Drop inbox messages that are decided (R12)."""
        trimmed = 0
        while True:
            await asyncio.sleep(self._trim_s)
            if self._consumed <= trimmed:
                continue
            try:
                await self.bus.purge_below(self.bus.subjects.inbox_stream, self._consumed)
                trimmed = self._consumed
            except BusUnavailable as error:
                log.warning("the inbox could not be trimmed: %s", error)


async def run(url: str, hive: str, name: str = "", disk: Path | None = None) -> None:
    """Stand by for the lead of a hive, lead, and when deposed stand by again; until cancelled."""
    telemetry.configure("coordinator")
    leader = name or f"coordinator-{secrets.token_hex(4)}"
    async with await Bus.connect(url, hive, name="coordinator") as bus:
        await bus.ensure_streams()
        lease = Lease(bus, leader)
        while True:
            await _one_reign(bus, leader, lease, disk)


async def _one_reign(bus: Bus, leader: str, lease: Lease, disk: Path | None) -> None:
    """Stand by, lead, return when deposed or when the bus was away for too long to take over.

    Raises `LogCorrupted`; `BusUnavailable` when the bus was closed.
    """
    coordinator = Coordinator(bus, leader, lease, disk=disk)
    try:
        await coordinator.lead(await stand_by(bus, lease))
    except* Deposed as group:
        log.warning("deposed, standing by: %s", group.exceptions[0])
    except* BusUnavailable as group:
        if bus.is_closed:
            raise
        log.warning("standing by for the bus: %s", group.exceptions[0])
        await asyncio.sleep(RETRY_S)
    finally:
        await lease.release()
        await coordinator.leave()
