"""The part of an engine's state that concerns training operations, and its fold.

A model is a queue: its operations are numbered in the order of the log, and are executed in that order. The result of
an executed operation is kept for its client. Its body is kept for a trainer that may have to rebuild the model from the
checkpoint before it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.operations.stopwatch import Stopwatch
from bombus.hive.records import BodyRef
from bombus.hive.shares import share_name

COMPLETED_KEPT = 1024  # number of executed operations per model that are still recognised
TTL_S_MAX = 100 * 365 * 24 * 3600.0
REMOVED_KEPT = 1000  # number of saved models removed last, whose folders a trainer may still have to delete
MODELS_KEPT = 256  # number of ended models that are kept with their results
FORWARD_BACKWARD, OPTIM_STEP, END_MODEL = "forward_backward", "optim_step", "end_model"


class Queued(msgspec.Struct, kw_only=True):
    """An operation. It waits until it has a result, or an `error` if it will never be executed."""

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
    begun_by: int = 0  # the epoch of the last of these trainers
    reads: str = ""  # the saved model that it loads
    reads_removed: bool = False  # whether that saved model was removed while the operation waited
    loaded: str = ""  # a hash of the checkpoint that it loaded
    by_server: bool = False  # whether it failed through the server's fault

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
    """A model that belongs to a session. `checkpoint` is the newest checkpoint from which a trainer can continue it."""

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
    away_ns: int = 0  # what `TrainingClients.trying` read when it was suspended
    left_ns: int = 0  # the reading at the latest of: its suspension, its session's end, the run's resumption
    # The epoch of the trainer that is rebuilding it, or that ended while rebuilding it; 0 for none.
    rebuilding_by: int = msgspec.field(default=0, name="remaking_by")
    unsurvived: dict[int, tuple[int, ...]] = {}  # by operation: the epochs of the trainers that re-executed it
    lost: int = 0  # how many of the trainers lost in a row were rebuilding it
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
        """Return the last operation whose re-execution `limit` earlier trainers did not survive, or 0."""
        ended = {number: set(epochs) - {trainer_epoch} for number, epochs in self.unsurvived.items()}
        return max((number for number, epochs in ended.items() if len(epochs) >= limit), default=0)

    def again(self) -> list[Queued]:
        """Return the operations that a trainer executes after it has loaded `checkpoint`, in order.

        Those that are not waiting already have a result, which is kept (R17).
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
        """Yield the bodies that must stay in the stream `ops`: those of `bodies`, and the results that can be read."""
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
    removed: dict[str, None] = {}  # the latest removed models by `kept_id`, oldest first
    results: dict[str, int] = {}  # the bytes of each result that can be read, by operation id, oldest first
    result_bytes: int = 0
    accepted: int = 0
    executed: int = 0
    failed: int = 0
    model_closed_ns: int = 0  # when a model last ended
    endpoints: dict[str, ev.EndpointAdded] = {}  # outside inference servers by `endpoint_id`, oldest first
    released: dict[str, int] = {}  # by model: the sequence of `ops` before which its bodies may be purged
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

        Work that it has completed does not count.
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
    """Return the loss of a forward_backward per token that counted, or None if no token counted."""
    tokens = metrics.get("tokens", 0.0)
    return metrics["loss"] / tokens if tokens > 0 and "loss" in metrics else None


def kept_id(model: str, use: str, name: str) -> str:
    return f"{model}/{use}/{name}"


def endpoint_id(host: str, port: int) -> str:
    return f"{host}:{port}"


# ---- the fold -------------------------------------------------------------------------------------------------


def open_session(clients: TrainingClients, event: ev.SessionOpened) -> None:
    clients.sessions[event.session] = TrainingSession(
        session=event.session,
        opened_ns=event.at_ns,
        idle_s=event.idle_s,
        owner=event.owner,
        dialect=event.dialect,
        metadata=event.metadata,
        for_model=event.for_model,
        admin=event.admin,
    )


def end_session(clients: TrainingClients, event: ev.SessionEnded) -> None:
    session = clients.sessions.get(event.session)
    if session is None:
        return
    session.ended = event
    for model in clients.open_models:
        if model.session == event.session:
            model.left_ns = clients.trying.shows(event.at_ns)


def begin_sampling(clients: TrainingClients, event: ev.SamplingBegun) -> None:
    session = clients.sessions.get(event.session)
    if session is not None:
        session.samples_in = event.run


def forget_session(clients: TrainingClients, event: ev.SessionForgotten) -> None:
    clients.sessions.pop(event.session, None)
    for model in [each for each in clients.models.values() if each.session == event.session and each.closed]:
        _forget_model(clients, model)


