"""Facts: messages in which services report something. They get no answer, unless noted otherwise."""

from bombus.hive.events import (
    Canary,
    CanaryCheck,
    ConversationFormat,
    ModelShape,
    MovedBody,
    NotedCall,
    SavedWeights,
    Weights,
)
from bombus.hive.fates import StepTokens
from bombus.hive.inbox.common import Message
from bombus.hive.records import BodyRef
from bombus.hive.trajectories.queue import QueuedGroup


class Tick(Message, frozen=True, kw_only=True, omit_defaults=True, tag="tick"):
    """The hive's clock (R5): the leader sends a tick every second, and the hive's time advances only with ticks.

    `answered` is the inbox sequence number up to which all answers had been sent by then, and `log_end` is the sequence
    number of the last event. `after_ns` is when the bus server stored the previous tick, from this or an earlier
    leader, or 0 if that is unknown.
    """

    answered: int | None = None
    log_end: int = 0
    after_ns: int = 0


class Touch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="touch"):
    """Activity collected by a gateway: episodes with an open call or a heartbeat, and claims whose answers have
    arrived.

    `sessions` lists the training sessions whose clients have sent heartbeats, `environments` the environments that have
    sent a message, and `clients` the clients whose processes have sent heartbeats. A gateway that accepts heartbeats
    from clients sends a touch without an engine every second, even if the touch is empty: if none arrives, clients may
    be alive but unable to report it.
    """

    episodes: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()  # claim ids
    sessions: tuple[str, ...] = ()
    environments: tuple[int, ...] = ()
    clients: tuple[str, ...] = ()


class BatchSent(Message, frozen=True, kw_only=True, omit_defaults=True, tag="batch.sent"):
    """A gateway has sent a whole batch to the trainer that requested it."""

    run: int
    number: int


class CallRecorded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="call.recorded"):
    run: int
    call: NotedCall


