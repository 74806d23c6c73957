"""What each event about training clients changes in the state of an engine."""

from collections import Counter

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.operations.state import (
    FORWARD_BACKWARD,
    OPTIM_STEP,
    TTL_S_MAX,
    ClientModel,
    KeptWeights,
    Queued,
    TrainingClients,
    TrainingSession,
    kept_id,
)

COMPLETED_KEPT = 1024  # number of executed operations per model that are still recognised
REMOVED_KEPT = 1000  # number of most recently removed saved models, whose folders a trainer may still have to delete
MODELS_KEPT = 256  # number of ended models that are kept with their results


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
    """Record which operation a trainer re-executes to rebuild a model, and that the trainer has survived the operations
    before it."""
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
    """Allow trainers to rebuild suspended models again, by forgetting the failed attempts. Models that are not
    suspended keep theirs, because they may be being rebuilt right now."""
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

    If the results have too many bytes, find the key that has the most bytes, and drop results of its model with the
    most bytes. If the operation's model has too many results, drop some of its own. The new result stays.
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
        most = _with_most_results(clients)  # the new result is not counted yet
        oldest = (each for each in most.operations.values() if each.result is not None and each is not queued)
        old = next(oldest, None)
        if old is None:  # only the new result has any bytes
            break
        _drop_result(clients, most, old)
    model.result_bytes += event.result.size
    _trim_operations(clients, model)


def _with_most_results(clients: TrainingClients) -> ClientModel:
    """Return the model with the most bytes of results among those that belong to the key with the most bytes of
    results."""
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
    """Forget the oldest operations of a model that are no longer needed. Like `bounded.trim`, this forgets many at a
    time."""
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