def _forget_model(clients: TrainingClients, model: ClientModel) -> None:
    for queued in model.operations.values():
        _drop_result(clients, model, queued)
    del clients.models[model.name]
    clients.released.pop(model.name, None)


def open_model(clients: TrainingClients, event: ev.ModelOpened) -> None:
    """Open a model. If a model of this name has ended, the new one keeps its results, which can still be read."""
    ended = [each for each in clients.models.values() if each.closed is not None]
    if len(ended) >= MODELS_KEPT:
        most, _ = Counter(map(clients.holder_of, ended)).most_common(1)[0]
        _forget_model(clients, next(each for each in ended if clients.holder_of(each) == most))
    before = clients.models.pop(event.model, None)
    model = ClientModel(
        name=event.model,
        session=event.session,
        base=event.base,
        run=event.run,
        opened_ns=event.at_ns,
        last_ns=event.at_ns,
        metadata=event.metadata,
    )
    if before is not None:
        model.numbers = before.numbers
        model.operations, model.result_bytes = before.operations, before.result_bytes
    model.begun = model.numbers + 1
    clients.models[event.model] = model


def suspend_model(clients: TrainingClients, event: ev.ModelSuspended) -> int:
    """Suspend or resume a model. On suspension, return how many trainers were lost while they were rebuilding it."""
    model = clients.models.get(event.model)
    if model is None:
        return 0
    if event.why and not model.suspended:
        model.away_ns = model.left_ns = clients.trying.shows(event.at_ns)
    model.suspended = event.why
    if not event.why:
        return 0
    lost, model.lost, model.rebuilding_by = model.lost, 0, 0
    return lost


def lose_trainer(clients: TrainingClients, trainer_epoch: int) -> None:
    """Count the loss of a trainer for the models that it was rebuilding."""
    for model in clients.open_models:
        model.lost += model.rebuilding_by == trainer_epoch


def forget_lost(clients: TrainingClients) -> None:
    for model in clients.open_models:
        model.lost = 0


def rebuild(clients: TrainingClients, event: ev.ModelRebuilding) -> None:
    """Record which operation a trainer re-executes to rebuild a model, and that it has survived the earlier ones."""
    model = clients.models.get(event.model)
    if model is None:
        return
    model.rebuilding_by = 0 if event.over else event.trainer_epoch
    if event.over:
        model.unsurvived, model.lost = {}, 0
    elif event.number:
        model.unsurvived = {number: each for number, each in model.unsurvived.items() if number >= event.number}
        model.unsurvived[event.number] = (*model.unsurvived.get(event.number, ()), event.trainer_epoch)


def forgive(clients: TrainingClients, at_ns: int) -> None:
    """Let trainers try again to rebuild suspended models. Other models keep their counts, because they are being
    rebuilt."""
    for model in clients.open_models:
        if model.suspended:
            model.unsurvived = {}
            model.left_ns = clients.trying.shows(at_ns)


def close_model(clients: TrainingClients, event: ev.ModelClosed) -> None:
    """Close a model. Its waiting operations will never be executed."""
    model = clients.models.get(event.model)
    if model is None:
        return
    model.closed = event
    clients.model_closed_ns = event.at_ns
    for queued in model.operations.values():
        if queued.waits:
            queued.error = event.why or f"the model has ended ({event.reason})"
            queued.completed_ns, queued.metadata = event.at_ns, {}
            clients.failed += 1
    model.waiting = model.held_bytes = 0


def end_run(clients: TrainingClients, run: int, at_ns: int, why: str) -> None:
    """Close all models of a run that has ended."""
    for model in clients.open_models:
        closed = ev.ModelClosed(at_ns=at_ns, run=run, model=model.name, reason=ev.ModelEnd.RUN_OVER, why=why)
        close_model(clients, closed)


def accept(clients: TrainingClients, event: ev.OperationAccepted) -> None:
    model = clients.models.get(event.model)
    if model is None:
        return
    clients.accepted += 1
    model.numbers = event.number
    model.waiting += 1
    model.held_bytes += 0 if event.body is None else event.body.size
    model.last_ns = event.at_ns
    model.operations[event.key] = Queued(
        number=event.number,
        arrival=clients.accepted,
        key=event.key,
        op=event.op,
        accepted_ns=event.at_ns,
        body=event.body,
        passive=event.passive,
        save_as=event.save_as,
        metadata=event.metadata,
        reads=event.reads,
    )


