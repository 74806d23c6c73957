"""The messages sent to a hive: commands, which get an answer, and facts, which get none.

All of them go through one stream, the inbox, in one order. Only the coordinator decides what follows from them (R1).
"""

from typing import Any

import msgspec

from bombus.errors import Code
from bombus.hive.decoding import decoded
from bombus.hive.events import (
    HIVE,
    Collection,
    ConversationFormat,
    EpisodeType,
    ModelShape,
    MovedBody,
    NotedCall,
    SavedWeights,
    Weights,
)
from bombus.hive.records import BodyRef
from bombus.hive.shares import share_name
from bombus.hive.subjects import is_name
from bombus.hive.trajectories.queue import QueuedGroup

DEPTH_MAX = 128  # of lists and objects within each other in metadata
_NOT_PLAIN = f"metadata that is not JSON, or nested deeper than {DEPTH_MAX}"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A message in the inbox. The sender chooses `id`: the same id is the same message and gets the same answer."""

    id: str
    engine: str = HIVE


BASE_SAMPLER = "base"  # instead of a saved model: the base of the run, without any adapter


# ---- commands -------------------------------------------------------------------------------------------------


class Configure(Message, frozen=True, kw_only=True, omit_defaults=True, tag="configure"):
    config: str
    config_digest: str
    collection: Collection
    model: str


class Start(Message, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    pass


class Stop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stop"):
    pass


class Resume(Message, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """Let a suspended run try again."""


class Claim(Message, frozen=True, kw_only=True, omit_defaults=True, tag="claim"):
    """Claim `count` episodes, all or none. `claim` stays the same over the slices of one long wait (R13).

    `owner` is the name of the key that the client has shown, if it has one. Such a key may have caps on its open
    episodes and on its waiting claims; 0 is no cap. In a run of operations `sampler` names the saved model that their
    calls sample from, by its `MODEL/USE/NAME`, or is `BASE_SAMPLER`. `admin`: the client has shown the hive's own key.
    `touches`: it shows every few seconds that it lives (`Touch.clients`), so that its silence says that it does not.
    """

    claim: str
    client: str
    count: int = 1
    type: EpisodeType = EpisodeType.TRAIN
    discard_timeout_s: float = 240.0
    first_asked_ns: int = 0
    wait_s: float = 0.0
    task_hint: str = ""
    owner: str = ""
    open_max: int = 0
    waiting_max: int = 0
    sampler: str = ""
    admin: bool = False
    touches: bool = False

    @property
    def holder(self) -> str:
        """Return for whose share it counts while it waits."""
        return share_name(self.owner, self.admin)


class MultiModelClaim(Claim, frozen=True, kw_only=True, omit_defaults=True, tag="claim_joint"):
    """Claim `count` multi-model episodes, of one episode on each of `engines`, all or none. It is about the hive."""

    engines: tuple[str, ...]


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one episode as a client reports it: with `reward`, `call_rewards` in the order of the calls, or
    `rewards_by_call`, by the calls' ids. `data_set` names the set that the task is of."""

    episode: str
    task: str
    reward: float | None = None
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    rewards_by_call: dict[str, float] | None = None
    data_set: str = ""


