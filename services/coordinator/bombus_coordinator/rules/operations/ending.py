"""End training clients' sessions and their models, including silent sessions whose room other clients need."""

from collections import Counter
from typing import TypedDict, Unpack

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Event, SessionEnd
from bombus.hive.operations.state import END_MODEL, ClientModel, TrainingSession
from bombus.hive.shares import has_share
from bombus.hive.state import EngineState
from bombus_coordinator.rules.live import Live, ns

OWN_KEY = "_end-"  # key prefix of operations that end the models of ended sessions; never a client's key
SILENT_S = 120.0  # silence after which a client's room may go to others; clients usually report every few seconds
MADE_ROOM = "it was silent, and other clients needed its room"


class _How(TypedDict, total=False):
    detail: str
    save: bool


def open_models(engine: EngineState, session: TrainingSession) -> list[ClientModel]:
    return [model for model in engine.clients.open_models if model.session == session.session]


def to_end(engine: EngineState, session: TrainingSession) -> list[ClientModel]:
    """Return a session's models that no waiting operation will end. Suspended models are left out, because they cannot
    be saved yet."""
    return [
        model
        for model in open_models(engine, session)
        if not model.suspended
        and not (model.waiting and any(each.waits and each.op == END_MODEL for each in model.operations.values()))
    ]


def end_of(engine: EngineState, live: Live, model: ClientModel, save: bool) -> ev.OperationAccepted:
    """Return the operation that ends a model. It is executed once the model's waiting operations are done."""
    number = model.numbers + 1
    return ev.OperationAccepted(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        model=model.name,
        number=number,
        key=f"{OWN_KEY}{number}",
        op=END_MODEL,
        save_as=f"ended-{number}" if save else "",
    )


def ended(
    engine: EngineState, live: Live, session: TrainingSession, reason: SessionEnd, **how: Unpack[_How]
) -> tuple[Event, ...]:
    """Return the event that ends a session, and the operations that end its models. Each of these is executed once the
    model's waiting operations are done."""
    live.session_seen.pop((engine.name, session.session), None)
    event = ev.SessionEnded(at_ns=live.now_ns, engine=engine.name, session=session.session, reason=reason, **how)
    return (event, *(end_of(engine, live, model, event.save) for model in to_end(engine, session)))


def seen_ns(engine: EngineState, live: Live, session: TrainingSession) -> int:
    """Return when a session last showed a sign of life, or when work was last done for it.

    Silence does not count while the run is suspended, while the trainer is asleep, or while operations wait. Operations
    that wait for a model that cannot be rebuilt do not stop the count, since they may wait forever.
    """
    models = open_models(engine, session)
    if engine.rest_wanted or engine.asleep or any(model.waiting and not model.suspended for model in models):
        return live.now_ns
    seen = live.session_seen.get((engine.name, session.session), 0)
    worked = max((model.last_ns for model in models), default=0)
    return live.silent_since(max(session.opened_ns, seen, worked, engine.resumed_ns))


# ---- room for others -------------------------------------------------------------------------------------------


def room_for_session(engine: EngineState, live: Live, holder: str) -> tuple[Event, ...]:
    """Return the events that end silent sessions, as far as another session needs their room. Raises `Refused` QUOTA if
    this makes too little room."""
    limit = engine.collection.operations.sessions_max
    there = [each for each in engine.clients.sessions.values() if each.ended is None]
    events: tuple[Event, ...] = ()
    for silent in [*_silent(engine, live), None]:
        held = Counter(each.holder for each in there)
        if has_share(held, holder, limit):
            return events
        if silent is not None:
            there.remove(silent)
            events += ended(engine, live, silent, SessionEnd.IDLE, detail=MADE_ROOM)
    raise Refused(
        Code.QUOTA,
        f"Engine {engine.name} has {len(there)} sessions, {held[holder]} of them opened with this key, and the limit "
        f"for all keys together is {limit}: end some, or try again later.",
    )


def room_for_model(engine: EngineState, live: Live, session: TrainingSession, limit: int) -> tuple[Event, ...]:
    """Return the events that end silent sessions with models, as far as another model needs their room. Raises
    `Refused` QUOTA if this makes too little room."""
    there = _taking_room(engine, limit)
    events: tuple[Event, ...] = ()
    silent_ones = [each for each in _silent(engine, live) if any(model.session == each.session for model in there)]
    for silent in [*silent_ones, None]:
        held = Counter(map(engine.clients.holder_of, there))
        if has_share(held, session.holder, limit):
            return events
        if silent is not None and silent is not session:
            there = [each for each in there if each.session != silent.session]
            events += ended(engine, live, silent, SessionEnd.IDLE, detail=MADE_ROOM)
    raise Refused(
        Code.QUOTA,
        f"Engine {engine.name} has {len(there)} models, {held[session.holder]} of them made with this key, and the "
        f"limit for all keys together is {limit}. A Tinker client's model ends with its session (at the end of its "
        "program, or by POST /api/v1/sessions/ID/finish), an xorl client's model with kill_session; the operator can "
        "set --models-max higher if memory allows.",
    )


def _taking_room(engine: EngineState, limit: int) -> list[ClientModel]:
    """Return the models that take up room: all except models of ended sessions and models that cannot be rebuilt.

    If `limit` or more models are excepted, all models count until some of the excepted ones have ended.
    """
    sessions, models = engine.clients.sessions, engine.clients.open_models
    over = {name for name, each in sessions.items() if each.ended is not None}
    there = [each for each in models if each.session not in over and not each.suspended]
    return there if len(models) - len(there) < limit else models


def _silent(engine: EngineState, live: Live) -> list[TrainingSession]:
    """Return the open sessions whose clients should have shown a sign of life by now, longest silence first.

    Sessions for a single model are left out: their clients send nothing between requests.
    """
    if engine.suspended:
        return []
    seen = [
        (seen_ns(engine, live, each), each)
        for each in engine.clients.sessions.values()
        if each.ended is None and not each.for_model
    ]
    silent = [(at_ns, each) for at_ns, each in seen if at_ns + ns(SILENT_S) <= live.now_ns]
    return [each for _, each in sorted(silent, key=lambda pair: pair[0])]
