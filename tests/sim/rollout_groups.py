"""Rollout groups in the simulator: environments that push them, a trainer that takes batches, and what must hold.

No acknowledged group is lost, none is in two batches, and no batch counts as delivered that its trainer never had. A
disk may lose a body: then that group alone is given up. So are those that crowd others out of a full stream.
"""

from collections import Counter
from collections.abc import Callable

from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Event
from bombus.hive.records import BodyRef
from bombus.hive.shares import has_share_of_stream
from bombus.hive.state import ROLLOUT_GROUPS, EngineState, Hive, Phase
from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import REPEAT_S, HandedOut
from bombus_coordinator.rules.crowding import WHY_GIVEN_UP
from tests.sim.faults import Fault
from tests.sim.fold import Follower
from tests.sim.link import ANSWER_S, Link, Net
from tests.sim.loop import Process
from tests.sim.operations import fetch, store
from tests.sim.server import SECOND, TRAJECTORIES_STREAM, Server
from tests.sim.variants import Variant

GROUPS_ENGINE = "scored"
BATCH = 4  # sequences
BEAT_S = 2.0


def check_crowded(hive: Hive, event: ev.GroupsGivenUp, engine: EngineState) -> None:
    """Check that groups are given up for room only while there is none, and by who has more than a share of it."""
    queue, size = engine.trajectories.queue, hive.full[ROLLOUT_GROUPS].size
    assert form(queue) is None
    (holder,) = {queue.groups[number].holder for number in event.groups}
    assert not has_share_of_stream(hive.queued_groups(), holder, size, more=0)


