"""The facts of a hive, in the past tense. All state is the fold of these.

Events only ever gain fields: a new field gets a default, and no field is renamed or given another meaning.
Logs of every released version are in tests/logs and must always fold.
"""

from enum import StrEnum
from typing import Any

import msgspec

from bombus.errors import Code
from bombus.hive.decoding import decoded
from bombus.hive.records import BodyRef, CallRef, CallStatus
from bombus.hive.trajectories.queue import QueuedGroup

HIVE = "_hive"  # the engine token of events that belong to no engine


class EpisodeType(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class AbortReason(StrEnum):
    CLIENT = "client"
    IDLE = "idle"
    UNCONFIRMED = "unconfirmed"  # the claim's answer never reached a live connection
    ENGINE_STOPPED = "engine_stopped"
    SUPERSEDED = "superseded"  # the drain deadline passed
    INFRA = "infra"  # an infrastructure failure: no reward, not in its group's statistics
    MULTI_MODEL = "joint"  # another episode of its multi-model episode was aborted
    SILENT = "silent"  # its client, which touches, was not heard from for too long
    CROWDED = "crowded"  # its key pinned more than its share of a full stream of calls


class DropReason(StrEnum):
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    OVERFLOW = "overflow"
    UNTAKEN = "untaken"  # of a run of operations: its client did not take it in time
    UNFIT = "unfit"  # of a run of trajectories: it cannot be a rollout group


class RunKind(StrEnum):
    """How older logs told runs apart. `base`, `config_digest` and the job's collection now say the same."""

    EPISODES = "episodes"
    OPERATIONS = "operations"
    TRAJECTORIES = "trajectories"


class EnvironmentEnd(StrEnum):
    """Why an environment has left."""

    DISCONNECTED = "disconnected"  # it said so
    SILENT = "silent"  # nothing was heard of it


class SessionEnd(StrEnum):
    """Why a session has ended."""

    FINISHED = "finished"  # its client said so
    IDLE = "idle"  # nothing was heard from its client


class ModelEnd(StrEnum):
    """Why a model has ended."""

    ENDED = "ended"  # by an operation
    NOT_CREATED = "not_created"  # its first operation failed
    NOT_SAVED = "not_saved"  # its session ended, and it could not be saved
    RUN_OVER = "run_over"


class Method(StrEnum):
    """The rule for when a batch is complete. A job may name a method without its prefix."""

    ENOUGH_EPISODES = "rollout_until_finish_enough_episodes"
    ENOUGH_TASKS = "rollout_until_finish_enough_tasks"
    ENOUGH_NON_DUMMY_TASKS = "rollout_until_finish_enough_non_dummy_tasks"
    ANY_CLIENT_AGREES = "rollout_until_any_client_agree_sync_weight"
    ALL_CLIENTS_AGREE = "rollout_until_all_clients_agree_sync_weight"


class OperationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of training operations on an engine, and for how long what nobody uses is kept."""

    sessions_max: int = 256
    models_max: int = 16
    waiting_max: int = 256  # operations of one model
    operations_max: int = 4096  # of one model, with those that were executed and no recovery checkpoint has
    bodies_bytes_max: int = 512 << 20  # of operations that wait, and of those that no checkpoint covers
    results_bytes_max: int = 256 << 20  # beyond which the oldest results are dropped
    results_s: float = 3600.0  # for which results can be read after their session has ended
    session_idle_s: float = 3600.0  # of a session that names no other time
    run_idle_s: float = 300.0  # after which a run without a model ends
    checkpoints_max: int = 1000
    executions_max: int = 3  # of one operation, whose trainers end before it has a result
    episodes_s: float = 86_400.0  # for which an ended episode waits to be taken


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job that the coordinator needs: how episodes are handed out and made into batches."""

    method: Method = Method.ENOUGH_TASKS
    batch_size: int = 32
    num_repeat: int = 4
    max_open_claims: int = 128
    max_pool_episodes: int = 9999
    max_pool_bytes: int = 2 << 30
    max_staleness: int = 0
    max_carry_staleness: int = 1
    drain_s: float = 300.0
    boot_s: float = 1800.0
    sync_s: float = 600.0
    agreed_sync_s: float = 6.0  # the shortest sync, with the methods by agreement
    client_silence_s: float = 15.0  # after which the episodes of a client that touches are taken away
    max_step_failures: int = 3
    replay_steps: int = 1000  # steps whose calls are kept for replay while there is room (R12)
    resume: str = "never"  # which checkpoint a new run begins at: never, auto, or "from VERSION"
    checkpoints_kept: int = 2
    operations: OperationLimits = msgspec.field(default=OperationLimits(), name="tenancy")
    # The job trains what environments have scored.
    rollout_groups: bool = msgspec.field(default=False, name="scored_groups")
    episode_groups: bool = False  # its episodes become rollout groups, and batches are made of these

    @property
    def episode_target(self) -> int:
        return self.batch_size * self.num_repeat

    @property
    def trained_staleness(self) -> int | None:
        """Return the age beyond which no token is trained (R14). None when synchronous: the coordinator enforces it."""
        return self.max_staleness or None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A fact on the log. `at_ns` is the time of the decided inbox message (R5) and never decreases."""

    at_ns: int = 0
    engine: str = HIVE


class EpochOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="epoch.opened"):
    """Another coordinator leads. The streams `calls` and `trajectories` have these limits then, 0 for none."""

    epoch: int
    leader: str
    calls_bytes_max: int = 0
    trajectories_bytes_max: int = 0


class LeadingPaused(Event, frozen=True, kw_only=True, omit_defaults=True, tag="leading.paused"):
    """Nobody led from `since_ns` until now: there was no leader, it stood still, or the bus was away."""

    since_ns: int


class EngineConfigured(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.configured"):
    config: str  # the whole job as canonical JSON
    config_digest: str
    collection: Collection
    model: str
    command: str = ""


class Beginning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint of `step` of an earlier `run`, at which a run begins.

    `changed` are the settings of the trainer that were others then, with both values.
    """

    run: int
    step: int
    checkpoint: str
    checkpoint_digest: str
    changed: tuple[str, ...] = ()


class EngineStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.started"):
    """A run has started. It `begins` at a checkpoint, or at the model as loaded.

    `anew` says why it is the latter although an earlier run has left checkpoints. One that serves training operations
    has a `base`, and one without a `config_digest` hands out its batches to an outside trainer.
    """

    run: int
    config_digest: str
    command: str = ""
    begins: Beginning | None = None
    anew: str = ""
    run_kind: RunKind = RunKind.EPISODES  # read from older logs, never written: the default says nothing
    base: str = ""


class EngineProgressed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.progressed"):
    """The engine reached a stage of booting, shown as `engine_status_detail`."""

    run: int
    stage: str


class EngineBooted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.booted"):
    run: int


class EngineStopped(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.stopped"):
    run: int
    command: str = ""


class EngineFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.failed"):
    run: int
    reason: str


class EngineSuspended(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.suspended"):
    """The run cannot go on for now. It keeps all it has, and waits for its operator to resume or stop it.

    With `until_served` it also goes on by itself, once a replica serves its newest weights.
    """

    run: int
    reason: str
    until_served: bool = False


class EngineResumed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.resumed"):
    """A suspended run tries again: its operator said so by `command`, or a replica serves its weights again.

    The deadlines of its phase start again. After a command, quarantined replicas try again at once.
    """

    run: int
    command: str = ""


class CommandAnswered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="command.answered"):
    """A command to configure, start, stop or resume changed nothing: it was refused for `why`, or there was no need.

    The same command may come again much later, under another leader. It gets the same answer then, and does nothing.
    """

    command: str
    run: int
    code: Code | None = None  # None: it was not refused
    why: str = ""


class ConversationFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a gateway writes conversations with a model and reads its turns.

    `template` is a digest of what decides prompts. `tool_calls` and `reasoning` are the names of syntaxes, "text" where
    they stay text.
    """

    template: str
    tool_calls: str
    reasoning: str


class ModelRead(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.read"):
    """A gateway has read the run's model, in a way in which no gateway had read it in this run."""

    run: int
    gateway: str
    format: ConversationFormat


class RollingStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rolling.started"):
    run: int
    version: int


class RollingClosed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rolling.closed"):
    run: int


class SyncingStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="syncing.started"):
    run: int


class SyncAgreed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="sync.agreed"):
    run: int
    client: str


class SamplerWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the calls of an episode sample from in a run of operations: an adapter, or the base where all are "".

    `checkpoint` is its `MODEL/USE/NAME`, `address` the hash of its file of weights, which is in `folder`.
    """

    checkpoint: str = ""
    address: str = ""
    folder: str = ""


class EpisodeClaimed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.claimed"):
    """One claim was granted: one episode or a whole group. `version` is the policy version at the claim.

    `owner` is the name of the client's key, "" where it has none, and `admin` says that it is the hive's own. Only in a
    run of operations is there a `sampler`. Those of multi-model episodes have `partners` on other engines, which are
    claimed in the same decision: by engine, in the order of `episodes`. `touches`: the client shows that it lives for
    as long as it holds them.
    """

    run: int
    claim: str
    client: str
    episodes: tuple[str, ...]
    type: EpisodeType = EpisodeType.TRAIN
    discard_timeout_s: float = 240.0
    version: int = 0
    task_hint: str = ""
    owner: str = ""
    sampler: SamplerWeights | None = None
    partners: dict[str, tuple[str, ...]] = {}
    touches: bool = False
    admin: bool = False


class NotedCall(msgspec.Struct, frozen=True, array_like=True):
    """A recorded call. `oldest` and `newest` are the policy versions of its sampled tokens."""

    episode: str
    ref: CallRef
    prompt_tokens: int
    completion_tokens: int
    oldest: int
    newest: int
    status: CallStatus = CallStatus.COMPLETE
    late: bool = False
    merged: bool = False  # it extended an earlier call of its episode token for token
    masked: bool = False  # an auxiliary call of its harness, which the job does not train
    incomplete: bool = False  # a part of its conversation, such as an image, was left out of its prompt
    bytes: int = 0  # that its record takes in the stream `calls`


class CallsNoted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="calls.noted"):
    run: int
    calls: tuple[NotedCall, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an episode as its client reported it, and the calls that belong to it from then on (R7).

    On the log it has no `calls`: they are those that were noted before it as complete, which the fold has. Events of
    older versions list them. `call_rewards`, when given, has a reward for each that is not masked, in order, and
    `reward` is their mean. `digest` is that of the report: for a multi-model episode, of the results of all its
    episodes. `data_set` names the set that the task is of, "" where the client does not say.
    """

    episode: str
    task: str
    reward: float
    digest: bytes
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    calls: tuple[CallRef, ...] = ()
    completion_tokens: int = 0
    oldest: int = 0
    data_set: str = ""


