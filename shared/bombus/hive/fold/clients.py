"""What training clients and environments have on an engine: sessions, models and operations; queued groups."""

from collections.abc import Callable

from bombus.hive import events as ev
from bombus.hive.fold.episodes import take
from bombus.hive.fold.handlers import EventT, Handlers, forget_lost, keep_time
from bombus.hive.state import EngineState
from bombus.hive.tenants import state as tenancy
from bombus.hive.tenants.state import Tenants
from bombus.hive.trajectories import state as scored
from bombus.hive.trajectories.state import Trajectories

HANDLERS = Handlers()


# ---- training operations ----------------------------------------------------------------------------------------


def _tenants(kind: type[EventT], fold: Callable[[Tenants, EventT], object]) -> None:
    """Fold the events of a kind into what training clients have alone."""

    def handler(engine: EngineState, event: EventT) -> None:
        fold(engine.tenants, event)

    HANDLERS[kind] = handler


_tenants(ev.SessionOpened, tenancy.open_session)
_tenants(ev.SessionEnded, tenancy.end_session)
_tenants(ev.SessionForgotten, tenancy.forget_session)
_tenants(ev.SamplingBegun, tenancy.begin_sampling)
_tenants(ev.ModelOpened, tenancy.open_model)
_tenants(ev.ModelClosed, tenancy.close_model)
_tenants(ev.OperationAccepted, tenancy.accept)
_tenants(ev.OperationBegun, tenancy.begin)
_tenants(ev.ModelRemaking, tenancy.remake)
_tenants(ev.ModelCovered, tenancy.cover)
_tenants(ev.WeightsKept, tenancy.keep)
_tenants(ev.WeightsRemoved, tenancy.remove)


@HANDLERS.on(ev.OperationCompleted)
def _operation_completed(engine: EngineState, event: ev.OperationCompleted) -> None:
    tenancy.execute(engine.tenants, event, engine.collection.tenancy.results_bytes_max)
    engine.step_failures = 0
    forget_lost(engine)


@HANDLERS.on(ev.ModelSuspended)
def _model_suspended(engine: EngineState, event: ev.ModelSuspended) -> None:
    engine.trainers_lost = max(0, engine.trainers_lost - tenancy.suspend_model(engine.tenants, event))


@HANDLERS.on(ev.EndpointAdded)
def _endpoint_added(engine: EngineState, event: ev.EndpointAdded) -> None:
    engine.tenants.endpoints[tenancy.endpoint_id(event.host, event.port)] = event


@HANDLERS.on(ev.EndpointRemoved)
def _endpoint_removed(engine: EngineState, event: ev.EndpointRemoved) -> None:
    engine.tenants.endpoints.pop(tenancy.endpoint_id(event.host, event.port), None)


@HANDLERS.on(ev.RestAsked)
def _rest_asked(engine: EngineState, event: ev.RestAsked) -> None:
    """Note what is wanted. The trainer may be on its way elsewhere, so it says anew when it is there."""
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


# ---- scored groups ----------------------------------------------------------------------------------------------


def _groups(kind: type[EventT], fold: Callable[[Trajectories, EventT], object]) -> None:
    """Fold the events of a kind into the queue of groups, its environments and its trainer alone."""

    def handler(engine: EngineState, event: EventT) -> None:
        fold(engine.trajectories, event)

    HANDLERS[kind] = handler


_groups(ev.TrainerRegistered, scored.register)
_groups(ev.BatchesBegun, scored.begin)
_groups(ev.EnvironmentJoined, scored.join)
_groups(ev.EnvironmentLeft, scored.leave)
_groups(ev.BatchHandedOut, scored.hand_out)
_groups(ev.BatchDelivered, scored.deliver)
_groups(ev.GroupsReset, scored.reset)
_groups(ev.BodiesMoved, scored.move)


@HANDLERS.on(ev.GroupsPushed)
def _groups_pushed(engine: EngineState, event: ev.GroupsPushed) -> None:
    scored.push(engine.trajectories, event)
    engine.counters.taken += take(engine, event.episodes)


@HANDLERS.on(ev.GroupsGivenUp)
def _groups_given_up(engine: EngineState, event: ev.GroupsGivenUp) -> None:
    scored.give_up(engine.trajectories, event)
    for step in engine.steps if engine.makes_steps else ():
        if (step.batch.run, step.batch.step) == (event.run, event.number):
            step.batch = scored.without_bodies(step.batch, event.groups)
    if engine.batch is not None and (engine.batch.run, engine.batch.step) == (event.run, event.number):
        engine.batch = scored.without_bodies(engine.batch, event.groups)
