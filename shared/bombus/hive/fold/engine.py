"""The fold of events of an engine: jobs and runs, phases, trainers, replicas and weights."""

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.checkpoints import goes_on, keep, step_of
from bombus.hive.fold import operations, trajectories
from bombus.hive.fold.episodes import release_steps
from bombus.hive.fold.handlers import Handlers, enter, forget_lost, keep_time, release_replicas, remember
from bombus.hive.rollouts import silent_after
from bombus.hive.state import BOOTED, COMMANDS_KEPT, NO_TRAINER, EngineState, Phase, Replica
from bombus.hive.steps import SealedStep, complete, episodes_of, up_to

HANDLERS = Handlers()


@HANDLERS.on(ev.EngineConfigured)
def _configured(engine: EngineState, event: ev.EngineConfigured) -> None:
    engine.configured = event
    remember(engine, event.command)


@HANDLERS.on(ev.EngineStarted)
def _started(engine: EngineState, event: ev.EngineStarted) -> None:
    """Begin a run. The engine keeps its replicas, its answered commands and the bounds of the calls that are kept (R8,
    R12)."""
    fresh = EngineState(
        name=engine.name,
        configured=engine.configured,
        active=engine.configured,
        run=event.run,
        started=event,
        replicas=engine.replicas,
        commands=engine.commands,
        refused=engine.refused,
        newest_call=engine.newest_call,
        calls=engine.calls,
        steps_from=engine.steps_from,
        left=engine.checkpoints_left(),
        stage=NO_TRAINER,
        clients=engine.clients,
        trajectories=engine.trajectories,
    )
    if event.begins is not None:
        _begin_at(fresh, event.begins, engine.steps)
        if goes_on(event.begins, engine.run, engine.started):
            fresh.counters = engine.counters
            kept = {version: stats for version, stats in engine.evals.items() if version <= event.begins.step}
            fresh.evals = kept  # later versions are trained again, and will differ
            fresh.rollouts = [each for each in engine.rollouts if each.step <= event.begins.step]
    for field in EngineState.__struct_fields__:
        setattr(engine, field, getattr(fresh, field))
    engine.calls.keep(episodes_of(engine.needed_steps))
    release_replicas(engine)
    enter(engine, Phase.BOOTING, event.at_ns)
    remember(engine, event.command)


def _begin_at(engine: EngineState, begins: ev.Beginning, before: list[SealedStep]) -> None:
    """Make a run start at a checkpoint as if the run itself had completed the checkpoint's step.

    If the previous run completed that step with the same settings, the trainer can also fall back to an older
    checkpoint, just as the previous run's trainer could. Otherwise no earlier batch is needed.
    """
    batch = ev.BatchReady(engine=engine.name, run=begins.run, step=begins.step, groups=(), config_digest="")
    done = step_of(engine.name, begins)
    engine.step = engine.begun = begins.step
    engine.step_done = done
    kept = [] if begins.changed else up_to(before, begins.checkpoint)
    engine.steps = kept or [SealedStep(batch=batch, done=done)]
    unfinished = len(before) - len(kept) if kept else 0
    for _ in range(min(unfinished, len(engine.steps_from) - 1)):  # so that each bound again belongs to one step
        *older, last, newest = engine.steps_from
        engine.steps_from = [*older, min(last, newest)]


@HANDLERS.on(ev.EngineProgressed)
def _progressed(engine: EngineState, event: ev.EngineProgressed) -> None:
    engine.stage = event.stage


@HANDLERS.on(ev.EngineBooted)
def _booted(engine: EngineState, event: ev.EngineBooted) -> None:
    engine.stage = BOOTED


def _end_run(engine: EngineState, at_ns: int, why: str) -> None:
    operations.end_run(engine.clients, engine.run, at_ns, why)
    if engine.queues_groups:
        trajectories.end_run(engine.trajectories)
    engine.stage = engine.suspended = ""
    engine.until_served = engine.rest_wanted = engine.asleep = False
    enter(engine, Phase.OFFLINE, at_ns)
    keep_time(engine, at_ns)


@HANDLERS.on(ev.EngineStopped)
def _stopped(engine: EngineState, event: ev.EngineStopped) -> None:
    _end_run(engine, event.at_ns, "the run was stopped; create the model again, from a checkpoint if it was saved")
    remember(engine, event.command)


@HANDLERS.on(ev.EngineFailed)
def _failed(engine: EngineState, event: ev.EngineFailed) -> None:
    _end_run(engine, event.at_ns, f"the run has failed: {event.reason}")
    engine.failure = event.reason


@HANDLERS.on(ev.EngineSuspended)
def _suspended(engine: EngineState, event: ev.EngineSuspended) -> None:
    engine.suspended = event.reason
    engine.until_served = event.until_served
    engine.suspensions += 1
    keep_time(engine, event.at_ns)


@HANDLERS.on(ev.EngineResumed)
def _resumed(engine: EngineState, event: ev.EngineResumed) -> None:
    """Continue in the same phase as if it had just begun: there was no progress while the run was suspended.

    Failure counts are reset only if the operator resumes the run, not if a replica serves again.
    """
    engine.suspended = ""
    engine.until_served = False
    if event.command:
        engine.resumed_ns = event.at_ns
        engine.step_failures = 0
        forget_lost(engine)
        operations.forgive(engine.clients, event.at_ns)
        release_replicas(engine)
    enter(engine, engine.phase, event.at_ns)
    remember(engine, event.command)
    keep_time(engine, event.at_ns)


