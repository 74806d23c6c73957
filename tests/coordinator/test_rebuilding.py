"""What trainers do not survive making again, on the log: counted for each operation, and forgiven by an operator."""

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive, Phase
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.operations_in_memory import MODEL, OperationHarness


def rebuild(
    harness: OperationHarness, number: int = 0, over: bool = False, trainer_epoch: int = 0, model: str = MODEL
) -> list[str]:
    message = inbox.RebuildsModel(
        id=harness.id(),
        engine=ENGINE,
        run=1,
        trainer_epoch=trainer_epoch or harness.engine.trainer_epoch,
        model=model,
        number=number,
        over=over,
    )
    return [type(event).__name__ for event in harness.send(message)]


def executed(harness: OperationHarness) -> OperationHarness:
    """Let a model have operations 1 to 4, all of which were executed."""
    harness.serving()
    for key in "123":
        harness.operate(key)
        harness.done(key)
    return harness


def test_r17_what_trainers_do_not_survive_executing_again_is_known_by_its_operation() -> None:
    harness = executed(OperationHarness())
    said = ["ModelRebuilding"]
    for _ in range(3):
        harness.serve()
        assert rebuild(harness) == said
        assert rebuild(harness) == rebuild(harness, trainer_epoch=1) == rebuild(harness, number=5) == []
        for number in (1, 2, 3):
            assert rebuild(harness, number) == said
        assert rebuild(harness, 3) == [], "once for each trainer"
    harness.serve()
    epochs = (2, 3, 4)
    assert harness.model.unsurvived == {3: epochs}, "a trainer that goes on with the next has survived the last"
    assert (harness.model.deadly(3), harness.model.deadly(3, trainer_epoch=4), harness.model.deadly(4)) == (3, 0, 0)
    assert rebuild(harness, over=True) == said
    assert (harness.model.unsurvived, harness.model.rebuilding_by) == ({}, 0)
    assert rebuild(harness, over=True) == []


def test_a_model_that_no_trainer_makes_again_is_tried_again_when_the_operator_resumes_the_run() -> None:
    harness = executed(OperationHarness())

    def resume() -> list[str]:
        events = harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
        return [type(event).__name__ for event in events]

    assert resume() == ["CommandAnswered"]
    for _ in range(3):
        assert harness.model.deadly(3) == 0
        harness.serve()
        rebuild(harness, 2)
    assert harness.model.deadly(3) == 2
    assert resume() == ["CommandAnswered"], "the next trainer may still find what the model can go on from"
    harness.serve()
    say_away(harness)
    assert resume() == ["EngineResumed"]
    assert harness.model.deadly(3) == 0
    assert harness.phase() == Phase.ROLLING
    assert resume() == ["CommandAnswered"]


def test_trainers_that_were_lost_with_a_model_do_not_count_for_the_run_once_the_model_waits() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for _ in range(3):
        harness.serve()
        rebuild(harness, 2)
    harness.serve()
    assert harness.engine.trainers_lost == 4

    def away(why: str) -> None:
        message = inbox.ModelAway(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=harness.engine.trainer_epoch, model=MODEL, why=why
        )
        harness.send(message)

    away("3 trainers ended")
    assert harness.engine.trainers_lost == 1, "the first of all ended for another reason"
    rebuild(harness)
    rebuild(harness, over=True)
    harness.serve()
    away("its recovery checkpoint is gone")
    assert harness.engine.trainers_lost == 2, "and so did the last one"


def test_a_trainer_that_hangs_as_it_makes_a_model_again_is_no_failure_of_the_run() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for is_said in (True, False):
        epoch = harness.open_trainer()
        if is_said:
            rebuild(harness)
        hanging = inbox.TrainerHangs(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, doing="operation 2", still_s=60.0
        )
        (stalled,) = harness.send(hanging)
        assert isinstance(stalled, ev.TrainerStalled)
        assert stalled.failures == (0 if is_said else 1)


def say_away(harness: OperationHarness, model: str = MODEL, why: str = "3 trainers ended") -> list[str]:
    said = inbox.ModelAway(
        id=harness.id(), engine=ENGINE, run=1, trainer_epoch=harness.engine.trainer_epoch, model=model, why=why
    )
    return [type(event).__name__ for event in harness.send(said)]


