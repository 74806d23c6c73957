"""Trainers that hang or fall silent lose their epoch: given, when, then for the core."""

import pytest

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, Weights
from bombus.hive.state import Phase
from bombus.hive.status.detail import detail_of
from bombus.hive.status.text import render_status
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, SECOND, CoreHarness

PATIENCE_S = 300.0
DAY_S = 86_400
DOING = "step 1, micro-batch 12 of 40"


def open_trainer(harness: CoreHarness, patience_s: float = PATIENCE_S) -> int:
    opens = inbox.TrainerOpens(
        id=harness.id(), engine=ENGINE, run=harness.engine.run, trainer="t2", patience_s=patience_s
    )
    answer = harness.request(opens)
    assert isinstance(answer, inbox.Done)
    return answer.epoch


def training(patience_s: float = PATIENCE_S, **rules: object) -> CoreHarness:
    """Return a hive whose trainer has a batch to train."""
    harness = CoreHarness()
    harness.boot(**rules)  # type: ignore[arg-type]
    open_trainer(harness, patience_s)
    for task in "ab":
        for reward in (0.0, 1.0):
            harness.play(task, reward)
    assert harness.engine.batch is not None
    return harness


def hangs(harness: CoreHarness, epoch: int | None = None) -> list[ev.AnyEvent]:
    engine = harness.engine
    return harness.send(
        inbox.TrainerHangs(
            id=harness.id(),
            engine=ENGINE,
            run=engine.run,
            trainer_epoch=engine.trainer_epoch if epoch is None else epoch,
            doing=DOING,
            still_s=620.0,
        )
    )


def beat(harness: CoreHarness, epoch: int | None = None) -> None:
    alive = inbox.TrainerAlive(
        id=harness.id(),
        engine=ENGINE,
        run=harness.engine.run,
        trainer_epoch=harness.engine.trainer_epoch if epoch is None else epoch,
        doing=DOING,
    )
    assert harness.send(alive) == []


def tick(harness: CoreHarness, after_s: float = 1.0) -> list[ev.AnyEvent]:
    """Tick as a leader does, and leave out that the replica is gone."""
    decided = harness.send(inbox.Tick(id=harness.id(), answered=harness.seq), after_s)
    return [event for event in decided if not isinstance(event, ev.ReplicaLeft)]


def pass_time(harness: CoreHarness, seconds: int, beats: bool = False) -> list[ev.AnyEvent]:
    """Let the leader tick once a second, and the trainer beat if it does."""
    decided: list[ev.AnyEvent] = []
    for _ in range(seconds):
        decided += tick(harness)
        if beats:
            beat(harness)
    return decided


def test_r11_a_trainer_that_hangs_in_a_step_loses_its_epoch_and_the_next_trains_the_same_batch_once() -> None:
    harness = training()
    batch, old = harness.engine.batch, harness.engine.trainer_epoch
    (stalled,) = hangs(harness)
    assert stalled == ev.TrainerStalled(
        at_ns=harness.now_ns,
        engine=ENGINE,
        run=1,
        trainer="t2",
        trainer_epoch=old,
        doing=DOING,
        still_s=620.0,
        failures=1,
    )
    assert harness.step_done(1, epoch=old) == [], "what it still says is ignored"
    assert harness.save_weights(1, epoch=old) == []
    assert hangs(harness, epoch=old) == []
    new = open_trainer(harness)
    assert new > old
    assert harness.step_done(1, epoch=old) == []
    assert harness.engine.batch == batch
    assert [type(event) for event in harness.step_done(1, epoch=new)] == [ev.StepCompleted]


def test_a_trainer_that_hangs_in_three_attempts_in_a_row_suspends_the_run() -> None:
    harness = training()
    for failures in (1, 2):
        hangs(harness)
        open_trainer(harness)
        assert harness.engine.step_failures == failures
    _, suspended = hangs(harness)
    assert isinstance(suspended, ev.EngineSuspended)
    assert suspended.reason == (
        "its trainers failed 3 times in a row; most recently, t2 made no progress at step 1, micro-batch 12 of 40 for "
        "10 m 20 s"
    )
    assert harness.engine.batch is not None


def test_a_trainer_that_is_silent_for_longer_than_it_said_loses_its_epoch() -> None:
    harness = training()
    assert pass_time(harness, 900, beats=True) == [], "a slow trainer that says that it lives is left alone"
    assert pass_time(harness, 299) == []
    (stalled,) = pass_time(harness, 2)
    assert isinstance(stalled, ev.TrainerStalled)
    assert (stalled.silent, stalled.doing, stalled.failures) == (True, DOING, 1)
    assert stalled.still_s == pytest.approx(PATIENCE_S, abs=2)
    assert pass_time(harness, 3600) == [], "without a trainer there is none to judge, and the run waits"
    assert harness.engine.suspended == ""