class EpisodeEnded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.ended"):
    run: int
    client: str
    type: EpisodeType = EpisodeType.TRAIN
    version: int = 0
    outcomes: tuple[Outcome, ...]


class EpisodeAborted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.aborted"):
    run: int
    episodes: tuple[str, ...]
    reason: AbortReason
    detail: str = ""


class GroupDropped(Event, frozen=True, kw_only=True, omit_defaults=True, tag="group.dropped"):
    """Episodes left the pool untrained."""

    run: int
    reason: DropReason
    tasks: tuple[str, ...]
    episodes: tuple[str, ...]


class EpisodesTaken(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episodes.taken"):
    """Ended episodes of a run of operations left the pool: their client has their tokens."""

    run: int
    client: str
    episodes: tuple[str, ...]


class PoolCleared(Event, frozen=True, kw_only=True, omit_defaults=True, tag="pool.cleared"):
    run: int
    reason: DropReason
    episodes: int
    bytes: int


class BatchEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An episode of a batch.

    On the log it has neither `calls` nor `call_rewards`, which would make a large batch too large for one message: the
    fold takes them from the pool. Events of older versions have them.
    """

    episode: str
    reward: float
    calls: tuple[CallRef, ...] = ()
    call_rewards: tuple[float, ...] | None = None


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    episodes: tuple[BatchEpisode, ...]


class BatchReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.ready"):
    """The batch of optimizer step `step` is sealed, which trains policy version `step - 1` into version `step`.

    In a run of trajectories it is `taken` from the queue of rollout groups, by their numbers. On the log it does not
    have them as `rollout_groups`: the fold takes them from the queue.
    """

    run: int
    step: int
    groups: tuple[BatchGroup, ...]
    config_digest: str
    taken: tuple[int, ...] = ()
    rollout_groups: tuple[QueuedGroup, ...] = msgspec.field(default=(), name="scored")


class TrainerOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.opened"):
    """A trainer has opened the run. It is taken for gone after `patience_s` of silence; 0: it named none."""

    run: int
    trainer: str
    trainer_epoch: int
    command: str = ""
    patience_s: float = 0.0


class TrainerStalled(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.stalled"):
    """A trainer has made no progress for `still_s`, or was not heard from for as long. Its epoch is over (R11).

    `doing` is what it worked on, "" when it waited. `failures` counts this as a failure of the step, if it owed one.
    """

    run: int
    trainer: str
    trainer_epoch: int
    doing: str
    still_s: float
    silent: bool = False
    failures: int = 0


class StepCompleted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="step.completed"):
    """A step was completed: this is its one attempt that counts (R11)."""

    run: int
    step: int
    trainer_epoch: int
    checkpoint: str
    checkpoint_digest: str
    metrics: dict[str, float] = {}


class StepFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="step.failed"):
    run: int
    step: int
    trainer_epoch: int
    reason: str
    failures: int


OBJECTS = "object:"


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a stored policy version: a folder, or `object:` and a prefix of object names (R15).

    `bytes` and `sha256` are always those of the whole safetensors file; `tokenizer` is the name of an object. With
    format `safetensors-delta` only the changes since version `base` are stored, in a file of `delta_bytes` and
    `delta_sha256`. With format `safetensors-lora` it is an adapter, to be added to the full copy `adapter_of`.
    """

    where: str
    format: str = "safetensors"
    bytes: int = 0
    sha256: str = ""
    tokenizer: str = ""
    base: int = -1
    delta_bytes: int = 0
    delta_sha256: str = ""
    adapter_of: "Weights | None" = None

    @property
    def objects(self) -> str:
        """Return the prefix of its objects' names, "" when it is in a folder."""
        return self.where.removeprefix(OBJECTS) if self.where.startswith(OBJECTS) else ""


class WeightsReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.ready"):
    run: int
    version: int
    weights: Weights


class WeightsLoaded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.loaded"):
    """`sequence_tokens` is the longest sequence that the replica serves, 0 where it does not say.

    `constrains`: whether it can hold answers to a form.
    """

    run: int
    version: int
    replica: str
    sequence_tokens: int = 0
    constrains: bool = False


class ReplicaJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.joined"):
    replica: str
    url: str
    capacity: int = 64


class ReplicaLeft(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.left"):
    replica: str
    reason: str = ""


class ReplicaQuarantined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.quarantined"):
    """A replica cannot load the newest weights. It goes on trying.

    Until it has loaded, it gets no calls and nothing waits for it. A new run and a command to resume release it too.
    With `answers` it has loaded them, and its answers are wrong: it serves again with other weights, or when it starts
    anew.
    """

    run: int
    version: int
    replica: str
    reason: str
    answers: bool = False


# ---- training operations --------------------------------------------------------------------------------------


class SessionOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.opened"):
    """A client of training operations has come. It is taken for gone after `idle_s` without a sign of life.

    `owner` is the name of its key, "" where it has none; `dialect` is what the gateway wants to remember of it.
    One `for_model` ends when it has no model any more, or gets none. One of the hive's own `admin` key has a share of
    its own.
    """

    session: str
    idle_s: float
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False


class SessionEnded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.ended"):
    """A session takes no more operations. Its models end, each after what waits for it."""

    session: str
    reason: SessionEnd
    detail: str = ""
    save: bool = True


class SessionForgotten(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.forgotten"):
    """The results of a session that has ended can no longer be read."""

    session: str


class SamplingBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="sampling.begun"):
    """A session samples from what run `run` serves, which goes on until the session has ended, also without a model."""

    run: int
    session: str


class ModelOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.opened"):
    """A model takes operations, of which the first one, accepted with this event, makes it from `base`.

    `metadata` is its client's.
    """

    run: int
    model: str
    session: str
    base: str
    metadata: dict[str, str] = {}


class ModelClosed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.closed"):
    """A model is gone. What waits for it will not be executed, for the reason `why`."""

    run: int
    model: str
    reason: ModelEnd
    why: str = ""


class ModelSuspended(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.suspended"):
    """A trainer cannot make a model again, for the reason `why`: what came to it waits, and other models go on.

    Without a reason it goes on too.
    """

    run: int
    model: str
    why: str = ""


class ModelRebuilding(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.remaking"):
    """A trainer makes a model again, from its recovery checkpoint and by what was executed since.

    Where a trainer before it has begun that and has ended, each `number` is said before it is executed again, the
    checkpoint's for the checkpoint itself. What several trainers have not survived is left alone from then on
    (`OperationLimits.executions_max`). `over`: the trainer has lived through it.
    """

    run: int
    model: str
    trainer_epoch: int
    number: int = 0
    over: bool = False


class OperationAccepted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operation.accepted"):
    """An operation waits for its model, after all that were accepted before it: it is the `number`th of the model.

    Its body is in the stream `ops`. Without one it ends the model of a session that has ended, and saves it as
    `save_as` first, unless that is "". One that is `passive` leaves the model as it is, such as a forward pass. The
    client's `metadata` is for what it saves. A saved model that it `reads`, named by its `kept_id`, stays until it was
    executed.
    """

    run: int
    model: str
    number: int
    key: str
    op: str
    body: BodyRef | None = None
    passive: bool = False
    save_as: str = ""
    metadata: dict[str, str] = {}
    reads: str = ""

    @property
    def operation(self) -> str:
        """Return the operation's id."""
        return f"{self.model}:{self.key}"


class OperationBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operation.begun"):
    """A trainer begins to execute an operation, the first one of its model that it executes.

    One that was begun several times by trainers that have ended fails (`OperationLimits.executions_max`).
    """

    run: int
    model: str
    number: int
    key: str
    trainer_epoch: int


class AdapterShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapter of a model, as lists of models and checkpoints tell it, with the seed that it was drawn from."""

    rank: int
    alpha: float
    parts: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    seed: int | None = None


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was made by the operation that creates a model. Without an adapter all weights are trained."""

    adapter: AdapterShape | None = None
    parameters: int = 0


class OperationCompleted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operation.completed"):
    """An operation was executed: this is its one result (R17).

    `step` counts the model's optimizer steps. `made` is what the first operation of a model has made, and `loaded` is a
    hash of the checkpoint that was loaded. `by_server`: it has failed by the server's fault.
    """

    run: int
    model: str
    number: int
    key: str
    op: str
    trainer_epoch: int
    result: BodyRef
    failed: bool = False
    step: int = 0
    metrics: dict[str, float] = {}
    made: ModelShape | None = None
    by_server: bool = False
    loaded: str = ""


class ModelCheckpointed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.covered"):
    """A trainer has written a checkpoint of a model from which it can go on after operation `number`."""

    run: int
    model: str
    number: int
    trainer_epoch: int
    folder: str
    digest: str


class SavedWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint that a client asked for by `name`. `use` is what it is for: training, sampler or external.

    `address` is a hash of the weights. It is removed after `ttl_s`, 0 for never.
    """

    use: str
    name: str
    folder: str
    address: str
    size_bytes: int = 0
    ttl_s: float = 0.0


class WeightsKept(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.kept"):
    """A model was saved for its client. One of the same use and name is replaced. It outlives its model and its run.

    It comes again where what is said of it has changed: `saved_ns` is when it was saved then. `public` is a mark that
    its client may give it, after which every client may read it. `owner` is its session's, the name of a key.
    """

    run: int
    model: str
    session: str
    base: str
    saved: SavedWeights
    step: int = 0
    adapter: AdapterShape | None = None
    metadata: dict[str, str] = {}
    public: bool = False
    saved_ns: int = 0
    owner: str = ""


class WeightsRemoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.removed"):
    """A saved model is not to be used any more, and its folder can go: its client said so, or its time is over."""

    model: str
    use: str
    name: str
    expired: bool = False


class EndpointAdded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="endpoint.added"):
    """An inference server elsewhere gets the weights that a client of training operations puts in sync.

    `owner` is the name of the key of the client that registered it.
    """

    host: str
    port: int
    world_size: int = 1
    owner: str = ""


class EndpointRemoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="endpoint.removed"):
    host: str
    port: int


class RestAsked(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rest.asked"):
    """The trainer of a run of operations is to free its memory (`asleep`), or to go on. What comes meanwhile waits."""

    run: int
    asleep: bool = False


class RestReached(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rest.reached"):
    """The trainer has freed its memory (`asleep`), or has all of its models again, as they were."""

    run: int
    trainer_epoch: int
    asleep: bool = False


class ModelFloor(msgspec.Struct, frozen=True, array_like=True):
    """The sequence of `ops` before which nothing of a model is needed."""

    engine: str
    model: str
    below: int


class OperationsReleased(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operations.released"):
    """The messages of `ops` before `below` may be purged, and those of some models before a floor of their own.

    An operation whose body is older is refused: its sender stores the body again.
    """

    below: int
    models: tuple[ModelFloor, ...] = ()


# ---- rollout groups --------------------------------------------------------------------------------------


class TrainerRegistered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.registered"):
    """A trainer of its own takes the batches of this run, of `batch_size` sequences each.

    The other settings are passed on to environments, and to whoever tracks the run. `owner` is whose key registered it,
    which takes the batches: its name, or `bombus.hive.shares.ADMIN`.
    """

    run: int
    trainer: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    wandb_group: str = ""
    wandb_project: str = ""
    owner: str = ""


class BatchesBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batches.begun"):
    """The trainer has asked for its first batch: environments can join from now on."""

    run: int


class EnvironmentJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="environment.joined"):
    """An environment sends groups. One that fell silent and is heard of again joins under the same number.

    `minimum` is the part of each batch that it asks for, and `owner` the name of its client's key. `admin`: it is the
    hive's own.
    """

    environment: int
    desired_name: str
    name: str
    max_tokens: int
    weight: float
    group_size: int
    minimum: float | None = None
    owner: str = ""
    admin: bool = False


class EnvironmentLeft(Event, frozen=True, kw_only=True, omit_defaults=True, tag="environment.left"):
    """An environment has left. Its groups stay."""

    environment: int
    reason: EnvironmentEnd


class GroupsPushed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.pushed"):
    """Rollout groups wait for a batch, in this order after all that were pushed before.

    Their bodies are in the stream `trajectories`. A push of the same `key` soon after is the same one. A group that was
    made of ended `episodes` of this run takes them from the pool, and was queued at this policy `version`.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""
    episodes: tuple[str, ...] = ()
    version: int = -1  # -1: nobody made it of episodes, or an older release did


class BatchHandedOut(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.handed_out"):
    """These groups are the run's batch `number`, from 1. Until it is delivered, whoever asks gets it."""

    run: int
    number: int
    groups: tuple[int, ...]


class BatchDelivered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.delivered"):
    """The whole batch was sent to the trainer that asked for it: the next time it gets another one."""

    run: int
    number: int


class GroupsGivenUp(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.given_up"):
    """No batch has these groups any more: their bodies are lost, they have waited too long, or their key kept too much.

    They were in the batch `number` that was handed out, whose other groups are queued again; in that of our own
    trainer's step of this number, which is made without them; or, if it is 0, in the queue.
    """

    run: int
    number: int
    groups: tuple[int, ...]
    why: str


class MovedBody(msgspec.Struct, frozen=True, array_like=True):
    """Where the body of a group is now that is queued, or in the last batch."""

    group: int
    body: BodyRef


class BodiesMoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="bodies.moved"):
    """The bodies of groups that have waited for long were stored once more, so that what is before them can go."""

    moved: tuple[MovedBody, ...]


class GroupsReset(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.reset"):
    """All groups and environments are forgotten."""


class HolderFloor(msgspec.Struct, frozen=True, array_like=True):
    """The sequence of `trajectories` before which nothing of a holder's groups on an engine is needed."""

    engine: str
    holder: str
    below: int


class TrajectoriesReleased(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trajectories.released"):
    """The messages of `trajectories` before `below` may be purged, and those of some holders before their own floors.

    A group whose body is older is refused.
    """

    below: int
    holders: tuple[HolderFloor, ...] = ()


class MessageDeadLettered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="message.set_aside"):
    """An inbox message could not be decided, by a fault of bombus, and the next one was read."""

    message: str  # its kind
    about: str  # the engine that it is about
    id: str
    why: str


class StorageFilled(Event, frozen=True, kw_only=True, omit_defaults=True, tag="storage.filled"):
    """Less than the reserve of `what`, a stream or the disk, is left: new work is refused until `storage.freed`."""

    what: str
    used: int
    size: int
    why: str


class StorageFreed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="storage.freed"):
    what: str
    used: int
    size: int


class LogCompacted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="log.compacted"):
    """The events before `below` were removed, which two verified snapshots make up for.

    With an archive, they were written to it first. 0: nothing had to be removed any more.
    """

    below: int


class CompactionFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="compaction.failed"):
    """The log is over 60 % full, and nothing could be removed from it, for a reason that its operator can mend."""

    why: str


class StreamWentBack(Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.went_back"):
    """The stream `what` has lost its end: it had message `known`, and has kept those up to `kept`.

    The hive goes on with what is there. Of `inbox`, whatever came after `kept` is decided from here on. Of `calls`,
    `needed` of the lost ones belong to episodes that are open or were still to be trained.
    """

    what: str
    known: int
    kept: int
    needed: int = 0


AnyEvent = (
    EpochOpened
    | LeadingPaused
    | EngineConfigured
    | EngineStarted
    | EngineProgressed
    | EngineBooted
    | EngineStopped
    | EngineFailed
    | EngineSuspended
    | EngineResumed
    | CommandAnswered
    | ModelRead
    | RollingStarted
    | RollingClosed
    | SyncingStarted
    | SyncAgreed
    | EpisodeClaimed
    | CallsNoted
    | EpisodeEnded
    | EpisodeAborted
    | GroupDropped
    | EpisodesTaken
    | PoolCleared
    | BatchReady
    | TrainerOpened
    | TrainerStalled
    | StepCompleted
    | StepFailed
    | WeightsReady
    | WeightsLoaded
    | ReplicaJoined
    | ReplicaLeft
    | ReplicaQuarantined
    | SessionOpened
    | SessionEnded
    | SessionForgotten
    | SamplingBegun
    | ModelOpened
    | ModelClosed
    | ModelSuspended
    | ModelRebuilding
    | OperationAccepted
    | OperationBegun
    | OperationCompleted
    | ModelCheckpointed
    | WeightsKept
    | WeightsRemoved
    | EndpointAdded
    | EndpointRemoved
    | RestAsked
    | RestReached
    | OperationsReleased
    | TrainerRegistered
    | BatchesBegun
    | EnvironmentJoined
    | EnvironmentLeft
    | GroupsPushed
    | BatchHandedOut
    | BatchDelivered
    | GroupsReset
    | GroupsGivenUp
    | BodiesMoved
    | TrajectoriesReleased
    | StorageFilled
    | StorageFreed
    | MessageDeadLettered
    | LogCompacted
    | CompactionFailed
    | StreamWentBack
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def kind_of(tagged: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name on the wire of a kind of events, messages or operations, such as `episode.claimed`."""
    kind = tagged.__struct_config__.tag
    assert isinstance(kind, str)
    return kind


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(body: bytes) -> AnyEvent:
    """Decode an event. Raises `msgspec.MsgspecError` when this version cannot read the bytes."""
    return decoded(_decoder.decode, body)
