"""The checkpoints from which a new run can start: those that a run keeps, and those that earlier runs have left."""

import msgspec

from bombus.hive.events import Beginning, EngineStarted, StepCompleted

KEPT_MIN = 2  # for recovery: the newest, and the one before it in case the newest is damaged
RUNS_KEPT = 32  # number of earlier runs whose checkpoints are remembered
UNNAMED = "read_yaml_name"  # the experiment of a job that does not name one


class LeftRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended: its job, and its checkpoints, oldest first."""

    config: str
    checkpoints: tuple[StepCompleted, ...]


def keep(kept: list[StepCompleted], done: StepCompleted, most: int) -> list[StepCompleted]:
    """Return the checkpoints of a run to keep after a step, oldest first: the newest `most`, but at least two."""
    if not done.checkpoint:
        return kept
    return [*kept, msgspec.structs.replace(done, metrics={})][-max(most, KEPT_MIN) :]


def leave(left: list[LeftRun], config: str, kept: list[StepCompleted]) -> list[LeftRun]:
    """Return the ended runs that have left checkpoints, oldest first, including the run that has just ended with the
    checkpoints `kept`."""
    if not kept:
        return left
    return [*left, LeftRun(config=config, checkpoints=tuple(kept))][-RUNS_KEPT:]


def step_of(engine: str, begins: Beginning) -> StepCompleted:
    """Return the step at which a run begins, as if the run itself had completed that step."""
    return StepCompleted(
        engine=engine,
        run=begins.run,
        step=begins.step,
        trainer_epoch=0,
        checkpoint=begins.checkpoint,
        checkpoint_digest=begins.checkpoint_digest,
    )


def goes_on(begins: Beginning, run: int, started: EngineStarted | None) -> bool:
    """Return whether a new run continues the previous run, which has the number `run`. It does if it begins at a
    checkpoint of the previous run, or at the checkpoint at which the previous run itself began."""
    before = None if started is None else started.begins
    return begins.run == run or (before is not None and before.checkpoint == begins.checkpoint)


def where_begun(started: EngineStarted) -> str:
    """Return a clause that says where a run began, or "" if no checkpoint was available to it."""
    begins = started.begins
    if begins is None:
        return f"at the model as loaded: {started.anew}" if started.anew else ""
    changed = f", with {', '.join(begins.changed)}" if begins.changed else ""
    return f"at the checkpoint of step {begins.step} of run {begins.run}{changed}"
