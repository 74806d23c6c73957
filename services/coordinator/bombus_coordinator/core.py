"""The coordinator's pure core: one message in, decisions out. No clock, no I/O, no randomness.

`Core` folds every decision into its own state as it makes it, and bases the next decision on the new state. The shell
appends the decisions to the log. If appending fails, the shell discards this object and folds the log again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive import inbox, levels
from bombus.hive.events import NotedCall
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import EngineState, Hive
from bombus_coordinator import storage
from bombus_coordinator.rules import (
    claims,
    crowding,
    engines,
    episodes,
    log_upkeep,
    replicas,
    trainers,
    transitions,
)
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, refusal
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.multi_model import claims as multi_model_claims
from bombus_coordinator.rules.multi_model import outcomes as multi_model_outcomes
from bombus_coordinator.rules.operations import endpoints, facts, queue, serving, sessions
from bombus_coordinator.rules.trajectories import batches, registering
from bombus_coordinator.rules.waiting import share_of

NOTED_MAX = 1000  # maximum number of calls in a `calls.noted` event
NOTE_BYTES_MAX = 1024  # maximum size of a noted call; gateways write at most a third of it
ID_CHARS_MAX = 256  # maximum length of the id recorded for a dead letter
EVENT_BYTES_MAX = 8 << 20
_TOO_LARGE = (
    "An event of {} bytes exceeds the limit of {} bytes per bus message: send less at once, or raise the "
    "server's max_payload."
)


class PendingDecision(msgspec.Struct, frozen=True):
    """A decision to append to the log. `bodies` are its encoded events, and `answers` is the sequence of the inbox
    message that it answers."""

    decision: Decision
    answers: int
    bodies: tuple[bytes, ...] = ()


class Core:
    """The state of a hive, and the rules by which decisions on it are made. No event is larger than
    `event_bytes_max`."""

    def __init__(self, hive: Hive | None = None, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.hive = hive if hive is not None else Hive()
        now_ns = self.hive.now_ns
        self.live = Live(now_ns=now_ns, epoch_ns=now_ns, ticked_ns=now_ns)
        self.live.pauses = self.hive.pauses
        self._note_refusing()
        self.live.event_bytes_max = event_bytes_max
        self.live.released = self.hive.released
        self._follow_clients()
        self._noted: dict[tuple[str, int], dict[str, NotedCall]] = {}
        self._noted_seq = 0

    def open_epoch(
        self, leader: str, calls_bytes_max: int = 0, trajectories_bytes_max: int = 0, *, raise_level: bool = False
    ) -> Decision:
        """Return the decision with which a new leader begins (R4). From its event on, all silence is counted afresh
        (R5).

        A new log begins at our own feature level. Another log keeps its level unless `raise_level`.
        """
        opened = ev.EpochOpened(
            at_ns=self.hive.now_ns,
            epoch=self.hive.epoch + 1,
            leader=leader,
            calls_bytes_max=calls_bytes_max,
            trajectories_bytes_max=trajectories_bytes_max,
            level=levels.LEVEL if raise_level or not self.hive.epoch else self.hive.level,
        )
        return self._fold(Decision(events=(opened,)), 0).decision

    def note_lost(self, lost: Iterable[ev.StreamWentBack]) -> Decision:
        """Record which streams have lost their ends, as found by a new leader (R6)."""
        return self._fold(Decision(events=tuple(lost)), 0).decision

    def receive(self, message: inbox.AnyMessage, seq: int, at_ns: int) -> Iterator[PendingDecision]:
        """Yield the decisions on the inbox message at `seq`, which the server stamped `at_ns`.

        The first decision answers the message itself. The later decisions can be derived again from the fold, so
        nothing is lost if appending stops after any of them.
        """
        self.live.arrived(seq, at_ns)
        if isinstance(message, inbox.CallRecorded):
            yield from self._note(message, seq)
            return
        if not isinstance(message, inbox.Touch):
            yield from self.flush()
        yield from self._decide(message)

    def flush(self) -> Iterator[PendingDecision]:
        """Note the calls recorded since the last decision, in one event for each engine (R9).

        The events form one decision, so that they are appended together: they all answer the same inbox message, and
        the next leader continues after that message.
        """
        noted, self._noted = self._noted, {}
        if not noted:
            return
        decision = Decision(
            events=tuple(
                ev.CallsNoted(at_ns=self.live.now_ns, engine=name, run=run, calls=tuple(calls.values()))
                for (name, run), calls in noted.items()
            )
        )
        yield self._fold(decision, self._noted_seq)

    def dead_letter(self, message: inbox.AnyMessage, seq: int, at_ns: int, why: str) -> Iterator[PendingDecision]:
        """Record that a message is skipped because a bug in the coordinator prevented a decision on it."""
        self.live.arrived(seq, at_ns)
        yield from self._dead_letter(message, seq, why)

    def _dead_letter(self, message: inbox.AnyMessage, seq: int, why: str) -> Iterator[PendingDecision]:
        event = ev.MessageDeadLettered(
            at_ns=self.live.now_ns,
            message=ev.kind_of(message),
            about=message.engine,
            id=message.id[:ID_CHARS_MAX],
            why=why,
        )
        reply = CommandReply(message.id, inbox.Refusal(code=Code.INTERNAL, why=f"It could not be decided: {why}"))
        yield from self.flush()
        yield self._fold(Decision(events=(event,), replies=(reply,)), seq)

    def recover(self) -> Iterator[Decision]:
        """Make the transitions that are already due, since a crash may have prevented them from being appended."""
        for engine in list(self.hive.engines.values()):
            for pending in self._safely(engine, transitions.settle(engine, self.live)):
                yield pending.decision

    def _fold(self, decision: Decision, answers: int) -> PendingDecision:
        """Fold a decision. If it aborts parts of multi-model episodes, first add the aborts of all their partners.

        Raises `Refused`, before folding anything, if one of the events is too large.
        """
        decision = multi_model_outcomes.completed(self.hive, decision)
        bodies = tuple(map(ev.encode_event, decision.events))
        largest = max(map(len, bodies), default=0)
        if largest > self.live.event_bytes_max:
            raise Refused(Code.TOO_LARGE, _TOO_LARGE.format(largest, self.live.event_bytes_max))
        for event in decision.events:
            self._count_open(event)
            evolve(self.hive, event)
            if isinstance(event, ev.EpochOpened):
                self.live.epoch_ns = event.at_ns
            elif isinstance(event, ev.StorageFilled | ev.StorageFreed):
                self._note_refusing()
            elif isinstance(event, ev.OperationsReleased):
                self.live.released = self.hive.released
        for reply in decision.replies:
            self.live.remember(reply.command, reply.answer)
        return PendingDecision(decision, answers, bodies)

    def _follow_clients(self) -> None:
        self.live.follow_clients(episode for engine in self.hive.engines.values() for episode in engine.open.values())

    def _note_refusing(self) -> None:
        self.live.refusing, self.live.refusing_groups = self.hive.refusing, self.hive.refusing_groups

    def _count_open(self, event: ev.Event) -> None:
        """Update the live state that tracks open episodes. Call this before the event is folded."""
        if isinstance(event, ev.EpisodeClaimed):
            self.live.opened(event.engine, share_of(event), len(event.episodes))
            idle_ns = event.at_ns + ns(event.discard_timeout_s)
            self.live.idle_from_ns[event.engine] = min(idle_ns, self.live.idle_from_ns.get(event.engine, 0))
            if event.touches:
                self.live.client_seen[event.client] = event.at_ns
        elif isinstance(event, ev.EpisodeEnded | ev.EpisodeAborted):
            for name in _closed_by(event):
                self.live.forget(name)
                episode = self.hive.engine(event.engine).open.get(name)
                if episode is not None:
                    self.live.opened(event.engine, share_of(episode), -1)

    def _folded(self, decisions: Iterable[Decision]) -> Iterator[PendingDecision]:
        for decision in decisions:
            yield self._fold(decision, self.live.seq)

    def _safely(self, engine: EngineState, decisions: Decisions) -> Iterator[PendingDecision]:
        """Fold decisions that follow from the state. If an event is too large, suspend the run: otherwise the same
        event would recur."""
        try:
            yield from self._folded(decisions)
        except Refused as error:
            yield from self._folded(engines.suspend(engine, self.live, error.why))

    def _note(self, message: inbox.CallRecorded, seq: int) -> Iterator[PendingDecision]:
        """Hold a call back until the next decision, or until enough calls have gathered to fill one event."""
        size = len(inbox.encode_message(message))
        if size > NOTE_BYTES_MAX:
            yield from self._dead_letter(message, seq, f"it has {size} bytes, but a call has at most {NOTE_BYTES_MAX}")
            return
        self._noted_seq = seq
        key = (message.engine, message.run)
        pending = self._noted.setdefault(key, {})
        call = episodes.note(self.hive.engine(message.engine), self.live, message)
        if call is not None:
            pending.setdefault(call.ref.id, call)
        if not pending:
            del self._noted[key]
        most = min(NOTED_MAX, self.live.event_bytes_max // (2 * NOTE_BYTES_MAX))
        if sum(map(len, self._noted.values())) >= most:
            yield from self.flush()

    def _decide(self, message: inbox.AnyMessage) -> Iterator[PendingDecision]:
        if isinstance(message, inbox.Tick):
            if message.answered is not None:
                self.live.tick(message.answered)
            self.live.led_until_ns = self.live.now_ns
            yield from self._folded(log_upkeep.paused(self.hive, self.live, message))
            yield from self._folded(log_upkeep.ticked(self.hive, self.live, message))
            yield from self._pass_time()
            return
        if (rule := _HIVE_RULES.get(type(message))) is not None:
            yield from self._folded(rule(self.hive, self.live, message))
            return
        engine = self.hive.engine(message.engine)
        if isinstance(message, inbox.Touch):
            self._touch(engine, message)
            return
        answered = self.live.answers.get(message.id)
        if answered is None and isinstance(message, engines.ControlCommand):
            answered = engines.recorded(engine, message.id)
        if answered is not None:
            yield PendingDecision(Decision(replies=(CommandReply(message.id, answered),)), self.live.seq)
            return
        changed = [message.engine]
        try:
            for pending in self._folded(self._command(engine, message)):
                changed += _engines_of(pending)
                yield pending
        except Refused as error:
            yield from self._folded([_refused(engine, self.live, message, error)])
            return
        yield from self._follow(changed)

    def _command(self, engine: EngineState, message: inbox.AnyMessage) -> Decisions:
        if (rule := _COMMANDS_OF_SEVERAL.get(type(message))) is not None:
            return rule(self.hive, self.live, message)
        return _RULES[type(message)](engine, self.live, message)

    def _follow(self, changed: Iterable[str]) -> Iterator[PendingDecision]:
        """Make the decisions that follow in the changed engines, and in the engines linked to them by multi-model
        claims or episodes."""
        left = dict.fromkeys(self._with_neighbours(changed))
        while left:
            name = next(iter(left))
            del left[name]
            engine = self.hive.engine(name)
            for pending in self._safely(engine, self._follow_up(engine)):
                others = [each for each in self._with_neighbours(_engines_of(pending)) if each != name]
                left |= dict.fromkeys(others)
                yield pending

    def _with_neighbours(self, engines: Iterable[str]) -> list[str]:
        """Return the given engines, plus all engines of the multi-model claims that wait for any of them, since such a
        claim may now be grantable."""
        names = [name for name in engines if name != ev.HIVE]
        sets = [each for each in self.live.multi_model if not set(names).isdisjoint(each)]
        return [*names, *(name for each in sets for name in each)]

    def _pass_time(self) -> Iterator[PendingDecision]:
        changed: list[str] = []
        self._follow_clients()
        for pending in self._folded(crowding.make_room(self.hive, self.live)):
            changed += _engines_of(pending)
            yield pending
        for engine in list(self.hive.engines.values()):
            for pending in self._safely(engine, self._tick(engine)):
                changed += (name for name in _engines_of(pending) if name != engine.name)
                yield pending
        if self.live.multi_model:
            changed += self.hive.engines
            yield from self._folded(multi_model_claims.lapse(self.hive, self.live))
        yield from self._follow(changed)

    def _follow_up(self, engine: EngineState) -> Decisions:
        """Make the transitions that are due, then grant the claims that now have room."""
        yield from transitions.settle(engine, self.live)
        yield from claims.grant(self.hive, engine, self.live)

    def _tick(self, engine: EngineState) -> Decisions:
        yield from episodes.expire(self.hive, engine, self.live)
        yield from replicas.lapse_replicas(engine, self.live)
        yield from trainers.lapse(engine, self.live)
        yield from sessions.expire(engine, self.live)
        yield from sessions.expire_weights(engine, self.live)
        yield from serving.end_idle_run(engine, self.live)
        yield from registering.lapse(engine, self.live)
        yield from self._follow_up(engine)
        yield from claims.lapse(engine, self.live)

    def _touch(self, engine: EngineState, message: inbox.Touch) -> None:
        if message.engine == ev.HIVE:
            self.live.touched(message.clients)
        for episode in message.episodes:
            if episode in engine.open:
                self.live.activity[episode] = self.live.now_ns
        for claim in message.confirmed:
            self.live.unconfirmed.pop(claim, None)
        for session in message.sessions:
            known = engine.clients.sessions.get(session)
            if known is not None and known.ended is None:
                self.live.session_seen[engine.name, session] = self.live.now_ns
        for environment in message.environments:
            if environment in engine.trajectories.queue.environments:
                self.live.environment_seen[engine.name, environment] = self.live.now_ns


def _engines_of(pending: PendingDecision) -> list[str]:
    return [event.engine for event in pending.decision.events]


def _refused(engine: EngineState, live: Live, message: inbox.AnyMessage, error: Refused) -> Decision:
    reply = CommandReply(message.id, refusal(error))
    if not isinstance(message, engines.ControlCommand):
        return Decision(replies=(reply,))
    return Decision(events=(engines.answered(engine, live, message, error),), replies=(reply,))


def _closed_by(event: ev.EpisodeEnded | ev.EpisodeAborted) -> Iterable[str]:
    if isinstance(event, ev.EpisodeAborted):
        return event.episodes
    return [outcome.episode for outcome in event.outcomes]


_HIVE_RULES: dict[type[inbox.Message], Callable[[Hive, Live, Any], Decisions]] = {
    inbox.StorageSeen: storage.seen,
    inbox.CompactionTried: log_upkeep.tried,
    inbox.OperationsStored: serving.release,
    inbox.TrajectoriesStored: batches.release,
}
_COMMANDS_OF_SEVERAL: dict[type[inbox.Message], Callable[[Hive, Live, Any], Decisions]] = {
    inbox.PushGroups: batches.push,
    inbox.BodiesStored: batches.move,
    inbox.EpisodesGrouped: batches.group_episodes,
    inbox.Claim: claims.claim,
    inbox.MultiModelClaim: multi_model_claims.claim,
    inbox.MultiModelEnd: multi_model_outcomes.end,
}
_RULES: dict[type[inbox.Message], Callable[[EngineState, Live, Any], Decisions]] = {
    inbox.End: episodes.end,
    inbox.Abort: episodes.abort,
    inbox.Take: episodes.take,
    inbox.Lookup: episodes.lookup,
    inbox.Configure: engines.configure,
    inbox.Start: engines.start,
    inbox.Stop: engines.stop,
    inbox.Resume: engines.resume,
    inbox.AgreeSync: engines.agree,
    inbox.TrainerOpens: trainers.trainer_opens,
    inbox.TrainerAlive: trainers.alive,
    inbox.TrainerHangs: trainers.hangs,
    inbox.StageReached: trainers.stage_reached,
    inbox.StepDone: trainers.step_done,
    inbox.StepBroke: trainers.step_broke,
    inbox.WeightsSaved: trainers.weights_saved,
    inbox.EngineBroke: engines.broke,
    inbox.ModelReadFact: engines.model_read,
    inbox.ReplicaAlive: replicas.replica_alive,
    inbox.ReplicaLeaves: replicas.replica_leaves,
    inbox.WeightsLoadedFact: replicas.weights_loaded,
    inbox.LoadBroke: replicas.load_broke,
    inbox.AnswersBroke: replicas.answers_broke,
    inbox.OpenSession: sessions.open_session,
    inbox.CloseSession: sessions.close_session,
    inbox.BeginSampling: serving.begin_sampling,
    inbox.RemoveWeights: sessions.remove_weights,
    inbox.RetainWeights: sessions.retain_weights,
    inbox.PublishWeights: sessions.publish_weights,
    inbox.Operate: queue.operate,
    inbox.OperationDone: facts.done,
    inbox.CheckpointWritten: facts.checkpointed,
    inbox.ModelAway: facts.away,
    inbox.OperationBegins: facts.begins,
    inbox.RebuildsModel: facts.rebuilds,
    inbox.TrainerServes: serving.trainer_serves,
    inbox.RegisterTrainer: registering.register_trainer,
    inbox.JoinEnvironment: registering.join,
    inbox.LeaveEnvironment: registering.leave,
    inbox.ResetGroups: registering.reset,
    inbox.TakeBatch: batches.take,
    inbox.BatchSent: batches.sent,
    inbox.GiveUpGroups: batches.give_up,
    inbox.AskRest: serving.ask_rest,
    inbox.TrainerRests: serving.trainer_rests,
    inbox.AddEndpoint: endpoints.add,
    inbox.RemoveEndpoint: endpoints.remove,
}
