"""The fold of events of training clients and environments: sessions, models, operations and queued groups."""

from collections.abc import Callable

from bombus.hive import events as ev
from bombus.hive.fold import operations, trajectories
from bombus.hive.fold.episodes import take
from bombus.hive.fold.handlers import EventT, Handlers, forget_lost, keep_time
from bombus.hive.operations.state import TrainingClients, endpoint_id
from bombus.hive.state import EngineState
from bombus.hive.trajectories.state import Trajectories

HANDLERS = Handlers()


# ---- training operations ----------------------------------------------------------------------------------------


def _of_clients(kind: type[EventT], fold: Callable[[TrainingClients, EventT], object]) -> None:
    """Register a fold for a kind of event that changes only `EngineState.clients`."""

    def handler(engine: EngineState, event: EventT) -> None:
        fold(engine.clients, event)

    HANDLERS[kind] = handler


_of_clients(ev.SessionOpened, operations.open_session)
_of_clients(ev.SessionEnded, operations.end_session)
_of_clients(ev.SessionForgotten, operations.forget_session)
_of_clients(ev.SamplingBegun, operations.begin_sampling)
_of_clients(ev.ModelOpened, operations.open_model)
_of_clients(ev.ModelClosed, operations.close_model)
_of_clients(ev.OperationAccepted, operations.accept)
_of_clients(ev.OperationBegun, operations.begin)
_of_clients(ev.ModelRebuilding, operations.rebuild)
_of_clients(ev.ModelCheckpointed, operations.checkpoint)
_of_clients(ev.WeightsKept, operations.keep)
_of_clients(ev.WeightsRemoved, operations.remove)


@HANDLERS.on(ev.OperationCompleted)
def _operation_completed(engine: EngineState, event: ev.OperationCompleted) -> None:
    operations.execute(engine.clients, event, engine.collection.operations.results_bytes_max)
    engine.step_failures = 0
    forget_lost(engine)


@HANDLERS.on(ev.ModelSuspended)
def _model_suspended(engine: EngineState, event: ev.ModelSuspended) -> None:
    engine.trainers_lost = max(0, engine.trainers_lost - operations.suspend_model(engine.clients, event))


@HANDLERS.on(ev.EndpointAdded)
def _endpoint_added(engine: EngineState, event: ev.EndpointAdded) -> None:
    engine.clients.endpoints[endpoint_id(event.host, event.port)] = event


@HANDLERS.on(ev.EndpointRemoved)
def _endpoint_removed(engine: EngineState, event: ev.EndpointRemoved) -> None:
    engine.clients.endpoints.pop(endpoint_id(event.host, event.port), None)


@HANDLERS.on(ev.RestAsked)
def _rest_asked(engine: EngineState, event: ev.RestAsked) -> None:
    """Record the request. The trainer may still be carrying out the opposite request, so any state that it reported
    before does not count."""
    engine.rest_wanted = event.asleep
    engine.asleep = not event.asleep
    engine.rest_since_ns = event.at_ns
    keep_time(engine, event.at_ns)


@HANDLERS.on(ev.RestReached)
def _rest_reached(engine: EngineState, event: ev.RestReached) -> None:
    engine.asleep = event.asleep
    if not event.asleep:
        engine.resumed_ns = event.at_ns
    keep_time(engine, event.at_ns)


# ---- rollout groups ----------------------------------------------------------------------------------------------


def _groups(kind: type[EventT], fold: Callable[[Trajectories, EventT], object]) -> None:
    """Register a fold for a kind of event that changes only `EngineState.trajectories`."""

    def handler(engine: EngineState, event: EventT) -> None:
        fold(engine.trajectories, event)

    HANDLERS[kind] = handler


_groups(ev.TrainerRegistered, trajectories.register)
_groups(ev.BatchesBegun, trajectories.begin)
_groups(ev.EnvironmentJoined, trajectories.join)
_groups(ev.EnvironmentLeft, trajectories.leave)
_groups(ev.BatchHandedOut, trajectories.hand_out)
_groups(ev.BatchDelivered, trajectories.deliver)
_groups(ev.GroupsReset, trajectories.reset)
_groups(ev.BodiesMoved, trajectories.move)


@HANDLERS.on(ev.GroupsPushed)
def _groups_pushed(engine: EngineState, event: ev.GroupsPushed) -> None:
    trajectories.push(engine.trajectories, event)
    engine.counters.taken += take(engine, event.episodes)


@HANDLERS.on(ev.GroupsGivenUp)
def _groups_given_up(engine: EngineState, event: ev.GroupsGivenUp) -> None:
    trajectories.give_up(engine.trajectories, event)
    for step in engine.steps if engine.makes_steps else ():
        if (step.batch.run, step.batch.step) == (event.run, event.number):
            step.batch = trajectories.without_bodies(step.batch, event.groups)
    if engine.batch is not None and (engine.batch.run, engine.batch.step) == (event.run, event.number):
        engine.batch = trajectories.without_bodies(engine.batch, event.groups)
