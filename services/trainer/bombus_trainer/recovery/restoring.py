"""Continues a run from its newest readable checkpoint whose later steps can be retrained (R11)."""

import logging
from pathlib import Path

from bombus.errors import EngineFault
from bombus.hive.state import EngineState
from bombus.hive.steps import checkpoints, steps_after
from bombus.weights.checkpoints import CheckpointLost
from bombus_trainer.backend import TrainerBackend

log = logging.getLogger(__name__)

ANEW = (
    "or stop the run and set trainer.resume to `from VERSION`, which begins at another checkpoint, or to never, which "
    "begins with the model as loaded"
)


def restore_newest(executor: TrainerBackend, engine: EngineState) -> int:
    """Bring a model, loaded at step 0, to the newest checkpoint of its run that can be read. Return that checkpoint's
    step.

    A checkpoint is used only if the steps after it are kept, so that they can be retrained. If no checkpoint can be
    used, the model stays at step 0, provided that the run began there and all of its steps are kept; otherwise raises
    `EngineFault`. Also raises whatever `TrainerBackend.restore` raises.
    """
    newest = engine.step_done
    if newest is None:
        return 0
    lost: CheckpointLost | None = None
    older = [newest] if newest.checkpoint else []  # a snapshot written by an older version has only the newest step
    for done in checkpoints(engine.steps) or older:
        if done is not newest and steps_after(engine.steps, done.step, newest.step) is None:
            continue
        try:
            executor.restore(Path(done.checkpoint), done.checkpoint_digest)
            return done.step
        except CheckpointLost as error:
            log.warning("%s: going back further", error)
            lost = lost or error
        except EngineFault as error:
            if done.run == engine.run:
                raise
            raise EngineFault(f"{error}, {ANEW}") from error  # an earlier run's checkpoint does not fit
    if not engine.begun and steps_after(engine.steps, 0, newest.step) is not None:
        return 0
    if lost is None:
        raise EngineFault(f"step {newest.step} is in the log, but no checkpoint is left to resume from")
    others = ". The run began at this checkpoint" if newest.step == engine.begun else ", and no other can be used"
    raise type(lost)(f"{lost}{others}: bring it back, {ANEW}") from lost
