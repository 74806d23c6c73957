"""The events of training clients: their sessions, models, operations and saved weights."""

from typing import Any

import msgspec

from bombus.hive.events.common import Event, ModelEnd, SessionEnd
from bombus.hive.records import BodyRef


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
    """A trainer cannot rebuild a model, for the reason `why`: what came to it waits, but other models continue.

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
    """A trainer has written a checkpoint of a model from which it can continue after operation `number`."""

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
    """A saved model is not to be used any more, and its folder can go: its client said so, or it has expired."""

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


OperationEvent = (
    SessionOpened
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
)
