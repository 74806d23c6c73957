"""Facts that services report, which get no answer."""

from bombus.hive.events import ConversationFormat, ModelShape, MovedBody, NotedCall, SavedWeights, Weights
from bombus.hive.inbox.common import Message
from bombus.hive.records import BodyRef
from bombus.hive.trajectories.queue import QueuedGroup


class Tick(Message, frozen=True, kw_only=True, omit_defaults=True, tag="tick"):
    """The clock of the hive (R5): the leader sends one every second, and time passes only by these.

    `answered` is the inbox sequence up to which all answers had been sent by then, `log_end` the last event, and
    `after_ns` when the server stored the tick before this one, whoever led then; 0: not known.
    """

    answered: int | None = None
    log_end: int = 0
    after_ns: int = 0


class Touch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="touch"):
    """Activity collected by a gateway: episodes with an open call or a heartbeat, and claims whose answer arrived.

    `sessions` are those of training operations whose clients have shown that they live, `environments` those that were
    heard of, and `clients` those whose processes have shown that they live. A gateway that hears clients sends one
    of no engine each second, empty too: while none comes, no client can show anything.
    """

    episodes: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()  # claim ids
    sessions: tuple[str, ...] = ()
    environments: tuple[int, ...] = ()
    clients: tuple[str, ...] = ()


class BatchSent(Message, frozen=True, kw_only=True, omit_defaults=True, tag="batch.sent"):
    """A gateway has sent all of a batch to the trainer that asked for it."""

    run: int
    number: int


class CallRecorded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="call.recorded"):
    run: int
    call: NotedCall


class ModelReadFact(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.read"):
    """A gateway has read the run's model. It is sent until the format is on the log (`EngineState.lacks_format`)."""

    run: int
    gateway: str
    format: ConversationFormat


class ReplicaAlive(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.alive"):
    """A replica's heartbeat, once a second: it serves `version` of `run`, or nothing if that is -1.

    `sequence_tokens` is the longest sequence that it serves, 0 where it does not say. `constrains`: whether it supports
    structured output.
    """

    replica: str
    url: str
    run: int = 0
    version: int = -1
    capacity: int = 64
    sequence_tokens: int = 0
    constrains: bool = False


class ReplicaLeaves(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.leaves"):
    replica: str


class WeightsLoadedFact(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.loaded"):
    """`sequence_tokens` is the longest sequence that the replica serves, 0 where it does not say.

    `constrains`: whether it supports structured output.
    """

    run: int
    version: int
    replica: str
    sequence_tokens: int = 0
    constrains: bool = False


class LoadBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load.broke"):
    """A replica has failed to load a version several times, for a reason given in one clear sentence.

    It keeps trying, and reports `weights.loaded` when it has succeeded.
    """

    run: int
    version: int
    replica: str
    reason: str


class AnswersBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="answers.broke"):
    """A gateway has got several answers from a replica that cannot be right; the last one for this reason.

    `version` is the newest one that the gateway knew.
    """

    run: int
    version: int
    replica: str
    reason: str


class TrainerOpens(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.opens"):
    """A trainer opens a run. This is a command: its answer has the trainer epoch (R11).

    A trainer of which nothing is heard for `patience_s` is taken for gone. 0: it may send no heartbeats, and is taken
    for gone after a day in which work waited for it and nothing came of it.
    """

    run: int
    trainer: str
    patience_s: float = 0.0


class TrainerAlive(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.alive"):
    """A trainer's heartbeat. `doing` says what it works on, "" while it waits."""

    run: int
    trainer_epoch: int
    doing: str = ""


class TrainerHangs(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.hangs"):
    """A trainer has made no progress in `doing` for `still_s`. Its process ends after this message."""

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


class StepBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="step.broke"):
    run: int
    step: int
    trainer_epoch: int
    reason: str
    waits: bool = False  # for room on a disk: it does not count, and the trainer tries again until there is some


class WeightsSaved(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.saved"):
    """A trainer has saved the weights of a step. Step 0 is the model as loaded."""

    run: int
    step: int
    trainer_epoch: int
    weights: Weights


class TrainerServes(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.serves"):
    """A trainer has loaded the base of a run of operations, and takes what waits."""

    run: int
    trainer_epoch: int


class TrainerRests(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.rests"):
    """A trainer has freed its memory (`asleep`), or has all of its models again."""

    run: int
    trainer_epoch: int
    asleep: bool = False


class OperationDone(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operation.done"):
    """A trainer has executed an operation, and its result is durable. As a command it is answered once that is decided.

    `closes`: the model is gone after it. `made` is what the first operation of a model has made, `saved` what one that
    saves has written, `loaded` a hash of the checkpoint that one has loaded; `step` counts the model's optimizer steps.
    `by_server`: it has failed by the server's fault.
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
    """A trainer is about to execute an operation, the first one of its model since it has opened the run."""

    run: int
    trainer_epoch: int
    model: str
    number: int
    key: str


class ModelAway(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.away"):
    """A trainer cannot make a model again, and says `why`; without a reason it can."""

    run: int
    trainer_epoch: int
    model: str
    why: str = ""


class RebuildsModel(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model.remakes"):
    """A trainer is about to make a model again, or to execute its operation `number` again for that.

    `over`: it has lived through making the model again.
    """

    run: int
    trainer_epoch: int
    model: str
    number: int = 0
    over: bool = False


class CheckpointWritten(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cover.written"):
    """A trainer has written a checkpoint of a model, from which it can continue after operation `number`."""

    run: int
    trainer_epoch: int
    model: str
    number: int
    folder: str
    digest: str


class OperationsStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operations.stored"):
    """The messages of `ops` before `below` have been there for long: those that nothing needs can go.

    With `overfull` those between needed ones can go too. `shrunk`: the stream has lost its end, and `below` is where it
    ends now.
    """

    below: int
    overfull: bool = False
    shrunk: bool = False


class TrajectoriesStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trajectories.stored"):
    """The messages of `trajectories` before `below` have been there for long: those that nothing needs can go.

    `overfull`: the stream is more than half full, so that those in between are purged too. `shrunk`: the stream has
    lost its end, and `below` is where it ends now.
    """

    below: int
    shrunk: bool = False
    overfull: bool = False


class BodiesStored(Message, frozen=True, kw_only=True, omit_defaults=True, tag="bodies.stored"):
    """The leader has stored the bodies of groups that have waited for long once more. `was` is where each was."""

    moved: tuple[MovedBody, ...]
    was: tuple[int, ...]


class EpisodesGrouped(Message, frozen=True, kw_only=True, omit_defaults=True, tag="episodes.grouped"):
    """The leader has made a rollout group of ended episodes of one task, or says `why` it could not."""

    run: int
    episodes: tuple[str, ...]
    group: QueuedGroup | None = None
    why: str = ""


class StorageSeen(Message, frozen=True, kw_only=True, omit_defaults=True, tag="storage.seen"):
    """`used` of the `size` bytes of `what` are in use. The last `reserve` bytes are kept for work in progress."""

    what: str
    used: int
    size: int
    reserve: int


class CompactionTried(Message, frozen=True, kw_only=True, omit_defaults=True, tag="compaction.tried"):
    """The leader has removed the events before `below`, 0 for none; or it could not, for the reason `why`."""

    below: int = 0
    why: str = ""


class EngineBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="engine.broke"):
    """A trainer cannot continue this run, for a reason given in one clear sentence.

    One that was superseded does not end the run of its successor (R11). With `may_pass` the run is suspended rather
    than ended: the cause lies in the moment, not in the job. So it is without `trainer_epoch`, as replicas of older
    versions send it.
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
