"""The part of an engine's state that concerns training operations.

A model is a queue: its operations are numbered in the order of the log, and are executed in that order. The result of
an executed operation is kept for the client. The operation's body is kept for a trainer that may have to rebuild the
model from the checkpoint before the operation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bombus.hive import events as ev
from bombus.hive.operations.stopwatch import Stopwatch
from bombus.hive.records import BodyRef
from bombus.hive.shares import share_name

TTL_S_MAX = 100 * 365 * 24 * 3600.0
FORWARD_BACKWARD, OPTIM_STEP, END_MODEL = "forward_backward", "optim_step", "end_model"


class Queued(msgspec.Struct, kw_only=True):
    """An operation in a model's queue. It waits until it has a result, or an `error` if it will never be executed."""

    number: int
    arrival: int  # its number among all operations of the engine
    key: str
    op: str
    accepted_ns: int
    body: BodyRef | None = None
    passive: bool = False
    save_as: str = ""
    result: BodyRef | None = None  # None while the operation waits, and after the result was dropped
    failed: bool = False
    completed_ns: int = 0
    error: str = ""
    metadata: dict[str, str] = {}  # set by its client; dropped once the operation has a result
    begun: int = 0  # how many trainers have reported that they were beginning to execute it
    begun_by: int = 0  # the epoch of the last trainer that did so
    reads: str = ""  # the saved model that it loads
    reads_removed: bool = False  # whether that saved model was removed while the operation waited
    loaded: str = ""  # a hash of the checkpoint that it loaded
    by_server: bool = False  # whether the failure was the server's fault

    @property
    def waits(self) -> bool:
        return not self.completed_ns

    def begun_before(self, trainer_epoch: int) -> int:
        """Return how many trainers before this one have begun the operation."""
        return self.begun - (self.begun_by == trainer_epoch)


class TrainingSession(msgspec.Struct, kw_only=True):
    """A session that a client of training operations has opened."""

    session: str
    opened_ns: int
    idle_s: float
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False
    ended: ev.SessionEnded | None = None
    samples_in: int = 0  # the latest run in which it has sampled

    @property
    def holder(self) -> str:
        """Return the holder whose share the session counts toward."""
        return share_name(self.owner, self.admin)


class ClientModel(msgspec.Struct, kw_only=True):
    """A model that belongs to a session. `checkpoint` is the newest checkpoint from which a trainer can continue the
    model."""

    name: str
    session: str
    base: str
    run: int
    opened_ns: int
    numbers: int = 0  # how many of its operations were accepted
    begun: int = 0  # the number of the operation that created it
    operations: dict[str, Queued] = {}  # keyed by the operation's key, in order
    waiting: int = 0
    held_bytes: int = 0  # total size of the bodies that a trainer may still have to read
    result_bytes: int = 0  # total size of the results that can be read
    checkpoint: ev.ModelCheckpointed | None = msgspec.field(default=None, name="cover")
    closed: ev.ModelClosed | None = None
    adapter: ev.AdapterShape | None = None
    parameters: int = 0
    step: int = 0
    executed: int = 0
    failures_to_end: int = 0  # failed attempts to end it after the end of its session
    last_ns: int = 0  # when an operation was last accepted or executed
    metadata: dict[str, str] = {}
    suspended: str = ""  # why its trainer cannot rebuild it
    away_ns: int = 0  # what `TrainingClients.trying` read when the model was suspended
    left_ns: int = 0  # the reading at the last of these: its suspension, its session's end, the run's resumption
    # The epoch of the trainer that is rebuilding it, or that ended while rebuilding it; 0 for none.
    rebuilding_by: int = msgspec.field(default=0, name="remaking_by")
    unsurvived: dict[int, tuple[int, ...]] = {}  # by operation: the epochs of the trainers that re-executed it
    lost: int = 0  # how many of the trainers lost in a row were rebuilding this model
    last_op: str = ""  # the kind of the operation executed last
    last_failed: bool = False
    scored: dict[str, float] = {}  # the metrics of the newest forward_backward that succeeded
    stepped: dict[str, float] = {}  # the metrics of the newest optim_step that succeeded

    @property
    def checkpointed(self) -> int:
        """Return the number of the last operation that never has to be re-executed."""
        return max(self.begun - 1, 0 if self.checkpoint is None else self.checkpoint.number)

    @property
    def done(self) -> int:
        """Return the number of the last operation before the first waiting one."""
        return min((each.number for each in self.operations.values() if each.waits), default=self.numbers + 1) - 1

    def deadly(self, limit: int, trainer_epoch: int = 0) -> int:
        """Return the number of the last operation whose re-execution `limit` earlier trainers did not survive, or 0 if
        there is none."""
        ended = {number: set(epochs) - {trainer_epoch} for number, epochs in self.unsurvived.items()}
        return max((number for number, epochs in ended.items() if len(epochs) >= limit), default=0)

    def again(self) -> list[Queued]:
        """Return the operations that a trainer executes after it has loaded `checkpoint`, in order.

        Some of them are not waiting, because they have a result already; that result is kept (R17).
        """
        return [each for each in self.operations.values() if self.needs(each)]

    def needs(self, queued: Queued) -> bool:
        """Return whether an operation must still be executed, or may have to be re-executed."""
        if self.closed is not None or queued.error:
            return False
        return queued.waits or (queued.number > self.checkpointed and not queued.passive)

    def bodies(self) -> Iterator[BodyRef]:
        """Yield the bodies that a trainer may still have to read."""
        return (each.body for each in self.operations.values() if each.body is not None and self.needs(each))

    def needed(self) -> Iterator[BodyRef]:
        """Yield the bodies that must stay in the stream `ops`: those that `bodies` yields, and the results that can be
        read."""
        yield from self.bodies()
        yield from (each.result for each in self.operations.values() if each.result is not None)


