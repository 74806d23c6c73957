"""How an operations run begins, rests and ends, and which messages in the stream `ops` are no longer needed."""

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Event, ModelFloor
from bombus.hive.inbox import AskRest, BeginSampling, Done, OperationsStored, TrainerRests, TrainerServes
from bombus.hive.operations.state import ClientModel
from bombus.hive.state import BOOTED, EngineState, Hive, Phase
from bombus_coordinator.rules.claims import no_room
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.operations.queue import TEXT_CHARS_MAX, check_base, run_started

NAME_CHARS = 128  # characters of a session's name shown in a message
FLOORS_MAX = 1000  # maximum number in one event


def trainer_serves(engine: EngineState, live: Live, message: TrainerServes) -> Decisions:
    """Note that the run can begin to serve, because its trainer has loaded the base. The transition to rolling
    follows."""
    if message.run != engine.run or not engine.serves_operations or message.trainer_epoch != engine.trainer_epoch:
        return
    if engine.phase != Phase.BOOTING or not engine.trainer or engine.stage == BOOTED:
        return
    yield Decision(events=(ev.EngineBooted(**live.at(engine)),))


def begin_sampling(engine: EngineState, live: Live, message: BeginSampling) -> Decisions:
    """Let a session sample, starting a run if the engine is offline. A repeat changes nothing."""
    session = engine.clients.sessions.get(message.session)
    if session is None or session.ended is not None:
        raise Refused(Code.SESSION_OVER, f"Session {message.session[:NAME_CHARS]} has ended; open a new one.")
    if len(message.base) > TEXT_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"The name of a base model must have at most {TEXT_CHARS_MAX} characters.")
    check_base(engine, message.base, "sample")
    run = engine.run
    events: tuple[Event, ...] = ()
    if engine.phase == Phase.OFFLINE:
        if live.refusing:
            raise no_room(live)
        run += 1
        events = (run_started(engine, live, message.base),)
    if session.samples_in != run:
        events += (ev.SamplingBegun(at_ns=live.now_ns, engine=engine.name, run=run, session=message.session),)
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=run)),))


def ask_rest(engine: EngineState, live: Live, message: AskRest) -> Decisions:
    """Tell the trainer to free its memory, or to continue. A repeat changes nothing."""
    what = "put the trainer to sleep" if message.asleep else "wake the trainer up"
    if not engine.serves_operations:
        raise wrong_phase(what, engine.phase, f"Engine {engine.name} serves no training operations: create a model.")
    if message.asleep and engine.phase == Phase.BOOTING:
        raise wrong_phase(what, engine.phase, "Its trainer is loading the base: try again once a model is created.")
    if message.asleep and engine.suspended:
        raise wrong_phase(what, engine.phase, f"The run is suspended and uses no memory: {engine.suspended}")
    asked = ev.RestAsked(**live.at(engine), asleep=message.asleep, by=message.by)
    events = () if engine.rest_wanted == message.asleep else (asked,)
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))


def trainer_rests(engine: EngineState, live: Live, message: TrainerRests) -> Decisions:
    """Note that the current trainer has freed its memory, or has reloaded its models."""
    if message.run != engine.run or not engine.serves_operations or message.trainer_epoch != engine.trainer_epoch:
        return
    if not engine.trainer or engine.asleep == message.asleep:
        return
    reached = ev.RestReached(**live.at(engine), trainer_epoch=message.trainer_epoch, asleep=message.asleep)
    yield Decision(events=(reached,))


def end_idle_run(engine: EngineState, live: Live) -> Decisions:
    """End a run that has had no model for a while. A session or an open episode that is still sampling keeps the run
    alive."""
    clients = engine.clients
    if not engine.serves_operations or engine.suspended or clients.open_models or engine.open:
        return
    sampling = [session for session in clients.sessions.values() if session.samples_in == engine.run]
    if any(session.ended is None for session in sampling):
        return
    sampled_ns = max((session.ended.at_ns for session in sampling if session.ended is not None), default=0)
    since_ns = max(engine.phase_since_ns, clients.model_closed_ns, sampled_ns)
    if live.is_over(since_ns, engine.collection.operations.run_idle_s):
        yield Decision(events=(ev.EngineStopped(**live.at(engine)),))


# ---- what is no longer needed (R12, R17) -------------------------------------------------------------------------


def floor_of(model: ClientModel, below: int) -> int:
    """Return the sequence in `ops` before which a model needs nothing, or `below` if that is smaller."""
    return min([below, *(body.first for body in model.needed())])


def release(hive: Hive, live: Live, message: OperationsStored) -> Decisions:
    """Release the messages before `below` that no model needs. Senders may still name messages from `below` on.

    Once the release is on the log, operations with older bodies are refused, so a purged message is never needed later.
    """
    if message.shrunk:
        lowered = tuple(
            ModelFloor(engine.name, model, message.below)
            for engine in hive.engines.values()
            for model, floor in engine.clients.released.items()
            if floor > message.below
        )
        if message.below < hive.released or lowered:
            below = min(hive.released, message.below)
            yield Decision(events=(ev.OperationsReleased(at_ns=live.now_ns, below=below, models=lowered),))
        return
    floors = {
        (engine.name, model.name): floor_of(model, message.below)
        for engine in hive.engines.values()
        for model in engine.clients.models.values()
    }
    below = max(hive.released, min(floors.values(), default=message.below))
    models: list[ModelFloor] = []
    if message.overfull:
        for (name, model), floor in floors.items():
            if floor > max(below, hive.engine(name).clients.released.get(model, 0)):
                models.append(ModelFloor(name, model, floor))
    if below > max(hive.released, 1) or models:
        event = ev.OperationsReleased(at_ns=live.now_ns, below=below, models=tuple(models[:FLOORS_MAX]))
        yield Decision(events=(event,))
