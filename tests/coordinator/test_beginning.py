"""Where a new run begins: at the model as loaded, or at a checkpoint that an earlier run has left."""

from typing import Any

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.checkpoints import KEPT_MIN, RUNS_KEPT, UNNAMED
from bombus.hive.describe import line_of
from bombus.hive.events import Collection, EpisodeType
from bombus.hive.state import Phase
from bombus.hive.status.data import engine_status
from bombus.hive.steps import episodes_of
from tests.coordinator.core_in_memory import ENGINE, CoreHarness

MODEL = {"path": "smollm2", "seed": 0}
TRAINER = {"lr": 1e-5, "lora_rank": 8}


def job(resume: str, model: dict[str, Any] = MODEL, experiment: str = "", **trainer: Any) -> inbox.Configure:
    named = {"project_name": "ajet_default_project", "experiment_name": experiment or UNNAMED}
    groups = {"model": model, "trainer": {**TRAINER, "resume": resume, **trainer}, "experiment": named}
    kept = trainer.get("checkpoints_kept", KEPT_MIN)
    return inbox.Configure(
        id="",
        engine=ENGINE,
        config=msgspec.json.encode(groups).decode(),
        config_digest="d",
        collection=Collection(batch_size=1, num_repeat=2, resume=resume, checkpoints_kept=kept),
        model=str(model["path"]),
    )


def configure(harness: CoreHarness, wanted: inbox.Configure) -> None:
    harness.send(msgspec.structs.replace(wanted, id=harness.id()))


def start(harness: CoreHarness, wanted: inbox.Configure) -> inbox.AnyAnswer:
    configure(harness, wanted)
    return harness.request(inbox.Start(id=harness.id(), engine=ENGINE))


def stop(harness: CoreHarness) -> None:
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))


def roll(harness: CoreHarness, version: int) -> None:
    """Let a trainer boot the run that was started, with weights of a version."""
    harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
    harness.open_trainer()
    harness.save_weights(version)
    harness.load(version)


def step(harness: CoreHarness, saved: bool = True) -> None:
    harness.play("t", 1.0)
    harness.play("t", 0.0)
    harness.train(saved)


def stopped(steps: int = 2, experiment: str = "", **trainer: Any) -> CoreHarness:
    """Return an engine whose first run was stopped after so many steps."""
    harness = CoreHarness()
    start(harness, job("never", experiment=experiment, **trainer))
    roll(harness, 0)
    for _ in range(steps):
        step(harness)
    stop(harness)
    return harness


def test_r8_a_run_begins_at_the_newest_checkpoint_of_the_same_job_and_goes_on_counting() -> None:
    harness = stopped(steps=2)
    before = harness.engine.counters
    start(harness, job("auto"))
    begins = ev.Beginning(run=1, step=2, checkpoint="/checkpoints/2", checkpoint_digest="c")
    started = harness.log[-1]
    assert isinstance(started, ev.EngineStarted)
    assert started.begins is not None
    assert msgspec.structs.replace(started.begins, changed=()) == begins
    engine = harness.engine
    assert (engine.run, engine.step, engine.version, engine.phase) == (2, 2, -1, Phase.BOOTING)
    assert engine.counters == before
    assert harness.save_weights(0) == [], "version 0 is not that of this run's beginning"
    roll(harness, 2)
    assert (harness.phase(), engine.version) == (Phase.ROLLING, 2)
    step(harness)
    assert (engine.version, engine.batch) == (3, None)


def test_r12_a_run_that_begins_at_an_earlier_step_needs_no_calls_that_were_released_before() -> None:
    harness = CoreHarness()
    start(harness, job("auto"))
    roll(harness, 0)
    for _ in range(2):
        step(harness)
    second = list(episodes_of(harness.engine.steps[-1:]))
    for reward in (1.0, 0.0):
        harness.play("t", reward)  # a third batch, with which nobody makes the first step again
    stop(harness)
    start(harness, job("auto"))
    assert (harness.engine.begun, len(harness.engine.steps)) == (2, 2)
    assert list(episodes_of(harness.engine.needed_steps)) == second


def test_a_run_begins_again_at_the_model_as_loaded_where_the_job_does_not_ask_for_more() -> None:
    harness = stopped()
    start(harness, job("never"))
    assert (harness.engine.step, harness.engine.step_done, harness.engine.counters.trained) == (0, None, 0)
    roll(harness, 0)
    assert harness.phase() == Phase.ROLLING


def test_another_model_of_a_named_experiment_is_refused_in_words_with_both_ways_out() -> None:
    harness = stopped(experiment="bees")
    refused = start(harness, job("auto", model={"path": "tiny", "seed": 0}, experiment="bees"))
    assert isinstance(refused, inbox.Refusal)
    assert refused.code == Code.BAD_CONFIG
    assert refused.why == (
        "This experiment has already begun, but the checkpoint of version 2 of run 1 belongs to another job "
        "(model.path 'smollm2' -> 'tiny'). Set trainer.resume to never to start over, or use another "
        "experiment.experiment_name; to continue, restore these settings."
    )
    assert harness.phase() == Phase.OFFLINE
    assert start(harness, job("never", model={"path": "tiny", "seed": 0}, experiment="bees")) == inbox.Done(run=2)