class PushedLedger:
    """Sees every event about rollout groups, and every answer to environments and trainers."""

    engine = GROUPS_ENGINE

    def __init__(self, server: Server, hive: Callable[[], Hive], seen: Counter[str]) -> None:
        """`hive` is the fold of the log."""
        self.hive = hive
        self.seen = seen
        self.received: set[tuple[int, int]] = set()  # batches that a trainer has read to their end, by run and number
        self.saved: dict[int, int] = {}  # the last batch that a trainer which says so has, by run
        self._server = server
        self._pushed: dict[str, tuple[int, tuple[bytes, ...]]] = {}  # by key: when, and the digests of its bodies
        self._acknowledged: set[str] = set()
        self._forgotten: set[str] = set()  # keys, by a reset
        self._gone: set[bytes] = set()  # in a batch, or with a run that has ended
        self._numbers: dict[int, bytes] = {}  # of what waits
        self._handed: dict[int, bytes] = {}  # of the batch that was handed out last
        self.lost: set[bytes] = set()  # by the disk

    @property
    def _waiting(self) -> set[bytes]:
        return set(self._numbers.values())

    def acknowledged(self, key: str) -> None:
        assert key in self._pushed, "a group is on the log before its push is answered"
        self._acknowledged.add(key)
        self.seen["pushes acknowledged"] += 1

    def check(self, event: Event, engine: EngineState) -> None:
        match event:
            case ev.EngineStarted():
                assert engine.phase == Phase.OFFLINE
                assert (event.base, event.config_digest) == ("", "")
            case ev.GroupsPushed():
                self._check_pushed(event, engine)
            case ev.BatchHandedOut():
                self._check_handed_out(event, engine)
            case ev.GroupsGivenUp():
                self._check_given_up(event, engine)
            case ev.BodiesMoved():
                needed = self._handed | self._numbers
                for moved in event.moved:
                    assert self._fetch(moved.body) == needed[moved.group], "it is moved while it is needed"
                    self.seen["bodies of a batch moved"] += moved.group not in self._numbers
            case ev.BatchDelivered():
                assert (event.run, event.number) in self.received, "what is delivered has reached its trainer"
            case ev.EngineStopped() | ev.GroupsReset():
                self._gone |= self._waiting
                self._numbers.clear()
                self._handed.clear()
                self._forgotten |= set(self._pushed)

    def _check_pushed(self, event: ev.GroupsPushed, engine: EngineState) -> None:
        before = self._pushed.get(event.key)
        digests = tuple(self._fetch(group.body) for group in event.groups if group.body is not None)
        if before is not None:
            is_late = event.at_ns - before[0] > REPEAT_S * SECOND or event.key in self._forgotten
            assert is_late, f"{event.key} is queued twice"
            self._forgotten.discard(event.key)
            self.seen["pushes that came again late"] += 1
        self._pushed[event.key] = event.at_ns, digests
        for number, digest in enumerate(digests, start=engine.trajectories.queue.arrived + 1):
            self._numbers[number] = digest

    def _check_handed_out(self, event: ev.BatchHandedOut, engine: EngineState) -> None:
        state = engine.trajectories
        assert state.batch is None or state.batch.delivered, "what was not delivered is handed out again first"
        assert event.number == state.batches + 1
        groups = [state.queue.groups[number] for number in event.groups]
        assert sum(group.sequences for group in groups) == BATCH, "a batch is exact"
        self._handed = {number: self._numbers.pop(number) for number in event.groups}
        self._gone |= set(self._handed.values())

    def _check_given_up(self, event: ev.GroupsGivenUp, engine: EngineState) -> None:
        """Check that only what is lost or crowds others is given up, and what was with it in a batch waits again."""
        batch = engine.trajectories.batch
        if event.number:
            assert batch is not None
            assert not batch.delivered
            self._numbers |= self._handed
            self._gone -= set(self._handed.values())
        crowded = event.why == WHY_GIVEN_UP
        if crowded:
            check_crowded(self.hive(), event, engine)
        for number in event.groups:
            digest = self._numbers.pop(number)
            assert crowded or digest in self.lost
            self._gone.add(digest)
            self.seen["groups given up to make room" if crowded else "groups given up"] += 1

    def fetch(self, ref: BodyRef) -> bytes:
        """Return a body. Raises `LogCorrupted` when it is gone."""
        if ref.digest in self.lost:
            raise LogCorrupted("the disk has lost this body")
        return fetch(self._server, ref, TRAJECTORIES_STREAM)

    def _fetch(self, ref: BodyRef) -> bytes:
        try:
            fetch(self._server, ref, TRAJECTORIES_STREAM)
        except LogCorrupted as error:
            raise AssertionError(f"a body that is needed is gone: {error}") from error
        return ref.digest

    def purged(self) -> None:
        """Check that what is needed is still there, whatever was purged."""
        for group in self.hive().engine(GROUPS_ENGINE).trajectories.needed():
            assert group.body is not None
            self._fetch(group.body)
        self.seen["groups purged"] += self._server.streams[TRAJECTORIES_STREAM].first_seq > 1

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left that could be a batch. A minimum of who fell silent may hold groups back."""
        state = self.hive().engine(GROUPS_ENGINE).trajectories
        return form(state.queue) is None and (state.batch is None or state.batch.delivered)

    def finish(self) -> None:
        queue = self.hive().engine(GROUPS_ENGINE).trajectories.queue
        queued = {group.body.digest for group in queue.groups.values() if group.body is not None}
        assert queued == self._waiting, "the queue has what was pushed and not handed out"
        digests = {each for key in self._acknowledged for each in self._pushed[key][1]}
        assert digests <= self._waiting | self._gone, "an acknowledged group is lost"


class AtroposClient(Process):
    """What environments and trainers have in common: a link, a fold, and commands that may not be answered."""

    def __init__(
        self, name: str, net: Net, ledger: PushedLedger, playing: Callable[[], bool], variant: Variant | None = None
    ) -> None:
        super().__init__(net.loop, name)
        self._variant = variant
        self._net = net
        self._ledger = ledger
        self._playing = playing

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self.spawn(self.follower.run())
        while True:
            await self.sleep(self._net.pick.random())
            await self._act()

    async def _act(self) -> None:
        raise NotImplementedError

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(GROUPS_ENGINE)


class AtroposEnvironment(AtroposClient):
    """Joins, pushes groups until each push is answered, and leaves, or falls silent."""

    async def _act(self) -> None:
        if not self._playing():
            return
        pick = self._net.pick
        joins = inbox.JoinEnvironment(
            id=self._net.fresh("join"), engine=GROUPS_ENGINE, desired_name=self.name, max_tokens=64,
            weight=pick.choice((0.5, 1.0)), group_size=2, minimum=pick.choice((None, None, 0.25)),
        )  # fmt: skip
        joined = await self.link.ask(joins)
        environment = joined.environment if isinstance(joined, inbox.Joined) else None
        for _ in range(pick.choice((1, 4, 10))):
            await self._push(pick.choice((environment, environment, None)))
            if environment is not None and pick.random() < 0.3:
                await self._touch(environment)
        if environment is not None and pick.random() < 0.7:  # otherwise it is forgotten
            leaves = inbox.LeaveEnvironment(id=self._net.fresh("leave"), engine=GROUPS_ENGINE, environment=environment)
            await self.link.ask(leaves)

    async def _touch(self, environment: int) -> None:
        touch = inbox.Touch(id=self._net.fresh("touch"), engine=GROUPS_ENGINE, environments=(environment,))
        try:
            await self.link.send(touch)
        except BusUnavailable:
            pass  # the next one will do

    async def _push(self, environment: int | None) -> None:
        """Push groups until that is answered, and sometimes again under the same key."""
        pick = self._net.pick
        key = self._net.fresh("push")
        texts = [self._net.fresh("group").encode() * 3 for _ in range(pick.choice((1, 1, 3)))]
        sizes = [pick.choice((1, 2, 2, 2)) for _ in texts]
        while True:
            try:
                bodies = [await store(self.link, text, TRAJECTORIES_STREAM) for text in texts]
            except BusUnavailable:
                continue
            if pick.random() < 0.05:
                await self.sleep(pick.random() * 20)  # an API that hangs between the two
            groups = tuple(
                QueuedGroup(environment=environment, sequences=size, tokens=6, longest=3, body=body)
                for size, body in zip(sizes, bodies, strict=True)
            )
            message = inbox.PushGroups(id=self._net.fresh("push"), engine=GROUPS_ENGINE, groups=groups, key=key)
            answer = await self.link.ask(message)
            if isinstance(answer, inbox.Pushed):
                self._ledger.acknowledged(key)
                if not self._net.faults.strikes(Fault.REPEAT):
                    return
            elif isinstance(answer, Refused):
                self._ledger.seen[f"pushes refused: {answer.code}"] += 1
                if answer.code not in (Code.STORAGE_FULL, Code.BODY_GONE):
                    return
                await self.sleep(pick.random())


class AtroposTrainer(AtroposClient):
    """Registers, and takes batches through a gateway that says what has arrived. It may be killed anywhere.

    In some runs it says itself which batch it has, and then has each once.
    """

    async def _act(self) -> None:
        pick = self._net.pick
        engine = self._engine
        if engine.trajectories.trainer is None or (self._playing() and pick.random() < 0.02):
            await self._register()
        elif self._playing() and pick.random() < 0.02:
            await self.link.ask(inbox.ResetGroups(id=self._net.fresh("reset"), engine=GROUPS_ENGINE))
        else:
            await self._take()

    async def _register(self) -> None:
        registers = inbox.RegisterTrainer(
            id=self._net.fresh("register"), engine=GROUPS_ENGINE, trainer=self._net.fresh("trainer"), batch_size=BATCH,
            max_token_len=64, checkpoint_dir="c", save_checkpoint_interval=5, starting_step=0, num_steps=9,
        )  # fmt: skip
        await self.link.ask(registers)

    async def _take(self) -> None:
        run = self._engine.run
        after = self._ledger.saved.get(run, 0) if run % 2 else None
        answer = await self.link.ask(inbox.TakeBatch(id=self._net.fresh("take"), engine=GROUPS_ENGINE, after=after))
        if not isinstance(answer, inbox.BatchTaken) or not answer.number:
            return
        try:
            await self.follower.wait_for(lambda: self.follower.position >= answer.position, ANSWER_S)
        except TimeoutError:
            return
        batch = self._engine.trajectories.batch
        if batch is None or (batch.run, batch.number) != (answer.run, answer.number):
            return
        if self._variant == Variant.SENT_EARLY:
            await self._say_sent(answer)
        if self._net.pick.random() < 0.03:
            self._ledger.lost.update(group.body.digest for group in batch.groups[:1] if group.body is not None)
        if not await self._read(answer, batch):
            return
        if self._net.pick.random() < 0.2:
            self._ledger.seen["batches that were cut off"] += 1
            return
        await self._receive(answer)

    async def _receive(self, answer: inbox.BatchTaken) -> None:
        """Have read a batch to its end. Who takes it may die before that is said."""
        self._ledger.seen["batches received again"] += (answer.run, answer.number) in self._ledger.received
        self._ledger.received.add((answer.run, answer.number))
        if answer.run % 2:
            if self._net.pick.random() > 0.2:  # otherwise it has died before it could save what it has
                assert answer.number > self._ledger.saved.get(answer.run, 0), "a batch is received once"
                self._ledger.saved[answer.run] = answer.number
            return
        if self._net.pick.random() > 0.05:  # otherwise its gateway has died right after the last byte
            await self._say_sent(answer)

    async def _read(self, taken: inbox.BatchTaken, batch: HandedOut) -> bool:
        """Read the bodies of a batch, and return whether all are there. One that is lost is given up."""
        for number, group in zip(batch.numbers, batch.groups, strict=True):
            assert group.body is not None
            ref = group.body
            try:
                await self.link.call(lambda: self._ledger.fetch(ref))  # noqa: B023
            except BusUnavailable:
                return False
            except LogCorrupted:
                state = self._ledger.hive().engine(GROUPS_ENGINE).trajectories.batch
                late = state is None or state.delivered or (state.run, state.number) != (taken.run, taken.number)
                assert late or ref.digest in self._ledger.lost, "the body of a batch that is not delivered is gone"
                await self._give_up(taken, inbox.LostGroup(number, ref.first))
                return False
        return True

    async def _give_up(self, taken: inbox.BatchTaken, lost: inbox.LostGroup) -> None:
        given_up = inbox.GiveUpGroups(
            id=self._net.fresh("lost"), engine=GROUPS_ENGINE, run=taken.run, number=taken.number, groups=(lost,),
            why="lost",
        )  # fmt: skip
        await self.link.ask(given_up)

    async def _say_sent(self, taken: inbox.BatchTaken) -> None:
        sent = inbox.BatchSent(id=self._net.fresh("sent"), engine=GROUPS_ENGINE, run=taken.run, number=taken.number)
        try:
            await self.link.send(sent)
        except BusUnavailable:
            pass  # it is handed out again
