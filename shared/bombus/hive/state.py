"""The state of a hive: the fold of its events, and nothing else.

Every service folds the same log with the same function, so all of them have the same state without asking each other.
`evolve` never refuses an event: what is on the log has happened.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.checkpoints import LeftRun, goes_on, keep, leave, step_of
from bombus.hive.events import AbortReason, Collection, ConversationFormat, EpisodeType, Event, NotedCall
from bombus.hive.pauses import Pause, note_pause
from bombus.hive.pins import StoredCalls, why_no_share
from bombus.hive.records import BodyRef, CallRef, CallStatus
from bombus.hive.rollouts import STEPS_KEPT, RolloutFigures, silent_after
from bombus.hive.shares import SHARED, share_name
from bombus.hive.steps import SealedStep, complete, episodes_of, lacking, up_to
from bombus.hive.tenants import state as tenancy
from bombus.hive.tenants.state import Tenants
from bombus.hive.trajectories import queue as queues
from bombus.hive.trajectories import state as scored
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import Trajectories

FOLD = 14  # incremented when `evolve` makes another state of an old log: older snapshots are then not used
OUTCOMES_KEPT = 100_000  # ended episodes of a run whose outcome is still known
COMMANDS_KEPT = 1_000
EVALS_KEPT = 256
DATA_SETS_MAX = 32  # of one version that are counted each by itself
ASIDE_KEPT = 8
ACTIVE_S = 600.0  # how long a client counts as active after it ended an episode, as in the swarm contract
FORMATS_MAX = 4  # ways of reading the model of one run that are told apart
STEPS_NEEDED = 2  # the older of a trainer's two checkpoints lacks this many steps, if it saves one in each step
NO_TRAINER = "waiting for a trainer"
BOOTED = "booted"  # the stage of an engine that has booted and is not rolling yet


class Phase(StrEnum):
    """The phase of an engine, as the swarm contract spells it."""

    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    ROLLING_POST = "ENGINE.ROLLING_POST"
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"


class Episode(msgspec.Struct, kw_only=True):
    """An open episode: claimed, and neither ended nor aborted."""

    id: str
    claim: str
    client: str
    type: EpisodeType
    discard_timeout_s: float
    claimed_ns: int
    version: int
    task_hint: str = ""
    calls: list[NotedCall] = []
    calls_from: int = 0  # none of its calls is before this sequence of the `calls` stream (see retention.py)
    last_call_ns: int = 0
    owner: str = ""  # the name of its client's key
    admin: bool = False  # that key is the hive's own
    sampler: ev.SamplerWeights | None = None  # what its calls sample from, in a run of operations
    partners: dict[str, str] = {}  # by engine: the other episodes of its joint episode, open for as long as it is
    oldest: int | None = None  # the oldest policy version of its tokens that are trained
    touches: bool = False  # whether the client that holds it shows that it lives

    @property
    def holder(self) -> str:
        """Return for whose share its calls count."""
        return share_name(self.owner, self.admin)

    def complete_calls(self) -> list[NotedCall]:
        return [call for call in self.calls if call.status == CallStatus.COMPLETE]

    def trainable_calls(self) -> list[NotedCall]:
        """Return the calls that are trained: the complete ones, without side calls that the job masks."""
        return [call for call in self.complete_calls() if not call.masked]


class Completed(msgspec.Struct, kw_only=True, frozen=True):
    """An ended training episode that waits in the pool. `sampler` is the saved model that it has sampled from.

    `owner` is the name of its client's key.
    """

    episode: str
    task: str
    client: str
    reward: float
    call_rewards: tuple[float, ...] | None
    calls: tuple[CallRef, ...]
    oldest: int
    bytes: int
    ended_ns: int
    calls_from: int = 0
    sampler: str = ""
    owner: str = ""

    @property
    def holder(self) -> str:
        """Return whose share of the pool it takes: that of a key's name, or of a client whose key has none."""
        return self.owner or self.client


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """The end of a closed episode: the digest of its outcome, or the reason of its abort.

    `holder` is for whose share its calls count.
    """

    client: str
    outcome: bytes = b""
    aborted: AbortReason | None = None
    holder: str = ""


class Replica(msgspec.Struct, kw_only=True):
    url: str
    capacity: int
    joined_ns: int
    run: int = 0
    version: int = -1
    sequence_tokens: int = 0  # the longest sequence that it serves, 0 where it does not say
    constrains: bool = False  # whether it can hold answers to a form
    quarantined: ev.ReplicaQuarantined | None = None  # why it gets no calls, and nothing waits for it


