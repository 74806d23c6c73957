"""What trainers do not survive making again, on the log: counted for each operation, and forgiven by an operator."""

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.state import Phase
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.tenants_in_memory import MODEL, TenantHarness


def remaking(harness: TenantHarness, number: int = 0, over: bool = False, trainer_epoch: int = 0) -> list[str]:
    message = inbox.RemakesModel(
        id=harness.id(),
        engine=ENGINE,
        run=1,
        trainer_epoch=trainer_epoch or harness.engine.trainer_epoch,
        model=MODEL,
        number=number,
        over=over,
    )
    return [type(event).__name__ for event in harness.send(message)]


def executed(harness: TenantHarness) -> TenantHarness:
    """Let a model have operations 1 to 4, all of which were executed."""
    harness.serving()
    for key in "123":
        harness.operate(key)
        harness.done(key)
    return harness


def test_r17_what_trainers_do_not_survive_executing_again_is_known_by_its_operation() -> None:
    harness = executed(TenantHarness())
    said = ["ModelRemaking"]
    for _ in range(3):
        harness.serve()
        assert remaking(harness) == said
        assert remaking(harness) == remaking(harness, trainer_epoch=1) == remaking(harness, number=5) == []
        for number in (1, 2, 3):
            assert remaking(harness, number) == said
        assert remaking(harness, 3) == [], "once for each trainer"
    harness.serve()
    epochs = (2, 3, 4)
    assert harness.model.unsurvived == {3: epochs}, "a trainer that goes on with the next has survived the last"
    assert (harness.model.deadly(3), harness.model.deadly(3, trainer_epoch=4), harness.model.deadly(4)) == (3, 0, 0)
    assert remaking(harness, over=True) == said
    assert (harness.model.unsurvived, harness.model.remaking_by) == ({}, 0)
    assert remaking(harness, over=True) == []


def test_a_model_that_no_trainer_makes_again_is_tried_again_when_the_operator_resumes_the_run() -> None:
    harness = executed(TenantHarness())

    def resume() -> list[str]:
        events = harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
        return [type(event).__name__ for event in events]

    assert resume() == ["CommandAnswered"]
    for _ in range(3):
        assert harness.model.deadly(3) == 0
        harness.serve()
        remaking(harness, 2)
    assert harness.model.deadly(3) == 2
    assert resume() == ["EngineResumed"]
    assert harness.model.deadly(3) == 0
    assert harness.phase() == Phase.ROLLING
    assert resume() == ["CommandAnswered"]


def test_trainers_that_were_lost_with_a_model_do_not_count_for_the_run_once_the_model_waits() -> None:
    harness = executed(TenantHarness())
    harness.operate("4")
    for _ in range(3):
        harness.serve()
        remaking(harness, 2)
    harness.serve()
    assert harness.engine.trainers_lost == 4

    def away(why: str) -> None:
        message = inbox.ModelAway(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=harness.engine.trainer_epoch, model=MODEL, why=why
        )
        harness.send(message)

    away("3 trainers ended")
    assert harness.engine.trainers_lost == 0
    remaking(harness)
    remaking(harness, over=True)
    harness.serve()
    away("its cover is gone")
    assert harness.engine.trainers_lost == 1, "it ended for another reason"


def test_a_trainer_that_hangs_as_it_makes_a_model_again_is_no_failure_of_the_run() -> None:
    harness = executed(TenantHarness())
    harness.operate("4")
    for is_said in (True, False):
        epoch = harness.open_trainer()
        if is_said:
            remaking(harness)
        hanging = inbox.TrainerHangs(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, doing="operation 2", still_s=60.0
        )
        (stalled,) = harness.send(hanging)
        assert isinstance(stalled, ev.TrainerStalled)
        assert stalled.failures == (0 if is_said else 1)
