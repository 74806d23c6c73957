"""Accept training operations in the order in which they arrive (R17)."""

import re
from collections import Counter
from itertools import chain

import msgspec

from bombus.errors import Code, Refused
from bombus.figures import byte_size
from bombus.hive import events as ev
from bombus.hive.events import Event
from bombus.hive.inbox import (
    Accepted,
    Operate,
)
from bombus.hive.operations.owners import owner_of
from bombus.hive.operations.state import END_MODEL, ClientModel, KeptWeights, Queued, TrainingSession, bodies_share
from bombus.hive.records import BODY_BYTES_MAX, BODY_PARTS_MAX, DIGEST_BYTES, BodyRef
from bombus.hive.shares import has_share
from bombus.hive.state import EngineState, Phase
from bombus_coordinator.rules.claims import no_room
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.operations.ending import room_for_model

CREATE, END, SAVE = "create_model", END_MODEL, "save_weights"
HELD_S = 24 * 3600.0  # how long operations waiting for a suspended model protect the saved models they load
WHY_CHARS_MAX = 500
TEXT_CHARS_MAX = 1000  # maximum length of the name of a base or saved model
METADATA_BYTES_MAX = 4 << 10  # maximum size for a model, and for a checkpoint
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,127}\Z")  # must be usable as a folder name
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_UNNAMED = re.compile(r"(sample|inflight)-\d+\Z")  # name that gateways give an unnamed save
_OP = re.compile(r"[a-z][a-z_]{0,31}\Z")


def operate(engine: EngineState, live: Live, message: Operate) -> Decisions:
    """Accept an operation. One that was accepted earlier keeps its id, whether it is still waiting or has been
    executed.

    An operation that creates a model starts a run if the engine is offline.
    """
    clients = engine.clients
    session = clients.sessions.get(message.session)
    if session is not None and session.ended is None:
        live.session_seen[engine.name, message.session] = live.now_ns
    model = clients.models.get(message.model)
    before = None if model is None else model.operations.get(message.key)
    if model is not None and before is not None:
        _check_owner(engine, message, model)
        yield Decision(replies=(CommandReply(message.id, _again(model, live, message, before)),))
        return
    _check_form(message)
    if session is None:
        raise Refused(Code.UNKNOWN_SESSION, f"There is no session {message.session}: open one.")
    if session.ended is not None and message.op != END:  # a client may still end its remaining models
        raise Refused(
            Code.SESSION_OVER, f"Session {message.session} has ended ({session.ended.reason}): open another one."
        )
    if live.refusing and message.op != END:
        raise no_room(live)
    if message.body.first < max(live.released, clients.released.get(message.model, 0)):
        raise Refused(Code.BODY_GONE, "The body of this operation was stored too long ago: store it again.")
    events: tuple[Event, ...] = ()
    run = engine.run
    if message.op == CREATE:
        events = _room_for_new(engine, live, message, session)
        if engine.phase == Phase.OFFLINE:
            run += 1
            events += (run_started(engine, live, message.base),)
        events += (
            ev.ModelOpened(
                at_ns=live.now_ns,
                engine=engine.name,
                run=run,
                model=message.model,
                session=message.session,
                base=message.base,
                metadata=message.metadata,
            ),
        )
    else:
        model = _open_model(engine, message, model)
        _check_room(engine, message, model)
        events = _room_for_save(engine, live, message, model)
    number = 1 if model is None else model.numbers + 1
    accepted = ev.OperationAccepted(
        at_ns=live.now_ns,
        engine=engine.name,
        run=run,
        model=message.model,
        number=number,
        key=message.key,
        op=message.op,
        body=message.body,
        passive=message.passive,
        metadata=message.metadata if message.op == SAVE else {},
        reads=message.reads,
    )
    reply = Accepted(run=run, operation=accepted.operation, number=number)
    yield Decision(events=(*events, accepted), replies=(CommandReply(message.id, reply),))


def _check_owner(engine: EngineState, message: Operate, model: ClientModel) -> None:
    """Raise `Refused` if the model belongs to another key, whose client chose the same name."""
    session = engine.clients.sessions.get(message.session)
    if session is not None and session.owner != owner_of(engine.clients, model):
        code = Code.MODEL_EXISTS if message.op == CREATE else Code.UNKNOWN_MODEL
        raise Refused(code, f"Model {message.model} belongs to another client: choose another name for yours.")


