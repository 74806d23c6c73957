"""What the operations of training clients wait for."""

from collections.abc import Iterator

from bombus.figures import counted
from bombus.hive import events as ev
from bombus.hive.operations.state import ClientModel, Queued
from bombus.hive.state import EngineState
from bombus.hive.why import serving
from bombus.hive.why.links import OPERATOR, ChainLink, View
from bombus.hive.why.serving import trainer_of


def operations(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield what the longest-waiting operation waits for, or nothing if no operation waits."""
    models = [model for model in engine.clients.open_models if model.waiting]
    if models:
        model = min(models, key=lambda each: _waiting(each)[0].arrival)
        count, since_ns = counted(engine.clients.waiting, "training operation"), _waiting(model)[0].accepted_ns
        what = f"engine {engine.name} has {count} of {counted(len(models), 'model')} waiting, the first"
        yield ChainLink(what + view.lasting(since_ns), trainer_of(engine), since_ns)
        yield from of_model(view, engine, model)


def of_model(view: View, engine: EngineState, model: ClientModel) -> Iterator[ChainLink]:
    """Yield what the newest waiting operation of a model waits for, or nothing if no operation waits."""
    if not model.waiting:
        return
    first, *others = _waiting(model)
    if others:
        last = others[-1]
        what = (
            f"{_named(last)} of model {model.name} has waited{view.lasting(last.accepted_ns)}, behind {_named(first)}"
        )
        yield ChainLink(what, trainer_of(engine), last.accepted_ns)
    yield from _first(view, engine, model, first)


def _waiting(model: ClientModel) -> list[Queued]:
    return sorted((each for each in model.operations.values() if each.waits), key=lambda each: each.number)


def _named(queued: Queued) -> str:
    return f"operation {queued.number} ({queued.op})"


def _first(view: View, engine: EngineState, model: ClientModel, first: Queued) -> Iterator[ChainLink]:
    who, rest_ns, epoch = trainer_of(engine), engine.rest_since_ns, engine.trainer_epoch
    rebuilt = next((each for each in engine.clients.open_models if each.rebuilding_by == epoch), None)
    if model.suspended:
        yield _suspended(view, engine, model)
    elif engine.rest_wanted:
        what = f"the trainer was told to sleep {view.ago(rest_ns)}, and nothing is executed until POST /wake_up"
        yield ChainLink(what, "the client that sends /wake_up", rest_ns)
    elif engine.trainer and engine.asleep:
        what = f"{who} was told to wake up {view.ago(rest_ns)}, and has not loaded its models again yet"
        yield ChainLink(what, who, rest_ns)
    elif engine.trainer and rebuilt is not None:
        since_ns = view.last.at_ns(ev.ModelRebuilding, engine.name)
        at = f", and is executing operation {max(rebuilt.unsurvived)} again" if rebuilt.unsurvived else ""
        yield ChainLink(f"{who} has been rebuilding model {rebuilt.name}{view.lasting(since_ns)}{at}", who, since_ns)
    else:
        yield from _turn(view, engine, model, first)


def _suspended(view: View, engine: EngineState, model: ClientModel) -> ChainLink:
    noted = view.last.of(ev.ModelSuspended, engine.name)
    since_ns = noted.at_ns if noted is not None and noted.model == model.name else 0
    tried = f" ({view.ago(since_ns)})" if since_ns else ""
    what = f"no trainer could rebuild model {model.name}{tried}: {model.suspended}"
    if model.deadly(engine.collection.operations.executions_max):
        return ChainLink(f"{what}; `bombus resume` lets trainers try again", OPERATOR, since_ns)
    return ChainLink(f"{what}; trainers will try again on their own", trainer_of(engine), since_ns)


def _turn(view: View, engine: EngineState, model: ClientModel, first: Queued) -> Iterator[ChainLink]:
    """Yield the operation of another model that arrived earlier, if any, and what the trainer has to do now.

    Models take turns. The log does not say which operation is being executed, only which operation is each model's
    first.
    """
    name, who = f"{_named(first)} of model {model.name}", trainer_of(engine)
    queues = [each for each in engine.clients.open_models if each.waiting and not each.suspended]
    oldest = min(queues, key=lambda each: _waiting(each)[0].arrival)
    if oldest is not model:
        before = f"{_named(_waiting(oldest)[0])} of model {oldest.name}"
        yield ChainLink(f"{name} is waiting for its turn, after {before}", who, first.accepted_ns)
        name = before
    models = engine.clients.models.values()
    done_ns = max((each.completed_ns for every in models for each in every.operations.values()), default=0)
    since_ns = max(_waiting(oldest)[0].accepted_ns, done_ns)
    yield from serving.trainer(view, engine, f"has had {name} pending", since_ns)