class RewardStats(msgspec.Struct):
    """Sums over ended episodes."""

    episodes: int = 0
    reward_sum: float = 0.0
    successes: int = 0

    @property
    def mean(self) -> float:
        return self.reward_sum / self.episodes if self.episodes else 0.0

    @property
    def success_rate(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0

    def add(self, outcome: ev.Outcome) -> None:
        self.episodes += 1
        self.reward_sum += outcome.reward
        self.successes += bool(outcome.is_success)


class EvalFigures(RewardStats):
    """Evaluation episodes of which one policy version has sampled every token.

    `mixed` has those that were claimed at that version and have tokens of several: no mean is over both.
    """

    mixed: RewardStats = msgspec.field(default_factory=RewardStats)


class EvalStats(EvalFigures):
    """The evaluation of one policy version, in all and by the data sets that its episodes name."""

    data_sets: dict[str, EvalFigures] = {}


class Counters(msgspec.Struct):
    """Totals since the run began. `calls_merged` has none of `calls_masked`, which are side calls."""

    claimed: int = 0
    ended: int = 0
    aborted: int = 0
    trained: int = 0
    dropped: int = 0
    calls: int = 0
    calls_merged: int = 0
    calls_late: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls_masked: int = 0
    taken: int = 0  # by clients of training operations
    calls_incomplete: int = 0  # without a part of their conversation, such as an image


class EngineState(msgspec.Struct, kw_only=True):
    name: str
    phase: Phase = Phase.OFFLINE
    phase_since_ns: int = 0
    stage: str = ""  # while booting: what it waits for
    failure: str = ""  # why the last run ended, "" when it did not fail
    suspended: str = ""  # why the run waits for its operator, "" while it goes on
    until_served: bool = False  # a suspended run goes on by itself once a replica serves `weights`
    suspensions: int = 0  # of this run, over or not
    rest_wanted: bool = False  # the trainer of a run of operations is to free its memory
    asleep: bool = False  # it has said so since that was wanted, or not yet that it has taken its memory again
    rest_since_ns: int = 0  # when that was asked for last
    resumed_ns: int = 0  # when its operator resumed the run last, or its trainer woke up
    configured: ev.EngineConfigured | None = None  # the latest
    active: ev.EngineConfigured | None = None  # the configuration of the run
    run: int = 0
    version: int = -1  # the version of the newest weights that are ready
    step: int = 0  # the step of the newest sealed batch
    started: ev.EngineStarted | None = None  # the run's beginning
    begun: int = 0  # the step at which the run began
    left: list[LeftRun] = []  # checkpoints of earlier runs, oldest first
    kept: list[ev.StepCompleted] = []  # checkpoints of this run that are not removed, oldest first
    next_episode: int = 1
    open: dict[str, Episode] = {}
    claims: dict[str, tuple[str, ...]] = {}  # of open episodes, by claim id
    open_tasks: dict[str, int] = {}  # how many open training episodes there are, by the task that their claim named
    open_aged: dict[int, dict[str, int]] = {}  # the same of those that have an oldest version, by that
    pool: dict[str, Completed] = {}  # in order of completion
    by_task: dict[str, list[str]] = {}  # the pool's episodes, by task
    pool_bytes: int = 0
    newest_call: int = 0  # sequence of the call noted last, in any run
    calls: StoredCalls = msgspec.field(default_factory=StoredCalls)  # in any run
    batch: ev.BatchReady | None = None  # sealed, with its step not completed; its episodes have their calls
    steps: list[SealedStep] = []  # those that may have to be made again, oldest first
    steps_from: list[int] = []  # `calls_from` of the newest sealed steps, in any run: the replay window
    step_failures: int = 0
    step_done: ev.StepCompleted | None = None
    formats: list[ev.ModelRead] = []  # the ways in which gateways read the model of the run, oldest first
    trainer: str = ""  # "" before the first has opened the run, and after one has stalled
    trainer_epoch: int = 0
    trainer_since_ns: int = 0
    trainer_patience_s: float = 0.0  # after so much silence it is taken for gone; 0: it named none
    stalled: ev.TrainerStalled | None = None  # why there is no trainer
    trainers_lost: int = 0  # in a row, without a word, while the run waited for the same step or weights
    openings: dict[str, int] = {}  # commands with which trainers opened this run: their epochs
    weights: ev.WeightsReady | None = None
    weights_before: ev.WeightsReady | None = None
    loaded: set[str] = set()  # replicas that serve `weights`
    replicas: dict[str, Replica] = {}
    agreed: set[str] = set()
    rewarded_ns: dict[str, int] = {}  # when each client that may be active last ended an episode
    closed: dict[str, Closed] = {}  # the newest OUTCOMES_KEPT, oldest first
    commands: dict[str, int] = {}  # configure, start, stop and resume commands that were carried out: their runs
    refused: dict[str, ev.CommandAnswered] = {}  # those that were refused
    evals: dict[int, EvalStats] = {}
    collected: RolloutFigures = msgspec.field(default_factory=RolloutFigures)  # since the newest batch was sealed
    rollouts: list[RolloutFigures] = []  # those of the newest sealed batches, oldest first
    silent_steps: int = 0  # the newest steps in a row of which no group had a signal
    counters: Counters = msgspec.field(default_factory=Counters)
    tenants: Tenants = msgspec.field(default_factory=Tenants)
    trajectories: Trajectories = msgspec.field(default_factory=Trajectories)

    @property
    def clients_take(self) -> bool:
        """Return whether clients of training operations take the ended episodes, of this run or of the last one."""
        return self.started is not None and self.started.base != ""

    @property
    def serves_operations(self) -> bool:
        """Return whether a run is on that holds the models of training clients on a base."""
        return self.clients_take and self.phase != Phase.OFFLINE

    @property
    def has_policy(self) -> bool:
        """Return whether a run is on that has the model of a job, which replicas serve."""
        started = self.started
        return started is not None and not started.base and started.config_digest != "" and self.phase != Phase.OFFLINE

    @property
    def makes_steps(self) -> bool:
        """Return whether our own trainer makes steps of the run's batches."""
        return self.has_policy and (self.collection.scored_groups or not self.collection.episode_groups)

    @property
    def plays_episodes(self) -> bool:
        """Return whether episodes are claimed that play with the policy of a job."""
        return self.has_policy and (self.collection.episode_groups or not self.collection.scored_groups)

    @property
    def queues_groups(self) -> bool:
        """Return whether batches are made of a queue of scored groups: for our own trainer, or one outside.

        An outside trainer needs no job. Those of a job come from environments, from ended episodes, or from both.
        """
        started = self.started  # asked for every message, several times
        if started is None or started.base or self.phase == Phase.OFFLINE:
            return False
        return not started.config_digest or self.collection.scored_groups or self.collection.episode_groups

    @property
    def groups_episodes(self) -> bool:
        """Return whether ended episodes become scored groups."""
        return self.queues_groups and self.plays_episodes

    def groups_needed(self) -> Iterator[QueuedGroup]:
        """Yield the scored groups that can still be asked for, or trained again."""
        yield from self.trajectories.needed()
        for step in self.steps if self.makes_steps else ():
            yield from step.batch.scored

    @property
    def collection(self) -> Collection:
        """Return the rules of the running job; before the first start, those of the configured one."""
        source = self.active or self.configured
        return source.collection if source is not None else Collection()

    @property
    def steps_needed(self) -> int:
        """Return how many of the newest sealed steps must be kept, because they may have to be made (again)."""
        return max(STEPS_NEEDED, lacking(self.steps))

    @property
    def needed_steps(self) -> list[SealedStep]:
        return [step for step in self.steps[-self.steps_needed :] if not step.released]

    @property
    def usable(self) -> dict[str, Replica]:
        """Return the replicas that are not quarantined."""
        return {name: replica for name, replica in self.replicas.items() if replica.quarantined is None}

    @property
    def rolling(self) -> bool:
        return self.phase in (Phase.ROLLING, Phase.ROLLING_POST)

    @property
    def granting(self) -> bool:
        """Return whether claims can be granted now."""
        return self.phase == Phase.ROLLING and not self.suspended

    @property
    def waits_for_operator(self) -> bool:
        """Return whether only its operator lets the run go on. One that waits for a replica may go on by itself."""
        return bool(self.suspended) and not self.until_served

    @property
    def owes_weights(self) -> bool:
        """Return whether the run waits for its trainer: for a step, for its weights, or for the first ones.

        One of operations waits for it to boot, and for what waits.
        """
        if self.serves_operations:
            return self.phase == Phase.BOOTING or (self.tenants.waiting > 0 and not self.rest_wanted)
        if self.queues_groups and not self.has_policy:
            return False
        return self.batch is not None or self.version < max(self.step, 0)

    @property
    def global_step(self) -> int:
        """Return the newest version; while a run boots, the one at which it begins."""
        return max(self.version, self.begun)

    def checkpoints_left(self) -> list[LeftRun]:
        """Return the runs that have left checkpoints, oldest first, with this one."""
        return leave(self.left, "" if self.active is None else self.active.config, self.kept)

    def lacks_format(self, run: int, found: ConversationFormat) -> bool:
        """Return whether this way of reading the model is news.

        Gateways report what is news, and the coordinator writes it: the two end together, whoever reports it.
        """
        is_current = run == self.run and self.phase != Phase.OFFLINE
        return is_current and len(self.formats) < FORMATS_MAX and all(each.format != found for each in self.formats)

    def episode_number(self, episode: str) -> int | None:
        """Return the number in an episode id of this engine's current run, None for any other id."""
        stem, _, number = episode.rpartition("-")
        if stem != f"{self.name}-{self.run}" or not number.isdigit():
            return None
        return int(number)

    def is_over(self, episode: str) -> bool:
        """Return whether this episode was open and is not any more. False for one that is not claimed yet."""
        if episode in self.open:
            return False
        number = self.episode_number(episode)
        return number is None or number < self.next_episode


def episode_id(engine: str, run: int, number: int) -> str:
    return f"{engine}-{run}-{number}"


def engine_of(episode: str) -> str:
    """Return the engine in an episode id; what it returns for any other text is the name of no engine with it."""
    return episode.rpartition("-")[0].rpartition("-")[0]


CALLS = "calls"  # the stream of recorded calls
SCORED_GROUPS = "trajectories"  # the stream that only scored groups need


class Hive(msgspec.Struct, kw_only=True):
    epoch: int = 0
    now_ns: int = 0
    pauses: list[Pause] = []  # without a leader, the newest ones
    engines: dict[str, EngineState] = {}
    full: dict[str, ev.StorageFilled] = {}  # streams and disks with no room for new work
    aside: list[ev.MessageSetAside] = []  # the newest messages that could not be decided
    uncompacted: str = ""  # why the log is longer than it should be, "" when it is not
    went_back: dict[str, ev.StreamWentBack] = {}  # by stream: the newest loss of its end
    released: int = 0  # what is before this sequence of the stream `ops` may be purged
    trajectories_released: int = 0  # the same of the stream `trajectories`
    calls_bytes_max: int = 0  # of the stream `calls` when this epoch began, 0 where it has no limit
    trajectories_bytes_max: int = 0  # the same of the stream `trajectories`

    @property
    def refusing(self) -> str:
        """Return why no new work is taken, "" while there is room for it. Scored groups have a stream of their own."""
        return " ".join(filled.why for what, filled in self.full.items() if what != SCORED_GROUPS)

    @property
    def refusing_groups(self) -> str:
        """Return why no scored groups are taken, "" while there is room for them."""
        return " ".join(filled.why for filled in self.full.values())

    def refusing_of(self, engine: EngineState) -> str:
        """Return why an engine takes no new work, "" while it does."""
        return self.refusing_groups if engine.queues_groups else self.refusing

    def pinned_calls(self) -> Counter[str]:
        """Return how many bytes of the stream `calls` each holder pins."""
        found: Counter[str] = Counter()
        for engine in self.engines.values():
            found.update({holder: calls.pinned for holder, calls in engine.calls.holders.items()})
        return found

    def why_no_calls(self, holder: str, more: int = 1) -> str:
        """Return why a holder may not store so many bytes `more` of calls, "" where it may."""
        size = self.calls_bytes_max
        if not size or sum(engine.calls.pinned for engine in self.engines.values()) + more <= SHARED * size:
            return ""
        return why_no_share(self.pinned_calls(), holder, size, more)

    def why_no_groups(self, holder: str, more: int = 1) -> str:
        """Return why a holder may not queue scored groups with so many bytes `more`, "" where it may."""
        size, engines = self.trajectories_bytes_max, self.engines.values()
        if not size or sum([each.trajectories.queue.bytes for each in engines]) + more <= SHARED * size:
            return ""
        return queues.why_no_share(self.queued_groups(), holder, size, more)

    def queued_groups(self) -> Counter[str]:
        """Return how many bytes of the stream `trajectories` the queued groups of each holder have."""
        found: Counter[str] = Counter()
        for engine in self.engines.values():
            found.update({name: each.bytes for name, each in engine.trajectories.queue.holders.items()})
        return found

    def groups_released(self, engine: EngineState, holder: str) -> int:
        """Return the sequence before which bodies of a holder's scored groups may be gone."""
        kept = engine.trajectories.queue.holders.get(holder)
        return self.trajectories_released if kept is None else max(self.trajectories_released, kept.released)

    def released_of_holders(self) -> dict[tuple[str, str], int]:
        """Return the same of each holder alone, by engine and holder."""
        return {
            (name, holder): kept.released
            for name, engine in self.engines.items()
            for holder, kept in engine.trajectories.queue.holders.items()
        }

    def bodies_needed(self) -> Iterator[tuple[str, str, BodyRef]]:
        """Yield the bodies of scored groups that are kept, with the names of their engines and holders.

        The one that was pushed last is an example to look at, and is kept until the stream of scored groups is full.
        """
        for name, engine in self.engines.items():
            for group in engine.groups_needed():
                if group.body is not None:
                    yield name, group.holder, group.body
            latest = engine.trajectories.latest
            if latest is None or latest.body is None or SCORED_GROUPS in self.full:
                continue
            if latest.body.first >= self.groups_released(engine, latest.holder):
                yield name, latest.holder, latest.body

    def engine(self, name: str) -> EngineState:
        """Return the state of an engine; an empty one, which is not kept, when no event has named it yet."""
        return self.engines.get(name) or EngineState(name=name)

    def partners(self, episode: Episode) -> Iterator[Episode]:
        """Yield the other episodes of an open joint episode, none for an episode of its own."""
        for engine, name in episode.partners.items():
            partner = self.engine(engine).open.get(name)
            if partner is not None:  # in a fold that has not reached the end of a decision, one may be over
                yield partner


_EventT = TypeVar("_EventT", bound=Event)
_handlers: dict[type[Event], Callable[[EngineState, Event], None]] = {}


def evolve(hive: Hive, event: Event) -> None:
    """Fold one event into the state, in place."""
    if event.at_ns > hive.now_ns:
        hive.now_ns = event.at_ns
    if isinstance(event, _OF_THE_HIVE):
        _evolve_hive(hive, event)
        return
    engine = hive.engines.get(event.engine)
    if engine is None:
        engine = hive.engines[event.engine] = EngineState(name=event.engine)
    _handlers[type(event)](engine, event)


_OF_THE_HIVE = (
    ev.EpochOpened,
    ev.LeadingPaused,
    ev.StorageFilled,
    ev.StorageFreed,
    ev.MessageSetAside,
    ev.OperationsReleased,
    ev.TrajectoriesReleased,
    ev.LogCompacted,
    ev.CompactionFailed,
    ev.StreamWentBack,
)


def _evolve_hive(hive: Hive, event: Event) -> None:
    """Fold an event that is about no engine."""
    match event:
        case ev.EpochOpened():
            hive.epoch = event.epoch
            hive.calls_bytes_max = event.calls_bytes_max
            hive.trajectories_bytes_max = event.trajectories_bytes_max
        case ev.LeadingPaused():
            note_pause(hive.pauses, event.since_ns, event.at_ns)
        case ev.StorageFilled():
            hive.full[event.what] = event
        case ev.StorageFreed():
            hive.full.pop(event.what, None)
        case ev.MessageSetAside():
            hive.aside = [*hive.aside[1 - ASIDE_KEPT :], event]
        case ev.OperationsReleased():
            _released(hive, event)
        case ev.TrajectoriesReleased():
            _groups_released(hive, event)
        case ev.LogCompacted() | ev.CompactionFailed():
            hive.uncompacted = event.why if isinstance(event, ev.CompactionFailed) else ""
        case ev.StreamWentBack():
            hive.went_back[event.what] = event


def _released(hive: Hive, event: ev.OperationsReleased) -> None:
    if event.below < hive.released:  # a power cut has removed the end of the stream (R6)
        for engine in hive.engines.values():
            engine.tenants.released = {}
    hive.released = event.below
    for floor in event.models:
        if floor.engine in hive.engines:
            tenancy.release(hive.engines[floor.engine].tenants, floor)


def _groups_released(hive: Hive, event: ev.TrajectoriesReleased) -> None:
    hive.trajectories_released = event.below
    for floor in event.holders:
        if floor.engine in hive.engines:
            hive.engines[floor.engine].trajectories.queue.kept_of(floor.holder).released = floor.below


def as_folded(hive: Hive, event: ev.AnyEvent) -> ev.AnyEvent:
    """Return the event that was folded last with what the fold has added: to a batch, its calls or scored groups."""
    batch = hive.engine(event.engine).batch
    return batch if isinstance(event, ev.BatchReady) and batch is not None else event


def ended_calls(outcome: ev.Outcome, episode: Episode | None) -> tuple[CallRef, ...]:
    """Return the calls of an episode's outcome: where it lists none, the complete ones of the open episode."""
    if outcome.calls or episode is None:
        return outcome.calls
    return tuple(call.ref for call in episode.complete_calls())


def with_calls(hive: Hive, event: ev.EpisodeEnded) -> ev.EpisodeEnded:
    """Return an end that is not folded yet with the calls of its episodes."""
    engine = hive.engine(event.engine)
    outcomes = (
        msgspec.structs.replace(outcome, calls=ended_calls(outcome, engine.open.get(outcome.episode)))
        for outcome in event.outcomes
    )
    return msgspec.structs.replace(event, outcomes=tuple(outcomes))


def _on(
    kind: type[_EventT],
) -> Callable[[Callable[[EngineState, _EventT], None]], Callable[[EngineState, _EventT], None]]:
    def register(handler: Callable[[EngineState, _EventT], None]) -> Callable[[EngineState, _EventT], None]:
        _handlers[kind] = handler  # type: ignore[assignment]  # looked up by the event's own type
        return handler

    return register


def _enter(engine: EngineState, phase: Phase, at_ns: int) -> None:
    engine.phase = phase
    engine.phase_since_ns = at_ns


def _remember(engine: EngineState, command: str) -> None:
    if command:
        engine.commands[command] = engine.run
        trim(engine.commands, COMMANDS_KEPT)


# ---- the engine's life ----------------------------------------------------------------------------------------


@_on(ev.EngineConfigured)
def _configured(engine: EngineState, event: ev.EngineConfigured) -> None:
    engine.configured = event
    _remember(engine, event.command)


@_on(ev.EngineStarted)
def _started(engine: EngineState, event: ev.EngineStarted) -> None:
    """Begin a run. It keeps the replicas, the answered commands and the bounds of kept calls (R8, R12)."""
    fresh = EngineState(
        name=engine.name,
        configured=engine.configured,
        active=engine.configured,
        run=event.run,
        started=event,
        replicas=engine.replicas,
        commands=engine.commands,
        refused=engine.refused,
        newest_call=engine.newest_call,
        calls=engine.calls,
        steps_from=engine.steps_from,
        left=engine.checkpoints_left(),
        stage=NO_TRAINER,
        tenants=engine.tenants,
        trajectories=engine.trajectories,
    )
    if event.begins is not None:
        _begin_at(fresh, event.begins, engine.steps)
        if goes_on(event.begins, engine.run, engine.started):
            fresh.counters = engine.counters
            kept = {version: stats for version, stats in engine.evals.items() if version <= event.begins.step}
            fresh.evals = kept  # the versions after it are made again, and are others
            fresh.rollouts = [each for each in engine.rollouts if each.step <= event.begins.step]
    for field in EngineState.__struct_fields__:
        setattr(engine, field, getattr(fresh, field))
    engine.calls.keep(episodes_of(engine.needed_steps))
    _release_replicas(engine)
    _enter(engine, Phase.BOOTING, event.at_ns)
    _remember(engine, event.command)


def _release_replicas(engine: EngineState) -> None:
    for replica in engine.replicas.values():
        replica.quarantined = None


def _begin_at(engine: EngineState, begins: ev.Beginning, before: list[SealedStep]) -> None:
    """Let a run begin as if it had made the step of that checkpoint itself.

    Where the run before it made that step, with the same settings, its trainer can fall back to an older checkpoint as
    that of the run before would. Otherwise no batch is needed again.
    """
    batch = ev.BatchReady(engine=engine.name, run=begins.run, step=begins.step, groups=(), config_digest="")
    done = step_of(engine.name, begins)
    engine.step = engine.begun = begins.step
    engine.step_done = done
    kept = [] if begins.changed else up_to(before, begins.checkpoint)
    engine.steps = kept or [SealedStep(batch=batch, done=done)]
    unfinished = len(before) - len(kept) if kept else 0
    for _ in range(min(unfinished, len(engine.steps_from) - 1)):  # so that one bound is one step again
        *older, last, newest = engine.steps_from
        engine.steps_from = [*older, min(last, newest)]


@_on(ev.EngineProgressed)
def _progressed(engine: EngineState, event: ev.EngineProgressed) -> None:
    engine.stage = event.stage


@_on(ev.EngineBooted)
def _booted(engine: EngineState, event: ev.EngineBooted) -> None:
    engine.stage = BOOTED


def _end_run(engine: EngineState, at_ns: int, why: str) -> None:
    tenancy.end_run(engine.tenants, engine.run, at_ns, why)
    if engine.queues_groups:
        scored.end_run(engine.trajectories)
    engine.stage = engine.suspended = ""
    engine.until_served = engine.rest_wanted = engine.asleep = False
    _enter(engine, Phase.OFFLINE, at_ns)
    _keep_time(engine, at_ns)


@_on(ev.EngineStopped)
def _stopped(engine: EngineState, event: ev.EngineStopped) -> None:
    _end_run(engine, event.at_ns, "the run was stopped; create the model again, from a checkpoint if it was saved")
    _remember(engine, event.command)


@_on(ev.EngineFailed)
def _failed(engine: EngineState, event: ev.EngineFailed) -> None:
    _end_run(engine, event.at_ns, f"the run has failed: {event.reason}")
    engine.failure = event.reason


@_on(ev.EngineSuspended)
def _suspended(engine: EngineState, event: ev.EngineSuspended) -> None:
    engine.suspended = event.reason
    engine.until_served = event.until_served
    engine.suspensions += 1
    _keep_time(engine, event.at_ns)


@_on(ev.EngineResumed)
def _resumed(engine: EngineState, event: ev.EngineResumed) -> None:
    """Go on in the same phase, as if it had just begun: nothing moved while the run was suspended.

    Failures are forgotten when the operator says so, and not because a replica serves again.
    """
    engine.suspended = ""
    engine.until_served = False
    if event.command:
        engine.resumed_ns = event.at_ns
        engine.step_failures = 0
        _forget_lost(engine)
        tenancy.forgive(engine.tenants, event.at_ns)
        _release_replicas(engine)
    _enter(engine, engine.phase, event.at_ns)
    _remember(engine, event.command)
    _keep_time(engine, event.at_ns)


def _forget_lost(engine: EngineState) -> None:
    """Begin to count anew the trainers that are lost in a row."""
    if engine.trainers_lost:
        tenancy.forget_lost(engine.tenants)
    engine.trainers_lost = 0


def _keep_time(engine: EngineState, at_ns: int) -> None:
    """Count the time in which models that could not be made again could be tried again."""
    rests = engine.suspended or engine.rest_wanted or engine.asleep
    engine.tenants.trying.run(engine.serves_operations and engine.trainer != "" and not rests, at_ns)


@_on(ev.CommandAnswered)
def _command_answered(engine: EngineState, event: ev.CommandAnswered) -> None:
    if event.code is None:
        _remember(engine, event.command)
    else:
        engine.refused[event.command] = event
        trim(engine.refused, COMMANDS_KEPT)


@_on(ev.ModelRead)
def _model_read(engine: EngineState, event: ev.ModelRead) -> None:
    engine.formats.append(event)


@_on(ev.RollingStarted)
def _rolling_started(engine: EngineState, event: ev.RollingStarted) -> None:
    engine.stage = ""
    engine.agreed = set()
    _enter(engine, Phase.ROLLING, event.at_ns)


@_on(ev.RollingClosed)
def _rolling_closed(engine: EngineState, event: ev.RollingClosed) -> None:
    _enter(engine, Phase.ROLLING_POST, event.at_ns)


@_on(ev.SyncingStarted)
def _syncing_started(engine: EngineState, event: ev.SyncingStarted) -> None:
    _enter(engine, Phase.WEIGHT_SYNCING, event.at_ns)


@_on(ev.SyncAgreed)
def _sync_agreed(engine: EngineState, event: ev.SyncAgreed) -> None:
    engine.agreed.add(event.client)


# ---- episodes -------------------------------------------------------------------------------------------------


@_on(ev.EpisodeClaimed)
def _claimed(engine: EngineState, event: ev.EpisodeClaimed) -> None:
    for number, episode in enumerate(event.episodes):
        engine.open[episode] = Episode(
            id=episode,
            claim=event.claim,
            client=event.client,
            type=event.type,
            discard_timeout_s=event.discard_timeout_s,
            claimed_ns=event.at_ns,
            version=event.version,
            task_hint=event.task_hint,
            owner=event.owner,
            admin=event.admin,
            calls_from=engine.newest_call,
            sampler=event.sampler,
            partners={name: ids[number] for name, ids in event.partners.items() if number < len(ids)},
            touches=event.touches,
        )
        engine.calls.claim(engine.open[episode].holder, episode, engine.newest_call)
    if event.type == EpisodeType.TRAIN:
        _count(engine.open_tasks, event.task_hint, len(event.episodes))
    engine.claims[event.claim] = event.episodes
    engine.next_episode += len(event.episodes)
    engine.counters.claimed += len(event.episodes)


@_on(ev.CallsNoted)
def _calls_noted(engine: EngineState, event: ev.CallsNoted) -> None:
    counters = engine.counters
    for call in event.calls:
        counters.calls += 1
        counters.calls_merged += call.merged and not call.masked
        counters.calls_masked += call.masked
        counters.calls_incomplete += call.incomplete
        counters.prompt_tokens += call.prompt_tokens
        counters.completion_tokens += call.completion_tokens
        episode = engine.open.get(call.episode)
        known = episode or engine.closed.get(call.episode)
        engine.calls.store("" if known is None else known.holder, call.bytes)
        if call.late or episode is None:
            counters.calls_late += 1
            continue
        episode.calls.append(call)
        if call.status == CallStatus.COMPLETE and not call.masked:
            _count_aged(engine, episode, -1)
            episode.oldest = call.oldest if episode.oldest is None else min(episode.oldest, call.oldest)
            _count_aged(engine, episode, 1)
        if call.ref.seq < episode.calls_from:  # a power cut has removed the end of the stream (R6)
            episode.calls_from = call.ref.seq
            engine.calls.lower(episode.holder, episode.id, call.ref.seq)
        episode.last_call_ns = event.at_ns
        engine.newest_call = call.ref.seq


def _count(counts: dict[str, int], name: str, more: int) -> None:
    left = counts.get(name, 0) + more
    if left:
        counts[name] = left
    else:
        counts.pop(name, None)


def _count_aged(engine: EngineState, episode: Episode, more: int) -> None:
    if episode.oldest is None or episode.type != EpisodeType.TRAIN:
        return
    tasks = engine.open_aged.setdefault(episode.oldest, {})
    _count(tasks, episode.task_hint, more)
    if not tasks:
        del engine.open_aged[episode.oldest]


def _close(engine: EngineState, episode_id: str, closed: Closed) -> Episode | None:
    episode = engine.open.pop(episode_id, None)
    if episode is not None:
        closed = Closed(closed.client, closed.outcome, closed.aborted, episode.holder)
        if episode.type == EpisodeType.TRAIN:
            _count(engine.open_tasks, episode.task_hint, -1)
        _count_aged(engine, episode, -1)
        siblings = engine.claims.get(episode.claim, ())
        if engine.open.keys().isdisjoint(siblings):
            engine.claims.pop(episode.claim, None)
    engine.closed[episode_id] = closed
    if len(engine.closed) > OUTCOMES_KEPT:
        trim(engine.closed, OUTCOMES_KEPT)
    return episode


@_on(ev.EpisodeEnded)
def _ended(engine: EngineState, event: ev.EpisodeEnded) -> None:
    engine.counters.ended += len(event.outcomes)
    _note_reward(engine, event.client, event.at_ns)
    is_eval = event.type == EpisodeType.EVAL
    for outcome in event.outcomes:
        episode = _close(engine, outcome.episode, Closed(event.client, outcome.digest))
        if is_eval and (episode is None or episode.sampler is None):
            _count_evaluation(engine, event.version, outcome, episode)
        if is_eval:
            engine.calls.release((outcome.episode,))
            continue
        before = _leave_pool(engine, outcome.episode)  # a log that ends an episode twice keeps the last end
        if before is None:
            engine.collected.add(outcome)
        calls = ended_calls(outcome, episode) or (before.calls if before is not None else ())
        size = 200 + 8 * outcome.completion_tokens + 100 * len(calls)
        engine.pool[outcome.episode] = Completed(
            episode=outcome.episode,
            task=outcome.task,
            client=event.client,
            reward=outcome.reward,
            call_rewards=outcome.call_rewards,
            calls=calls,
            oldest=outcome.oldest,
            bytes=size,
            ended_ns=event.at_ns,
            calls_from=next((each.calls_from for each in (episode, before) if each is not None), 0),
            sampler="" if episode is None or episode.sampler is None else episode.sampler.checkpoint,
            owner=next((each.owner for each in (episode, before) if each is not None), ""),
        )
        engine.by_task.setdefault(outcome.task, []).append(outcome.episode)
        engine.pool_bytes += size


def _count_evaluation(engine: EngineState, claimed: int, outcome: ev.Outcome, episode: Episode | None) -> None:
    """Count an evaluation episode for the version that has sampled it, one without calls for that of its claim.

    Those of too many data sets are in the sums of their version alone.
    """
    calls = () if episode is None else episode.complete_calls()
    oldest = min((call.oldest for call in calls), default=claimed)
    is_mixed = any(call.newest > oldest for call in calls)
    stats = engine.evals.setdefault(claimed if is_mixed else oldest, EvalStats())
    counted: list[EvalFigures] = [stats]
    name = outcome.data_set
    if name and (name in stats.data_sets or len(stats.data_sets) < DATA_SETS_MAX):
        counted.append(stats.data_sets.setdefault(name, EvalFigures()))
    for figures in counted:
        (figures.mixed if is_mixed else figures).add(outcome)
    trim(engine.evals, EVALS_KEPT)


def _note_reward(engine: EngineState, client: str, at_ns: int) -> None:
    """Note that a client is active now, and forget those that are not: any number of them come and go."""
    seen = engine.rewarded_ns
    seen.pop(client, None)
    seen[client] = at_ns  # last, so that the first has been silent longest
    limit_ns = int(ACTIVE_S * 1e9)
    if seen[next(iter(seen))] < at_ns - 2 * limit_ns:
        engine.rewarded_ns = {name: last_ns for name, last_ns in seen.items() if last_ns >= at_ns - limit_ns}


@_on(ev.EpisodeAborted)
def _aborted(engine: EngineState, event: ev.EpisodeAborted) -> None:
    engine.counters.aborted += len(event.episodes)
    engine.calls.release(event.episodes)
    for episode_id in event.episodes:
        episode = engine.open.get(episode_id)
        _close(engine, episode_id, Closed(episode.client if episode else "", aborted=event.reason))
        if event.reason == AbortReason.SILENT and episode is not None:
            engine.rewarded_ns.pop(episode.client, None)  # it is not active: nobody waits for its agreement


# ---- the pool and its batches ---------------------------------------------------------------------------------


def _leave_pool(engine: EngineState, episode_id: str) -> Completed | None:
    completed = engine.pool.pop(episode_id, None)
    if completed is None:
        return None
    engine.pool_bytes -= completed.bytes
    rest = engine.by_task[completed.task]
    rest.remove(episode_id)
    if not rest:
        del engine.by_task[completed.task]
    return completed


def _take(engine: EngineState, episodes: Iterable[str]) -> int:
    """Let episodes leave the pool whose calls nobody needs any more. Return how many were in it."""
    gone = [episode for episode in episodes if _leave_pool(engine, episode) is not None]
    engine.calls.release(gone)
    return len(gone)


@_on(ev.GroupDropped)
def _group_dropped(engine: EngineState, event: ev.GroupDropped) -> None:
    engine.counters.dropped += _take(engine, event.episodes)


@_on(ev.EpisodesTaken)
def _episodes_taken(engine: EngineState, event: ev.EpisodesTaken) -> None:
    engine.counters.taken += _take(engine, event.episodes)


@_on(ev.PoolCleared)
def _pool_cleared(engine: EngineState, event: ev.PoolCleared) -> None:
    engine.counters.dropped += len(engine.pool)
    engine.calls.release(engine.pool)
    engine.pool = {}
    engine.by_task = {}
    engine.pool_bytes = 0


def _with_calls(engine: EngineState, event: ev.BatchReady) -> ev.BatchReady:
    """Return a batch whose episodes have their calls, which are in the pool until the batch is folded."""

    def filled(episode: ev.BatchEpisode) -> ev.BatchEpisode:
        completed = engine.pool.get(episode.episode)
        if episode.calls or completed is None:
            return episode
        return msgspec.structs.replace(episode, calls=completed.calls, call_rewards=completed.call_rewards)

    groups = tuple(
        msgspec.structs.replace(group, episodes=tuple(map(filled, group.episodes))) for group in event.groups
    )
    return msgspec.structs.replace(event, groups=groups)


@_on(ev.BatchReady)
def _batch_ready(engine: EngineState, event: ev.BatchReady) -> None:
    event = _with_calls(engine, event)
    if event.taken:
        taken = scored.seal(engine.trajectories, event.taken)
        event = msgspec.structs.replace(event, scored=event.scored or taken)
    engine.batch = event
    engine.step = event.step
    engine.step_failures = engine.trainers_lost = 0
    left = [_leave_pool(engine, episode.episode) for group in event.groups for episode in group.episodes]
    sealed = [completed for completed in left if completed is not None]
    engine.counters.trained += len(sealed) + sum(group.sequences for group in event.scored)
    engine.steps_from.append(min((completed.calls_from for completed in sealed), default=engine.newest_call))
    engine.steps.append(SealedStep(batch=event))
    _release_steps(engine, engine.steps)
    engine.collected.step = event.step
    engine.rollouts.append(engine.collected)
    engine.collected = RolloutFigures()
    del engine.rollouts[:-STEPS_KEPT]
    del engine.steps_from[: -max(engine.steps_needed, engine.collection.replay_steps)]


def _release_steps(engine: EngineState, before: list[SealedStep]) -> None:
    """Release the calls of the steps, of those that were kept before, that nobody has to make again."""
    gone = before[: len(before) - len(engine.needed_steps)]
    for step in gone:
        step.released = True
    engine.calls.release(episodes_of(gone))


# ---- training and weights -------------------------------------------------------------------------------------


@_on(ev.TrainerOpened)
def _trainer_opened(engine: EngineState, event: ev.TrainerOpened) -> None:
    if engine.trainer and engine.owes_weights:
        engine.trainers_lost += 1
        tenancy.lose_trainer(engine.tenants, engine.trainer_epoch)
    engine.trainer = event.trainer
    engine.trainer_epoch = event.trainer_epoch
    engine.trainer_since_ns = event.at_ns
    engine.trainer_patience_s = event.patience_s
    engine.stalled = None
    engine.openings[event.command] = event.trainer_epoch
    trim(engine.openings, COMMANDS_KEPT)
    _keep_time(engine, event.at_ns)


@_on(ev.TrainerStalled)
def _trainer_stalled(engine: EngineState, event: ev.TrainerStalled) -> None:
    """End the trainer's epoch: what it still sends is ignored. Its successor has as long to boot as it had."""
    engine.trainer = ""
    engine.trainer_epoch = event.trainer_epoch + 1
    engine.stalled = event
    engine.step_failures = event.failures
    if engine.phase == Phase.BOOTING:
        engine.stage = NO_TRAINER
        _enter(engine, Phase.BOOTING, event.at_ns)
    _keep_time(engine, event.at_ns)


@_on(ev.StepCompleted)
def _step_completed(engine: EngineState, event: ev.StepCompleted) -> None:
    engine.step_done = event
    groups = 0 if engine.batch is None else len(engine.batch.groups)
    engine.silent_steps = silent_after(engine.silent_steps, groups, event.metrics)
    before = engine.steps.copy()
    complete(engine.steps, event)
    _release_steps(engine, before)
    engine.kept = keep(engine.kept, event, engine.collection.checkpoints_kept)
    engine.batch = None
    engine.step_failures = engine.trainers_lost = 0


@_on(ev.StepFailed)
def _step_failed(engine: EngineState, event: ev.StepFailed) -> None:
    engine.step_failures = event.failures


@_on(ev.WeightsReady)
def _weights_ready(engine: EngineState, event: ev.WeightsReady) -> None:
    engine.weights_before = engine.weights
    engine.weights = event
    engine.version = event.version
    engine.loaded = set()
    _forget_lost(engine)


@_on(ev.WeightsLoaded)
def _weights_loaded(engine: EngineState, event: ev.WeightsLoaded) -> None:
    replica = engine.replicas.get(event.replica)
    if replica is not None:
        replica.run, replica.version = event.run, event.version
        replica.sequence_tokens, replica.constrains = event.sequence_tokens, event.constrains
        replica.quarantined = None
    if event.run == engine.run and event.version == engine.version:
        engine.loaded.add(event.replica)


@_on(ev.ReplicaJoined)
def _replica_joined(engine: EngineState, event: ev.ReplicaJoined) -> None:
    engine.replicas[event.replica] = Replica(url=event.url, capacity=event.capacity, joined_ns=event.at_ns)
    engine.loaded.discard(event.replica)


@_on(ev.ReplicaLeft)
def _replica_left(engine: EngineState, event: ev.ReplicaLeft) -> None:
    engine.replicas.pop(event.replica, None)
    engine.loaded.discard(event.replica)


@_on(ev.ReplicaQuarantined)
def _replica_quarantined(engine: EngineState, event: ev.ReplicaQuarantined) -> None:
    replica = engine.replicas.get(event.replica)
    if replica is not None:
        replica.quarantined = event
        if event.answers:
            engine.loaded.discard(event.replica)


# ---- training operations ----------------------------------------------------------------------------------------


@_on(ev.SessionOpened)
def _session_opened(engine: EngineState, event: ev.SessionOpened) -> None:
    tenancy.open_session(engine.tenants, event)


@_on(ev.SessionEnded)
def _session_ended(engine: EngineState, event: ev.SessionEnded) -> None:
    tenancy.end_session(engine.tenants, event)


@_on(ev.SessionForgotten)
def _session_forgotten(engine: EngineState, event: ev.SessionForgotten) -> None:
    tenancy.forget_session(engine.tenants, event)


@_on(ev.SamplingBegun)
def _sampling_begun(engine: EngineState, event: ev.SamplingBegun) -> None:
    tenancy.begin_sampling(engine.tenants, event)


@_on(ev.ModelOpened)
def _model_opened(engine: EngineState, event: ev.ModelOpened) -> None:
    tenancy.open_model(engine.tenants, event)


@_on(ev.ModelClosed)
def _model_closed(engine: EngineState, event: ev.ModelClosed) -> None:
    tenancy.close_model(engine.tenants, event)


@_on(ev.OperationAccepted)
def _operation_accepted(engine: EngineState, event: ev.OperationAccepted) -> None:
    tenancy.accept(engine.tenants, event)


@_on(ev.OperationCompleted)
def _operation_completed(engine: EngineState, event: ev.OperationCompleted) -> None:
    tenancy.execute(engine.tenants, event, engine.collection.tenancy.results_bytes_max)
    engine.step_failures = 0
    _forget_lost(engine)


@_on(ev.ModelSuspended)
def _model_suspended(engine: EngineState, event: ev.ModelSuspended) -> None:
    engine.trainers_lost = max(0, engine.trainers_lost - tenancy.suspend_model(engine.tenants, event))


@_on(ev.ModelRemaking)
def _model_remaking(engine: EngineState, event: ev.ModelRemaking) -> None:
    tenancy.remake(engine.tenants, event)


@_on(ev.OperationBegun)
def _operation_begun(engine: EngineState, event: ev.OperationBegun) -> None:
    tenancy.begin(engine.tenants, event)


@_on(ev.ModelCovered)
def _model_covered(engine: EngineState, event: ev.ModelCovered) -> None:
    tenancy.cover(engine.tenants, event)


@_on(ev.WeightsKept)
def _weights_kept(engine: EngineState, event: ev.WeightsKept) -> None:
    tenancy.keep(engine.tenants, event)


@_on(ev.WeightsRemoved)
def _weights_removed(engine: EngineState, event: ev.WeightsRemoved) -> None:
    tenancy.remove(engine.tenants, event)


# ---- scored trajectories ----------------------------------------------------------------------------------------


@_on(ev.TrainerRegistered)
def _trainer_registered(engine: EngineState, event: ev.TrainerRegistered) -> None:
    scored.register(engine.trajectories, event)


@_on(ev.BatchesBegun)
def _batches_begun(engine: EngineState, event: ev.BatchesBegun) -> None:
    scored.begin(engine.trajectories)


@_on(ev.EnvironmentJoined)
def _environment_joined(engine: EngineState, event: ev.EnvironmentJoined) -> None:
    scored.join(engine.trajectories, event)


@_on(ev.EnvironmentLeft)
def _environment_left(engine: EngineState, event: ev.EnvironmentLeft) -> None:
    scored.leave(engine.trajectories, event)


@_on(ev.GroupsPushed)
def _groups_pushed(engine: EngineState, event: ev.GroupsPushed) -> None:
    scored.push(engine.trajectories, event)
    engine.counters.taken += _take(engine, event.episodes)


@_on(ev.BatchHandedOut)
def _batch_handed_out(engine: EngineState, event: ev.BatchHandedOut) -> None:
    scored.hand_out(engine.trajectories, event)


@_on(ev.BatchDelivered)
def _batch_delivered(engine: EngineState, event: ev.BatchDelivered) -> None:
    scored.deliver(engine.trajectories, event)


@_on(ev.GroupsReset)
def _groups_reset(engine: EngineState, event: ev.GroupsReset) -> None:
    scored.reset(engine.trajectories)


@_on(ev.GroupsGivenUp)
def _groups_given_up(engine: EngineState, event: ev.GroupsGivenUp) -> None:
    scored.give_up(engine.trajectories, event)
    for step in engine.steps if engine.makes_steps else ():
        if (step.batch.run, step.batch.step) == (event.run, event.number):
            step.batch = scored.without_bodies(step.batch, event.groups)
    if engine.batch is not None and (engine.batch.run, engine.batch.step) == (event.run, event.number):
        engine.batch = scored.without_bodies(engine.batch, event.groups)


@_on(ev.BodiesMoved)
def _bodies_moved(engine: EngineState, event: ev.BodiesMoved) -> None:
    scored.move(engine.trajectories, event)


@_on(ev.EndpointAdded)
def _endpoint_added(engine: EngineState, event: ev.EndpointAdded) -> None:
    engine.tenants.endpoints[tenancy.endpoint_id(event.host, event.port)] = event


@_on(ev.EndpointRemoved)
def _endpoint_removed(engine: EngineState, event: ev.EndpointRemoved) -> None:
    engine.tenants.endpoints.pop(tenancy.endpoint_id(event.host, event.port), None)


@_on(ev.RestAsked)
def _rest_asked(engine: EngineState, event: ev.RestAsked) -> None:
    """Note what is wanted. The trainer may be on its way elsewhere, so it says anew when it is there."""
    engine.rest_wanted = event.asleep
    engine.asleep = not event.asleep
    engine.rest_since_ns = event.at_ns
    _keep_time(engine, event.at_ns)


@_on(ev.RestReached)
def _rest_reached(engine: EngineState, event: ev.RestReached) -> None:
    engine.asleep = event.asleep
    if not event.asleep:
        engine.resumed_ns = event.at_ns
    _keep_time(engine, event.at_ns)
