"""A small world around the coordinator's core: random senders, a log that can be cut off, a leader that dies.

Everything comes from one seed. Clients, trainers and replicas know only the log and their answers, as the real ones do.
"""

import random
from collections.abc import Sequence

import msgspec

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.collection import BATCH_METHODS
from bombus.hive.events import (
    AbortReason,
    Collection,
    ConversationFormat,
    EpisodeType,
    Event,
    Method,
    NotedCall,
    Weights,
)
from bombus.hive.failures import FailureKind
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import CallRef
from bombus.hive.state import FORMATS_MAX, EngineState, Hive, Phase
from bombus_coordinator.core import Core, PendingDecision
from tests.hive.phases import TRANSITIONS
from tests.hive.pinned import PinLedger

SECOND = 1_000_000_000
ENGINE = "main"
CLIENTS = ("ann", "bob")
KEYS = {"ann": "", "bob": "bobs-key"}
TASKS = ("t1", "t2", "t3")
REPLICAS = ("r1", "r2")
MOVES = (
    ev.EpisodeClaimed, ev.RollingStarted, ev.RollingClosed, ev.SyncingStarted, ev.BatchReady, ev.GroupDropped,
    ev.PoolCleared, ev.EngineBooted, ev.EngineSuspended,
)  # fmt: skip


class Logged(msgspec.Struct, frozen=True):
    event: Event
    answers: int


