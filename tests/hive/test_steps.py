"""Which steps are kept, so that a trainer can make them again."""

import pytest

from bombus.hive.events import BatchReady, StepCompleted
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import EngineState, Hive
from bombus.hive.steps import STEPS_KEPT, SealedStep, checkpoints, complete, is_due, steps_after


def engine_after(steps: int, every: int, outstanding: bool = False) -> EngineState:
    """Return an engine that has made `steps` steps, each `every`-th of them with a checkpoint."""
    hive = Hive()
    for step in range(1, steps + 1 + outstanding):
        evolve(hive, BatchReady(engine="main", run=1, step=step, groups=(), config_digest=""))
        where = f"step-{step}" if step % every == 0 else ""
        if step <= steps:
            evolve(
                hive,
                StepCompleted(engine="main", run=1, step=step, trainer_epoch=1, checkpoint=where, checkpoint_digest=""),
            )
    return hive.engine("main")


@pytest.mark.parametrize(
    ("steps", "every", "saved", "needed"),
    [
        (0, 1, [], 2),
        (1, 1, [1], 2),
        (7, 1, [7, 6], 2),  # the newest, and the outstanding one
        (5, 3, [3], 6),  # all since the model as loaded
        (8, 3, [6, 3], 6),
        (9, 3, [9, 6], 4),
        (500, 1000, [], STEPS_KEPT + 1),
    ],
)
def test_what_the_older_of_two_checkpoints_lacks_is_kept(steps: int, every: int, saved: list[int], needed: int) -> None:
    engine = engine_after(steps, every, outstanding=True)
    assert [done.step for done in checkpoints(engine.steps)] == saved
    assert engine.steps_needed == needed


def test_the_steps_after_a_checkpoint_are_found_only_if_all_of_them_are_kept() -> None:
    engine = engine_after(8, 3, outstanding=True)
    found = steps_after(engine.steps, 6, 8)
    assert found is not None
    assert [step.batch.step for step in found] == [7, 8]
    assert steps_after(engine.steps, 8, 8) == []
    assert steps_after(engine.steps, 1, 8) is None


def test_r11_steps_far_apart_leave_checkpoints_in_between_so_that_what_both_lack_is_kept() -> None:
    steps: list[SealedStep] = []
    saved: list[int] = []
    for step in range(1, 601):
        steps.append(SealedStep(batch=BatchReady(engine="main", run=1, step=step, groups=(), config_digest="")))
        where = f"step-{step}" if is_due(steps, step, 250) else ""
        saved += [step] if where else []
        complete(
            steps,
            StepCompleted(engine="main", run=1, step=step, trainer_epoch=1, checkpoint=where, checkpoint_digest=""),
        )
        older = saved[-2] if len(saved) > 1 else 0
        assert steps_after(steps, older, step) is not None
    assert saved == [100, 200, 250, 350, 450, 500, 600]


def test_every_step_that_is_due_leaves_a_checkpoint() -> None:
    assert [is_due([], step, 2) for step in (1, 2, 3, 4)] == [False, True, False, True]
