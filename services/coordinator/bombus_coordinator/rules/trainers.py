"""End the epoch of a trainer that reports that it hangs, or that has been silent for too long (R11).

A trainer judges its own progress, by its own pace and clock. The coordinator judges its silence only. It leaves out the
time in which the bus was away or there was no leader: nothing could be heard then (R5).
"""

from bombus.hive import events as ev
from bombus.hive.inbox import TrainerAlive, TrainerHangs
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.detail import stall_text
from bombus_coordinator.rules.decision import Decisions
from bombus_coordinator.rules.engines import note_failure
from bombus_coordinator.rules.live import Heard, Live, ns

DOING_CHARS_MAX = 200
UNSAID_PATIENCE_S = 86_400.0  # with a trainer that names none: nothing waits for ever


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
    """End the epoch of a trainer that has been silent for longer than it said at its opening.

    One that said nothing may send no heartbeats, and is then heard by its work alone: only while work waits for it.
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
    """Return when the log last showed that the trainer works, or got something to do."""
    known = (engine.batch, engine.step_done, engine.weights)
    models = (model.last_ns for model in engine.clients.open_models)
    return max(engine.phase_since_ns, engine.resumed_ns, *models, *(each.at_ns for each in known if each is not None))


def _stall(engine: EngineState, live: Live, doing: str, still_s: float, silent: bool = False) -> Decisions:
    """End the trainer's epoch. It is a failure of what the run waits for, of which several in a row suspend the run.

    Where the trainer has begun an operation, it is one of that operation, which fails after several; and where it makes
    a model again, one of that model.
    """
    live.trainers.pop(engine.name, None)
    is_runs = engine.owes_weights and not engine.waits_for_operator
    failures = engine.step_failures + (is_runs and not engine.clients.is_at_work(engine.trainer_epoch))
    stalled = ev.TrainerStalled(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        trainer=engine.trainer,
        trainer_epoch=engine.trainer_epoch,
        doing=doing,
        still_s=still_s,
        silent=silent,
        failures=failures,
    )
    reason = f"its trainers failed {failures} times in a row; the last, {stall_text(stalled)}"
    yield from note_failure(engine, live, stalled, reason)
