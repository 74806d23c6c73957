"""Handle the facts that trainers report about operations and models. Only the first result of an operation counts
(R17)."""

from typing import TypeAlias

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Event, ModelEnd
from bombus.hive.inbox import CheckpointWritten, Done, ModelAway, OperationBegins, OperationDone, RebuildsModel
from bombus.hive.operations.owners import owner_of
from bombus.hive.operations.state import ClientModel, Queued
from bombus.hive.state import EngineState
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.operations.queue import (
    TEXT_CHARS_MAX,
    WHY_CHARS_MAX,
    is_body,
)

ENDS_MAX = 3  # attempts to save a model whose session has ended
ENDED_S = 30 * 24 * 3600.0  # how long a model saved in this way is kept
METRICS_MAX = 32
PATH_CHARS_MAX = 4096  # no operating system takes longer paths
ADDRESS_CHARS_MAX = 128

Fact: TypeAlias = OperationDone | OperationBegins | CheckpointWritten | ModelAway | RebuildsModel


def _is_current(engine: EngineState, message: Fact) -> bool:
    return (
        message.run == engine.run
        and engine.serves_operations
        and engine.trainer != ""
        and message.trainer_epoch == engine.trainer_epoch
    )


def _open_model(engine: EngineState, message: ModelAway | RebuildsModel | CheckpointWritten) -> ClientModel | None:
    """Return the model that a trainer's fact is about, or None if the model is closed or the trainer is not the current
    one."""
    model = engine.clients.models.get(message.model)
    return model if model is not None and model.closed is None and _is_current(engine, message) else None


def begins(engine: EngineState, live: Live, message: OperationBegins) -> Decisions:
    """Record that the current trainer is starting an operation, because it may die before it reports a result."""
    model = engine.clients.models.get(message.model)
    queued = None if model is None or model.closed is not None else model.operations.get(message.key)
    if queued is None or not _is_current(engine, message) or not queued.waits or queued.number != message.number:
        return
    if queued.begun_by == message.trainer_epoch:
        return
    event = ev.OperationBegun(
        **live.at(engine),
        model=message.model,
        number=queued.number,
        key=queued.key,
        trainer_epoch=message.trainer_epoch,
    )
    yield Decision(events=(event,))


def done(engine: EngineState, live: Live, message: OperationDone) -> Decisions:
    """Accept an operation's first result from the current trainer. A later result changes nothing.

    The message can be sent as a command: the answer says that the operation has a result, whether this one or an
    earlier one.
    """
    model = engine.clients.models.get(message.model)
    if not _is_current(engine, message):
        raise wrong_phase(
            f"complete an operation of run {message.run} as trainer {message.trainer_epoch}",
            engine.phase,
            f"Run {engine.run} belongs to trainer {engine.trainer_epoch}.",
        )
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    queued = None if model is None or model.closed is not None else model.operations.get(message.key)
    if model is None or queued is None or not queued.waits or queued.number != message.number:
        yield Decision(replies=reply)
        return
    if not is_body(message.result):
        raise Refused(Code.MALFORMED, "The reference to the result is malformed: store the result again.")
    if message.result.first < max(live.released, engine.clients.released.get(model.name, 0)):
        raise Refused(Code.BODY_GONE, "This result was stored too long ago: store it again.")
    events: list[Event] = [
        ev.OperationCompleted(
            at_ns=live.now_ns,
            engine=engine.name,
            run=engine.run,
            model=model.name,
            number=queued.number,
            key=queued.key,
            op=queued.op,
            trainer_epoch=message.trainer_epoch,
            result=message.result,
            failed=message.failed,
            step=message.step,
            metrics=dict(list(message.metrics.items())[:METRICS_MAX]),
            made=message.made,
            by_server=message.by_server and message.failed,
            loaded="" if message.failed else message.loaded[:ADDRESS_CHARS_MAX],
        )
    ]
    events += _kept(engine, live, model, queued, message)
    events += _closed(engine, live, model, queued, message)
    yield Decision(events=tuple(events), replies=reply)