def test_an_idle_trainer_that_falls_silent_is_told_of_and_no_failure_is_counted() -> None:
    harness = CoreHarness()
    harness.boot()
    open_trainer(harness)
    for _ in range(4):
        (stalled,) = pass_time(harness, 301)
        assert isinstance(stalled, ev.TrainerStalled)
        open_trainer(harness)
    assert harness.engine.step_failures == 0


def test_a_trainer_that_promises_no_heartbeats_is_taken_for_gone_after_a_day_of_work_that_waits() -> None:
    """Those of an older version send none, and `stall_s: 0` switches the watch off."""
    idle, harness = CoreHarness(), training(patience_s=0.0)
    idle.boot()
    open_trainer(idle, patience_s=0.0)
    assert after(idle, 3 * DAY_S) == [], "nothing waits for it"
    assert after(harness, DAY_S - 1) == []
    (stalled,) = after(harness, 1)
    assert isinstance(stalled, ev.TrainerStalled)
    open_trainer(harness, patience_s=0.0)
    assert after(harness, DAY_S - 1) == []


def after(harness: CoreHarness, seconds: int) -> list[ev.AnyEvent]:
    """Return what is decided after so much time, in which a leader was there and no replica left."""
    harness.core.live.ticked_ns = None
    decided = harness.send(inbox.Tick(id=harness.id()), seconds)
    return [event for event in decided if not isinstance(event, ev.ReplicaLeft)]


def test_while_the_bus_is_away_for_minutes_no_trainer_is_taken_for_gone() -> None:
    """No heartbeat and no tick arrive, and the first tick after it finds all deadlines set anew (R5)."""
    harness = training()
    assert tick(harness) == []
    assert tick(harness, 20 * 60.0) == []
    assert pass_time(harness, 299) == []
    assert [type(event) for event in tick(harness, 2.0)] == [ev.TrainerStalled]


def test_a_new_leader_gives_a_trainer_its_whole_patience_and_then_judges_it() -> None:
    harness = training()
    pass_time(harness, 250)
    harness.core = Core(harness.core.hive)
    harness.core.open_epoch("another")
    assert pass_time(harness, 299) == []
    assert [type(event) for event in pass_time(harness, 3)] == [ev.TrainerStalled]


def test_the_heartbeats_of_an_earlier_epoch_or_run_keep_no_trainer() -> None:
    harness = training()
    old = harness.engine.trainer_epoch
    open_trainer(harness)
    for _ in range(299):
        tick(harness)
        beat(harness, epoch=old)
    assert [type(event) for event in pass_time(harness, 3)] == [ev.TrainerStalled]


def test_a_load_that_hangs_has_its_time_to_boot_again_with_the_next_trainer() -> None:
    harness = CoreHarness()
    harness.configure(Collection(boot_s=1000.0))
    harness.send(inbox.Start(id=harness.id(), engine=ENGINE))
    open_trainer(harness)
    pass_time(harness, 900, beats=True)
    hangs(harness)
    assert harness.engine.stage == "waiting for a trainer"
    open_trainer(harness)
    assert pass_time(harness, 900, beats=True) == []
    assert harness.phase() == Phase.BOOTING
    saved = inbox.WeightsSaved(
        id=harness.id(),
        engine=ENGINE,
        run=1,
        step=0,
        trainer_epoch=harness.engine.trainer_epoch,
        weights=Weights(where="/weights/0"),
    )
    assert [type(event) for event in harness.send(saved)] == [ev.WeightsReady]


def test_a_suspended_run_counts_no_failure_of_a_trainer_that_falls_silent() -> None:
    harness = training()
    for _ in range(3):
        hangs(harness)
        open_trainer(harness)
    assert harness.engine.suspended
    (stalled,) = pass_time(harness, 301)
    assert isinstance(stalled, ev.TrainerStalled)
    assert stalled.failures == 3


def test_the_status_says_since_when_there_is_no_trainer_and_why() -> None:
    harness = training()
    hangs(harness)
    now_ns = harness.now_ns + 42 * 60 * SECOND
    why = "no trainer for 42 m 00 s: t2 made no progress at step 1, micro-batch 12 of 40 for 10 m 20 s"
    assert detail_of(harness.engine, now_ns) == f"training step 1; {why}"
    assert f"trainer: {why}, epoch" in render_status(harness.core.hive, now_ns=now_ns)
    open_trainer(harness)
    assert detail_of(harness.engine, now_ns) == "training step 1"