def test_another_experiment_begins_at_the_model_as_loaded() -> None:
    harness = stopped(experiment="bees")
    start(harness, job("auto", model={"path": "tiny", "seed": 0}, experiment="wasps"))
    assert (harness.engine.run, harness.engine.begun) == (2, 0)
    assert line_of(harness.log[-1]) == "run 2 started with configuration d"


def test_another_job_without_a_name_begins_anew_which_is_told_and_the_first_one_finds_its_checkpoint_again() -> None:
    harness = stopped()
    for other in (job("auto", model={"path": "tiny", "seed": 0}), job("auto", lora_rank=16)):
        start(harness, other)
        assert (harness.engine.step, harness.engine.begun) == (0, 0)
        stop(harness)
    told = [line_of(event) for event in harness.log if isinstance(event, ev.EngineStarted)]
    assert told[1:] == [
        "run 2 started with configuration d, at the model as loaded: the checkpoint of version 2 of run 1 belongs to "
        "another job (model.path 'smollm2' -> 'tiny')",
        "run 3 started with configuration d, at the model as loaded: the checkpoint of version 2 of run 1 belongs to "
        "another job (trainer.lora_rank 8 -> 16)",
    ]
    start(harness, job("auto"))
    assert harness.engine.begun == 2


def test_a_learning_rate_may_change_and_the_log_says_so() -> None:
    harness = stopped()
    start(harness, job("auto", lr=2e-5))
    assert harness.engine.begun == 2
    assert line_of(harness.log[-1]) == (
        "run 2 started with configuration d, at the checkpoint of step 2 of run 1, with trainer.lr 1e-05 -> 2e-05"
    )


def test_a_version_that_is_named_is_the_beginning_and_one_that_is_not_left_is_refused_with_those_that_are() -> None:
    harness = stopped(steps=3)
    refused = start(harness, job("from 1"))
    assert isinstance(refused, inbox.Refusal)
    assert refused.code == Code.BAD_CONFIG
    assert refused.why == (
        "trainer.resume is 'from 1', but no checkpoint of version 1 is left; available: 2 (run 1), 3 (run 1)"
    )
    assert start(harness, job("from 2")) == inbox.Done(run=2)
    assert harness.engine.begun == 2


@pytest.mark.parametrize(("kept", "left"), [(1, [5, 6]), (3, [4, 5, 6]), (100, [1, 2, 3, 4, 5, 6])])
def test_as_many_checkpoints_as_the_job_says_can_be_begun_at_and_two_at_least(kept: int, left: list[int]) -> None:
    for version in range(1, 7):
        harness = stopped(steps=6, checkpoints_kept=kept)
        answer = start(harness, job(f"from {version}"))
        assert (answer == inbox.Done(run=2)) == (version in left)


def test_a_version_of_another_job_is_refused_in_words() -> None:
    harness = stopped()
    refused = start(harness, job("from 2", model={"path": "tiny", "seed": 0}))
    assert isinstance(refused, inbox.Refusal)
    assert "belongs to another job: model.path 'smollm2' -> 'tiny'. Set trainer.resume to never" in refused.why
    assert harness.phase() == Phase.OFFLINE


def test_a_run_that_left_no_checkpoint_of_its_own_hands_on_the_one_at_which_it_began() -> None:
    harness = stopped(steps=2)
    counters = harness.engine.counters
    for _ in range(3):
        start(harness, job("auto"))
        assert (harness.engine.begun, harness.engine.counters) == (2, counters)
        roll(harness, 2)
        stop(harness)


def test_steps_since_the_beginning_are_kept_to_be_made_again() -> None:
    harness = stopped(steps=2)
    start(harness, job("auto"))
    roll(harness, 2)
    step(harness, saved=False)
    step(harness, saved=False)
    assert [each.batch.step for each in harness.engine.steps] == [1, 2, 3, 4], "step 1 has the older checkpoint"
    step(harness)
    step(harness)
    assert [each.batch.step for each in harness.engine.steps] == [5, 6]


def test_the_checkpoints_of_few_earlier_runs_are_remembered() -> None:
    harness = stopped(steps=2)
    for _ in range(RUNS_KEPT + 3):
        start(harness, job("auto"))
        roll(harness, harness.engine.begun)
        step(harness)
        stop(harness)
    start(harness, job("auto"))
    assert len(harness.engine.left) == RUNS_KEPT
    assert harness.engine.begun == 2 + RUNS_KEPT + 3


def test_the_status_of_a_run_that_goes_on_has_its_step_and_no_last_step_until_it_has_made_one() -> None:
    """It said that the last step was made 20717 days ago, and that the run was at step 0 until it had booted."""
    harness = stopped(steps=2)
    start(harness, job("auto"))
    told = engine_status(harness.engine, harness.now_ns)
    assert (told.global_step, told.last_step) == (2, None)
    roll(harness, 2)
    step(harness)
    told = engine_status(harness.engine, harness.now_ns)
    assert told.last_step is not None
    assert (told.global_step, told.last_step.step) == (3, 3)


def test_r8_evaluations_of_versions_that_are_lost_are_not_mixed_with_those_of_new_ones() -> None:
    harness = stopped(steps=0)
    start(harness, job("never"))
    roll(harness, 0)
    for _ in range(4):
        harness.play("eval", type=EpisodeType.EVAL)
        step(harness)
    harness.play("eval", type=EpisodeType.EVAL)
    stop(harness)
    start(harness, job("from 3"))
    assert list(harness.engine.evals) == [0, 1, 2, 3], "version 4 is made again"