def begin(clients: TrainingClients, event: ev.OperationBegun) -> None:
    queued = clients.operation(f"{event.model}:{event.key}")
    if queued is not None and queued.waits:
        queued.begun += 1
        queued.begun_by = event.trainer_epoch


def execute(clients: TrainingClients, event: ev.OperationCompleted, results_bytes_max: int) -> None:
    """Record a result, and drop older results beyond the limits.

    If there are too many bytes, drop results from the key that has the most bytes, and there from the model with the
    most bytes; if there are too many results, drop those of this model. The new result stays.
    """
    model = clients.models.get(event.model)
    queued = None if model is None else model.operations.get(event.key)
    if model is None or queued is None or not queued.waits:
        return
    queued.result, queued.failed, queued.completed_ns = event.result, event.failed, event.at_ns
    queued.metadata, queued.loaded, queued.by_server = {}, event.loaded, event.by_server
    model.waiting -= 1
    if queued.passive and queued.body is not None:
        model.held_bytes -= queued.body.size
    model.executed += 1
    model.step = event.step
    model.last_ns = event.at_ns
    model.last_op, model.last_failed = event.op, event.failed
    if event.op == FORWARD_BACKWARD and not event.failed:
        model.scored = event.metrics
    elif event.op == OPTIM_STEP and not event.failed:
        model.stepped = event.metrics
    if event.made is not None:
        model.adapter, model.parameters = event.made.adapter, event.made.parameters
    clients.executed += 1
    clients.failed += event.failed
    if queued.body is None and event.failed:
        model.failures_to_end += 1
    clients.results[f"{event.model}:{event.key}"] = event.result.size
    clients.result_bytes += event.result.size
    while clients.result_bytes > results_bytes_max and len(clients.results) > 1:
        most = _with_most_results(clients)  # does not count the new result
        oldest = (each for each in most.operations.values() if each.result is not None and each is not queued)
        old = next(oldest, None)
        if old is None:  # only the new result has any bytes
            break
        _drop_result(clients, most, old)
    model.result_bytes += event.result.size
    _trim_operations(clients, model)


def _with_most_results(clients: TrainingClients) -> ClientModel:
    """Return the model with the most bytes of results that belongs to the key with the most bytes of results."""
    of_holders: Counter[str] = Counter()
    for model in clients.models.values():
        of_holders[clients.holder_of(model)] += model.result_bytes
    return max(clients.models.values(), key=lambda each: (of_holders[clients.holder_of(each)], each.result_bytes))


def _drop_result(clients: TrainingClients, model: ClientModel, queued: Queued) -> None:
    queued.result = None
    size = clients.results.pop(f"{model.name}:{queued.key}", 0)
    clients.result_bytes -= size
    model.result_bytes -= size


def _trim_operations(clients: TrainingClients, model: ClientModel) -> None:
    """Forget the oldest operations of a model that are no longer needed, many at a time, like `bounded.trim`."""
    if len(model.operations) <= COMPLETED_KEPT + COMPLETED_KEPT // 8:
        return
    unneeded = [each for each in model.operations.values() if not each.waits and not model.needs(each)]
    for queued in unneeded[: max(0, len(model.operations) - COMPLETED_KEPT)]:
        _drop_result(clients, model, queued)
        del model.operations[queued.key]


def checkpoint(clients: TrainingClients, event: ev.ModelCheckpointed) -> None:
    model = clients.models.get(event.model)
    if model is None:
        return
    model.checkpoint = event
    model.held_bytes = sum(body.size for body in model.bodies())
    _trim_operations(clients, model)


def keep(clients: TrainingClients, event: ev.WeightsKept) -> None:
    saved = event.saved
    name = kept_id(event.model, saved.use, saved.name)
    if not event.saved_ns:  # a saved model whose description changes keeps its place
        clients.kept.pop(name, None)
    clients.removed.pop(name, None)
    until_ns = event.at_ns + int(min(saved.ttl_s, TTL_S_MAX) * 1e9) if saved.ttl_s > 0 else 0
    clients.kept[name] = KeptWeights(noted=event, until_ns=until_ns)


def remove(clients: TrainingClients, event: ev.WeightsRemoved) -> None:
    name = kept_id(event.model, event.use, event.name)
    if clients.kept.pop(name, None) is None:
        return
    clients.removed[name] = None
    trim(clients.removed, REMOVED_KEPT)
    for _, queued in clients.readers(name):
        queued.reads_removed = True


def release(clients: TrainingClients, floor: ev.ModelFloor) -> None:
    clients.released[floor.model] = floor.below
