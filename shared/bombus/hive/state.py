"""The state of a hive: the fold of its events, and nothing else.

Every service folds the same log with the same function (`bombus.hive.fold`), so all of them have the same state without
asking each other. Outstanding work, such as a batch, is read from this state too. A durable consumer of the bus would
be a second record of that work, and the two could disagree after a crash.
"""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from bombus.hive import events as ev
from bombus.hive.checkpoints import LeftRun, leave
from bombus.hive.events import AbortReason, Collection, ConversationFormat, EpisodeType, NotedCall
from bombus.hive.failures import FailureKind
from bombus.hive.operations.state import TrainingClients
from bombus.hive.pauses import Pause
from bombus.hive.pins import StoredCalls, why_no_share
from bombus.hive.records import BodyRef, CallRef, CallStatus
from bombus.hive.rollouts import RolloutFigures
from bombus.hive.shares import SHARED, share_name
from bombus.hive.steps import SealedStep, lacking
from bombus.hive.trajectories import queue as queues
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import Trajectories

FOLD = 16  # incremented whenever `evolve` folds an old log into a different state, to invalidate older snapshots
OUTCOMES_KEPT = 100_000  # number of closed episodes in a run whose outcomes are kept
CALLS_KEPT = 16_384  # number of a run's newest calls that are recognised when they are reported again
COMMANDS_KEPT = 1_000
EVALS_KEPT = 256
DATA_SETS_MAX = 32  # the most data sets with separate evaluation figures, for one version
ASIDE_KEPT = 8
ACTIVE_S = 600.0  # how long a client counts as active after it has ended an episode, as in the swarm contract
FORMATS_MAX = 4  # the most conversation formats recorded for the model of one run
STEPS_NEEDED = 2  # steps that may have to be made or repeated even if every step saves a checkpoint
NO_TRAINER = "waiting for a trainer"
BOOTED = "booted"  # the stage of an engine that has booted but is not rolling yet
LOAD_FAILED = "loading the model failed, trying again: "  # then the reason


class Phase(StrEnum):
    """The phase of an engine, as the swarm contract spells it.

    The contract's clients depend on these values, so any other condition is shown in the status and in refusals instead
    of as a new phase.
    """

    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    ROLLING_POST = "ENGINE.ROLLING_POST"
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"


class Episode(msgspec.Struct, kw_only=True):
    """An open episode, which was claimed and has been neither ended nor aborted."""

    id: str
    claim: str
    client: str
    type: EpisodeType
    discard_timeout_s: float
    claimed_ns: int
    version: int
    task_hint: str = ""
    calls: list[NotedCall] = []
    calls_from: int = 0  # no call is before this sequence number in `calls` (see the coordinator's retention.py)
    last_call_ns: int = 0
    owner: str = ""  # the name of its client's key
    admin: bool = False  # whether that key is the hive's admin key
    sampler: ev.SamplerWeights | None = None  # the weights from which its calls are sampled, in an operations run
    partners: dict[str, str] = {}  # by engine: the other episodes of its multi-model episode, which end when it does
    oldest: int | None = None  # the oldest policy version among its tokens that can be trained on
    touches: bool = False  # whether its client sends heartbeats while it holds the episode

    @property
    def holder(self) -> str:
        """Return the holder whose share the episode's calls count toward."""
        return share_name(self.owner, self.admin)

    @property
    def active_ns(self) -> int:
        """Return the time of the last activity that the log shows: the episode's last call, or its claim."""
        return max(self.claimed_ns, self.last_call_ns)

    def complete_calls(self) -> list[NotedCall]:
        return [call for call in self.calls if call.status == CallStatus.COMPLETE]

    def trainable_calls(self) -> list[NotedCall]:
        """Return the calls that can be trained on: the complete ones, except auxiliary calls that the job masks."""
        return [call for call in self.complete_calls() if not call.masked]