class ModelReadFact(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.read"):
    """A gateway has read the run's model, and reports its conversation format. The gateway sends this again until the
    format is on the log (`EngineState.lacks_format`)."""

    run: int
    gateway: str
    format: ConversationFormat


class ReplicaAlive(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.alive"):
    """A replica's heartbeat, once a second: the replica serves `version` of `run`, or no weights if `version` is -1.

    `sequence_tokens` is the longest sequence that the replica serves, or 0 if the replica does not report it.
    `constrains` says whether the replica supports structured output. `canary` is None if the replica's weights were not
    compared with the trainer's.
    """

    replica: str
    url: str
    run: int = 0
    version: int = -1
    capacity: int = 64
    sequence_tokens: int = 0
    constrains: bool = False
    canary: CanaryCheck | None = None


class ReplicaLeaves(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.leaves"):
    replica: str


class WeightsLoadedFact(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.loaded"):
    """A replica has loaded a policy version.

    `sequence_tokens` is the longest sequence that the replica serves, or 0 if the replica does not report it.
    `constrains` says whether the replica supports structured output. `canary` is None if the replica's weights were not
    compared with the trainer's.
    """

    run: int
    version: int
    replica: str
    sequence_tokens: int = 0
    constrains: bool = False
    canary: CanaryCheck | None = None


class LoadBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load.broke"):
    """A replica has failed several times to load a version. `reason` is one clear sentence.

    The replica keeps trying, and reports `weights.loaded` once it has succeeded.
    """

    run: int
    version: int
    replica: str
    reason: str


class AnswersBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="answers.broke"):
    """Several answers that a gateway has received from a replica cannot be right. `reason` describes the last one.

    `version` is the newest version that the gateway knew.
    """

    run: int
    version: int
    replica: str
    reason: str


class TrainerOpens(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.opens"):
    """A trainer opens a run. This is a command: its answer contains the trainer's epoch (R11).

    A trainer that is silent for `patience_s` counts as gone. If `patience_s` is 0, the trainer need not send
    heartbeats, but counts as gone once work has been waiting for it for a day without any result.
    """

    run: int
    trainer: str
    patience_s: float = 0.0


class TrainerAlive(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.alive"):
    """A trainer's heartbeat. `doing` is its current work, "" while it waits."""

    run: int
    trainer_epoch: int
    doing: str = ""


class TrainerHangs(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.hangs"):
    """A trainer has made no progress in `doing` for `still_s`. Its process exits after sending this."""

    run: int
    trainer_epoch: int
    doing: str
    still_s: float


class StageReached(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stage.reached"):
    run: int
    stage: str


class StepDone(Message, frozen=True, kw_only=True, omit_defaults=True, tag="step.done"):
    run: int
    step: int
    trainer_epoch: int
    checkpoint: str
    checkpoint_digest: str
    metrics: dict[str, float] = {}
    tokens: StepTokens | None = None


class StepBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="step.broke"):
    run: int
    step: int
    trainer_epoch: int
    reason: str
    waits: bool = False  # for disk space: the failure does not count, and the trainer retries until there is enough


class WeightsSaved(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.saved"):
    """A trainer has saved the weights of a step. Step 0 is the model as loaded. `canary` is None if the trainer
    computes none."""

    run: int
    step: int
    trainer_epoch: int
    weights: Weights
    canary: Canary | None = None


class TrainerServes(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.serves"):
    """A trainer has loaded the base model of an operations run, and executes waiting operations from now on."""

    run: int
    trainer_epoch: int


class TrainerRests(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.rests"):
    """A trainer has freed its memory (`asleep`), or has restored all of its models."""

    run: int
    trainer_epoch: int
    asleep: bool = False


class OperationDone(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operation.done"):
    """A trainer has executed an operation, and its result is durable. If this is sent as a command, it is answered.

    `closes` says that the operation ended the model. `made` is the shape of the model if this is the operation that
    created the model, `saved` the checkpoint that was saved, and `loaded` a hash of the checkpoint that was loaded.
    `step` counts the model's optimizer steps. `by_server` says that the failure was the server's fault.
    """

    run: int
    trainer_epoch: int
    model: str
    number: int
    key: str
    result: BodyRef
    failed: bool = False
    closes: bool = False
    step: int = 0
    metrics: dict[str, float] = {}
    made: ModelShape | None = None
    saved: SavedWeights | None = None
    by_server: bool = False
    loaded: str = ""


class OperationBegins(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operation.begins"):
    """A trainer is about to execute an operation, the first one for this model since the trainer opened the run."""

    run: int
    trainer_epoch: int
    model: str
    number: int
    key: str


class ModelAway(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.away"):
    """A trainer cannot rebuild a model, for the reason `why`. If the reason is empty, the trainer can rebuild the model
    again."""

    run: int
    trainer_epoch: int
    model: str
    why: str = ""


class RebuildsModel(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.remakes"):
    """A trainer is about to rebuild a model, or to re-execute the model's operation `number` in order to rebuild it.

    `over` says that the trainer has finished rebuilding the model.
    """

    run: int
    trainer_epoch: int
    model: str
    number: int = 0
    over: bool = False


class CheckpointWritten(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cover.written"):
    """A trainer has written a checkpoint of a model, from which the model can continue after operation `number`."""

    run: int
    trainer_epoch: int
    model: str
    number: int
    folder: str
    digest: str


class OperationsStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operations.stored"):
    """The messages of `ops` before `below` are old enough to be purged if they are no longer needed.

    With `overfull`, messages between needed ones may be purged too. `shrunk` says that the stream has lost its end, and
    now ends at `below`.
    """

    below: int
    overfull: bool = False
    shrunk: bool = False


class TrajectoriesStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trajectories.stored"):
    """The messages of `trajectories` before `below` are old enough to be purged if they are no longer needed.

    `overfull` says that the stream is more than half full, so that messages between needed ones are purged too.
    `shrunk` says that the stream has lost its end, and now ends at `below`.
    """

    below: int
    shrunk: bool = False
    overfull: bool = False


class BodiesStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="bodies.stored"):
    """The leader has stored the bodies of groups that have waited for a long time again. `was` has the old place of
    each body."""

    moved: tuple[MovedBody, ...]
    was: tuple[int, ...]


class EpisodesGrouped(Message, frozen=True, kw_only=True, omit_defaults=True, tag="episodes.grouped"):
    """The leader has made a rollout group from ended episodes of one task, or could not, for the reason `why`."""

    run: int
    episodes: tuple[str, ...]
    group: QueuedGroup | None = None
    why: str = ""


class StorageSeen(Message, frozen=True, kw_only=True, omit_defaults=True, tag="storage.seen"):
    """How full `what` is: `used` of its `size` bytes are in use. The last `reserve` bytes are kept for work in
    progress."""

    what: str
    used: int
    size: int
    reserve: int


class CompactionTried(Message, frozen=True, kw_only=True, omit_defaults=True, tag="compaction.tried"):
    """The leader has removed the events before `below` (0 for none), or could not, for the reason `why`."""

    below: int = 0
    why: str = ""


class EngineBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="engine.broke"):
    """A trainer cannot continue this run. `reason` is one clear sentence.

    A superseded trainer does not end the run of its successor (R11). With `may_pass`, the run is suspended instead of
    ended, because the cause is temporary and does not lie in the job. The run is also suspended if there is no
    `trainer_epoch`, as in messages from replicas of older versions.
    """

    run: int
    reason: str
    trainer_epoch: int | None = None
    may_pass: bool = False


AnyFact = (
    Tick
    | Touch
    | BatchSent
    | CallRecorded
    | ModelReadFact
    | ReplicaAlive
    | ReplicaLeaves
    | WeightsLoadedFact
    | LoadBroke
    | AnswersBroke
    | TrainerOpens
    | TrainerAlive
    | TrainerHangs
    | StageReached
    | StepDone
    | StepBroke
    | WeightsSaved
    | TrainerServes
    | TrainerRests
    | OperationDone
    | OperationBegins
    | ModelAway
    | RebuildsModel
    | CheckpointWritten
    | OperationsStored
    | TrajectoriesStored
    | BodiesStored
    | EpisodesGrouped
    | StorageSeen
    | CompactionTried
    | EngineBroke
)