def _kept(engine: EngineState, live: Live, model: ClientModel, queued: Queued, message: OperationDone) -> list[Event]:
    """Return the event that records the model saved by an operation, or no event if the operation saved none."""
    saved = message.saved
    if saved is None or message.failed:
        return []
    if queued.body is None:  # no client has requested it
        saved = msgspec.structs.replace(saved, ttl_s=ENDED_S)
    kept = ev.WeightsKept(
        **live.at(engine),
        model=model.name,
        session=model.session,
        base=model.base,
        saved=saved,
        step=message.step,
        adapter=model.adapter,
        metadata=queued.metadata,
        owner=owner_of(engine.clients, model),
    )
    return [kept]


def _closed(engine: EngineState, live: Live, model: ClientModel, queued: Queued, message: OperationDone) -> list[Event]:
    """Return the event that closes a model, or no event unless the operation ended the model, could not create it, or
    repeatedly failed to save it."""
    if queued.number == model.begun and message.failed:
        reason, why = ModelEnd.NOT_CREATED, "it could not be created; the result of its first operation says why"
    elif message.closes and not message.failed:
        reason, why = ModelEnd.ENDED, ""
    elif queued.body is None and message.failed and model.failures_to_end + 1 >= ENDS_MAX:
        reason, why = ModelEnd.NOT_SAVED, "its session ended, and it could not be saved"
    else:
        return []
    closed = ev.ModelClosed(**live.at(engine), model=model.name, reason=reason, why=why[:WHY_CHARS_MAX])
    return [closed]


def away(engine: EngineState, live: Live, message: ModelAway) -> Decisions:
    """Note that the current trainer cannot rebuild a model, or that it is able to rebuild the model once more.

    A reason that is already on the log is noted again if the trainer has just tried to rebuild the model, or if
    trainers died trying.
    """
    model = _open_model(engine, message)
    why = message.why[:WHY_CHARS_MAX]
    if model is None:
        return
    is_over = bool(why) and (model.rebuilding_by == message.trainer_epoch or model.lost > 0)
    if model.suspended == why and not is_over:
        return
    event = ev.ModelSuspended(**live.at(engine), model=model.name, why=why)
    yield Decision(events=(event,))


def rebuilds(engine: EngineState, live: Live, message: RebuildsModel) -> Decisions:
    """Note which operation the current trainer is re-executing to rebuild a model, or that the trainer has survived the
    rebuild."""
    model = _open_model(engine, message)
    if model is None:
        return
    if message.over:
        is_new = bool(model.rebuilding_by)
    elif message.number:
        is_new = message.trainer_epoch not in model.unsurvived.get(message.number, ())
        is_new &= 0 < message.number <= model.numbers
    else:
        is_new = model.rebuilding_by != message.trainer_epoch
    if not is_new:
        return
    event = ev.ModelRebuilding(
        **live.at(engine),
        model=model.name,
        trainer_epoch=message.trainer_epoch,
        number=0 if message.over else message.number,
        over=message.over,
    )
    yield Decision(events=(event,))


def checkpointed(engine: EngineState, live: Live, message: CheckpointWritten) -> Decisions:
    """Note a checkpoint from which the current trainer, or its successor, can continue."""
    model = _open_model(engine, message)
    if model is None:
        return
    executed = all(not each.waits for each in model.operations.values() if each.number <= message.number)
    if not model.checkpointed < message.number <= model.numbers or not executed:
        return
    event = ev.ModelCheckpointed(
        **live.at(engine),
        model=model.name,
        number=message.number,
        trainer_epoch=message.trainer_epoch,
        folder=message.folder[:PATH_CHARS_MAX],
        digest=message.digest[:TEXT_CHARS_MAX],
    )
    yield Decision(events=(event,))
