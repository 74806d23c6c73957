"""The checkpoints that a run keeps, and those that earlier runs have left: a new run can begin at one of them."""

import msgspec

from bombus.hive.events import Beginning, EngineStarted, StepCompleted

KEPT_MIN = 2  # for recovery: the newest, and the one before in case the newest is damaged
RUNS_KEPT = 32  # earlier runs whose checkpoints are remembered
UNNAMED = "read_yaml_name"  # stands for the name of an experiment without one


class LeftRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over: its job, and its checkpoints, oldest first."""

    config: str
    checkpoints: tuple[StepCompleted, ...]


def keep(kept: list[StepCompleted], done: StepCompleted, most: int) -> list[StepCompleted]:
    """Return the checkpoints of a run to keep after a step, oldest first: the newest `most`, but at least two."""
    if not done.checkpoint:
        return kept
    return [*kept, msgspec.structs.replace(done, metrics={})][-max(most, KEPT_MIN) :]


def leave(left: list[LeftRun], config: str, kept: list[StepCompleted]) -> list[LeftRun]:
    """Return the runs that have left checkpoints, oldest first, after a run with the checkpoints `kept` has ended."""
    if not kept:
        return left
    return [*left, LeftRun(config=config, checkpoints=tuple(kept))][-RUNS_KEPT:]


def step_of(engine: str, begins: Beginning) -> StepCompleted:
    """Return the step at which a run begins, as if the run had completed that step itself."""
    return StepCompleted(
        engine=engine,
        run=begins.run,
        step=begins.step,
        trainer_epoch=0,
        checkpoint=begins.checkpoint,
        checkpoint_digest=begins.checkpoint_digest,
    )


def goes_on(begins: Beginning, run: int, started: EngineStarted | None) -> bool:
    """Return whether a new run continues `run`, the one before it: from its beginning or one of its checkpoints."""
    before = None if started is None else started.begins
    return begins.run == run or (before is not None and before.checkpoint == begins.checkpoint)


def where_begun(started: EngineStarted) -> str:
    """Return a clause that says where a run began, or "" if there was no checkpoint at which it could begin."""
    begins = started.begins
    if begins is None:
        return f"at the model as loaded: {started.anew}" if started.anew else ""
    changed = f", with {', '.join(begins.changed)}" if begins.changed else ""
    return f"at the checkpoint of step {begins.step} of run {begins.run}{changed}"