def _again(model: ClientModel, live: Live, message: Operate, before: Queued) -> Accepted:
    """Return the answer to an operation that was accepted earlier. Raises `Refused` if a different operation had this
    key."""
    if before.body is None or before.body.digest != message.body.digest:
        raise Refused(
            Code.OTHER_BODY,
            f"Operation {message.key} of model {message.model} was already accepted with a different body. Give "
            "each operation its own key.",
        )
    age_s = (live.now_ns - before.accepted_ns) / 1e9
    if message.again_s and age_s > message.again_s:
        raise Refused(
            Code.OTHER_BODY,
            f"Operation {message.key} of model {message.model} was accepted {age_s:.0f} s ago, too long ago for this "
            "one to be a retry. Give each operation its own key.",
        )
    return Accepted(run=model.run, operation=f"{message.model}:{message.key}", number=before.number)


def _check_form(message: Operate) -> None:
    """Raise `Refused` if names or the reference to the body are malformed. Gateways never send such messages."""
    for what, text, form in (
        ("session", message.session, NAME),
        ("model", message.model, NAME),
        ("key", message.key, _KEY),
        ("op", message.op, _OP),
    ):
        if not form.match(text):
            raise Refused(
                Code.MALFORMED, f"{what} {text[:40]!r} is not a name: use letters, digits, dots, dashes and underscores"
            )
    if not is_body(message.body):
        raise Refused(Code.MALFORMED, "The reference to the body of this operation is malformed: store it again.")
    if len(message.base) > TEXT_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"The name of a base model must have at most {TEXT_CHARS_MAX} characters.")
    if len(message.reads) > TEXT_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"The name of a saved model must have at most {TEXT_CHARS_MAX} characters.")
    if len(msgspec.msgpack.encode(message.metadata)) > METADATA_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"The metadata of a model or a checkpoint exceeds {METADATA_BYTES_MAX} bytes.")


def is_body(body: BodyRef) -> bool:
    """Return whether a reference to a body is well-formed."""
    seqs = body.seqs
    return (
        0 < len(seqs) <= BODY_PARTS_MAX
        and all(seq > 0 for seq in seqs)
        and 0 <= body.size <= BODY_BYTES_MAX
        and len(body.digest) == DIGEST_BYTES
    )


def check_base(engine: EngineState, base: str, what: str) -> None:
    """Raise `Refused` if this engine cannot serve models on this base now. `what` is what the client wants to do."""
    if engine.phase != Phase.OFFLINE and not engine.serves_operations:
        raise wrong_phase(
            what,
            engine.phase,
            f"Engine {engine.name} plays episodes in run {engine.run}; stop it first, or use another engine.",
        )
    if not base:
        raise Refused(Code.MALFORMED, f"To {what}, name its base.")
    job = engine.configured
    if engine.phase == Phase.OFFLINE and job is not None and base not in (job.model, engine.name):
        raise Refused(
            Code.UNKNOWN_MODEL,
            f"Engine {engine.name} is configured for models based on {job.model}, not {base}. Use that base, or "
            "another engine, or configure this one with a job for your base.",
        )
    served = "" if engine.started is None else engine.started.base
    if engine.phase != Phase.OFFLINE and base != served:
        raise Refused(
            Code.UNKNOWN_MODEL,
            f"Engine {engine.name} serves models on {served} in run {engine.run}, not on {base}. Use that base, "
            "or another engine.",
        )


def _room_for_new(engine: EngineState, live: Live, message: Operate, session: TrainingSession) -> tuple[Event, ...]:
    """Return the events that make room for another model. Raises `Refused` if this engine cannot serve another one
    now."""
    check_base(engine, message.base, "create a model")
    if engine.rest_wanted:
        why = f"The trainer of engine {engine.name} is asleep and creates no models until it is woken by /wake_up."
        raise wrong_phase("create a model", engine.phase, why)
    known = engine.clients.models.get(message.model)
    if known is not None and known.closed is None:
        raise Refused(Code.MODEL_EXISTS, f"Model {message.model} already exists: end it first, or choose another name.")
    return room_for_model(engine, live, session, message.models_max or engine.collection.operations.models_max)


def run_started(engine: EngineState, live: Live, base: str) -> ev.EngineStarted:
    """Return the event that starts an operations run on a base."""
    return ev.EngineStarted(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run + 1,
        config_digest="" if engine.configured is None else engine.configured.config_digest,
        base=base,
    )


def _open_model(engine: EngineState, message: Operate, model: ClientModel | None) -> ClientModel:
    """Return an operation's model. Raises `Refused` if the model does not exist, has ended, or belongs to another
    session."""
    if model is None or (message.run and message.run != model.run):
        raise Refused(Code.UNKNOWN_MODEL, f"There is no model {message.model}: create it first.")
    if model.closed is not None:
        why = model.closed.why or f"({model.closed.reason})"
        raise Refused(Code.UNKNOWN_MODEL, f"Model {message.model} has ended: {why}. Create another one.")
    if model.session != message.session:
        raise Refused(Code.UNKNOWN_MODEL, f"Model {message.model} belongs to another session.")
    return model


