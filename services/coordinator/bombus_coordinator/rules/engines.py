"""The life of an engine: configure, start, stop, suspend and resume."""

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.collection import BATCH_METHODS, active_clients
from bombus.hive.events import AbortReason, Collection, Event
from bombus.hive.inbox import (
    AgreeSync,
    Configure,
    Done,
    EngineBroke,
    ModelReadFact,
    Refusal,
    Resume,
    Start,
    Stop,
)
from bombus.hive.state import ACTIVE_S, EngineState, Phase
from bombus_coordinator.rules.beginning import beginning
from bombus_coordinator.rules.claims import check_collects, no_room, why_none
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.episodes import aborted
from bombus_coordinator.rules.live import Live

REASON_CHARS_MAX = 2000
EPISODE_BYTES = 256  # bytes per episode in `batch.ready`, with its share of its task's name, or in `step.completed`


ControlCommand = Configure | Start | Stop | Resume  # the outcome of these is always on the log


def recorded(engine: EngineState, command: str) -> Done | Refusal | None:
    """Return the answer that this or an earlier leader gave to a control command, or None for a new command."""
    refused = engine.refused.get(command)
    if refused is not None and refused.code is not None:
        return Refusal(code=refused.code, why=refused.why)
    run = engine.commands.get(command)
    return None if run is None else Done(run=run)


def answered(
    engine: EngineState, live: Live, message: ControlCommand, error: Refused | None = None
) -> ev.CommandAnswered:
    """Return the event that records a control command that changes nothing."""
    return ev.CommandAnswered(
        **live.at(engine),
        command=message.id,
        code=None if error is None else error.code,
        why="" if error is None else error.why,
        by=message.by,
    )


def configure(engine: EngineState, live: Live, message: Configure) -> Decisions:
    if engine.phase != Phase.OFFLINE:
        raise wrong_phase("change the configuration", engine.phase, "Call stop_engine first.")
    if not message.config_digest:
        raise Refused(Code.MALFORMED, "A configuration needs a digest, which identifies the job of its runs.")
    if message.collection.max_staleness > 0:
        check_asynchronous(message.collection)
    check_size(message.collection, live.event_bytes_max)
    event = ev.EngineConfigured(
        at_ns=live.now_ns,
        engine=engine.name,
        config=message.config,
        config_digest=message.config_digest,
        collection=message.collection,
        model=message.model,
        command=message.id,
        by=message.by,
    )
    yield Decision(events=(event,), replies=(CommandReply(message.id, Done(run=engine.run)),))


def check_size(rules: Collection, event_bytes_max: int) -> None:
    """Raise `Refused` for batches that would not fit into one event."""
    most = event_bytes_max // EPISODE_BYTES
    if rules.episode_target > most:
        raise Refused(
            Code.BAD_CONFIG,
            f"a batch of {rules.episode_target} episodes does not fit into one bus message, which has room for about "
            f"{most}: lower collection.batch_size or rollout.num_repeat, or raise the server's max_payload.",
        )


def check_asynchronous(rules: Collection) -> None:
    """Raise `Refused` if any of the rules makes no sense when episodes continue during a training step."""
    if BATCH_METHODS[rules.method].is_by_agreement:
        raise Refused(
            Code.BAD_CONFIG,
            f"collection.method = {rules.method} needs max_staleness = 0: clients that agree to train then wait for "
            "the engine to stop rolling, which an asynchronous engine never does. Use another method.",
        )
    ahead = (rules.max_staleness + 1) * rules.episode_target
    if rules.max_pool_episodes < ahead:
        raise Refused(
            Code.BAD_CONFIG,
            f"collection.max_cached_episodes = {rules.max_pool_episodes} is less than the {ahead} episodes of "
            f"max_staleness + 1 batches, which may all be waiting for training: raise it to at least {ahead}.",
        )


def start(engine: EngineState, live: Live, message: Start) -> Decisions:
    if engine.phase != Phase.OFFLINE:
        raise wrong_phase("start the engine", engine.phase, _why_started(engine))
    if live.refusing:
        raise no_room(live)
    if engine.configured is None:
        raise Refused(Code.NO_CONFIG, "No training configuration found: call sync_train_config first.")
    if engine.configured.collection.rollout_groups or engine.configured.collection.episode_groups:
        raise Refused(
            Code.WRONG_PHASE,
            "This job makes batches of rollout groups (collection.rollout_groups or collection.episode_groups): POST "
            "/register begins its run, see docs/atropos.md. To make batches of episodes, configure another job.",
        )
    run = engine.run + 1
    begins, anew = beginning(engine)
    event = ev.EngineStarted(
        at_ns=live.now_ns,
        engine=engine.name,
        run=run,
        config_digest=engine.configured.config_digest,
        command=message.id,
        begins=begins,
        anew=anew,
        by=message.by,
    )
    yield Decision(events=(event,), replies=(CommandReply(message.id, Done(run=run)),))