@HANDLERS.on(ev.CommandAnswered)
def _command_answered(engine: EngineState, event: ev.CommandAnswered) -> None:
    if event.code is None:
        remember(engine, event.command)
    else:
        engine.refused[event.command] = event
        trim(engine.refused, COMMANDS_KEPT)


@HANDLERS.on(ev.ModelRead)
def _model_read(engine: EngineState, event: ev.ModelRead) -> None:
    engine.formats.append(event)


@HANDLERS.on(ev.RollingStarted)
def _rolling_started(engine: EngineState, event: ev.RollingStarted) -> None:
    engine.stage = ""
    engine.agreed = set()
    enter(engine, Phase.ROLLING, event.at_ns)


@HANDLERS.on(ev.RollingClosed)
def _rolling_closed(engine: EngineState, event: ev.RollingClosed) -> None:
    enter(engine, Phase.ROLLING_POST, event.at_ns)


@HANDLERS.on(ev.SyncingStarted)
def _syncing_started(engine: EngineState, event: ev.SyncingStarted) -> None:
    enter(engine, Phase.WEIGHT_SYNCING, event.at_ns)


@HANDLERS.on(ev.SyncAgreed)
def _sync_agreed(engine: EngineState, event: ev.SyncAgreed) -> None:
    engine.agreed.add(event.client)


# ---- training and weights -------------------------------------------------------------------------------------


@HANDLERS.on(ev.TrainerOpened)
def _trainer_opened(engine: EngineState, event: ev.TrainerOpened) -> None:
    if engine.trainer and engine.owes_weights:
        engine.trainers_lost += 1
        operations.lose_trainer(engine.clients, engine.trainer_epoch)
    engine.trainer = event.trainer
    engine.trainer_epoch = event.trainer_epoch
    engine.trainer_since_ns = event.at_ns
    engine.trainer_patience_s = event.patience_s
    engine.stalled = None
    engine.openings[event.command] = event.trainer_epoch
    trim(engine.openings, COMMANDS_KEPT)
    keep_time(engine, event.at_ns)


@HANDLERS.on(ev.TrainerStalled)
def _trainer_stalled(engine: EngineState, event: ev.TrainerStalled) -> None:
    """End the trainer's epoch, so that the trainer's later messages are ignored. The next trainer gets the full time to
    boot."""
    engine.trainer = ""
    engine.trainer_epoch = event.trainer_epoch + 1
    engine.stalled = event
    engine.step_failures = event.failures
    if engine.phase == Phase.BOOTING:
        engine.stage = NO_TRAINER
        enter(engine, Phase.BOOTING, event.at_ns)
    keep_time(engine, event.at_ns)


@HANDLERS.on(ev.StepCompleted)
def _step_completed(engine: EngineState, event: ev.StepCompleted) -> None:
    event = msgspec.structs.replace(event, tokens=None)  # used only by the audit
    engine.step_done = event
    groups = 0 if engine.batch is None else len(engine.batch.groups)
    engine.silent_steps = silent_after(engine.silent_steps, groups, event.metrics)
    before = engine.steps.copy()
    complete(engine.steps, event)
    release_steps(engine, before)
    engine.kept = keep(engine.kept, event, engine.collection.checkpoints_kept)
    engine.batch = None
    engine.step_failures = engine.trainers_lost = 0


@HANDLERS.on(ev.StepFailed)
def _step_failed(engine: EngineState, event: ev.StepFailed) -> None:
    engine.step_failures = event.failures


@HANDLERS.on(ev.WeightsReady)
def _weights_ready(engine: EngineState, event: ev.WeightsReady) -> None:
    engine.weights_before = engine.weights
    engine.weights = event
    engine.version = event.version
    engine.loaded = set()
    forget_lost(engine)


@HANDLERS.on(ev.WeightsLoaded)
def _weights_loaded(engine: EngineState, event: ev.WeightsLoaded) -> None:
    replica = engine.replicas.get(event.replica)
    if replica is not None:
        replica.run, replica.version = event.run, event.version
        replica.sequence_tokens, replica.constrains = event.sequence_tokens, event.constrains
        replica.canary, replica.quarantined = event.canary, None
    if event.run == engine.run and event.version == engine.version:
        engine.loaded.add(event.replica)


@HANDLERS.on(ev.ReplicaJoined)
def _replica_joined(engine: EngineState, event: ev.ReplicaJoined) -> None:
    engine.replicas[event.replica] = Replica(url=event.url, capacity=event.capacity, joined_ns=event.at_ns)
    engine.loaded.discard(event.replica)


@HANDLERS.on(ev.ReplicaLeft)
def _replica_left(engine: EngineState, event: ev.ReplicaLeft) -> None:
    engine.replicas.pop(event.replica, None)
    engine.loaded.discard(event.replica)


@HANDLERS.on(ev.ReplicaQuarantined)
def _replica_quarantined(engine: EngineState, event: ev.ReplicaQuarantined) -> None:
    replica = engine.replicas.get(event.replica)
    if replica is not None:
        replica.quarantined = event
        if event.answers:
            engine.loaded.discard(event.replica)
