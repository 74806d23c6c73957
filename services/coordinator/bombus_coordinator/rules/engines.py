"""The life of an engine: configure, start, stop, and the facts that its trainers report."""

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.collection import BATCH_METHODS, active_clients
from bombus.hive.events import AbortReason, Collection, Event
from bombus.hive.inbox import (
    AgreeSync,
    Configure,
    Done,
    EngineBroke,
    Message,
    ModelReadFact,
    Refusal,
    Resume,
    StageReached,
    Start,
    StepBroke,
    StepDone,
    Stop,
    TrainerOpens,
    WeightsSaved,
)
from bombus.hive.state import ACTIVE_S, EngineState, Phase
from bombus_coordinator.rules.beginning import beginning
from bombus_coordinator.rules.claims import check_collects, no_room, why_none
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.episodes import aborted
from bombus_coordinator.rules.live import Live

REASON_CHARS_MAX = 2000
TRAINERS_LOST_MAX = 20  # a hive whose processes are killed at random loses a dozen in one step, and goes on
EPISODE_BYTES = 256  # of an episode in `batch.ready`, with its share of a task's name


CONTROL = (Configure, Start, Stop, Resume)  # commands whose outcome is always on the log


def recorded(engine: EngineState, command: str) -> Done | Refusal | None:
    """Return what a control command was answered, under whichever leader; None for a new one."""
    refused = engine.refused.get(command)
    if refused is not None and refused.code is not None:
        return Refusal(code=refused.code, why=refused.why)
    run = engine.commands.get(command)
    return None if run is None else Done(run=run)


def answered(engine: EngineState, live: Live, message: Message, error: Refused | None = None) -> ev.CommandAnswered:
    """Return the event of a control command that changes nothing."""
    return ev.CommandAnswered(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        command=message.id,
        code=None if error is None else error.code,
        why="" if error is None else error.why,
    )


def configure(engine: EngineState, live: Live, message: Configure) -> Decisions:
    if engine.phase != Phase.OFFLINE:
        raise wrong_phase("change the configuration", engine.phase, "Call stop_engine first.")
    if not message.config_digest:
        raise Refused(Code.MALFORMED, "A configuration has a digest: without one, a run has no job.")
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
    )
    yield Decision(events=(event,), replies=(CommandReply(message.id, Done(run=engine.run)),))


def check_size(rules: Collection, event_bytes_max: int) -> None:
    """Raise `Refused` for batches that do not fit into one event."""
    most = event_bytes_max // EPISODE_BYTES
    if rules.episode_target > most:
        raise Refused(
            Code.BAD_CONFIG,
            f"a batch of {rules.episode_target} episodes does not fit into one message of the bus, which takes about "
            f"{most}: lower collection.batch_size or rollout.num_repeat, or raise the server's max_payload.",
        )


def check_asynchronous(rules: Collection) -> None:
    """Raise `Refused` for rules that make no sense when rolling continues during a step."""
    if BATCH_METHODS[rules.method].is_by_agreement:
        raise Refused(
            Code.BAD_CONFIG,
            f"collection.method = {rules.method} needs max_staleness = 0: clients that agree wait for the phase to "
            "change, and an asynchronous engine keeps rolling. Use one of the other methods.",
        )
    ahead = (rules.max_staleness + 1) * rules.episode_target
    if rules.max_pool_episodes < ahead:
        raise Refused(
            Code.BAD_CONFIG,
            f"collection.max_cached_episodes = {rules.max_pool_episodes} is less than the {ahead} episodes of "
            f"max_staleness + 1 batches, which can wait for training at once: raise it to at least {ahead}.",
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
    )
    yield Decision(events=(event,), replies=(CommandReply(message.id, Done(run=run)),))


def _why_started(engine: EngineState) -> str:
    if engine.suspended:
        return f"Its run is suspended: {engine.suspended}. `bombus resume` lets it go on, `bombus stop` ends it."
    if engine.serves_operations:
        return "It serves training operations until its last model has ended; stop_engine ends them now."
    if engine.queues_groups and engine.has_policy:
        return "It makes batches of rollout groups since a trainer was registered; stop_engine ends that."
    if engine.queues_groups:
        return "It takes rollout groups for a trainer that has registered; stop_engine ends that."
    return "It is started already; call stop_engine to start over."