def _why_started(engine: EngineState) -> str:
    if engine.suspended:
        return f"Its run is suspended: {engine.suspended}. `bombus resume` lets it continue, `bombus stop` ends it."
    if engine.serves_operations:
        return "It serves training operations until its last model has ended; stop_engine ends them now."
    if engine.queues_groups and engine.has_policy:
        return "It has made batches of rollout groups since a trainer registered; stop_engine ends that."
    if engine.queues_groups:
        return "It takes rollout groups for a trainer that has registered; stop_engine ends that."
    return "It has already started; call stop_engine to start over."


def close_all(engine: EngineState, live: Live, last: Event) -> tuple[Event, ...]:
    """Return the events that end the run: aborts of all open episodes, then `last`."""
    if not engine.open:
        return (last,)
    return (*aborted(engine, live, tuple(engine.open), AbortReason.ENGINE_STOPPED), last)


def stop(engine: EngineState, live: Live, message: Stop) -> Decisions:
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if engine.phase == Phase.OFFLINE:
        yield Decision(events=(answered(engine, live, message),), replies=reply)
        return
    stopped = ev.EngineStopped(**live.at(engine), command=message.id, by=message.by)
    yield Decision(events=close_all(engine, live, stopped), replies=reply)


def resume(engine: EngineState, live: Live, message: Resume) -> Decisions:
    """Resume a suspended run, and retry the models that trainers gave up rebuilding. Do nothing for other runs."""
    if engine.phase == Phase.OFFLINE:
        raise wrong_phase("resume the engine", engine.phase, "It has no run to resume; start one.")
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    limit = engine.collection.operations.executions_max
    if not engine.suspended and not engine.clients.given_up(limit):
        yield Decision(events=(answered(engine, live, message),), replies=reply)
        return
    resumed = ev.EngineResumed(**live.at(engine), command=message.id, by=message.by)
    yield Decision(events=(resumed,), replies=reply)


def suspend(
    engine: EngineState, live: Live, reason: str, before: tuple[Event, ...] = (), until_served: bool = False
) -> Decisions:
    """Suspend the run, keeping all its state, until its operator resumes it or, if `until_served`, a replica serves it.

    A run that already waits for its operator keeps waiting for them. A run that waits for a replica waits for its
    operator from now on, unless this suspension is `until_served` too.
    """
    suspended = ev.EngineSuspended(**live.at(engine), reason=reason[:REASON_CHARS_MAX], until_served=until_served)
    waits = engine.suspended if until_served else engine.waits_for_operator
    events = before if waits else (*before, suspended)
    if events:
        yield Decision(events=events)


def fail(engine: EngineState, live: Live, reason: str) -> Decisions:
    failed = ev.EngineFailed(**live.at(engine), reason=reason[:REASON_CHARS_MAX])
    yield Decision(events=close_all(engine, live, failed))


def broke(engine: EngineState, live: Live, message: EngineBroke) -> Decisions:
    superseded = message.trainer_epoch not in (None, engine.trainer_epoch)
    if message.run == engine.run and engine.phase != Phase.OFFLINE and not superseded:
        of_trainer = message.trainer_epoch is not None
        end = fail if of_trainer and not message.may_pass else suspend
        yield from end(engine, live, message.reason)


def model_read(engine: EngineState, live: Live, message: ModelReadFact) -> Decisions:
    if engine.lacks_format(message.run, message.format):
        yield Decision(events=(ev.ModelRead(**live.at(engine), gateway=message.gateway, format=message.format),))


def agree(engine: EngineState, live: Live, message: AgreeSync) -> Decisions:
    """Record a client's vote to train now. A vote does nothing while a batch drains or trains."""
    check_collects(engine)
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if engine.phase in (Phase.ROLLING_POST, Phase.WEIGHT_SYNCING) or message.client in engine.agreed:
        yield Decision(replies=reply)
        return
    if engine.phase != Phase.ROLLING:
        raise why_none(engine)
    if message.client not in active_clients(engine, live.now_ns):
        raise Refused(
            Code.NOT_ACTIVE,
            f"Only an active client can agree, one that ended an episode with a reward in the last {ACTIVE_S:.0f} s.",
        )
    event = ev.SyncAgreed(**live.at(engine), client=message.client)
    yield Decision(events=(event,), replies=reply)
