"""Register the trainers and environments of rollout groups, track whether they are alive, and handle their
departure."""

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Collection, EnvironmentEnd, Event
from bombus.hive.inbox import Done, Joined, JoinEnvironment, LeaveEnvironment, RegisterTrainer, ResetGroups
from bombus.hive.state import EngineState, Phase
from bombus.hive.trajectories.queue import Environment, no_environment, why_no_batch_size, why_not_joined
from bombus.hive.trajectories.training import why_not_registered
from bombus_coordinator.rules.beginning import beginning
from bombus_coordinator.rules.claims import no_room
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.engines import close_all
from bombus_coordinator.rules.live import Live, ns

ENVIRONMENT_IDLE_S = 600.0  # silence after which an environment counts as gone
TEXT_CHARS_MAX = 1_000
FOLDER_CHARS_MAX = 4_096  # the maximum in most file systems


def register_trainer(engine: EngineState, live: Live, message: RegisterTrainer) -> Decisions:
    """Begin a run for a trainer. An earlier rollout-group run ends, and its groups are dropped.

    If the engine's job makes batches of rollout groups, the run boots like an episode run. Its trainer is then our own,
    with the registered settings, unless the job makes only groups of episodes. Without such a job, the trainer is an
    outside one, and the run starts rolling immediately.
    """
    check_queue(engine, "register a trainer")
    why = why_no_batch_size(message.batch_size)
    if why:
        raise Refused(Code.MALFORMED, why)
    if len(message.checkpoint_dir) > FOLDER_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"checkpoint_dir must have at most {FOLDER_CHARS_MAX} characters.")
    for text in (message.trainer, message.wandb_group, message.wandb_project, message.owner):
        if len(text) > TEXT_CHARS_MAX:
            raise Refused(Code.MALFORMED, f"A name must have at most {TEXT_CHARS_MAX} characters.")
    if live.refusing:
        raise no_room(live)
    run = engine.run + 1
    stopped = ev.EngineStopped(**live.at(engine), by=message.by)
    events: tuple[Event, ...] = close_all(engine, live, stopped) if engine.queues_groups else ()
    registered = ev.TrainerRegistered(
        at_ns=live.now_ns,
        engine=engine.name,
        run=run,
        trainer=message.trainer,
        batch_size=message.batch_size,
        max_token_len=message.max_token_len,
        checkpoint_dir=message.checkpoint_dir,
        save_checkpoint_interval=message.save_checkpoint_interval,
        starting_step=message.starting_step,
        num_steps=message.num_steps,
        wandb_group=message.wandb_group,
        wandb_project=message.wandb_project,
        owner=message.owner,
    )
    reply = CommandReply(message.id, Done(run=run))
    rules = Collection() if engine.configured is None else engine.configured.collection
    if rules.rollout_groups or rules.episode_groups:
        started = _started(engine, live, registered, message.by)
        yield Decision(events=(*events, started, registered), replies=(reply,))
        return
    started = ev.EngineStarted(at_ns=live.now_ns, engine=engine.name, run=run, config_digest="", by=message.by)
    booted = ev.EngineBooted(at_ns=live.now_ns, engine=engine.name, run=run)
    rolling = ev.RollingStarted(at_ns=live.now_ns, engine=engine.name, run=run, version=-1)
    yield Decision(events=(*events, started, booted, rolling, registered), replies=(reply,))


def check_queue(engine: EngineState, action: str) -> None:
    """Raise `Refused` if the current run does not make its batches from rollout groups."""
    if engine.phase != Phase.OFFLINE and not engine.queues_groups:
        does = "serves training operations" if engine.serves_operations else "plays episodes"
        hint = f"Run {engine.run} of engine {engine.name} {does}: stop it, or use another engine."
        raise wrong_phase(action, engine.phase, hint)


def _started(engine: EngineState, live: Live, registered: ev.TrainerRegistered, by: str) -> ev.EngineStarted:
    """Return the event that starts a run with a job. Raises `Refused` for settings that our own trainer does not
    support."""
    assert engine.configured is not None
    begins, anew = beginning(engine)
    is_ours = engine.configured.collection.rollout_groups
    why = why_not_registered(registered, 0 if begins is None else begins.step) if is_ours else ""
    if why:
        raise Refused(Code.MALFORMED, why)
    return ev.EngineStarted(
        at_ns=live.now_ns,
        engine=engine.name,
        run=registered.run,
        config_digest=engine.configured.config_digest,
        begins=begins,
        anew=anew,
        by=by,
    )