def _check_room(engine: EngineState, message: Operate, model: ClientModel) -> None:
    """Raise `Refused` if an operation exceeds the limits. An operation that ends a model always has room."""
    limits, holder = engine.collection.operations, engine.clients.holder_of(model)
    if message.op == END:
        return
    if model.waiting >= limits.waiting_max:
        raise Refused(
            Code.QUOTA,
            f"{model.waiting} operations of model {model.name} are waiting, and the limit is {limits.waiting_max}: "
            "send this one again once one of them has been executed.",
        )
    if len(model.operations) >= limits.operations_max:
        raise Refused(
            Code.QUOTA,
            f"Model {model.name} has {len(model.operations)} operations since its trainer last wrote a recovery "
            f"checkpoint, and the limit is {limits.operations_max}: send this one again once it has written another.",
        )
    is_over_share = model.held_bytes + message.body.size > bodies_share(limits)
    if is_over_share and not has_share(_held_bytes(engine), holder, limits.bodies_bytes_max, message.body.size):
        raise Refused(
            Code.QUOTA,
            f"Operations of {byte_size(engine.clients.held_bytes)} are kept for the trainer, and the limit is "
            f"{byte_size(limits.bodies_bytes_max)}: send this one again once some have been executed and saved.",
        )


def _is_full(engine: EngineState, holder: str) -> bool:
    """Return whether a key's holder has reached the limit on saved models. Published models count toward their owner's
    limit."""
    kept, limit = engine.clients.kept, engine.collection.operations.checkpoints_max
    return len(kept) >= limit and not has_share(Counter(each.noted.owner for each in kept.values()), holder, limit)


def _held_bytes(engine: EngineState) -> Counter[str]:
    """Return the bytes that are kept for the trainer, by holder."""
    held: Counter[str] = Counter()
    for model in engine.clients.open_models:
        held[engine.clients.holder_of(model)] += model.held_bytes
    return held


def _least_needed(engine: EngineState, live: Live, model: ClientModel) -> KeptWeights | None:
    """Return the saved model to remove so that this model can be saved: the oldest that its client did not name.

    What ended models of the same key have saved is removed before what this model has saved. Saved models that are in
    use, published or kept forever are not removed.
    """
    clients, used = engine.clients, in_use(engine, live)
    holder, open_now = clients.holder_of(model), {each.name for each in clients.open_models}

    def may_go(name: str, each: KeptWeights) -> bool:
        is_unnamed = each.is_for_sync or _UNNAMED.match(each.noted.saved.name) is not None
        return is_unnamed and each.until_ns > 0 and not each.noted.public and name not in used

    left = (
        each
        for name, each in clients.kept.items()
        if each.noted.owner == holder and each.noted.model not in open_now and may_go(name, each)
    )
    own = (each for name, each in clients.kept.items() if each.noted.model == model.name and may_go(name, each))
    return next(chain(left, own), None)


def in_use(engine: EngineState, live: Live) -> set[str]:
    """Return the saved models that open episodes sample from, or that waiting operations will load.

    The protection by operations of a suspended model ends after `HELD_S`, counting only time in which the model could
    have been rebuilt.
    """
    sampled = {episode.sampler.checkpoint for episode in engine.open.values() if episode.sampler is not None}
    return sampled | engine.clients.read_by_waiting(engine.clients.trying.shows(live.now_ns) - ns(HELD_S))


def _room_for_save(engine: EngineState, live: Live, message: Operate, model: ClientModel) -> tuple[Event, ...]:
    """Return the event that makes room for a save if the limit is reached, so that a client's loop can continue. Raises
    `Refused` if no room can be made."""
    holder = engine.clients.holder_of(model)
    if message.op != SAVE or not _is_full(engine, holder):
        return ()
    least = _least_needed(engine, live, model)
    if least is None:
        own = sum(each.noted.owner == holder for each in engine.clients.kept.values())
        raise Refused(
            Code.QUOTA,
            f"{len(engine.clients.kept)} saved models are kept, {own} of them by this key, and the limit for all keys "
            f"together is {engine.collection.operations.checkpoints_max}: remove some that are no longer needed.",
        )
    noted = least.noted
    removed = ev.WeightsRemoved(
        at_ns=live.now_ns,
        engine=engine.name,
        model=noted.model,
        use=noted.saved.use,
        name=noted.saved.name,
        expired=True,
    )
    return (removed,)
