"""Handle trainers' reports about a run, and end the epoch of a trainer that hangs or is silent for too long (R11).

A trainer judges its own progress, by its own pace and clock. The coordinator judges only the trainer's silence. Time
without the bus or without a leader does not count as silence, since nothing could be received (R5).
"""

from bombus.hive import events as ev
from bombus.hive.inbox import (
    Done,
    StageReached,
    StepBroke,
    StepDone,
    TrainerAlive,
    TrainerHangs,
    TrainerOpens,
    WeightsSaved,
)
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.detail import stall_text
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions, wrong_phase
from bombus_coordinator.rules.engines import REASON_CHARS_MAX, suspend
from bombus_coordinator.rules.live import Heard, Live, ns

DOING_CHARS_MAX = 200
TRAINERS_LOST_MAX = 20  # generous: a hive whose processes are killed at random may lose a dozen in one step
UNSAID_PATIENCE_S = 86_400.0  # patience for a trainer that specified none, so that nothing waits forever


def _is_current(engine: EngineState, message: TrainerAlive | TrainerHangs) -> bool:
    is_of_run = message.run == engine.run and engine.phase != Phase.OFFLINE
    return is_of_run and message.trainer_epoch == engine.trainer_epoch and engine.trainer != ""


def alive(engine: EngineState, live: Live, message: TrainerAlive) -> Decisions:
    if _is_current(engine, message):
        live.trainers[engine.name] = Heard(live.now_ns, message.doing[:DOING_CHARS_MAX])
    yield from ()


def hangs(engine: EngineState, live: Live, message: TrainerHangs) -> Decisions:
    if _is_current(engine, message):
        yield from _stall(engine, live, message.doing[:DOING_CHARS_MAX], message.still_s)


def lapse(engine: EngineState, live: Live) -> Decisions:
    """End the epoch of a trainer that has been silent for longer than the patience that it specified when it opened the
    epoch.

    A trainer that specified no patience may not send heartbeats. So its work counts as a sign of life too, and its
    silence counts only while work waits for it.
    """
    if engine.phase == Phase.OFFLINE or not engine.trainer:
        return
    heard = live.trainers.get(engine.name)
    if heard is None or heard.at_ns < engine.trainer_since_ns:
        heard = Heard(engine.trainer_since_ns, "")
    patience_s = engine.trainer_patience_s
    if patience_s:
        silent_ns = live.now_ns - live.silent_since(heard.at_ns)
    elif engine.owes_weights and not engine.suspended:
        patience_s = UNSAID_PATIENCE_S
        silent_ns = live.led_ns(max(heard.at_ns, _worked_ns(engine)))
    else:
        return
    if silent_ns >= ns(patience_s):
        yield from _stall(engine, live, heard.doing, silent_ns / 1e9, silent=True)


def _worked_ns(engine: EngineState) -> int:
    """Return when the log last showed that the trainer was working, or was given work."""
    known = (engine.batch, engine.step_done, engine.weights)
    models = (model.last_ns for model in engine.clients.open_models)
    return max(engine.phase_since_ns, engine.resumed_ns, *models, *(each.at_ns for each in known if each is not None))


def _stall(engine: EngineState, live: Live, doing: str, still_s: float, silent: bool = False) -> Decisions:
    """End the trainer's epoch. If the run waits for the trainer, this counts as a failure, and several failures in a
    row suspend the run.

    If the trainer has begun an operation, the failure counts against that operation, which fails after several such
    failures. If the trainer is rebuilding a model, the failure counts against the model.
    """
    live.trainers.pop(engine.name, None)
    is_runs = engine.owes_weights and not engine.waits_for_operator
    failures = engine.step_failures + (is_runs and not engine.clients.is_at_work(engine.trainer_epoch))
    stalled = ev.TrainerStalled(
        **live.at(engine),
        trainer=engine.trainer,
        trainer_epoch=engine.trainer_epoch,
        doing=doing,
        still_s=still_s,
        silent=silent,
        failures=failures,
    )
    reason = f"its trainers failed {failures} times in a row; most recently, {stall_text(stalled)}"
    yield from note_failure(engine, live, stalled, reason)


