"""Sees everything that is stored and every answer to a client, and fails at once at what must not happen."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from bombus.bus.headers import EPOCH, INBOX
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.checkpoints import step_of
from bombus.hive.events import DropReason, EpisodeType, Event
from bombus.hive.fold.episodes import ended_calls
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Answer
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Hive, Phase
from bombus.replay.audit.audit import Audit
from bombus_coordinator.rules.episodes import outcome_digest
from tests.coordinator.core_world import check_as_asked, check_in_time, check_read, check_replicas, check_stays
from tests.hive.phases import TRANSITIONS
from tests.hive.pinned import PinLedger
from tests.sim.grouped_ledger import GROUPED_ENGINE, GroupedLedger
from tests.sim.multi_model_ledger import SIDE, MultiModelLedger
from tests.sim.operations import OPS_ENGINE, Ledger
from tests.sim.rollout_groups import GROUPS_ENGINE, PushedLedger
from tests.sim.server import Message

ENGINE = "main"
RECOVERED = "Sim-Recovered"  # on events that a new leader derived from the fold alone
# Commands whose answers the fold has.
SURE = (inbox.Configure, inbox.Start, inbox.Stop, inbox.Resume, inbox.End, inbox.TrainerOpens)


LOADED = b"loaded"  # the model at step 0


class TrainerPart(msgspec.Struct, frozen=True):
    checkpoint_every: int


class JobConfig(msgspec.Struct, frozen=True):
    """The part of a job's configuration that the simulated trainer and the coordinator read."""

    trainer: TrainerPart
    model: dict[str, str]


class Published(msgspec.Struct, frozen=True):
    """A policy version that was published. `model` are the bytes that stand for its weights."""

    run: int
    version: int
    model: bytes


class Checkpoint(msgspec.Struct, frozen=True):
    """A step attempt on disk. `model` stands for its tensors: a hash of the model before and the batch."""

    run: int
    step: int
    trainer_epoch: int
    model: bytes
    digest: str
    damaged: bool = False


