"""The coordinator's shell around the real core: stand by, lead, decide, append, snapshot, trim, watch storage.

It is a model of `bombus_coordinator.shell`: a change of the logic there has to be made here too.
"""

from collections.abc import Sequence

import msgspec

from bombus.bus import snapshots
from bombus.bus.append import Outgoing
from bombus.bus.headers import EPOCH, INBOX, INBOX_DIGEST, REPLY
from bombus.bus.snapshots import Snapshot
from bombus.errors import BusUnavailable, Deposed, LogCorrupted, StreamEndLost
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.collection import pick, tasks
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import FOLD, Hive
from bombus.hive.trajectories.queue import QueuedGroup
from bombus_coordinator.compaction import Cut, cut_of, is_long, usable
from bombus_coordinator.core import Core, PendingDecision
from bombus_coordinator.recovery import Overtaken
from bombus_coordinator.retention import floors_of
from bombus_coordinator.rules.decision import CommandReply
from bombus_coordinator.storage import is_full
from tests.sim.append import append
from tests.sim.faults import Fault
from tests.sim.fold import RETRY_S, Fold
from tests.sim.grouped_ledger import GROUPED_ENGINE, GroupedLedger
from tests.sim.lease import RENEW_S, Lease
from tests.sim.link import Link, Net, Reader
from tests.sim.loop import Process
from tests.sim.lost_ends import find
from tests.sim.operations import store
from tests.sim.referee import ENGINE, RECOVERED, Referee
from tests.sim.rollout_groups import PushedLedger
from tests.sim.server import (
    CALLS_STREAM,
    EVENTS_STREAM,
    INBOX_STREAM,
    OPS_STREAM,
    SIZE,
    TICK,
    TRAJECTORIES_STREAM,
    Message,
)
from tests.sim.variants import Variant

ASK_S = 0.3
TICK_S = 1.0
TRIM_S = 3.0
GRACE_S = 6.0  # which an API that hangs exceeds
WATCH_S = 2.0
COMPACT_S = 4.0
GROUP_S = 0.5
AGAIN_S = 4.0  # after which a group of episodes is made again that was not queued
GROUPS = (1, 8, 512)