def close_all(engine: EngineState, live: Live, last: Event) -> tuple[Event, ...]:
    """Return the events that end the run: the abort of every open episode, then `last`."""
    if not engine.open:
        return (last,)
    return (*aborted(engine, live, tuple(engine.open), AbortReason.ENGINE_STOPPED), last)


def stop(engine: EngineState, live: Live, message: Stop) -> Decisions:
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    if engine.phase == Phase.OFFLINE:
        yield Decision(events=(answered(engine, live, message),), replies=reply)
        return
    stopped = ev.EngineStopped(at_ns=live.now_ns, engine=engine.name, run=engine.run, command=message.id)
    yield Decision(events=close_all(engine, live, stopped), replies=reply)


def resume(engine: EngineState, live: Live, message: Resume) -> Decisions:
    """Let a suspended run try again, or its models that no trainer makes again. One that goes on is left alone."""
    if engine.phase == Phase.OFFLINE:
        raise wrong_phase("resume the engine", engine.phase, "It has no run to resume; start one.")
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    limit = engine.collection.operations.executions_max
    if not engine.suspended and not engine.clients.given_up(limit):
        yield Decision(events=(answered(engine, live, message),), replies=reply)
        return
    resumed = ev.EngineResumed(at_ns=live.now_ns, engine=engine.name, run=engine.run, command=message.id)
    yield Decision(events=(resumed,), replies=reply)


def suspend(
    engine: EngineState, live: Live, reason: str, before: tuple[Event, ...] = (), until_served: bool = False
) -> Decisions:
    """Let the run wait for its operator, with all that it has. One that waits for its operator already goes on waiting.

    One that waits for a replica waits for its operator from here on, unless this is `until_served` too.
    """
    suspended = ev.EngineSuspended(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        reason=reason[:REASON_CHARS_MAX],
        until_served=until_served,
    )
    waits = engine.suspended if until_served else engine.waits_for_operator
    events = before if waits else (*before, suspended)
    if events:
        yield Decision(events=events)


def fail(engine: EngineState, live: Live, reason: str) -> Decisions:
    failed = ev.EngineFailed(at_ns=live.now_ns, engine=engine.name, run=engine.run, reason=reason[:REASON_CHARS_MAX])
    yield Decision(events=close_all(engine, live, failed))


def broke(engine: EngineState, live: Live, message: EngineBroke) -> Decisions:
    superseded = message.trainer_epoch not in (None, engine.trainer_epoch)
    if message.run == engine.run and engine.phase != Phase.OFFLINE and not superseded:
        of_trainer = message.trainer_epoch is not None
        end = fail if of_trainer and not message.may_pass else suspend
        yield from end(engine, live, message.reason)


def model_read(engine: EngineState, live: Live, message: ModelReadFact) -> Decisions:
    if engine.lacks_format(message.run, message.format):
        yield Decision(
            events=(
                ev.ModelRead(
                    at_ns=live.now_ns,
                    engine=engine.name,
                    run=engine.run,
                    gateway=message.gateway,
                    format=message.format,
                ),
            )
        )


def agree(engine: EngineState, live: Live, message: AgreeSync) -> Decisions:
    """Take a vote to train now. While a batch drains or trains, that is already happening: there is nothing to do."""
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
            f"Only an active client can agree: end an episode with a reward first (the last {ACTIVE_S:.0f} s count).",
        )
    event = ev.SyncAgreed(at_ns=live.now_ns, engine=engine.name, run=engine.run, client=message.client)
    yield Decision(events=(event,), replies=reply)


# ---- facts from trainers --------------------------------------------------------------------------------------