FOR_SYNC = {"saved_by": "sync_inference_weights"}  # marks a model that was saved only for a sync


class KeptWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A saved model, and when it is removed (0 for never)."""

    noted: ev.WeightsKept
    until_ns: int

    @property
    def saved_ns(self) -> int:
        return self.noted.saved_ns or self.noted.at_ns

    @property
    def is_for_sync(self) -> bool:
        """Return whether the model was saved in order to sync inference servers."""
        return FOR_SYNC.items() <= self.noted.metadata.items()


class TrainingClients(msgspec.Struct, kw_only=True):
    sessions: dict[str, TrainingSession] = {}
    models: dict[str, ClientModel] = {}
    kept: dict[str, KeptWeights] = {}  # saved models by `kept_id`, oldest first
    removed: dict[str, None] = {}  # the most recently removed models by `kept_id`, oldest first
    results: dict[str, int] = {}  # the bytes of each result that can be read, by operation id, oldest first
    result_bytes: int = 0
    accepted: int = 0
    executed: int = 0
    failed: int = 0
    model_closed_ns: int = 0  # when a model last ended
    endpoints: dict[str, ev.EndpointAdded] = {}  # outside inference servers by `endpoint_id`, oldest first
    released: dict[str, int] = {}  # by model: the sequence number in `ops` before which its bodies may be purged
    trying: Stopwatch = msgspec.field(default_factory=Stopwatch)  # runs while a trainer can rebuild models

    @property
    def open_models(self) -> list[ClientModel]:
        return [model for model in self.models.values() if model.closed is None]

    def holder_of(self, model: ClientModel) -> str:
        """Return the holder whose share a model counts toward."""
        session = self.sessions.get(model.session)
        return "" if session is None else session.holder

    @property
    def waiting(self) -> int:
        """Return how many operations are waiting, over all models."""
        return sum(model.waiting for model in self.models.values())

    def is_at_work(self, trainer_epoch: int) -> bool:
        """Return whether the trainer of this epoch has reported that it began an operation or is rebuilding a model.

        Work that the trainer has completed does not count.
        """
        if any(model.rebuilding_by == trainer_epoch for model in self.open_models):
            return True
        waiting = (each for model in self.open_models if model.waiting for each in model.operations.values())
        return any(each.waits and each.begun_by == trainer_epoch for each in waiting)

    def readers(self, kept: str) -> Iterator[tuple[ClientModel, Queued]]:
        """Yield the operations that are waiting to load a saved model."""
        waiting = ((model, each) for model in self.open_models if model.waiting for each in model.operations.values())
        return ((model, each) for model, each in waiting if each.waits and each.reads == kept)

    def read_by_waiting(self, away_ns: int = -1) -> set[str]:
        """Return the saved models that waiting operations will load.

        Operations of models that were suspended when `trying` read `away_ns` or less do not count.
        """
        there = (model for model in self.open_models if not model.suspended or model.away_ns > away_ns)
        waiting = (each for model in there if model.waiting for each in model.operations.values())
        return {each.reads for each in waiting if each.waits and each.reads}

    def given_up(self, limit: int) -> list[ClientModel]:
        """Return the models that no trainer will rebuild until an operator resumes the run."""
        return [model for model in self.open_models if model.suspended and model.deadly(limit)]

    @property
    def held_bytes(self) -> int:
        """Return the total size of the bodies that trainers may still have to read."""
        return sum(model.held_bytes for model in self.models.values())

    def operation(self, operation: str) -> Queued | None:
        """Return an operation by its id, or None if it is no longer known."""
        name, _, key = operation.rpartition(":")
        model = self.models.get(name)
        return None if model is None else model.operations.get(key)


def bodies_share(limits: ev.OperationLimits) -> int:
    """Return how many bytes of bodies each model may have, regardless of other models."""
    return limits.bodies_bytes_max // limits.models_max


def mean_loss(metrics: Mapping[str, float]) -> float | None:
    """Return the mean loss that a `forward_backward` reports for the tokens that count toward it, or None if no token
    does."""
    tokens = metrics.get("tokens", 0.0)
    return metrics["loss"] / tokens if tokens > 0 and "loss" in metrics else None


def kept_id(model: str, use: str, name: str) -> str:
    return f"{model}/{use}/{name}"


def endpoint_id(host: str, port: int) -> str:
    return f"{host}:{port}"