class Completed(msgspec.Struct, kw_only=True, frozen=True):
    """An ended training episode that is waiting in the pool. `sampler` is the saved model from which it was sampled.

    `owner` is the name of the client's key.
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
        """Return the holder whose share of the pool the episode uses: the name of its client's key or, if the key has
        no name, the client."""
        return self.owner or self.client


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """An episode that was closed: the digest of its outcome, or the reason why it was aborted.

    `holder` is the holder whose share its calls count toward.
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
    sequence_tokens: int = 0  # the longest sequence that it serves, or 0 if it does not say
    constrains: bool = False  # whether it supports structured output
    quarantined: ev.ReplicaQuarantined | None = None  # why it gets no calls, and why the run does not wait for it
    canary: ev.CanaryCheck | None = None  # the check of the version that it serves


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
    """Figures for evaluation episodes whose tokens were all sampled by one policy version.

    `mixed` counts episodes that were claimed at that version but have tokens of several versions. The means are
    computed separately for the two kinds of episodes.
    """

    mixed: RewardStats = msgspec.field(default_factory=RewardStats)


class EvalStats(EvalFigures):
    """The evaluation of one policy version: in total, and by the data set that each episode names."""

    data_sets: dict[str, EvalFigures] = {}


class Counters(msgspec.Struct):
    """Totals since the run began. `calls_merged` does not include `calls_masked`, which are auxiliary calls.

    `aborted_by` counts the failures of aborted episodes, and `ended_by` the budgets that ended episodes used up.
    """

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
    taken: int = 0  # episodes taken by training clients, or for rollout groups
    calls_incomplete: int = 0  # calls whose prompt lacks part of the conversation, such as an image
    aborted_by: dict[FailureKind, int] = {}
    ended_by: dict[FailureKind, int] = {}


