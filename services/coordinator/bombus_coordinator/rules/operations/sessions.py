"""Open and end the sessions of training clients, and manage the models that they have saved."""

from collections import Counter

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Event, ModelEnd, SessionEnd
from bombus.hive.inbox import CloseSession, Done, OpenSession, PublishWeights, RemoveWeights, RetainWeights
from bombus.hive.operations.owners import owner_of
from bombus.hive.operations.state import TTL_S_MAX, KeptWeights, TrainingSession, kept_id
from bombus.hive.shares import share_name
from bombus.hive.state import EngineState
from bombus_coordinator.rules.claims import no_room
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.operations.ending import end_of, ended, open_models, room_for_session, seen_ns, to_end
from bombus_coordinator.rules.operations.queue import NAME, WHY_CHARS_MAX, in_use

METADATA_BYTES_MAX = 64 << 10
TEXT_CHARS_MAX = 256  # maximum length of the name of a key or an API
SHOWN_CHARS = 128  # characters shown of an unknown name in a message
IDLE_S_MIN, IDLE_S_MAX = 10.0, 7 * 24 * 3600.0
AGAIN_S = 60.0  # delay before a model that could not be saved is saved again
LEFT_S = 24 * 3600.0  # how long a model that cannot be rebuilt waits to be saved after its session ended
TRIED_S = 1800.0  # by the end of LEFT_S, one trainer must have had this long, under a leader, to try rebuilding it
MODEL_S = 60.0  # how long a session for one model may exist before that model is created
ENDED_KEPT = 2  # ended sessions kept, as a multiple of the open ones allowed; others are forgotten early


def open_session(engine: EngineState, live: Live, message: OpenSession) -> Decisions:
    sessions = engine.clients.sessions
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    before = sessions.get(message.session)
    if before is not None:
        if before.ended is not None:
            raise Refused(Code.SESSION_OVER, f"Session {message.session} has ended ({before.ended.reason}).")
        yield Decision(replies=reply)
        return
    limits = engine.collection.operations
    idle_s = message.idle_s or limits.session_idle_s
    _check_form(message, idle_s)
    if live.refusing:
        raise no_room(live)
    events = room_for_session(engine, live, share_name(message.owner, message.admin))
    if len(sessions) >= ENDED_KEPT * limits.sessions_max:
        events += _forgotten_early(engine, live)
    opened = ev.SessionOpened(
        at_ns=live.now_ns,
        engine=engine.name,
        session=message.session,
        idle_s=idle_s,
        owner=message.owner,
        dialect=message.dialect,
        metadata=message.metadata,
        for_model=message.for_model,
        admin=message.admin,
    )
    yield Decision(events=(*events, opened), replies=reply)


def _forgotten_early(engine: EngineState, live: Live) -> tuple[Event, ...]:
    """Return the event that forgets the oldest ended session of the key with the most ended sessions, if there are
    any."""
    over = [each for each in engine.clients.sessions.values() if _is_over(engine, each)]
    if not over:
        return ()
    most, _ = Counter(each.holder for each in over).most_common(1)[0]
    return (_forgotten(engine, live, next(each for each in over if each.holder == most)),)


def _check_form(message: OpenSession, idle_s: float) -> None:
    if not NAME.match(message.session):
        raise Refused(Code.MALFORMED, f"{message.session[:40]!r} is not a valid session name.")
    if not IDLE_S_MIN <= idle_s <= IDLE_S_MAX:
        raise Refused(
            Code.MALFORMED,
            f"A session's idle time must be {IDLE_S_MIN:.0f} to {IDLE_S_MAX:.0f} seconds, not {message.idle_s}.",
        )
    if len(message.owner) > TEXT_CHARS_MAX or len(message.dialect) > TEXT_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"The name of a key or an API must have at most {TEXT_CHARS_MAX} characters.")
    if len(msgspec.msgpack.encode(message.metadata)) > METADATA_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"The metadata of a session exceeds {METADATA_BYTES_MAX} bytes.")