class Coordinator(Process):
    """One process: stands by, leads, and stands by again when deposed."""

    link: Link
    lease: Lease

    def __init__(self, name: str, net: Net, referee: Referee, variant: Variant | None) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._referee = referee
        self._variant = variant
        self._group_max = net.pick.choice(GROUPS)
        self._snapshot_events = net.pick.choice((5, 30, 150))

    @property
    def _answered(self) -> int:
        return self._place.seq

    @property
    def leads(self) -> bool:
        return self.alive and not self.stopped and self.lease.held and self._epoch == self._referee.hive.epoch

    async def main(self) -> None:
        self._epoch = -1
        self.link = Link(self, self._net)
        self.lease = Lease(self.link, self.name)
        while True:
            try:
                await self._lead(await self._stand_by())
            except Deposed:
                self._referee.count("deposed")
                self._epoch = -1
            except StreamEndLost:
                self._referee.count("lost ends found at work")
                self._epoch = -1
            except Overtaken:
                self._referee.count("overtaken by a compaction")
            except BusUnavailable:
                await self.sleep(RETRY_S)

    async def _stand_by(self) -> Fold:
        fold = await Fold.begin(self.link)
        if fold.position:
            self._referee.count("began at a snapshot")

        async def ask() -> None:
            while not await self.lease.acquire():
                await self.sleep(ASK_S)

        async def follow() -> None:
            reader = Reader(self.link, EVENTS_STREAM, fold.position + 1)
            while True:
                fold.apply(await reader.read())

        await self.together(ask(), follow())
        return fold

    async def _lead(self, fold: Fold) -> None:
        while not await self._take_over(fold):
            fold = await Fold.begin(self.link)
        upkeep = [self._trim(), self._retain(), self._watch()]
        if OPS_STREAM in self.link.server.streams:
            upkeep.append(self._release())
        if TRAJECTORIES_STREAM in self.link.server.streams:
            upkeep.append(self._release_groups())
        if self._referee.grouped is not None:
            upkeep.append(self._group_episodes())
        if self.link.server.events_max:
            upkeep.append(self._compact())
        await self.together(self._serve(), self._tick(), self.lease.keep(), *upkeep)

    async def _take_over(self, fold: Fold) -> bool:
        """Fold to the log's end and open the next epoch. Return False when the old leader wrote in between."""
        self._snapshot_at = fold.snapshot
        self._asked, self._held = False, set[int]()
        await fold.catch_up(self.link)
        self._last, self._event_id = fold.position, fold.event_id
        lost: list[ev.StreamWentBack] = []
        after = self._place = fold.place
        if self.link.server.loses_ends and self._variant != Variant.WENT_ON:
            after, lost = await find(self.link, fold)
        self._deciding: dict[int, Message] = {}
        self._newest_consumed: Message | None = None
        self.core = Core(fold.hive)
        self._reply_to: dict[str, str] = {}
        self._commands: dict[str, inbox.AnyMessage] = {}
        epoch = self.core.hive.epoch + 1
        try:
            await self._append([PendingDecision(self.core.open_epoch(self.name), self._answered)])
            self._epoch = epoch
            self._place = after
            self._consumed = self._read = after.seq
            if lost:
                await self._append([PendingDecision(self.core.note_lost(lost), self._answered)])
            await self._append(
                [PendingDecision(decision, self._answered) for decision in self.core.recover()], {RECOVERED: "1"}
            )
        except Deposed:
            newest = await self._newest()
            if newest is not None and int(newest.headers[EPOCH]) >= epoch:
                raise
            self._referee.count("the old leader wrote in between")
            return False
        self._referee.leader_state(self.core.hive, self._last)
        return True

    # ---- deciding ----

    async def _serve(self) -> None:
        start, after = self._answered + 1, None
        if self._variant == Variant.START_LATE:
            start = self.link.server.streams[INBOX_STREAM].last_seq + 1
        elif self._variant == Variant.START_EARLY:
            start = max(1, self._answered)
        elif self.link.server.loses_ends and self._variant != Variant.WENT_ON:
            after = self._place
        reader = Reader(self.link, INBOX_STREAM, start, after)
        while True:
            group = await reader.read(self._group_max)
            self._read = group[-1].seq
            await self._may_decide()
            await self._decide(group)
            if self._last - self._snapshot_at >= (1 if self._asked else self._snapshot_events):
                self._take_snapshot()

    async def _may_decide(self) -> None:
        """Wait while the lease is lost. Raises `Deposed` only for a higher epoch on the log (R4)."""
        while not self.lease.held:
            newest = await self._newest()
            if newest is not None and int(newest.headers[EPOCH]) > self._epoch:
                raise Deposed(f"epoch {newest.headers[EPOCH]} is open")
            await self.sleep(RENEW_S)

    async def _decide(self, group: Sequence[Message]) -> None:
        pending: list[PendingDecision] = []
        self._deciding = {message.seq: message for message in group}
        for message in group:
            command = message.message
            if reply := message.headers.get(REPLY):
                self._reply_to[command.id] = reply
                self._commands[command.id] = command
            if self._variant == Variant.OLD_TRAINER and isinstance(command, inbox.StepDone):
                epoch = self.core.hive.engine(command.engine).trainer_epoch
                command = msgspec.structs.replace(command, trainer_epoch=epoch)
            if self._variant == Variant.OLD_EXECUTOR and isinstance(command, inbox.OperationDone):
                epoch = self.core.hive.engine(command.engine).trainer_epoch
                command = msgspec.structs.replace(command, trainer_epoch=epoch)
            pending += self.core.receive(command, message.seq, message.time_ns)
        pending += self.core.flush()
        replies = [reply for each in pending for reply in each.decision.replies]
        if self._variant == Variant.REPLY_EARLY:
            self._reply(replies)
        if self._variant == Variant.SNAPSHOT_EARLY:
            self._take_snapshot()
        await self._append(pending)
        self._consumed, self._newest_consumed = group[-1].seq, group[-1]
        self._referee.leader_state(self.core.hive, self._last)
        self._reply(replies)

    async def _append(self, pending: Sequence[PendingDecision], more: dict[str, str] | None = None) -> None:
        """Append what was decided. While the bus is away or full this waits and retries: nothing is lost."""
        outgoing: list[list[Outgoing]] = []
        seq = self._last
        for each in pending:
            events: list[Outgoing] = []
            if each.answers != self._answered and each.decision.events:
                self._place = self._deciding[each.answers].stored.place
            for event in each.decision.events:
                seq += 1
                answers = {INBOX: str(each.answers), INBOX_DIGEST: self._place.digest}
                events.append(self._outgoing(event, seq, {**answers, **(more or {})}))
            if events and self._variant == Variant.ENDED_APART:
                outgoing += [[each] for each in events]
            elif events:
                outgoing.append(events)
        if not outgoing:
            if any(each.decision.replies for each in pending):
                await self._check_leading()
            return
        while True:
            try:
                self._last = await append(self.link, outgoing, self._last, self._variant)
                self._event_id = outgoing[-1][-1].msg_id
                return
            except BusUnavailable:
                await self.sleep(RETRY_S)

    def _outgoing(self, event: ev.Event, seq: int, headers: dict[str, str]) -> Outgoing:
        epoch = self.core.hive.epoch
        headers[EPOCH] = str(epoch)
        return Outgoing(ev.kind_of(event), ev.encode_event(event), f"{self.link.token}.{epoch}.{seq}", headers)

    async def _check_leading(self) -> None:
        newest = await self._newest()
        if newest is None or newest.seq != self._last:
            raise Deposed("the log does not end at our event")

    async def _newest(self) -> Message | None:
        while True:
            try:
                return await self.link.last(EVENTS_STREAM)
            except BusUnavailable:
                await self.sleep(RETRY_S)

    def _reply(self, replies: Sequence[CommandReply]) -> None:
        for reply in replies:
            to = self._reply_to.pop(reply.command, "")
            if to:
                answer = msgspec.structs.replace(reply.answer, position=self._last)
                self._referee.replied(self._commands.pop(reply.command), answer)
                self.link.reply(to, answer)

    # ---- in the background ----

    async def _tick(self) -> None:
        number = 0
        while True:
            await self._may_decide()
            number += 1
            try:
                before = self.link.server.streams[INBOX_STREAM].last(TICK)
                after_ns = self.core.live.now_ns if before is None else before.time_ns
                await self.link.send(
                    inbox.Tick(id=f"tick-{self._epoch}-{number}", answered=self._consumed, after_ns=after_ns)
                )
            except BusUnavailable:
                pass  # the next one will do
            await self.sleep(TICK_S)

    async def _trim(self) -> None:
        while True:
            await self.sleep(TRIM_S)
            below, newest = self._consumed, self._newest_consumed
            stream = self.link.server.streams[INBOX_STREAM]
            if self._variant == Variant.PURGE_EARLY:
                below = self._read
            elif newest is not None and not stream.keeps(newest.stored.place):
                raise StreamEndLost(INBOX_STREAM, newest.seq)
            try:
                await self.link.call(lambda: stream.purge_below(below))  # noqa: B023
            except BusUnavailable:
                pass  # the next one covers this one

    async def _retain(self) -> None:
        """Purge calls that are not needed (R12), by a state that was on the log a period ago, as in retention.py."""
        calls = self.link.server.streams[CALLS_STREAM]
        while True:
            hive = self.core.hive
            floors = floors_of(_without_earlier_steps(hive) if self._variant == Variant.STEPS_PURGED else hive)
            position = self._consumed
            await self.sleep(TRIM_S)
            if self._consumed == position or not floors:
                continue
            overfull = self._net.pick.random() < 0.5
            below = min(floor.needed if overfull else floor.kept for floor in floors.values())
            if self._variant == Variant.CALLS_PURGED:
                below = self.core.hive.engine(ENGINE).newest_call
            try:
                await self.link.call(lambda: calls.purge_below(below))  # noqa: B023
                self._referee.purged_below(calls.first_seq)
                self._referee.seen["calls purged"] += calls.first_seq > 1
            except BusUnavailable:
                pass  # the next one covers this one

    async def _release(self) -> None:
        """Let the core release training operations, then purge what the log says is released, as in releasing.py."""
        ops = self.link.server.streams[OPS_STREAM]
        ends: list[tuple[float, int]] = []
        number = 0
        while True:
            released, position = self.core.hive.released, self._consumed
            await self.sleep(TRIM_S)
            number += 1
            ends.append((self._net.loop.now_s, ops.last_seq + 1))
            old = [end for since, end in ends if since <= self._net.loop.now_s - GRACE_S]
            try:
                if self._consumed != position:
                    if self._variant == Variant.OPS_PURGED:
                        released = ops.last_seq
                    await self.link.call(lambda: ops.purge_below(released))  # noqa: B023
                    assert self._referee.ledger is not None
                    self._referee.ledger.purged()
                if old:
                    told = inbox.OperationsStored(id=f"{self.link.token}-{self._epoch}-ops-{number}", below=old[-1])
                    await self.link.send(told)
            except BusUnavailable:
                pass  # the next one covers this one

    async def _release_groups(self) -> None:
        """Let the core release the bodies of rollout groups, then purge what the log says is released."""
        stream = self.link.server.streams[TRAJECTORIES_STREAM]
        ends: list[tuple[float, int]] = []
        number = 0
        while True:
            released, position = self.core.hive.trajectories_released, self._consumed
            await self.sleep(TRIM_S)
            number += 1
            ends.append((self._net.loop.now_s, stream.last_seq + 1))
            old = [end for since, end in ends if since <= self._net.loop.now_s - GRACE_S]
            try:
                if self._consumed != position:
                    if self._variant == Variant.GROUPS_PURGED:
                        released = stream.last_seq
                    await self.link.call(lambda: stream.purge_below(released))  # noqa: B023
                    self._bodies.purged()
                if old:
                    told = inbox.TrajectoriesStored(
                        id=f"{self.link.token}-{self._epoch}-groups-{number}", below=old[-1]
                    )
                    await self.link.send(told)
                    await self._move_groups(old[-1], number)
            except BusUnavailable:
                pass  # the next one covers this one

    async def _move_groups(self, below: int, number: int) -> None:
        """Store the body of the group that has waited longest once more, as moving.py does in an overfull stream."""
        ledger = self._bodies
        queued = self.core.hive.engine(ledger.engine).trajectories.queue.groups.items()
        old = [(each.body, group) for group, each in queued if each.body is not None and each.body.first < below]
        if not old:
            return
        body, group = min(old, key=lambda found: found[0].first)
        try:
            found = await self.link.call(lambda: ledger.fetch(body))
        except LogCorrupted:
            return  # a batch that would have it gives it up
        moved = ev.MovedBody(group, await store(self.link, found, TRAJECTORIES_STREAM))
        told = inbox.BodiesStored(
            id=f"{self.link.token}-{self._epoch}-bodies-{number}", engine=ledger.engine, moved=(moved,),
            was=(body.first,),
        )  # fmt: skip
        await self.link.send(told)

    @property
    def _bodies(self) -> PushedLedger | GroupedLedger:
        """Return the ledger of the engine that has rollout groups."""
        ledger = self._referee.pushed or self._referee.grouped
        assert ledger is not None
        return ledger

    async def _group_episodes(self) -> None:
        """Make groups of ended episodes, as grouping.py does: again after a while where none was queued."""
        made: dict[str, float] = {}
        while True:
            await self.sleep(GROUP_S)
            engine = self.core.hive.engine(GROUPED_ENGINE)
            size = engine.collection.num_repeat
            complete = [pick(each, size) for each in tasks(engine) if len(each) >= size]
            for episodes in complete if engine.groups_episodes else ():
                if self._net.loop.now_s - made.get(episodes[0].episode, -AGAIN_S) >= AGAIN_S:
                    made[episodes[0].episode] = self._net.loop.now_s
                    try:
                        await self._make_group(engine.run, [each.episode for each in episodes])
                    except BusUnavailable:
                        pass  # it is made again

    async def _make_group(self, run: int, episodes: list[str]) -> None:
        """Store the group of these episodes and tell the core, sometimes twice, or that there can be none."""
        sequences = self._net.pick.choice((len(episodes), len(episodes), len(episodes), len(episodes) + 1))
        group = None
        if self._net.pick.random() < 0.95:
            body = await store(self.link, "+".join(episodes).encode(), TRAJECTORIES_STREAM)
            group = QueuedGroup(environment=None, sequences=sequences, body=body)
        made = inbox.EpisodesGrouped(
            id=self._net.fresh("grouped"), engine=GROUPED_ENGINE, run=run, episodes=tuple(episodes), group=group,
            why="" if group is not None else "nothing is left of it",
        )  # fmt: skip
        await self.link.send(made)
        if self._net.faults.strikes(Fault.REPEAT):
            await self.link.send(msgspec.structs.replace(made, id=self._net.fresh("grouped")))

    async def _watch(self) -> None:
        """Report what is nearly full and what has room again, as storage.py does."""
        number = 0
        while True:
            for name, stream in self.link.server.streams.items():
                place = inbox.StorageSeen(id="", what=name, used=stream.used, size=SIZE, reserve=SIZE // 10)
                if is_full(self.core.hive, place) == (name in self.core.hive.full):
                    continue
                number += 1
                try:
                    await self.link.send(
                        msgspec.structs.replace(place, id=f"{self.name}-{self._epoch}-storage-{number}")
                    )
                except BusUnavailable:
                    break  # it is seen again
            await self.sleep(WATCH_S)

    def _take_snapshot(self) -> None:
        """Encode a snapshot now, before the state changes, and store it in the background."""
        position, self._snapshot_at, self._asked = self._last, self._last, False
        held = frozenset(self._held)
        body = snapshots.encode(
            Snapshot(
                fold=FOLD, position=position, event_id=self._event_id, answered=self._answered, hive=self.core.hive
            )
        )
        self._referee.count("snapshots")
        self.link.call(lambda: self.link.server.put_snapshot(position, body, held))

    # ---- compaction, as in compaction.py ----

    async def _compact(self) -> None:
        """Remove the log's oldest events behind two verified snapshots whenever it is too long."""
        damaged: set[int] = set()
        while True:
            await self.sleep(COMPACT_S)
            try:
                await self._attempt_compaction(damaged)
            except BusUnavailable:
                pass  # it is tried again

    async def _attempt_compaction(self, damaged: set[int]) -> None:
        server = self.link.server
        events, positions = await self.link.call(lambda: (server.events_state, sorted(server.snapshots)))
        if not is_long(events):
            await self._tell(inbox.CompactionTried(id=""))
            return
        positions = usable(events, positions, damaged)
        cut = cut_of(events, positions)
        if cut is None:
            self._asked = True
            await self._tell(inbox.CompactionTried(id="", why=f"{len(positions)} good snapshots"))
            return
        self._held = {cut.at, cut.until}
        found = [position for position in (cut.at, cut.until) if position in server.damaged]
        if found:
            damaged.update(found)
            await self._tell(inbox.CompactionTried(id="", why=f"{found} are damaged"))
            return
        if cut.at not in server.snapshots or cut.until not in server.snapshots:
            return  # another leader's newer one has pushed it out
        self._check_snapshots(cut)
        server.cut_at = max(server.cut_at, cut.at)
        await self.sleep(self._net.pick.choice((0.1, 10.0)) * self._net.pick.random())
        newest = await self._newest()
        if newest is None or int(newest.headers[EPOCH]) != self._epoch:
            return
        stream = server.streams[EVENTS_STREAM]
        await self.link.call(lambda: stream.purge_below(cut.at))
        await self._tell(inbox.CompactionTried(id="", below=cut.at))

    async def _tell(self, tried: inbox.CompactionTried) -> None:
        if tried.below or tried.why != self.core.hive.uncompacted:
            await self.link.send(msgspec.structs.replace(tried, id=self._net.fresh("compaction")))

    def _check_snapshots(self, cut: Cut) -> None:
        """Check that the newer snapshot is the fold of the older one and the events in between."""
        server = self.link.server
        hive = snapshots.decode(server.get_snapshot(cut.at)).hive
        for message in server.streams[EVENTS_STREAM].messages[cut.at : cut.until]:
            evolve(hive, message.event)
        assert hive == snapshots.decode(server.get_snapshot(cut.until)).hive, f"the snapshot at {cut.until} is wrong"


def _without_earlier_steps(hive: Hive) -> Hive:
    engines = {name: msgspec.structs.replace(engine, steps=engine.steps[-1:]) for name, engine in hive.engines.items()}
    return msgspec.structs.replace(hive, engines=engines)