class End(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """End episodes, all or none."""

    client: str
    results: tuple[EpisodeResult, ...]
    client_active: bool = True


class MultiModelEnd(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end_joint"):
    """End multi-model episodes, all or none: each with a result for every one of its engines. It is about the hive."""

    client: str
    results: tuple[dict[str, EpisodeResult], ...]


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Abort episodes. With one of a multi-model episode, its partners are aborted too."""

    client: str
    episodes: tuple[str, ...]
    infra: bool = False
    detail: str = ""


class Take(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take"):
    """Let ended episodes of a run of operations go: their client has their tokens. Those that are gone are skipped."""

    client: str
    episodes: tuple[str, ...]


class AgreeSync(Message, frozen=True, kw_only=True, omit_defaults=True, tag="agree_sync"):
    client: str


class Lookup(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lookup"):
    """Request the calls of an episode, for a gateway that did not serve its earlier turns (R10)."""

    episode: str


class OpenSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="open_session"):
    """Open a session of training operations. `idle_s` is 0 where its client names no time.

    `owner` is the name of the key that the client has shown, if it has one. One `for_model` ends with its model. One of
    the hive's own `admin` key has a share of its own.
    """

    session: str
    idle_s: float = 0.0
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False


class CloseSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="close_session"):
    """End a session, and its models after what waits for them; with `save` each of them is saved first."""

    session: str
    detail: str = ""
    save: bool = True


class BeginSampling(Message, frozen=True, kw_only=True, omit_defaults=True, tag="begin_sampling"):
    """Let a session sample from a base, or from what was saved on it. An engine that is offline starts a run for it."""

    session: str
    base: str


class Operate(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operate"):
    """Accept an operation on a model. `op` says which, and `body` is where all of it is.

    The same `model` and `key` are the same operation, with the same answer, whatever the message's id. The first one
    of a model is `create_model`, with the name of its `base`. `run` is 0 where the sender knows none. The client's
    `metadata` is for the model that is created, or for the checkpoint that is saved. With `again_s`, they are the same
    operation only within so long: some clients begin to count again. `reads` is the `kept_id` of the saved model that
    it loads, which is not removed meanwhile. `models_max` is how many models the engine may have at once, where the
    gateway says so.
    """

    session: str
    model: str
    key: str
    op: str
    body: BodyRef
    run: int = 0
    passive: bool = False
    base: str = ""
    metadata: dict[str, str] = {}
    again_s: float = 0.0
    reads: str = ""
    models_max: int = 0


class RemoveWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="remove_weights"):
    """Remove a saved model. One that is not there is removed already. One that a waiting operation loads stays."""

    model: str
    use: str
    name: str


class AddEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="add_endpoint"):
    """Give the weights that are put in sync to this inference server too. One that is there already is changed.

    `owner` is the name of its client's key, "" where that has none.
    """

    host: str
    port: int
    world_size: int = 1
    owner: str = ""


class RemoveEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="remove_endpoint"):
    """Give no more weights to this inference server. One that is not there is removed already."""

    host: str
    port: int


class AskRest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="ask_rest"):
    """Let the trainer of a run of operations free its memory, or with `asleep` false take it again and go on."""

    asleep: bool = False


class RetainWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="retain_weights"):
    """Keep a saved model for `ttl_s` from now on, 0 for ever."""

    model: str
    use: str
    name: str
    ttl_s: float = 0.0


class RegisterTrainer(Message, frozen=True, kw_only=True, omit_defaults=True, tag="register_trainer"):
    """Begin a run of trajectories for a trainer of its own, which asks for batches of `batch_size` sequences."""

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


class JoinEnvironment(Message, frozen=True, kw_only=True, omit_defaults=True, tag="join_environment"):
    """Let an environment send groups of `group_size`. `minimum` is the part of each batch that it asks for.

    `owner` is the name of the key that its client has shown, if it has one: nobody else acts for it. `admin`: that key
    is the hive's own.
    """

    desired_name: str
    max_tokens: int
    weight: float
    group_size: int
    minimum: float | None = None
    owner: str = ""
    admin: bool = False


class LeaveEnvironment(Message, frozen=True, kw_only=True, omit_defaults=True, tag="leave_environment"):
    environment: int


class PushGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="push_groups"):
    """Queue rollout groups, all or none. Soon after a push of the same `key`, it is the same push.

    With bodies that have no sequences it asks whether they are to be stored: BODY_GONE says that they are.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""


class TakeBatch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take_batch"):
    """Hand out the next batch if there is one, or the last one again where it was not delivered.

    A trainer that says which batch it has, with all before it, gets the next one `after` that, until it says that it
    has it: 0 if it has none. Nothing else counts as delivered to it.
    """

    after: int | None = None


class LostGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group, by its number, whose body was looked for at `first` and is lost."""

    group: int
    first: int


class GiveUpGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="give_up_groups"):
    """Give up groups whose bodies are lost. See `GroupsGivenUp` for `number`."""

    run: int
    number: int
    groups: tuple[LostGroup, ...]
    why: str


class ResetGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="reset_groups"):
    """End a run of trajectories, and forget its groups and environments."""


class PublishWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="publish_weights"):
    """Mark a saved model as `public`, or take the mark away."""

    model: str
    use: str
    name: str
    public: bool = True


# ---- facts ----------------------------------------------------------------------------------------------------


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

    `sequence_tokens` is the longest sequence that it serves, 0 where it does not say. `constrains`: whether it can hold
    answers to a form.
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

    `constrains`: whether it can hold answers to a form.
    """

    run: int
    version: int
    replica: str
    sequence_tokens: int = 0
    constrains: bool = False


class LoadBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load.broke"):
    """A replica has failed to load a version several times, for a reason given in one clear sentence.

    It goes on trying, and reports `weights.loaded` when it has succeeded.
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
    """A trainer has written a checkpoint of a model, from which it can go on after operation `number`."""

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


AnyMessage = (
    Configure
    | Start
    | Stop
    | Resume
    | Claim
    | MultiModelClaim
    | End
    | MultiModelEnd
    | Abort
    | Take
    | AgreeSync
    | Lookup
    | OpenSession
    | CloseSession
    | BeginSampling
    | Operate
    | RemoveWeights
    | AddEndpoint
    | RemoveEndpoint
    | AskRest
    | RetainWeights
    | RegisterTrainer
    | JoinEnvironment
    | LeaveEnvironment
    | PushGroups
    | TakeBatch
    | ResetGroups
    | GiveUpGroups
    | PublishWeights
    | Tick
    | Touch
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
    | EngineBroke
    | TrainerServes
    | TrainerRests
    | OperationDone
    | OperationBegins
    | ModelAway
    | RebuildsModel
    | CheckpointWritten
    | OperationsStored
    | BatchSent
    | TrajectoriesStored
    | BodiesStored
    | EpisodesGrouped
    | StorageSeen
    | CompactionTried
)


# ---- answers --------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """The answer to a command. A reader that has folded the log up to event `position` has the state it describes."""

    position: int = 0


class Done(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    run: int = 0
    epoch: int = 0  # the trainer's, in the answer to `trainer.opens`
    doing: str = ""  # what a trainer works on, in its answer to who asks whether it lives


class Granted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    run: int
    episodes: tuple[str, ...]
    claimed_ns: int
    discard_timeout_s: float
    version: int


class EngineGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of one engine in the grant of a multi-model claim."""

    engine: str
    run: int
    episodes: tuple[str, ...]
    version: int


class MultiModelGranted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted_joint"):
    """The grant of a multi-model claim: multi-model episode n consists of the n-th episode of each engine."""

    grants: tuple[EngineGrant, ...]
    claimed_ns: int
    discard_timeout_s: float


class Found(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="found"):
    run: int
    open: bool
    calls: tuple[NotedCall, ...] = ()


class Accepted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """An operation waits or was executed: `operation` is its id, and it is the `number`th of its model."""

    run: int
    operation: str
    number: int


class Joined(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="joined"):
    """An environment has joined. Without a number it has to ask again: no trainer has asked for a batch yet."""

    environment: int | None = None


class Pushed(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="pushed"):
    """For each group the sequences that its environment holds after it, None where the group is queued."""

    held: tuple[int | None, ...]


class BatchTaken(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="batch.taken"):
    """The number of the batch that was handed out, 0 for none. The state at `position` has its groups.

    `again`: it was handed out before, and is not known to have arrived.
    """

    run: int
    number: int = 0
    again: bool = False


class Refusal(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    code: Code
    why: str


AnyAnswer = Done | Granted | MultiModelGranted | Found | Accepted | Joined | Pushed | BatchTaken | Refusal

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(body: bytes) -> AnyMessage:
    """Decode a message. Raises `msgspec.MsgspecError` when this version cannot read the bytes."""
    message = decoded(_messages.decode, body)
    if message.engine != HIVE and not is_name(message.engine):  # it becomes part of a subject
        raise msgspec.DecodeError(f"{message.engine[:40]!r} is not the name of an engine")
    if isinstance(message, End) and not all(_is_plain(result.metadata) for result in message.results):
        raise msgspec.DecodeError(_NOT_PLAIN)
    if isinstance(message, MultiModelEnd):
        reported = [result for results in message.results for result in results.values()]
        if not all(_is_plain(result.metadata) for result in reported):
            raise msgspec.DecodeError(_NOT_PLAIN)
    if isinstance(message, OpenSession) and not _is_plain(message.metadata):
        raise msgspec.DecodeError(_NOT_PLAIN)
    return message


def _is_plain(value: object, depth: int = DEPTH_MAX) -> bool:
    """Return whether every reader can decode a value, however deep in its own work it is, and write it as JSON."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(each, depth - 1) for key, each in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(body: bytes) -> AnyAnswer:
    """Decode an answer. Raises `msgspec.MsgspecError` when this version cannot read the bytes."""
    return decoded(_answers.decode, body)