def lives(harness: OperationHarness, models: list[str]) -> int:
    """Let trainers make these models again, each of which no trainer survives, and return how many were lost."""
    for lost in range(200):
        harness.serve()
        if harness.engine.suspended:
            return lost
        for model in models:
            made = harness.clients.models[model]
            deadly = made.deadly(3, harness.engine.trainer_epoch)
            if not deadly:
                number = 2 if made.rebuilding_by else 0
                rebuild(harness, number, model=model)
                break  # this trainer ends here
            rebuild(harness, deadly, model=model)  # it looks for what its client has saved, and finds nothing
            say_away(harness, model)
        else:
            return lost
    raise AssertionError("no end of it")


def test_nine_models_that_each_end_their_trainers_wait_and_the_run_goes_on_also_after_it_was_resumed() -> None:
    harness = OperationHarness()
    harness.limits(models_max=10)
    harness.serving()
    models = [f"m{number}" for number in range(9)]
    for model in models:
        harness.create(model)
        harness.done("0", model)
        harness.operate("1", model=model)
        harness.done("1", model)
    harness.operate("1")
    assert lives(harness, models) == 9 * 4, "one that begins and three that are at the operation, of each model"
    assert harness.engine.suspended == ""
    assert [bool(harness.clients.models[model].suspended) for model in models] == [True] * 9
    assert harness.engine.trainers_lost == 1, "one that was lost before"
    for _ in range(2):
        harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
        assert lives(harness, models) == 9 * 4
        assert (harness.engine.suspended, harness.engine.trainers_lost) == ("", 1), "the last one of those before"
    harness.done("1")
    folded = Hive()
    for event in harness.log:
        evolve(folded, event)
    assert folded == harness.core.hive


def test_trainers_that_are_lost_for_other_reasons_are_counted_although_models_wait() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for _ in range(3):
        harness.serve()
        rebuild(harness, 2)
    for lost in range(1, 20):
        harness.serve()
        assert rebuild(harness, 2) == ["ModelRebuilding"]
        assert say_away(harness) == ["ModelSuspended"]
        assert harness.engine.trainers_lost == lost
        assert harness.model.rebuilding_by == 0, "it lives"
    assert harness.engine.suspended == ""
    harness.serve()
    assert harness.engine.suspended != ""


def test_a_trainer_that_lives_is_not_taken_to_be_making_the_model_again_that_waits() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for _ in range(4):
        harness.serve()
        rebuild(harness, 2)
    assert say_away(harness) == ["ModelSuspended"]
    assert say_away(harness) == []
    assert not harness.clients.is_at_work(harness.engine.trainer_epoch)
    hanging = inbox.TrainerHangs(
        id=harness.id(), engine=ENGINE, run=1, trainer_epoch=harness.engine.trainer_epoch, doing="x", still_s=60.0
    )
    (stalled,) = harness.send(hanging)
    assert isinstance(stalled, ev.TrainerStalled)
    assert stalled.failures == 1


def test_resume_forgives_what_is_known_of_models_that_were_said_to_be_suspended_only() -> None:
    harness = executed(OperationHarness())
    harness.create("n")
    harness.done("0", "n")
    harness.operate("1", model="n")
    for _ in range(3):
        harness.serve()
        rebuild(harness, 2)
    harness.serve()
    rebuild(harness, 1, model="n")
    say_away(harness)
    assert [type(each) for each in harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))] == [ev.EngineResumed]
    assert harness.model.unsurvived == {}
    assert harness.clients.models["n"].unsurvived == {1: (5,)}


def test_trainers_that_were_lost_before_one_lived_through_it_count_for_the_run() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for _ in range(2):
        harness.serve()
        rebuild(harness, 2)
    harness.serve()
    rebuild(harness, 2)
    rebuild(harness, over=True)
    say_away(harness, why="its recovery checkpoint is gone")
    assert harness.engine.trainers_lost == 3


def test_trainers_that_were_lost_before_something_was_executed_are_not_taken_from_those_after_it() -> None:
    harness = executed(OperationHarness())
    harness.create("n")
    harness.operate("4")
    harness.serve()
    rebuild(harness, 2)
    harness.serve()
    harness.done("0", "n")
    assert harness.engine.trainers_lost == 0
    for _ in range(2):
        harness.serve()
    say_away(harness)
    assert harness.engine.trainers_lost == 2


def test_trainers_that_do_not_survive_what_its_client_has_saved_are_lost_in_it_too_each_time_it_is_resumed() -> None:
    harness = executed(OperationHarness())
    harness.operate("4")
    for _ in range(2):
        for _ in range(6):
            harness.serve()
            rebuild(harness, 2)
        harness.serve()
        assert say_away(harness) == ["ModelSuspended"]
        assert harness.engine.trainers_lost == 1, "the one before"
        harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
