"""The events of training clients: their sessions, models, operations and saved weights."""

from typing import Any

import msgspec

from bombus.hive.events.common import Event, ModelEnd, SessionEnd
from bombus.hive.records import BodyRef


class SessionOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.opened"):
    """A client of training operations has opened a session, which ends after `idle_s` without a message from the
    client.

    `owner` is the name of the client's key, or "" if the key has none; `dialect` is the gateway's note about the
    client. A session that was opened for a single model (`for_model`) ends when that model has ended or could not be
    created. A session opened with the hive's admin key (`admin`) has a separate share.
    """

    session: str
    idle_s: float
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False


class SessionEnded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.ended"):
    """A session has ended and accepts no more operations. Each of its models ends after its last waiting operation."""

    session: str
    reason: SessionEnd
    detail: str = ""
    save: bool = True


class SessionForgotten(Event, frozen=True, kw_only=True, omit_defaults=True, tag="session.forgotten"):
    """The results of a session that has ended can no longer be read."""

    session: str


class SamplingBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="sampling.begun"):
    """A session samples from run `run`, which therefore continues until the session ends, even if it has no model."""

    run: int
    session: str


class ModelOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.opened"):
    """A model accepts operations. The first operation, accepted together with this event, creates the model from
    `base`.

    `metadata` was set by the model's client.
    """

    run: int
    model: str
    session: str
    base: str
    metadata: dict[str, str] = {}


class ModelClosed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.closed"):
    """A model has ended. Its waiting operations will not be executed, for the reason `why`."""

    run: int
    model: str
    reason: ModelEnd
    why: str = ""


class ModelSuspended(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.suspended"):
    """A trainer cannot rebuild a model, for the reason `why`. The model's operations wait; other models continue.

    An event without a reason ends the suspension.
    """

    run: int
    model: str
    why: str = ""


class ModelRebuilding(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.remaking"):
    """A trainer rebuilds a model from the model's recovery checkpoint and the operations executed since then.

    If an earlier trainer ended while rebuilding the model, the `number` of each operation is recorded before the
    operation is executed again (and the checkpoint's number before the checkpoint is loaded). Operations that several
    trainers have not survived are not retried (`OperationLimits.executions_max`). `over` says that the trainer has
    finished rebuilding.
    """

    run: int
    model: str
    trainer_epoch: int
    number: int = 0
    over: bool = False


class OperationAccepted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operation.accepted"):
    """A model's operation with this `number` was accepted. It waits until all earlier operations of the model are done.

    The operation's body is in the stream `ops`. An operation without a body ends a model whose session has ended; it
    first saves the model as `save_as`, unless that is "". A `passive` operation, such as a forward pass, does not
    change the model. The client's `metadata` is attached to what the operation saves. If the operation `reads` a saved
    model, named by its `kept_id`, that model is kept until the operation has been executed.
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
    """A trainer begins to execute an operation, the first one that this trainer executes for the model.

    An operation fails if several trainers have begun it and then ended (`OperationLimits.executions_max`).
    """

    run: int
    model: str
    number: int
    key: str
    trainer_epoch: int


class AdapterShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapter of a model, as shown in lists of models and checkpoints, with the seed of its initial weights."""

    rank: int
    alpha: float
    parts: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    seed: int | None = None


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of the model that an operation has created. Without an adapter, all weights are trained."""

    adapter: AdapterShape | None = None
    parameters: int = 0


class OperationCompleted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operation.completed"):
    """An operation was executed. This is its only result (R17).

    `step` counts the model's optimizer steps. `made` is the shape of the model if this is the operation that created
    the model, and `loaded` is a hash of the checkpoint that was loaded. `by_server` says that the operation failed
    through the server's fault.
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
    """A trainer has written a checkpoint of a model, from which the model can continue after operation `number`."""

    run: int
    model: str
    number: int
    trainer_epoch: int
    folder: str
    digest: str


class SavedWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint that a client has saved as `name`. `use` is its purpose: training, sampler or external.

    `address` is a hash of the weights. The checkpoint is removed after `ttl_s`; 0 means never.
    """

    use: str
    name: str
    folder: str
    address: str
    size_bytes: int = 0
    ttl_s: float = 0.0


class WeightsKept(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.kept"):
    """A model was saved for its client, replacing any saved model with the same use and name. The saved model outlives
    the model and the run.

    If the description of the saved model changes, the event is repeated; `saved_ns` is still the time when the model
    was saved. If the client marks the saved model as `public`, every client may read it. `owner` is the name of the key
    that owns its session.
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
    """A saved model was deleted by its client or has expired. It can no longer be used, and its folder may be
    deleted."""

    model: str
    use: str
    name: str
    expired: bool = False


class EndpointAdded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="endpoint.added"):
    """An outside inference server was registered. It gets the weights that a training client syncs.

    `owner` is the name of the key of the client that registered the server.
    """

    host: str
    port: int
    world_size: int = 1
    owner: str = ""


class EndpointRemoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="endpoint.removed"):
    host: str
    port: int


class RestAsked(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rest.asked"):
    """The trainer of an operations run was asked to free its memory (`asleep`; operations then wait) or to wake up."""

    run: int
    asleep: bool = False
    by: str = ""


class RestReached(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rest.reached"):
    """The trainer has freed its memory (`asleep`), or has restored all of its models as they were."""

    run: int
    trainer_epoch: int
    asleep: bool = False


class ModelFloor(msgspec.Struct, frozen=True, array_like=True):
    """The sequence number in `ops` before which none of a model's messages are needed."""

    engine: str
    model: str
    below: int


class OperationsReleased(Event, frozen=True, kw_only=True, omit_defaults=True, tag="operations.released"):
    """The messages of `ops` before `below` may be purged; for some models, so may their messages before a later
    sequence number.

    An operation whose body was stored before the sequence number that applies to it is refused, and its sender stores
    the body again.
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