class EngineState(msgspec.Struct, kw_only=True):
    name: str
    phase: Phase = Phase.OFFLINE
    phase_since_ns: int = 0
    stage: str = ""  # what it is waiting for, while booting
    failure: str = ""  # why the last run failed, "" if it did not
    suspended: str = ""  # why the run is suspended, "" if it is not
    until_served: bool = False  # whether a suspended run resumes automatically once a replica serves `weights`
    suspensions: int = 0  # how often this run has been suspended
    rest_wanted: bool = False  # whether the trainer of an operations run was asked to free its memory
    asleep: bool = False  # whether the trainer reported its memory free, but has not yet reported its models restored
    rest_since_ns: int = 0  # when sleep or waking was last requested
    resumed_ns: int = 0  # when the operator last resumed the run, or its trainer last woke up
    configured: ev.EngineConfigured | None = None  # the latest configuration
    active: ev.EngineConfigured | None = None  # the configuration of the run
    run: int = 0
    version: int = -1  # the version of the newest weights that are ready
    step: int = 0  # the step of the newest sealed batch
    started: ev.EngineStarted | None = None  # the event with which the run began
    begun: int = 0  # the step at which the run began
    left: list[LeftRun] = []  # the checkpoints that earlier runs have left, oldest first
    kept: list[ev.StepCompleted] = []  # the checkpoints kept of this run, oldest first
    next_episode: int = 1
    open: dict[str, Episode] = {}
    claims: dict[str, tuple[str, ...]] = {}  # claims of open episodes, by claim id
    open_tasks: dict[str, int] = {}  # the number of open training episodes, by the task that their claim named
    open_aged: dict[int, dict[str, int]] = {}  # the same for each value of `oldest` among these episodes
    pool: dict[str, Completed] = {}  # in order of completion
    by_task: dict[str, list[str]] = {}  # the pool's episodes, by task
    pool_bytes: int = 0
    newest_call: int = 0  # the sequence number of the call noted last, in any run
    noted: dict[str, None] = {}  # the ids of the newest CALLS_KEPT calls of the run, oldest first
    calls: StoredCalls = msgspec.field(default_factory=StoredCalls)  # calls of all runs
    batch: ev.BatchReady | None = None  # the sealed batch whose step is not completed; its episodes include their calls
    steps: list[SealedStep] = []  # steps that may have to be repeated, oldest first
    steps_from: list[int] = []  # `calls_from` of the newest sealed steps, in any run: the replay window
    step_failures: int = 0
    step_done: ev.StepCompleted | None = None
    formats: list[ev.ModelRead] = []  # the distinct formats that gateways use for the run's model, oldest first
    trainer: str = ""  # "" until the first trainer has opened the run, and after a trainer has stalled
    trainer_epoch: int = 0
    trainer_since_ns: int = 0
    trainer_patience_s: float = 0.0  # silence after which the trainer counts as gone, or 0 if the trainer gave no time
    stalled: ev.TrainerStalled | None = None  # why there is no trainer
    trainers_lost: int = 0  # trainers replaced in a row while the run waited for the same step or weights
    openings: dict[str, int] = {}  # the epochs of trainers that opened this run, by the id of their command
    weights: ev.WeightsReady | None = None
    weights_before: ev.WeightsReady | None = None
    loaded: set[str] = set()  # names of replicas that serve `weights`
    replicas: dict[str, Replica] = {}
    agreed: set[str] = set()
    rewarded_ns: dict[str, int] = {}  # when each client that may be active last ended an episode
    closed: dict[str, Closed] = {}  # the newest OUTCOMES_KEPT episodes, oldest first
    commands: dict[str, int] = {}  # the runs of executed configure, start, stop and resume commands, by command id
    refused: dict[str, ev.CommandAnswered] = {}  # the refused commands, by command id
    evals: dict[int, EvalStats] = {}
    collected: RolloutFigures = msgspec.field(default_factory=RolloutFigures)  # counted since the last batch was sealed
    rollouts: list[RolloutFigures] = []  # the figures of the newest sealed batches, oldest first
    silent_steps: int = 0  # how many of the newest steps in a row had no group with a signal
    counters: Counters = msgspec.field(default_factory=Counters)
    clients: TrainingClients = msgspec.field(default_factory=TrainingClients, name="tenants")
    trajectories: Trajectories = msgspec.field(default_factory=Trajectories)

    @property
    def clients_take_episodes(self) -> bool:
        """Return whether clients of training operations take the ended episodes of this run (or of the last one)."""
        return self.started is not None and self.started.base != ""

    @property
    def serves_operations(self) -> bool:
        """Return whether an operations run, which builds training clients' models on a base model, is active."""
        return self.clients_take_episodes and self.phase != Phase.OFFLINE

    @property
    def has_policy(self) -> bool:
        """Return whether a run with a job's model, which replicas serve, is active."""
        started = self.started
        return started is not None and not started.base and started.config_digest != "" and self.phase != Phase.OFFLINE

    @property
    def makes_steps(self) -> bool:
        """Return whether our own trainer trains on the run's batches."""
        return self.has_policy and (self.collection.rollout_groups or not self.collection.episode_groups)

    @property
    def plays_episodes(self) -> bool:
        """Return whether clients claim episodes, which are played with a job's policy."""
        return self.has_policy and (self.collection.episode_groups or not self.collection.rollout_groups)

    @property
    def queues_groups(self) -> bool:
        """Return whether batches are formed from a queue of rollout groups, for our own trainer or an outside one.

        An outside trainer needs no job. In a run with a job, the groups come from environments, ended episodes, or
        both.
        """
        return self.phase != Phase.OFFLINE and self.batches_from_queue

    @property
    def batches_from_queue(self) -> bool:
        """Return whether batches of this run (or of the last one) are formed from a queue of rollout groups."""
        started, job = self.started, self.active  # this is read several times for every message
        if started is None or started.base:
            return False
        if not started.config_digest:
            return True
        return job is not None and (job.collection.rollout_groups or job.collection.episode_groups)

    @property
    def groups_episodes(self) -> bool:
        """Return whether ended episodes become rollout groups."""
        return self.active is not None and self.active.collection.episode_groups and self.has_policy

    def groups_needed(self) -> Iterator[QueuedGroup]:
        """Yield the rollout groups that may still be requested, or trained on again."""
        yield from self.trajectories.needed()
        for step in self.steps if self.makes_steps else ():
            yield from step.batch.rollout_groups

    @property
    def collection(self) -> Collection:
        """Return the rules of the running job or, before the first start, of the configured job."""
        source = self.active or self.configured
        return source.collection if source is not None else Collection()

    @property
    def steps_needed(self) -> int:
        """Return how many of the newest sealed steps must be kept because the trainer may still have to execute or
        repeat them."""
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
        """Return whether claims can currently be granted."""
        return self.phase == Phase.ROLLING and not self.suspended

    @property
    def waits_for_operator(self) -> bool:
        """Return whether the run can continue only if its operator gives a command. A replica may end other
        suspensions."""
        return bool(self.suspended) and not self.until_served

    @property
    def owes_weights(self) -> bool:
        """Return whether the run is waiting for its trainer: for a step, for its weights, or for the first weights.

        An operations run waits for its trainer to boot, and to execute waiting operations.
        """
        if self.serves_operations:
            return self.phase == Phase.BOOTING or (self.clients.waiting > 0 and not self.rest_wanted)
        if self.queues_groups and not self.has_policy:
            return False
        return self.batch is not None or self.version < max(self.step, 0)

    @property
    def global_step(self) -> int:
        """Return the newest version or, while a run boots, the version at which it begins."""
        return max(self.version, self.begun)

    def checkpoints_left(self) -> list[LeftRun]:
        """Return the runs that have left checkpoints, oldest first, including the current one."""
        return leave(self.left, "" if self.active is None else self.active.config, self.kept)

    def lacks_format(self, run: int, found: ConversationFormat) -> bool:
        """Return whether this conversation format is not yet recorded for the run, and there is room for it.

        Gateways report formats that the run lacks, and the coordinator records them, so the reports eventually stop.
        (If each gateway's newest report were recorded, two gateways that disagree and keep restarting would add events
        forever.)
        """
        is_current = run == self.run and self.phase != Phase.OFFLINE
        return is_current and len(self.formats) < FORMATS_MAX and all(each.format != found for each in self.formats)

    def episode_number(self, episode: str) -> int | None:
        """Return the episode number in an id that belongs to this engine's current run, or None for any other id."""
        stem, _, number = episode.rpartition("-")
        if stem != f"{self.name}-{self.run}" or not number.isdigit():
            return None
        return int(number)

    def is_over(self, episode: str) -> bool:
        """Return whether this episode is no longer open. Returns False for an id of the current run that has not been
        claimed yet."""
        if episode in self.open:
            return False
        number = self.episode_number(episode)
        return number is None or number < self.next_episode