def close_session(engine: EngineState, live: Live, message: CloseSession) -> Decisions:
    """End a session and its models. If the session has already ended, the first reason is kept."""
    session = engine.clients.sessions.get(message.session)
    if session is None:
        raise Refused(Code.UNKNOWN_SESSION, f"There is no session {message.session[:SHOWN_CHARS]}.")
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if session.ended is not None:
        yield Decision(replies=reply)
        return
    events = ended(engine, live, session, SessionEnd.FINISHED, detail=message.detail[:WHY_CHARS_MAX], save=message.save)
    yield Decision(events=events, replies=reply)


def expire(engine: EngineState, live: Live) -> Decisions:
    """End idle sessions and their models, and forget ended sessions whose results have been kept long enough.

    While the run is suspended, nothing is done.
    """
    if engine.suspended:
        return
    yield from _let_go(engine, live)
    for session in list(engine.clients.sessions.values()):
        if session.ended is None:
            if _has_no_model(engine, live, session):
                yield Decision(events=ended(engine, live, session, SessionEnd.FINISHED))
            elif _is_idle(engine, live, session):
                yield Decision(events=ended(engine, live, session, SessionEnd.IDLE))
            continue
        again = [model for model in to_end(engine, session) if live.is_over(model.last_ns, AGAIN_S)]
        if again:
            yield Decision(events=tuple(end_of(engine, live, model, session.ended.save) for model in again))
        elif _is_over(engine, session) and _is_old(engine, live, session):
            yield Decision(events=(_forgotten(engine, live, session),))


def _let_go(engine: EngineState, live: Live) -> Decisions:
    """End models that cannot be rebuilt, and therefore cannot be saved, once their sessions ended long ago.

    Only time in which a trainer could have rebuilt the models counts.
    """
    clients = engine.clients
    began_ns = max(engine.trainer_since_ns, engine.resumed_ns)
    if not clients.trying.since_ns or not live.is_over(began_ns, TRIED_S):
        return
    over = {name for name, session in clients.sessions.items() if session.ended is not None}
    for model in clients.open_models:
        is_left = bool(model.suspended) and model.session in over
        if is_left and model.left_ns + ns(LEFT_S) <= clients.trying.shows(live.now_ns):
            closed = ev.ModelClosed(
                **live.at(engine),
                model=model.name,
                reason=ModelEnd.NOT_SAVED,
                why=f"its session ended, but it could not be rebuilt to be saved: {model.suspended}"[:WHY_CHARS_MAX],
            )
            yield Decision(events=(closed,))


def _has_no_model(engine: EngineState, live: Live, session: TrainingSession) -> bool:
    """Return whether a session that was opened for one model has none, because the model has ended or was never
    created."""
    if not session.for_model or open_models(engine, session):
        return False
    models = (model for model in engine.clients.models.values() if model.session == session.session)
    closed_ns = max((model.closed.at_ns for model in models if model.closed is not None), default=0)
    return live.is_over(max(session.opened_ns, closed_ns), MODEL_S)


def _is_idle(engine: EngineState, live: Live, session: TrainingSession) -> bool:
    """Return whether a session has shown no sign of life, and no work has been done for it, for too long."""
    return seen_ns(engine, live, session) + ns(session.idle_s) <= live.now_ns


def _is_over(engine: EngineState, session: TrainingSession) -> bool:
    return session.ended is not None and not open_models(engine, session)


def _is_old(engine: EngineState, live: Live, session: TrainingSession) -> bool:
    assert session.ended is not None
    models = (model for model in engine.clients.models.values() if model.session == session.session)
    last_ns = max((model.closed.at_ns for model in models if model.closed is not None), default=0)
    return max(session.ended.at_ns, last_ns) + ns(engine.collection.operations.results_s) <= live.now_ns