class Referee:
    """`disk` and `weights` are the trainers' folder, whose contents are durable."""

    def __init__(self) -> None:
        self.hive = Hive()  # the fold of the log
        self.pins = PinLedger()
        self.position = 0
        self.ledger: Ledger | None = None  # of a hive that serves training operations
        self.pushed: PushedLedger | None = None  # of a hive that takes rollout groups
        self.grouped: GroupedLedger | None = None  # of a hive whose episodes become rollout groups
        self.multi_model: MultiModelLedger | None = None  # of a hive with a second engine, and multi-model episodes
        self.disk: dict[str, Checkpoint] = {}
        self.weights: dict[str, Published] = {}
        self.seen: Counter[str] = Counter()
        self.batches: dict[tuple[int, int], ev.BatchReady] = {}
        self.models: dict[tuple[int, int], bytes] = {}  # the model after each completed step, by run and step
        self.saved: list[ev.StepCompleted] = []  # the run's newest two steps with a checkpoint, oldest first
        self.lacking: list[ev.BatchReady] = []  # what the older of them lacks, or the model as loaded
        self.ended: dict[str, bytes] = {}  # episode: digest of the outcome that is on the log
        self.rewards_by_call: dict[bytes, dict[str, float]] = {}  # by the digests of the reports that gave them
        self.training: set[str] = set()  # ended training episodes
        self.batched: set[str] = set()
        self.gone: set[str] = set()  # dropped from the pool, or with their run
        self.noted: set[str] = set()  # ids of calls
        self.cut_off: set[str] = set()  # those whose messages were lost with the end of the inbox
        self.sampled: dict[str, int] = {}  # call: the version of its oldest token
        self.runs: set[int] = set()
        self.commands: set[str] = set()  # of the operator that were carried out
        self.claimed: dict[str, str] = {}  # episode: its claim
        # The answers to clients:
        self.acknowledged_calls: dict[str, list[str]] = {}  # episode: ids of acknowledged calls
        self.sealed: dict[str, frozenset[str]] = {}  # those that were acknowledged when its end was first sent
        self.acknowledged_ended: dict[str, bytes] = {}
        self._answers: dict[str, tuple[Answer, int]] = {}
        self._authors: dict[int, str] = {}
        self._answered = 0
        self._answered_at_opening = 0

    def count(self, what: str) -> None:
        self.seen[what] += 1

    # ---- an inbox that loses its end ----

    def lost(self, messages: Sequence[Message]) -> None:
        """Note what the inbox has lost: only what was decided already, or is sent again, is promised (R6)."""
        self.cut_off |= {each.message.call.ref.id for each in messages if isinstance(each.message, inbox.CallRecorded)}
        self.count("ends of the inbox that were lost")

    def received(self, messages: Sequence[Message]) -> None:
        """Note what the inbox has stored: nothing of it may be missed, whatever was lost before."""
        for each in messages:
            if isinstance(each.message, inbox.CallRecorded):
                self.cut_off.discard(each.message.call.ref.id)

    # ---- the log ----

    def stored(self, messages: Sequence[Message]) -> None:
        for message in messages:
            event = message.event
            self._check_order(message, event)
            self.pins.note(event)
            if self.multi_model is not None and event.engine == ENGINE:
                self.multi_model.check(event, self.hive.engine(ENGINE))
            if event.engine in (OPS_ENGINE, GROUPS_ENGINE, GROUPED_ENGINE, SIDE):
                self._note_apart(message, event)
                continue
            engine = self.hive.engine(ENGINE)
            before = engine.phase
            check_stays(event, engine)
            check_replicas(event, engine)
            self._check(event, engine)
            evolve(self.hive, event)
            self.position = message.seq
            engine = self.hive.engine(ENGINE)
            self._check_files(engine)
            after = engine.phase
            assert after == before or after in TRANSITIONS[before], f"{before} -> {after} is not a transition"
            self.seen[ev.kind_of(event)] += 1
        if self.multi_model is not None:
            self.multi_model.check_wholes()

    def _note_apart(self, message: Message, event: Event) -> None:
        """Note an event of another engine."""
        ledger = {
            OPS_ENGINE: self.ledger,
            GROUPS_ENGINE: self.pushed,
            GROUPED_ENGINE: self.grouped,
            SIDE: self.multi_model,
        }[event.engine]
        assert ledger is not None
        engine = self.hive.engine(event.engine)
        before = engine.phase
        ledger.check(event, engine)
        evolve(self.hive, event)
        self.position = message.seq
        after = self.hive.engine(event.engine).phase
        assert after == before or after in TRANSITIONS[before], f"{before} -> {after} is not a transition"
        self.seen[ev.kind_of(event)] += 1

    def _check_order(self, message: Message, event: Event) -> None:
        epoch, answers = int(message.headers[EPOCH]), int(message.headers[INBOX])
        author = message.msg_id.split(".")[0]
        assert event.at_ns >= self.hive.now_ns, "time never decreases"
        if isinstance(event, ev.StreamWentBack):
            self._answered = self._answered_at_opening = answers
        assert answers >= self._answered, f"event {message.seq} answers {answers} after {self._answered}"
        if isinstance(event, ev.EpochOpened):
            assert event.epoch == epoch > self.hive.epoch, "epochs increase"
            self._authors[epoch] = author
            self._answered_at_opening = answers
            assert answers == self._answered, "an epoch begins where the last one ended"
        else:
            assert epoch == self.hive.epoch, f"an event of epoch {epoch} in epoch {self.hive.epoch}"
            assert author == self._authors[epoch], "one epoch has one author"
            if RECOVERED not in message.headers and not isinstance(event, ev.StreamWentBack):
                assert answers > self._answered_at_opening, f"inbox message {answers} is decided twice"
        self._answered = answers

    def _check(self, event: Event, engine: EngineState) -> None:
        match event:
            case ev.EpisodeClaimed():
                assert engine.phase == Phase.ROLLING
                assert not set(event.episodes) & (set(engine.open) | set(engine.closed)), "every id is fresh"
                assert len(engine.open) + len(event.episodes) <= engine.collection.max_open_claims
                assert event.claim not in engine.claims, "one claim has one grant"
                self.claimed |= dict.fromkeys(event.episodes, event.claim)
            case ev.CallsNoted():
                self._check_noted(event)
            case ev.EpisodeEnded():
                self._check_ended(event, engine)
            case ev.EpisodeAborted():
                assert set(event.episodes) <= set(engine.open)
            case ev.BatchReady():
                self._check_batch(event, engine)
            case ev.GroupDropped():
                assert set(event.episodes) <= set(engine.pool)
                self.gone |= set(event.episodes)
                if event.reason == DropReason.STALE and engine.collection.max_staleness:
                    self.seen["dropped while rolling"] += len(event.episodes)
            case ev.PoolCleared():
                self.gone |= set(engine.pool)
            case _:
                self._check_run(event, engine)

    def _check_run(self, event: Event, engine: EngineState) -> None:
        match event:
            case ev.EngineConfigured() | ev.EngineStopped():
                self._once(event.command)
            case ev.EngineResumed():
                self.seen["resumed by a replica"] += not event.command
                if event.command:
                    self._once(event.command)
            case ev.EngineStarted():
                self._once(event.command)
                assert event.run not in self.runs
                self.runs.add(event.run)
                self.gone |= set(engine.pool)
                self.models[event.run, 0] = LOADED
                self.saved, self.lacking = [], []
                if event.begins is not None:
                    self._check_beginning(event, event.begins)
                self.seen["begun anew beside another job"] += bool(event.anew)
            case ev.ModelRead():
                check_read(event, engine)
            case _:
                self._check_training(event, engine)

    def _check_training(self, event: Event, engine: EngineState) -> None:
        match event:
            case ev.TrainerOpened():
                assert event.trainer_epoch == engine.trainer_epoch + 1
            case ev.TrainerStalled():
                assert (event.trainer, event.trainer_epoch) == (engine.trainer, engine.trainer_epoch)
                self.seen["silent trainers" if event.silent else "trainers that hung"] += 1
            case ev.StepCompleted():
                self._check_step(event, engine)
            case ev.WeightsReady():
                first = engine.begun if engine.version < 0 else engine.version + 1
                assert event.version == first, "versions increase by one, from that of the run's beginning"
                model = self.models.get((event.run, event.version))
                assert model is not None, "only a completed step has weights"
                published = self.weights.get(event.weights.where)
                assert published == Published(event.run, event.version, model), "weights are durable, and the step's"

    def _check_beginning(self, event: ev.EngineStarted, begins: ev.Beginning) -> None:
        """Check that a run begins where an earlier one was. Whoever starts it has the files brought back."""
        saved = self.disk[begins.checkpoint]
        assert (saved.run, saved.step, saved.digest) == (begins.run, begins.step, begins.checkpoint_digest)
        assert saved.model == self.models[begins.run, begins.step]
        self.disk[begins.checkpoint] = msgspec.structs.replace(saved, damaged=False)
        self.models[event.run, begins.step] = saved.model
        self.saved = [step_of(ENGINE, begins)]
        self.seen["begun at a checkpoint"] += 1

    def _check_files(self, engine: EngineState) -> None:
        """Check that the files that the log names are on disk."""
        weights = engine.weights
        left = [done for run in engine.left for done in run.checkpoints]
        for done in (*self.saved, *engine.kept, *left):
            assert done.checkpoint in self.disk, f"checkpoint {done.checkpoint} is gone"
        assert weights is None or weights.weights.where in self.weights, f"weights {weights.weights.where} are gone"

    def _once(self, command: str) -> None:
        assert command not in self.commands, f"{command} is carried out twice"
        self.commands.add(command)

    def _check_noted(self, event: ev.CallsNoted) -> None:
        for call in event.calls:
            assert call.ref.id not in self.noted, f"call {call.ref.id} is noted twice"
            self.noted.add(call.ref.id)
            self.sampled[call.ref.id] = call.oldest

    def _check_ended(self, event: ev.EpisodeEnded, engine: EngineState) -> None:
        for outcome in event.outcomes:
            assert outcome.episode in engine.open, "only an open episode ends"
            assert outcome.episode not in self.ended
            calls = [ref.id for ref in ended_calls(outcome, engine.open[outcome.episode])]
            missing = self.sealed.get(outcome.episode, frozenset()).difference(calls, self.cut_off)
            assert not missing, f"acknowledged calls {sorted(missing)} are not in episode {outcome.episode}"
            if given := self.rewards_by_call.get(outcome.digest):
                rewards = tuple(given[call] for call in calls)
                assert outcome.call_rewards == rewards, (
                    f"{outcome.episode} has not the rewards of its calls in their order"
                )
                self.seen["rewarded by call"] += len(calls) > 1
            self.ended[outcome.episode] = outcome.digest
            if event.type == EpisodeType.TRAIN:
                self.training.add(outcome.episode)

    def _check_batch(self, batch: ev.BatchReady, engine: EngineState) -> None:
        episodes = [episode.episode for group in batch.groups for episode in group.episodes]
        assert batch.step == engine.step + 1
        check_in_time(batch, engine)
        assert len(set(episodes)) == len(episodes)
        assert set(episodes) <= set(engine.pool)
        assert not set(episodes) & self.batched, "no episode is in two batches"
        self.batched |= set(episodes)
        self.batches[batch.run, batch.step] = batch
        self.lacking.append(batch)
        check_as_asked(batch, engine)
        self._check_ages(batch, engine)

    def _check_ages(self, batch: ev.BatchReady, engine: EngineState) -> None:
        """Check the ages, by the versions in the notes of the calls themselves."""
        bound = engine.collection.max_staleness
        if not bound:
            return
        episodes = [episode for group in batch.groups for episode in group.episodes]
        for episode in episodes:
            for ref in engine.pool[episode.episode].calls:
                age = batch.step - 1 - self.sampled[ref.id]
                assert age <= bound, f"call {ref.id} of {episode.episode} is {age} versions old in step {batch.step}"
                self.seen["sampled before the step's version"] += age > 0
        self.seen["sealed while rolling"] += 1
        self.seen["sealed with episodes open"] += bool(engine.open)
        self.seen["trained while rolling"] += len(episodes)

    def _check_step(self, event: ev.StepCompleted, engine: EngineState) -> None:
        assert engine.batch is not None
        assert engine.batch.step == event.step
        assert (event.run, event.step) not in self.models, "a step happens once"
        assert event.trainer_epoch == engine.trainer_epoch, "the step is the current trainer's"
        assert engine.trainer, "the step is that of a trainer whose epoch is not over"
        model = trained(self.models[event.run, event.step - 1], engine.batch)
        self.models[event.run, event.step] = model
        due = event.step % checkpoint_every(engine) == 0
        assert bool(event.checkpoint) == due, "every so many steps leave a checkpoint"
        if due:
            self._check_checkpoint(event, engine, model)

    def _check_checkpoint(self, event: ev.StepCompleted, engine: EngineState, model: bytes) -> None:
        saved = self.disk.get(event.checkpoint)
        assert saved is not None, f"checkpoint {event.checkpoint} of step {event.step} is not durable"
        assert saved.digest == event.checkpoint_digest
        assert (saved.run, saved.step) == (event.run, event.step)
        assert saved.trainer_epoch == engine.trainer_epoch, "the checkpoint is the current trainer's"
        assert saved.model == model, "the model is the one before, trained on this batch once"
        self.saved = [*self.saved[-1:], event]
        older = self.saved[0].step if len(self.saved) == 2 else 0
        self.lacking = [batch for batch in self.lacking if batch.step > older]

    # ---- what faults and purges remove ----

    def damage_checkpoint(self) -> str:
        """Damage the newest checkpoint, unless the one before is damaged too. Return its path, "" if nothing is done.

        A run goes on from the one before, or from the model as loaded (R11).
        """
        named = [(done.checkpoint, self.disk[done.checkpoint]) for done in self.saved]
        if not named or any(saved.damaged for _, saved in named):
            return ""
        if len(named) == 1 and named[0][1].run != self.hive.engine(ENGINE).run:
            return ""  # at which the run began
        newest, saved = named[-1]
        self.disk[newest] = msgspec.structs.replace(saved, damaged=True)
        return newest

    def purged_below(self, seq: int) -> None:
        """Check that no call was purged of a step that has to be made, or may have to be made again (R12)."""
        refs = [
            ref for batch in self.lacking for group in batch.groups for each in group.episodes for ref in each.calls
        ]
        assert all(ref.seq >= seq for ref in refs), "calls of a step that may have to be made again are purged"

    # ---- leaders ----

    def leader_state(self, hive: Hive, position: int) -> None:
        """Check a leader's state, which it reports after each append and after it has taken over."""
        if position == self.position:
            assert hive == self.hive, "the live state is the fold of the log"
            self.seen["states compared"] += 1
            self.seen["bytes pinned"] += self.pins.check(hive)

    def replied(self, message: inbox.AnyMessage, answer: Answer) -> None:
        """Check that the same command gets the same answer, where the fold has it and as long as its run lasts."""
        if not isinstance(message, SURE) or isinstance(answer, inbox.Refusal):
            return
        if isinstance(message, inbox.Stop) and message.id not in self.commands:
            return  # it found the engine stopped, which is not on the log
        answer = msgspec.structs.replace(answer, position=0)
        run = self.hive.engine(ENGINE).run
        before, run_before = self._answers.setdefault(message.id, (answer, run))
        if before is not answer:
            self.seen["answered again"] += 1
        if not isinstance(message, inbox.End) or run == run_before:
            assert before == answer, f"{message} was answered {before}, now {answer}"

    # ---- clients ----

    def acknowledged_grant(self, claim: str, granted: inbox.Granted) -> None:
        self.seen["grants acknowledged"] += 1
        for episode in granted.episodes:
            assert self.claimed.get(episode) == claim, f"{episode} was granted to {claim}, but not on the log"

    def acknowledged_call(self, episode: str, call: str) -> None:
        self.seen["calls acknowledged"] += 1
        self.acknowledged_calls.setdefault(episode, []).append(call)

    def ends(self, result: inbox.EpisodeResult) -> None:
        """Note that a client is about to send this: every call acknowledged before belongs to the episode."""
        self.sealed.setdefault(result.episode, frozenset(self.acknowledged_calls.get(result.episode, ())))
        if result.rewards_by_call is not None:
            self.rewards_by_call[outcome_digest(result)] = result.rewards_by_call

    def acknowledged_end(self, result: inbox.EpisodeResult) -> None:
        outcome = outcome_digest(result)
        found = self.ended.get(result.episode)
        assert found == outcome, f"the end of {result.episode} was acknowledged, but is not on the log"
        self.seen["ends acknowledged"] += 1
        self.acknowledged_ended[result.episode] = outcome

    def acknowledged_aborted(self, episode: str) -> None:
        assert episode not in self.hive.engine(ENGINE).open, f"{episode} was acknowledged as aborted, but is open"

    # ---- at the end ----

    def finish(self) -> None:
        engine = self.hive.engine(ENGINE)
        pool = set(engine.pool)
        assert self.training == pool | self.batched | self.gone, "every ended episode is in the pool, a batch, or gone"
        assert not pool & (self.batched | self.gone)
        assert not self.batched & self.gone
        self.pins.check(self.hive)
        for episode, outcome in self.acknowledged_ended.items():
            assert self.ended.get(episode) == outcome, f"the end of {episode} is lost"
        current = f"{ENGINE}-{engine.run}-"
        for episode, calls in self.acknowledged_calls.items():
            lost = set(calls) - self.noted - self.cut_off
            assert not lost or not episode.startswith(current), f"acknowledged calls of {episode} are lost: {lost}"
        self._check_files(engine)

    def refold(self, events: Sequence[Message]) -> None:
        audit = Audit()
        for seq, message in enumerate(events, 1):
            audit.read(message.event, seq)
        assert audit.hive == self.hive, "the fold of the log is the state"
        report = audit.report()
        assert not report.differences, f"every token is accounted for, but {report.differences}"


def trained(model: bytes, batch: ev.BatchReady) -> bytes:
    """Stand for an optimizer step: any other order, repeat or omission gives another model."""
    return digest(model + ev.encode_event(batch))


def checkpoint_every(engine: EngineState) -> int:
    """Return how many steps of the running job lie between two checkpoints."""
    assert engine.active is not None
    return msgspec.json.decode(engine.active.config, type=JobConfig).trainer.checkpoint_every