def trainer_opens(engine: EngineState, live: Live, message: TrainerOpens) -> Decisions:
    """Give the trainer a higher epoch. Facts of the trainer before are ignored from here on (R11).

    Trainers that end without a word, as by the kernel's want of memory, report no failure: the run is suspended when
    it has lost many in a row.
    """
    if message.id in engine.openings:
        yield Decision(replies=(CommandReply(message.id, Done(run=engine.run, epoch=engine.openings[message.id])),))
        return
    if message.run != engine.run or engine.phase == Phase.OFFLINE:
        raise wrong_phase(f"train run {message.run}", engine.phase, f"The engine's run is {engine.run}.")
    epoch = engine.trainer_epoch + 1
    event = ev.TrainerOpened(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        trainer=message.trainer,
        trainer_epoch=epoch,
        command=message.id,
        patience_s=message.patience_s,
    )
    yield Decision(events=(event,), replies=(CommandReply(message.id, Done(run=engine.run, epoch=epoch)),))
    if engine.trainers_lost >= TRAINERS_LOST_MAX:
        yield from suspend(engine, live, _why_lost(engine))


def _why_lost(engine: EngineState) -> str:
    waited_for = f"made version {max(engine.step, 0)}" if engine.batch is None else f"made step {engine.batch.step}"
    if engine.serves_operations:
        waited_for = "executed an operation"
    return (
        f"{engine.trainers_lost} trainers in a row ended without a word before they had {waited_for}. Look for "
        "the kernel's out-of-memory killer, and at the ends of their logs"
    )


def stage_reached(engine: EngineState, live: Live, message: StageReached) -> Decisions:
    if message.run == engine.run and engine.phase == Phase.BOOTING and message.stage != engine.stage:
        yield Decision(
            events=(
                ev.EngineProgressed(at_ns=live.now_ns, engine=engine.name, run=engine.run, stage=message.stage[:200]),
            )
        )


def _is_current_step(engine: EngineState, message: StepDone | StepBroke) -> bool:
    """Return whether this is about the outstanding batch and from the trainer with the current epoch."""
    return (
        message.run == engine.run
        and engine.phase != Phase.OFFLINE
        and message.trainer_epoch == engine.trainer_epoch
        and engine.batch is not None
        and message.step == engine.batch.step
    )


def step_done(engine: EngineState, live: Live, message: StepDone) -> Decisions:
    if _is_current_step(engine, message):
        yield Decision(
            events=(
                ev.StepCompleted(
                    at_ns=live.now_ns,
                    engine=engine.name,
                    run=engine.run,
                    step=message.step,
                    trainer_epoch=message.trainer_epoch,
                    checkpoint=message.checkpoint,
                    checkpoint_digest=message.checkpoint_digest,
                    metrics=message.metrics,
                ),
            )
        )


def step_broke(engine: EngineState, live: Live, message: StepBroke) -> Decisions:
    if not _is_current_step(engine, message):
        return
    failures = engine.step_failures + (not message.waits)
    failed = ev.StepFailed(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        step=message.step,
        trainer_epoch=message.trainer_epoch,
        reason=message.reason[:REASON_CHARS_MAX],
        failures=failures,
    )
    reason = f"step {message.step} failed {failures} times, the last time because: {message.reason}"
    yield from note_failure(engine, live, failed, reason)


def note_failure(engine: EngineState, live: Live, failed: ev.StepFailed | ev.TrainerStalled, reason: str) -> Decisions:
    """Put a trainer's failure on the log; suspend the run for `reason` if it counts and is one too many in a row."""
    is_counted = failed.failures > engine.step_failures
    if is_counted and failed.failures >= engine.collection.max_step_failures:
        yield from suspend(engine, live, reason, before=(failed,))
    else:
        yield Decision(events=(failed,))


def weights_saved(engine: EngineState, live: Live, message: WeightsSaved) -> Decisions:
    """Make the weights a policy version when their step is on the log, or those at which the run began.

    A run of operations has only the latter, and need not wait for them.
    """
    if message.run != engine.run or message.trainer_epoch != engine.trainer_epoch:
        return
    begins = engine.phase == Phase.BOOTING or engine.serves_operations
    first = message.step == engine.begun and begins and engine.weights is None
    stepped = engine.step_done is not None and engine.step_done.step == message.step
    if engine.phase == Phase.OFFLINE or not (first or stepped) or message.step <= engine.version:
        return
    yield Decision(
        events=(
            ev.WeightsReady(
                at_ns=live.now_ns,
                engine=engine.name,
                run=engine.run,
                version=message.step,
                weights=message.weights,
            ),
        )
    )