def _forgotten(engine: EngineState, live: Live, session: TrainingSession) -> ev.SessionForgotten:
    return ev.SessionForgotten(at_ns=live.now_ns, engine=engine.name, session=session.session)


# ---- saved models ---------------------------------------------------------------------------------------------


def remove_weights(engine: EngineState, live: Live, message: RemoveWeights) -> Decisions:
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    name = kept_id(message.model, message.use, message.name)
    kept = engine.clients.kept.get(name)
    if kept is None:
        yield Decision(replies=reply)
        return
    _check_unread(engine, name, kept)
    removed = ev.WeightsRemoved(
        at_ns=live.now_ns, engine=engine.name, model=message.model, use=message.use, name=message.name
    )
    yield Decision(events=(removed,), replies=reply)


def _check_unread(engine: EngineState, name: str, kept: KeptWeights) -> None:
    """Raise `Refused` if an operation is about to load a saved model. The refusal does not name operations of other
    clients.

    Operations of a model that cannot be rebuilt do not count, as they may wait for a long time: they will fail when
    they are executed.
    """
    found = next((each for each in engine.clients.readers(name) if not each[0].suspended), None)
    if found is None:
        return
    model, queued = found
    is_own = owner_of(engine.clients, model) == kept.noted.owner
    reader = f"operation {queued.key} of model {model.name}" if is_own else "an operation of another client"
    raise Refused(Code.WRONG_PHASE, f"{name} is about to be loaded by {reader}, which is waiting: remove it later.")


def retain_weights(engine: EngineState, live: Live, message: RetainWeights) -> Decisions:
    kept = _kept(engine, message)
    if not 0 <= message.ttl_s <= TTL_S_MAX:
        raise Refused(Code.MALFORMED, f"A time to live must be 0 to {TTL_S_MAX:.0f} seconds, not {message.ttl_s}.")
    saved = msgspec.structs.replace(kept.noted.saved, ttl_s=message.ttl_s)
    noted = msgspec.structs.replace(kept.noted, at_ns=live.now_ns, saved=saved, saved_ns=kept.saved_ns)
    yield Decision(events=(noted,), replies=(CommandReply(message.id, Done(run=engine.run)),))


def publish_weights(engine: EngineState, live: Live, message: PublishWeights) -> Decisions:
    """Make a saved model public, or private again. The model's time to live keeps running."""
    kept = _kept(engine, message)
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if kept.noted.public == message.public:
        yield Decision(replies=reply)
        return
    left_s = max(kept.until_ns - live.now_ns, 1) / 1e9 if kept.until_ns else 0.0
    noted = msgspec.structs.replace(
        kept.noted,
        at_ns=live.now_ns,
        saved=msgspec.structs.replace(kept.noted.saved, ttl_s=left_s),
        saved_ns=kept.saved_ns,
        public=message.public,
    )
    yield Decision(events=(noted,), replies=reply)


def _kept(engine: EngineState, message: RetainWeights | PublishWeights) -> KeptWeights:
    kept = engine.clients.kept.get(kept_id(message.model, message.use, message.name))
    if kept is None:
        raise Refused(
            Code.UNKNOWN_MODEL,
            f"Model {message.model[:SHOWN_CHARS]} was not saved as {message.name[:SHOWN_CHARS]}: list its checkpoints.",
        )
    return kept


def expire_weights(engine: EngineState, live: Live) -> Decisions:
    """Remove expired saved models, except those that open episodes sample from or that operations wait to load."""
    over = [
        (name, each) for name, each in engine.clients.kept.items() if each.until_ns and each.until_ns <= live.now_ns
    ]
    if not over:
        return
    used = in_use(engine, live)
    for name, each in over:
        if name not in used:
            saved = each.noted.saved
            removed = ev.WeightsRemoved(
                at_ns=live.now_ns,
                engine=engine.name,
                model=each.noted.model,
                use=saved.use,
                name=saved.name,
                expired=True,
            )
            yield Decision(events=(removed,))