class World:
    """`step()` sends a message or lets the leader decide. Invariants are checked for each stored event."""

    def __init__(self, seed: int, crashes: bool = True) -> None:
        self.random = random.Random(seed)
        self.crashes = crashes
        self.inbox: list[tuple[inbox.AnyMessage, int]] = []
        self.log: list[Logged] = []
        self.fold = Hive()  # the fold of the log, as all services have it
        self.pins = PinLedger()
        self.core = Core()
        self.now_ns = 1_000 * SECOND
        self.ticked_ns = 0  # when the last tick was sent
        self.ids = 0
        self.read = 0  # inbox messages that this leader has read
        self.answers: dict[str, inbox.AnyAnswer] = {}
        self.given: dict[str, inbox.AnyAnswer] = {}  # by this leader
        self.sent: dict[str, inbox.AnyMessage] = {}
        self.batched: set[str] = set()
        self.gone: set[str] = set()  # dropped, cleared or of an older run
        self.ended: set[str] = set()  # training episodes whose end is on the log
        self.evaluated: set[str] = set()  # evaluation episodes whose end is on the log
        self.deaths = 0
        self._lead()
        self._send(self._configure())
        self._send(inbox.Start(id=self._id(), engine=ENGINE))

    # ---- the leader ----

    def _lead(self) -> None:
        """Start a new leader: fold the log, open an epoch, continue after the message that the last event answers."""
        hive = Hive()
        for logged in self.log:
            evolve(hive, logged.event)
        assert hive == self.fold, "the fold of the log is the state"
        self.pins.check(hive)
        self.read = self.log[-1].answers if self.log else 0
        self.core = Core(hive)
        self.given = {}
        opened = self.core.open_epoch("x")
        self._store([PendingDecision(opened, self.read)])
        self._store([PendingDecision(decision, self.read) for decision in self.core.recover()])

    def decide(self) -> None:
        """Decide a group. All of it is stored, or the leader dies and a prefix is."""
        group = self.inbox[self.read : self.read + self.random.randint(1, 8)]
        if not group:
            return
        pending: list[PendingDecision] = []
        for offset, (message, at_ns) in enumerate(group, start=1):
            pending += self.core.receive(message, self.read + offset, at_ns)
        pending += self.core.flush()
        self.read += len(group)
        if self.crashes and self.random.random() < 0.1:
            self.deaths += 1
            self._store(pending[: self.random.randint(0, len(pending))])
            self._lead()
            return
        self._store(pending)
        assert self.core.hive == self.fold, "the live state is the fold of the log"
        for each in pending:
            for reply in each.decision.replies:
                self._answered(reply.command, reply.answer)  # type: ignore[arg-type]

    def _answered(self, command: str, answer: inbox.AnyAnswer) -> None:
        self.answers[command] = answer
        before = self.given.setdefault(command, answer)
        assert before == answer, "the same command gets the same answer"

    # ---- the log and its invariants ----

    def _store(self, pending: Sequence[PendingDecision]) -> None:
        for each in pending:
            for event in each.decision.events:
                before = self.fold.engine(event.engine).phase if event.engine == ENGINE else None
                self._check_before(event, self.fold.engine(ENGINE))
                self.log.append(Logged(event, each.answers))
                evolve(self.fold, event)
                self.pins.note(event)
                if before is not None:
                    after = self.fold.engine(ENGINE).phase
                    assert after == before or after in TRANSITIONS[before], f"{before} -> {after} is not a transition"

    def _check_before(self, event: Event, engine: EngineState) -> None:
        check_stays(event, engine)
        check_replicas(event, engine)
        match event:
            case ev.EpisodeEnded():
                self._check_ended(event, engine)
            case ev.EpisodeClaimed():
                assert engine.phase == Phase.ROLLING
                assert not set(event.episodes) & (set(engine.open) | set(engine.closed)), "every id is fresh"
                assert len(engine.open) + len(event.episodes) <= engine.collection.max_open_claims
            case ev.BatchReady():
                self._check_batch(event, engine)
            case ev.GroupDropped():
                self.gone |= set(event.episodes)
            case ev.PoolCleared() | ev.EngineStarted():
                self.gone |= set(engine.pool)
            case ev.StepCompleted() | ev.TrainerStalled() | ev.WeightsReady():
                _check_training(event, engine)
            case ev.EpisodeAborted():
                assert set(event.episodes) <= set(engine.open)
            case ev.ModelRead():
                check_read(event, engine)

    def _check_ended(self, event: ev.EpisodeEnded, engine: EngineState) -> None:
        for outcome in event.outcomes:
            assert outcome.episode in engine.open, "only an open episode ends"
            (self.ended if event.type == EpisodeType.TRAIN else self.evaluated).add(outcome.episode)

    def _check_batch(self, batch: ev.BatchReady, engine: EngineState) -> None:
        episodes = [episode.episode for group in batch.groups for episode in group.episodes]
        assert len(set(episodes)) == len(episodes)
        assert not set(episodes) & self.batched, "no episode is in two batches"
        self.batched |= set(episodes)
        assert batch.step == engine.step + 1
        check_in_time(batch, engine)
        check_as_asked(batch, engine)

    def check_nothing_lost(self) -> None:
        """Check that every ended training episode is in the pool, in one batch, or gone for a reason on the log."""
        pool = set(self.fold.engine(ENGINE).pool)
        assert self.ended == pool | self.batched | self.gone
        assert not pool & self.batched
        for command, answer in self.answers.items():
            message = self.sent.get(command)
            if isinstance(message, inbox.End) and isinstance(answer, inbox.Done):
                assert all(r.episode in self.ended | self.evaluated for r in message.results), (
                    "an answered end is on the log"
                )

    # ---- the senders ----

    def _id(self) -> str:
        self.ids += 1
        return f"m{self.ids}"

    def _send(self, message: inbox.AnyMessage) -> None:
        self.now_ns += self.random.choice((0, 1_000_000, SECOND // 4))
        self.sent.setdefault(message.id, message)
        self.inbox.append((message, self.now_ns))
        if self.random.random() < 0.05:
            self.inbox.append((message, self.now_ns))  # a sender that repeats itself

    def _tick(self) -> None:
        self._send(inbox.Tick(id=self._id(), after_ns=self.ticked_ns))
        self.ticked_ns = self.now_ns

    def _configure(self) -> inbox.Configure:
        pick = self.random
        method, batch_size, num_repeat = pick.choice(list(Method)), pick.randint(1, 2), pick.randint(1, 3)
        staleness = 0 if BATCH_METHODS[method].is_by_agreement else pick.choice((0, 0, 1, 2))
        rules = Collection(
            method=method,
            batch_size=batch_size,
            num_repeat=num_repeat,
            max_open_claims=pick.choice((2, 4, 16)),
            max_pool_episodes=pick.choice((2 if staleness == 0 else (staleness + 1) * batch_size * num_repeat, 100)),
            max_staleness=staleness,
            max_step_failures=pick.choice((1, 3)),
            drain_s=pick.choice((1.0, 30.0)),
            agreed_sync_s=pick.choice((0.0, 6.0)),
            max_carry_staleness=pick.choice((0, 1)),
        )
        return inbox.Configure(
            id=self._id(), engine=ENGINE, config="{}", config_digest="d", collection=rules, model="tiny"
        )

    def step(self) -> None:
        roll = self.random.random()
        engine = self.fold.engine(ENGINE)
        if engine.suspended and self.random.random() < 0.05:
            self._operator()
            return
        waits = engine.phase in (Phase.BOOTING, Phase.WEIGHT_SYNCING) or (
            engine.phase == Phase.ROLLING and engine.version < engine.step
        )
        if roll < 0.35:
            self.decide()
        elif roll < (0.45 if waits else 0.75):
            self._client(self.random.choice(CLIENTS))
        elif roll < (0.7 if waits else 0.8):
            self._trainer()
        elif roll < 0.95:
            self._replica(self.random.choice(REPLICAS))
        elif roll < 0.99:
            self._tick()
        else:
            self._operator()

    def _client(self, client: str) -> None:
        engine, pick = self.fold.engine(ENGINE), self.random
        mine = [episode for episode in engine.open.values() if episode.client == client]
        roll = pick.random()
        if not mine or roll < 0.2:
            kind = EpisodeType.EVAL if pick.random() < 0.15 else EpisodeType.TRAIN
            claim = f"{client}-{pick.randint(1, 40)}"  # few ids, so that they clash
            wait_s, limit_s = pick.choice((0.0, 2.0)), pick.choice((1.0, 240.0))
            count = pick.randint(1, 3)
            self._send(
                inbox.Claim(
                    id=self._id(), engine=ENGINE, claim=claim, client=client, count=count, type=kind,
                    wait_s=wait_s, discard_timeout_s=limit_s, owner=KEYS[client],
                )
            )  # fmt: skip
            return
        episode = pick.choice(mine)
        if roll < 0.5:
            self._record(engine, episode.id)
        elif roll < 0.85:
            reward = pick.choice((0.0, 1.0, 1.0, float("nan")))
            results = (inbox.EpisodeResult(episode=episode.id, task=pick.choice(TASKS), reward=reward),)
            who = client if pick.random() < 0.95 else "eve"
            self._send(inbox.End(id=self._id(), engine=ENGINE, client=who, results=results))
        elif roll < 0.9:
            ids = tuple(each.id for each in mine[:2])
            kinds = [None, *FailureKind]
            kind = kinds[int(roll * 1e6) % len(kinds)]
            self._send(inbox.Abort(id=self._id(), engine=ENGINE, client=client, episodes=ids, failure=kind))
        elif roll < 0.95:
            self._send(inbox.AgreeSync(id=self._id(), engine=ENGINE, client=client))
        else:
            self._send(inbox.Touch(id=self._id(), engine=ENGINE, episodes=(episode.id,), confirmed=(episode.claim,)))

    def _record(self, engine: EngineState, episode: str) -> None:
        ref = CallRef(self.ids, f"call{self.ids}", b"d" * 16)
        newest = oldest = engine.version
        if engine.collection.max_staleness:  # a replica that lags, sometimes by more than allowed
            oldest = max(0, newest - self.random.choice((0, 0, 0, 1, 1, 2, 3)))
        call = NotedCall(episode, ref, 5, 3, oldest, newest, bytes=1000 + self.ids)
        self._send(inbox.CallRecorded(id=self._id(), engine=ENGINE, run=engine.run, call=call))

    def _trainer(self) -> None:
        engine, pick = self.fold.engine(ENGINE), self.random
        epoch = engine.trainer_epoch if pick.random() < 0.9 else engine.trainer_epoch - 1
        run = engine.run if pick.random() < 0.95 else engine.run - 1
        if epoch < 1 or not engine.trainer or pick.random() < 0.05:
            patience_s = pick.choice((0.0, 60.0))
            self._send(inbox.TrainerOpens(id=self._id(), engine=ENGINE, run=run, trainer="t", patience_s=patience_s))
        elif pick.random() < 0.03:
            self._send(
                inbox.TrainerHangs(
                    id=self._id(), engine=ENGINE, run=run, trainer_epoch=epoch, doing="step", still_s=600.0
                )
            )
        elif pick.random() < 0.1:
            self._send(inbox.TrainerAlive(id=self._id(), engine=ENGINE, run=run, trainer_epoch=epoch))
        elif pick.random() < 0.03:
            self._send(
                inbox.EngineBroke(
                    id=self._id(), engine=ENGINE, run=run, reason="x", trainer_epoch=epoch,
                    may_pass=pick.random() < 0.9,
                )
            )  # fmt: skip
        elif engine.batch is not None and pick.random() < 0.8:
            self._send(
                inbox.StepDone(
                    id=self._id(), engine=ENGINE, run=run, step=engine.batch.step, trainer_epoch=epoch,
                    checkpoint="/c", checkpoint_digest="d",
                )
            )  # fmt: skip
        elif engine.batch is not None:
            self._send(
                inbox.StepBroke(
                    id=self._id(), engine=ENGINE, run=run, step=engine.batch.step, trainer_epoch=epoch, reason="x"
                )
            )
        else:
            step = engine.step_done.step if engine.step_done is not None else 0
            weights = Weights(where=f"/w/{step}")
            self._send(
                inbox.WeightsSaved(
                    id=self._id(), engine=ENGINE, run=run, step=step, trainer_epoch=epoch, weights=weights
                )
            )

    def _replica(self, replica: str) -> None:
        engine, pick = self.fold.engine(ENGINE), self.random
        if replica not in engine.replicas or pick.random() < 0.3:
            self._send(inbox.ReplicaAlive(id=self._id(), engine=ENGINE, replica=replica, url=f"http://{replica}"))
        elif pick.random() < 0.95:
            version = engine.version - pick.choice((0, 0, 0, 1))
            run = engine.run
            fact: inbox.AnyMessage = inbox.WeightsLoadedFact(
                id=self._id(), engine=ENGINE, run=run, version=version, replica=replica
            )
            if pick.random() < 0.2:
                fact = inbox.LoadBroke(
                    id=self._id(), engine=ENGINE, run=run, version=version, replica=replica, reason="no mount"
                )
            self._send(fact)
        else:
            self._send(inbox.ReplicaLeaves(id=self._id(), engine=ENGINE, replica=replica))

    def _operator(self) -> None:
        engine = self.fold.engine(ENGINE)
        if engine.phase == Phase.OFFLINE:
            self._send(self._configure())
            self._send(inbox.Start(id=self._id(), engine=ENGINE))
        elif self.random.random() < 0.3:
            self._send(inbox.Stop(id=self._id(), engine=ENGINE))
        elif self.random.random() < 0.7:
            self._send(inbox.Resume(id=self._id(), engine=ENGINE))
        self._send(self._read(engine))
        used = self.random.choice((0, 0, 0, 99))
        self._send(inbox.StorageSeen(id=self._id(), what="calls", used=used, size=100, reserve=10))

    def _read(self, engine: EngineState) -> inbox.ModelReadFact:
        """Return the report of a gateway, which may be of another version than the one before."""
        pick = self.random
        found = ConversationFormat(template=pick.choice("abcdef"), tool_calls="hermes", reasoning="text")
        run = engine.run - pick.choice((0, 0, 0, 1))
        return inbox.ModelReadFact(id=self._id(), engine=ENGINE, run=run, gateway="g", format=found)

    # ---- without faults ----

    def calm(self, steps: int, rounds_max: int = 400) -> None:
        """Behave correctly until `steps` more batches are sealed. Raises `AssertionError` if they never are."""
        wanted = self.fold.engine(ENGINE).step + steps
        self.crashes = False
        self._send(inbox.StorageSeen(id=self._id(), what="calls", used=0, size=100, reserve=10))
        self._send(inbox.TrainerOpens(id=self._id(), engine=ENGINE, run=self.fold.engine(ENGINE).run, trainer="t"))
        self._send(inbox.Resume(id=self._id(), engine=ENGINE))
        self._decide_all()
        rules = self.fold.engine(ENGINE).collection
        count = min(self.random.choice((1, rules.num_repeat, rules.num_repeat + 2)), rules.max_open_claims)
        named = self.random.random() < 0.3
        for number in range(rounds_max):
            if self.fold.engine(ENGINE).step >= wanted:
                return
            self._round(number, count, named)
        engine = self.fold.engine(ENGINE)
        raise AssertionError(f"no progress: {engine.collection}, step {engine.step}, version {engine.version}")

    def _decide_all(self) -> None:
        while self.read < len(self.inbox):
            self.decide()

    def _round(self, number: int, count: int, named: bool) -> None:
        """Claim `count` episodes if possible, end all that are open, make the step and load its weights."""
        task = f"calm-{number // (2 * self.fold.engine(ENGINE).collection.num_repeat)}"
        claim = inbox.Claim(
            id=self._id(), engine=ENGINE, claim=f"calm-{number}", client="ann", count=count, wait_s=0.0,
            task_hint=task if named else "",
        )  # fmt: skip
        self._send(claim)
        self._decide_all()
        engine = self.fold.engine(ENGINE)
        for index, episode in enumerate(list(engine.open.values())):
            result = inbox.EpisodeResult(episode=episode.id, task=task, reward=float((number + index) % 2))
            self._send(inbox.End(id=self._id(), engine=ENGINE, client=episode.client, results=(result,)))
        self._decide_all()
        engine = self.fold.engine(ENGINE)
        if engine.batch is not None:
            self._send(
                inbox.StepDone(
                    id=self._id(), engine=ENGINE, run=engine.run, step=engine.batch.step,
                    trainer_epoch=engine.trainer_epoch, checkpoint="/c", checkpoint_digest="d",
                )
            )  # fmt: skip
        elif engine.version < engine.step:
            weights = Weights(where=f"/w/{engine.step}")
            self._send(
                inbox.WeightsSaved(
                    id=self._id(), engine=ENGINE, run=engine.run, step=engine.step,
                    trainer_epoch=engine.trainer_epoch, weights=weights,
                )
            )  # fmt: skip
        for replica in REPLICAS:
            self._send(
                inbox.ReplicaAlive(
                    id=self._id(), engine=ENGINE, replica=replica, url=f"http://{replica}", run=engine.run,
                    version=engine.version,
                )
            )  # fmt: skip
        self._tick()
        self._decide_all()


def _check_training(event: ev.StepCompleted | ev.TrainerStalled | ev.WeightsReady, engine: EngineState) -> None:
    match event:
        case ev.StepCompleted():
            assert engine.batch is not None
            assert engine.batch.step == event.step
            assert event.trainer_epoch == engine.trainer_epoch
        case ev.TrainerStalled():
            assert (event.trainer, event.trainer_epoch) == (engine.trainer, engine.trainer_epoch)
        case ev.WeightsReady():
            assert event.version > engine.version


def reasons(world: World) -> set[AbortReason]:
    return {logged.event.reason for logged in world.log if isinstance(logged.event, ev.EpisodeAborted)}


def check_stays(event: Event, engine: EngineState) -> None:
    """Check that a suspended run hands out nothing, takes nothing away from anybody, and stays in its phase."""
    if not engine.suspended:
        assert not isinstance(event, ev.EngineResumed), "only a suspended run is resumed"
        return
    if isinstance(event, ev.EngineSuspended):
        assert engine.until_served, "it waits for its operator already"
        assert not event.until_served, "it waits for a replica already"
        return
    assert not isinstance(event, MOVES), f"a suspended run makes no {ev.kind_of(event)}"
    if isinstance(event, ev.EpisodeAborted):
        assert event.reason != AbortReason.SUPERSEDED


def check_replicas(event: Event, engine: EngineState) -> None:
    """Check that only a replica without the newest weights is quarantined, and what follows for the run."""
    match event:
        case ev.ReplicaQuarantined():
            assert (event.run, event.version) == (engine.run, engine.version)
            assert event.replica in engine.replicas
            assert event.replica not in engine.loaded, f"{event.replica} serves version {event.version}"
        case ev.EngineSuspended() if event.until_served:
            assert engine.replicas
            assert not engine.usable, f"{sorted(engine.usable)} are left"
        case ev.EngineResumed() if not event.command:
            assert engine.until_served
            assert engine.loaded, "no replica serves the newest weights"


def check_read(event: ev.ModelRead, engine: EngineState) -> None:
    """Check that a way of reading the model is of this run, is written once, and is one of few."""
    assert event.run == engine.run
    assert event.format not in [each.format for each in engine.formats]
    assert len(engine.formats) < FORMATS_MAX


def check_in_time(batch: ev.BatchReady, engine: EngineState) -> None:
    """Check that the step before is published, and that nothing is open (synchronous) or too old (asynchronous)."""
    assert engine.batch is None, "one batch at a time"
    rules = engine.collection
    if rules.max_staleness == 0:
        assert not engine.open, "every episode has ended or was aborted"
        return
    assert engine.version == engine.step, "the weights of the step before are ready"
    for group in batch.groups:
        for episode in group.episodes:
            age = batch.step - 1 - engine.pool[episode.episode].oldest
            assert age <= rules.max_staleness, f"{episode.episode} is {age} versions old"


def check_as_asked(batch: ev.BatchReady, engine: EngineState) -> None:
    """Check that a batch, whose episodes are in the pool, holds exactly what its method requires."""
    rules = engine.collection
    sizes = [len(group.episodes) for group in batch.groups]
    match rules.method:
        case Method.ENOUGH_EPISODES:
            assert sum(sizes) == rules.episode_target
        case Method.ENOUGH_TASKS | Method.ENOUGH_NON_DUMMY_TASKS:
            assert sizes == [rules.num_repeat] * rules.batch_size
            assert len({group.task for group in batch.groups}) == rules.batch_size
    if rules.method == Method.ENOUGH_NON_DUMMY_TASKS:
        for group in batch.groups:
            waited = [engine.pool[episode.episode] for episode in group.episodes]
            assert len({(each.reward, each.call_rewards) for each in waited}) > 1