def episode_id(engine: str, run: int, number: int) -> str:
    return f"{engine}-{run}-{number}"


def engine_of(episode: str) -> str:
    """Return the engine in an episode id. Any other text yields the name of an engine that has no such episode."""
    return episode.rpartition("-")[0].rpartition("-")[0]


CALLS = "calls"  # the stream of recorded calls
ROLLOUT_GROUPS = "trajectories"  # the stream that only rollout groups use


class Hive(msgspec.Struct, kw_only=True):
    epoch: int = 0
    now_ns: int = 0
    pauses: list[Pause] = []  # the newest periods without a leader
    engines: dict[str, EngineState] = {}
    full: dict[str, ev.StorageFilled] = {}  # streams and disks with no room for new work
    aside: list[ev.MessageDeadLettered] = []  # the newest messages that could not be decided
    uncompacted: str = ""  # why the log could not be compacted, "" if it could
    went_back: dict[str, ev.StreamWentBack] = {}  # the latest loss of each stream's end, by stream
    released: int = 0  # messages before this sequence number in the stream `ops` may be purged
    trajectories_released: int = 0  # the same for the stream `trajectories`
    calls_bytes_max: int = 0  # the limit of the stream `calls` when this epoch began, 0 if it has none
    trajectories_bytes_max: int = 0  # the same for the stream `trajectories`
    level: int = 1  # the feature level, by which releases are told apart that must not take part

    @property
    def refusing(self) -> str:
        """Return why no new work is accepted, or "" if it is. Rollout groups are not included, because they have a
        separate stream."""
        return " ".join(filled.why for what, filled in self.full.items() if what != ROLLOUT_GROUPS)

    @property
    def refusing_groups(self) -> str:
        """Return why no rollout groups are accepted, or "" if they are."""
        return " ".join(filled.why for filled in self.full.values())

    def refusing_of(self, engine: EngineState) -> str:
        """Return why an engine accepts no new work, or "" if it does."""
        return self.refusing_groups if engine.queues_groups else self.refusing

    def pinned_calls(self) -> Counter[str]:
        """Return how many bytes of the stream `calls` each holder pins."""
        found: Counter[str] = Counter()
        for engine in self.engines.values():
            found.update({holder: calls.pinned for holder, calls in engine.calls.holders.items()})
        return found

    def why_no_calls(self, holder: str, more: int = 1) -> str:
        """Return why a holder may not store `more` bytes of calls, or "" if the holder may."""
        size = self.calls_bytes_max
        if not size or sum(engine.calls.pinned for engine in self.engines.values()) + more <= SHARED * size:
            return ""
        return why_no_share(self.pinned_calls(), holder, size, more)

    def why_no_groups(self, holder: str, more: int = 1) -> str:
        """Return why a holder may not queue `more` bytes of rollout groups, or "" if the holder may."""
        size, engines = self.trajectories_bytes_max, self.engines.values()
        if not size or sum([each.trajectories.queue.bytes for each in engines]) + more <= SHARED * size:
            return ""
        return queues.why_no_share(self.queued_groups(), holder, size, more)

    def queued_groups(self) -> Counter[str]:
        """Return how many bytes of the stream `trajectories` are taken up by each holder's queued groups."""
        found: Counter[str] = Counter()
        for engine in self.engines.values():
            found.update({name: each.bytes for name, each in engine.trajectories.queue.holders.items()})
        return found

    def groups_released(self, engine: EngineState, holder: str) -> int:
        """Return the sequence number before which the bodies of a holder's rollout groups may have been purged."""
        kept = engine.trajectories.queue.holders.get(holder)
        return self.trajectories_released if kept is None else max(self.trajectories_released, kept.released)

    def released_of_holders(self) -> dict[tuple[str, str], int]:
        """Return the sequence numbers that were released separately for holders, by engine and holder."""
        return {
            (name, holder): kept.released
            for name, engine in self.engines.items()
            for holder, kept in engine.trajectories.queue.holders.items()
        }

    def bodies_needed(self) -> Iterator[tuple[str, str, BodyRef]]:
        """Yield the bodies of rollout groups that must be kept, with the names of their engines and holders.

        The group pushed last is kept as an example to look at, unless the stream of rollout groups is full.
        """
        for name, engine in self.engines.items():
            for group in engine.groups_needed():
                if group.body is not None:
                    yield name, group.holder, group.body
            latest = engine.trajectories.latest
            if latest is None or latest.body is None or ROLLOUT_GROUPS in self.full:
                continue
            if latest.body.first >= self.groups_released(engine, latest.holder):
                yield name, latest.holder, latest.body

    def engine(self, name: str) -> EngineState:
        """Return the state of an engine. If no event has named the engine yet, return an empty state that is not
        stored."""
        return self.engines.get(name) or EngineState(name=name)

    def partners(self, episode: Episode) -> Iterator[Episode]:
        """Yield the other episodes of an open multi-model episode. A single-model episode has none."""
        for engine, name in episode.partners.items():
            partner = self.engine(engine).open.get(name)
            if partner is not None:  # in the middle of folding a decision, a partner may have ended already
                yield partner