def join(engine: EngineState, live: Live, message: JoinEnvironment) -> Decisions:
    """Admit an environment. Until the trainer has asked for a batch, tell the environment to ask again.

    Our own trainer never asks for batches; with it, the environment waits until replicas serve the model.
    """
    state = engine.trajectories
    begun = engine.phase != Phase.BOOTING and (engine.makes_steps or state.begun)
    if not engine.queues_groups or not begun:
        yield Decision(replies=(CommandReply(message.id, Joined()),))
        return
    desired = message.desired_name[:TEXT_CHARS_MAX]
    environment = Environment(
        id=state.queue.joined,
        name=state.queue.name_for(desired),
        max_tokens=message.max_tokens,
        weight=message.weight,
        group_size=message.group_size,
        minimum=message.minimum,
        owner=message.owner[:TEXT_CHARS_MAX],
        admin=message.admin,
    )
    why = why_not_joined(state.queue, environment)
    if why:
        raise Refused(Code.MALFORMED, why)
    joined = _joined(engine, live, environment, desired)
    yield Decision(events=(joined,), replies=(CommandReply(message.id, Joined(environment=environment.id)),))


def _joined(engine: EngineState, live: Live, environment: Environment, desired: str = "") -> ev.EnvironmentJoined:
    return ev.EnvironmentJoined(
        at_ns=live.now_ns,
        engine=engine.name,
        environment=environment.id,
        desired_name=desired,
        name=environment.name,
        max_tokens=environment.max_tokens,
        weight=environment.weight,
        group_size=environment.group_size,
        minimum=environment.minimum,
        owner=environment.owner,
        admin=environment.admin,
    )


def leave(engine: EngineState, live: Live, message: LeaveEnvironment) -> Decisions:
    known = engine.trajectories.queue.environments.get(message.environment)
    if known is None:
        raise Refused(Code.UNKNOWN_ENVIRONMENT, no_environment(message.environment))
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if not known.connected:
        yield Decision(replies=reply)
        return
    yield Decision(events=(_left(engine, live, known.id, EnvironmentEnd.DISCONNECTED),), replies=reply)


def _left(engine: EngineState, live: Live, environment: int, reason: EnvironmentEnd) -> ev.EnvironmentLeft:
    live.environment_seen.pop((engine.name, environment), None)
    return ev.EnvironmentLeft(at_ns=live.now_ns, engine=engine.name, environment=environment, reason=reason)


def again(engine: EngineState, live: Live, environment: int) -> tuple[Event, ...]:
    """Return the event that reconnects an environment if it had fallen silent, or else no event."""
    known = engine.trajectories.queue.environments.get(environment)
    if known is None or known.connected or environment not in engine.trajectories.silent_ns:
        return ()
    return (_joined(engine, live, known),)


def lapse(engine: EngineState, live: Live) -> Decisions:
    """Mark silent environments as gone, and environments that are heard from again as connected."""
    state = engine.trajectories
    if not state.heard_ns and not state.silent_ns:
        return
    for environment, heard_ns in list(state.heard_ns.items()):
        seen_ns = max(heard_ns, live.environment_seen.get((engine.name, environment), 0))
        if live.silent_since(seen_ns) + ns(ENVIRONMENT_IDLE_S) <= live.now_ns:
            yield Decision(events=(_left(engine, live, environment, EnvironmentEnd.SILENT),))
    for environment, left_ns in list(state.silent_ns.items()):
        if live.environment_seen.get((engine.name, environment), 0) > left_ns:
            events = again(engine, live, environment)
            if events:
                yield Decision(events=events)


def reset(engine: EngineState, live: Live, message: ResetGroups) -> Decisions:
    """End a rollout-group run, and forget its groups and environments."""
    events: tuple[Event, ...] = (ev.GroupsReset(at_ns=live.now_ns, engine=engine.name, by=message.by),)
    if engine.queues_groups:
        stopped = ev.EngineStopped(**live.at(engine), by=message.by)
        events = (*close_all(engine, live, stopped), *events)
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))
