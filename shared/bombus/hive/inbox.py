"""What anybody may say to a hive: commands that want an answer, and facts that want none.

All of it goes through one stream, the inbox, in one order; the coordinator alone decides what becomes of it (R1).
"""

from typing import Any

import msgspec

from bombus.errors import Code
from bombus.hive.events import HIVE, Collection, EpisodeType, NotedCall, Weights


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """`id` is the sender's: the same id is the same message, and gets the same answer."""

    id: str
    engine: str = HIVE


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


class Claim(Message, frozen=True, kw_only=True, omit_defaults=True, tag="claim"):
    """`count` episodes, all or none. `claim` stays the same over the slices of one long wait (R13)."""

    claim: str
    client: str
    count: int = 1
    type: EpisodeType = EpisodeType.TRAIN
    discard_timeout_s: float = 240.0
    first_asked_ns: int = 0
    wait_s: float = 0.0
    task_hint: str = ""


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode's outcome as a client reports it. One of `reward` and `call_rewards` is given."""

    episode: str
    task: str
    reward: float | None = None
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}


class End(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """All of these end, or none does."""

    client: str
    results: tuple[EpisodeResult, ...]
    client_active: bool = True


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    client: str
    episodes: tuple[str, ...]
    infra: bool = False
    detail: str = ""


class AgreeSync(Message, frozen=True, kw_only=True, omit_defaults=True, tag="agree_sync"):
    client: str


class Lookup(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lookup"):
    """The calls of an episode, for a gateway that did not serve its earlier turns (R10)."""

    episode: str


# ---- facts ----------------------------------------------------------------------------------------------------


class Tick(Message, frozen=True, kw_only=True, omit_defaults=True, tag="tick"):
    """Time passes because the log says so (R5). The leader puts one in every second.

    `answered` is the inbox sequence up to which all answers had left by then.
    """

    answered: int | None = None


class Touch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="touch"):
    """Signs of life, coalesced by a gateway: episodes with an open call or a heartbeat, and claims received."""

    episodes: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()  # claim ids


class CallRecorded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="call.recorded"):
    run: int
    call: NotedCall


class ReplicaAlive(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.alive"):
    """Said once a second. `version` is what it serves now, -1 for nothing; `run` is the run of that version."""

    replica: str
    url: str
    run: int = 0
    version: int = -1
    capacity: int = 64


class ReplicaLeaves(Message, frozen=True, kw_only=True, omit_defaults=True, tag="replica.leaves"):
    replica: str


class WeightsLoadedFact(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.loaded"):
    run: int
    version: int
    replica: str


class TrainerOpens(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.opens"):
    """A command too: the answer carries the trainer epoch (R11)."""

    run: int
    trainer: str


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


class WeightsSaved(Message, frozen=True, kw_only=True, omit_defaults=True, tag="weights.saved"):
    """Step 0 is the model as loaded."""

    run: int
    step: int
    trainer_epoch: int
    weights: Weights


class StorageSeen(Message, frozen=True, kw_only=True, omit_defaults=True, tag="storage.seen"):
    """So many bytes of `what` are in use. The last `reserve` of them are for what is under way."""

    what: str
    used: int
    size: int
    reserve: int


class EngineBroke(Message, frozen=True, kw_only=True, omit_defaults=True, tag="engine.broke"):
    """A trainer or replica cannot go on with this run: one clear sentence says why.

    `trainer_epoch` is a trainer's: one that was superseded does not end the run of its successor (R11).
    """

    run: int
    reason: str
    trainer_epoch: int | None = None


AnyMessage = (
    Configure
    | Start
    | Stop
    | Claim
    | End
    | Abort
    | AgreeSync
    | Lookup
    | Tick
    | Touch
    | CallRecorded
    | ReplicaAlive
    | ReplicaLeaves
    | WeightsLoadedFact
    | TrainerOpens
    | StageReached
    | StepDone
    | StepBroke
    | WeightsSaved
    | EngineBroke
    | StorageSeen
)


# ---- answers --------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """`position` is the last event's sequence when this was decided: a reader that has folded that far agrees."""

    position: int = 0


class Done(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="done"):
    run: int = 0
    epoch: int = 0  # of the trainer, answering `trainer.opens`


class Granted(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    run: int
    episodes: tuple[str, ...]
    claimed_ns: int
    discard_timeout_s: float
    version: int


class Found(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="found"):
    run: int
    open: bool
    calls: tuple[NotedCall, ...] = ()


class Refusal(Answer, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    code: Code
    why: str


AnyAnswer = Done | Granted | Found | Refusal

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def kind_of(message: Message) -> str:
    kind = message.__struct_config__.tag
    assert isinstance(kind, str)
    return kind


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(body: bytes) -> AnyMessage:
    return _messages.decode(body)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(body: bytes) -> AnyAnswer:
    return _answers.decode(body)
