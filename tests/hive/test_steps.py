"""Which steps are kept, so that a trainer can make them again."""

import pytest

from bombus.hive.events import BatchReady, StepCompleted
from bombus.hive.state import EngineState, Hive, evolve
from bombus.hive.steps import STEPS_KEPT, checkpoints, steps_after


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