# ---- what trainers report ---------------------------------------------------------------------------------------


def trainer_opens(engine: EngineState, live: Live, message: TrainerOpens) -> Decisions:
    """Give the trainer a higher epoch. Facts from the previous trainer are ignored from then on (R11).

    Trainers that are killed, for example by the kernel's out-of-memory killer, report no failure. So the run is also
    suspended when it has lost many trainers in a row.
    """
    if message.id in engine.openings:
        yield Decision(replies=(CommandReply(message.id, Done(run=engine.run, epoch=engine.openings[message.id])),))
        return
    if message.run != engine.run or engine.phase == Phase.OFFLINE:
        raise wrong_phase(f"train run {message.run}", engine.phase, f"The engine's run is {engine.run}.")
    epoch = engine.trainer_epoch + 1
    event = ev.TrainerOpened(
        **live.at(engine),
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
        f"{engine.trainers_lost} trainers in a row ended without reporting an error before they had {waited_for}. "
        "Check the kernel log for the out-of-memory killer, and the ends of the trainers' logs"
    )


def stage_reached(engine: EngineState, live: Live, message: StageReached) -> Decisions:
    if message.run == engine.run and engine.phase == Phase.BOOTING and message.stage != engine.stage:
        yield Decision(events=(ev.EngineProgressed(**live.at(engine), stage=message.stage[:200]),))


def _is_current_step(engine: EngineState, message: StepDone | StepBroke) -> bool:
    """Return whether a message is about the outstanding batch and comes from the trainer of the current epoch."""
    return (
        message.run == engine.run
        and engine.phase != Phase.OFFLINE
        and message.trainer_epoch == engine.trainer_epoch
        and engine.batch is not None
        and message.step == engine.batch.step
    )


def step_done(engine: EngineState, live: Live, message: StepDone) -> Decisions:
    if _is_current_step(engine, message):
        completed = ev.StepCompleted(
            **live.at(engine),
            step=message.step,
            trainer_epoch=message.trainer_epoch,
            checkpoint=message.checkpoint,
            checkpoint_digest=message.checkpoint_digest,
            metrics=message.metrics,
            tokens=message.tokens,
        )
        yield Decision(events=(completed,))


def step_broke(engine: EngineState, live: Live, message: StepBroke) -> Decisions:
    if not _is_current_step(engine, message):
        return
    failures = engine.step_failures + (not message.waits)
    failed = ev.StepFailed(
        **live.at(engine),
        step=message.step,
        trainer_epoch=message.trainer_epoch,
        reason=message.reason[:REASON_CHARS_MAX],
        failures=failures,
    )
    reason = f"step {message.step} failed {failures} times, the last time because: {message.reason}"
    yield from note_failure(engine, live, failed, reason)


def note_failure(engine: EngineState, live: Live, failed: ev.StepFailed | ev.TrainerStalled, reason: str) -> Decisions:
    """Record a trainer's failure. If the failure counts and is one too many in a row, suspend the run for `reason`."""
    is_counted = failed.failures > engine.step_failures
    if is_counted and failed.failures >= engine.collection.max_step_failures:
        yield from suspend(engine, live, reason, before=(failed,))
    else:
        yield Decision(events=(failed,))


def weights_saved(engine: EngineState, live: Live, message: WeightsSaved) -> Decisions:
    """Turn saved weights into a policy version if their step is on the log, or if the run begins with them.

    An operations run has only the weights that it begins with, and does not have to wait for them.
    """
    if message.run != engine.run or message.trainer_epoch != engine.trainer_epoch:
        return
    begins = engine.phase == Phase.BOOTING or engine.serves_operations
    first = message.step == engine.begun and begins and engine.weights is None
    stepped = engine.step_done is not None and engine.step_done.step == message.step
    if engine.phase == Phase.OFFLINE or not (first or stepped) or message.step <= engine.version:
        return
    ready = ev.WeightsReady(**live.at(engine), version=message.step, weights=message.weights, canary=message.canary)
    yield Decision(events=(ready,))
