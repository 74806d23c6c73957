"""A run that cannot go on waits for its operator, with all that it has: given, when, then for the core."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, Method
from bombus.hive.state import Phase
from bombus.hive.status.detail import detail_of
from bombus.hive.status.text import render_status
from bombus_coordinator.rules.trainers import TRAINERS_LOST_MAX
from tests.coordinator.core_in_memory import ENGINE, CoreHarness

REASON = "OutOfMemoryError: CUDA out of memory"


def rolling(**rules: object) -> CoreHarness:
    harness = CoreHarness()
    harness.boot(**rules)  # type: ignore[arg-type]
    return harness


def suspend(harness: CoreHarness, reason: str = REASON) -> list[ev.AnyEvent]:
    return harness.send(
        inbox.EngineBroke(
            id=harness.id(),
            engine=ENGINE,
            run=harness.engine.run,
            reason=reason,
            trainer_epoch=harness.engine.trainer_epoch,
            may_pass=True,
        )
    )


def resume(harness: CoreHarness, command: str = "") -> inbox.AnyAnswer:
    return harness.request(inbox.Resume(id=command or harness.id(), engine=ENGINE))


def break_step(harness: CoreHarness, waits: bool = False) -> list[ev.AnyEvent]:
    return harness.send(
        inbox.StepBroke(
            id=harness.id(),
            engine=ENGINE,
            run=harness.engine.run,
            step=harness.engine.step,
            trainer_epoch=harness.engine.trainer_epoch,
            reason=REASON,
            waits=waits,
        )
    )


def refused(answer: inbox.AnyAnswer, code: Code) -> str:
    assert isinstance(answer, inbox.Refusal), answer
    assert answer.code == code
    return answer.why


def test_a_step_that_waits_for_room_is_told_each_time_and_counts_as_no_failure() -> None:
    harness = rolling(batch_size=1, num_repeat=2)
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    told = [event for _ in range(4) for event in break_step(harness, waits=True)]
    assert [(type(event), getattr(event, "failures", None)) for event in told] == 4 * [(ev.StepFailed, 0)]
    assert not harness.engine.suspended


def test_r8_a_fault_that_may_pass_suspends_the_run_which_keeps_its_episodes_pool_and_version() -> None:
    harness = rolling()
    (episode,) = harness.claim()
    ended = harness.play("a")
    assert suspend(harness) == [ev.EngineSuspended(at_ns=harness.now_ns, engine=ENGINE, run=1, reason=REASON)]
    engine = harness.engine
    assert (engine.phase, engine.version, engine.suspended) == (Phase.ROLLING, 0, REASON)
    assert list(engine.open) == [episode]
    assert list(engine.pool) == [ended]
    assert suspend(harness) == [], "a run that waits goes on waiting"


def test_the_episodes_of_a_suspended_run_can_be_ended_and_no_batch_is_sealed() -> None:
    harness = rolling(method=Method.ENOUGH_EPISODES, batch_size=1, num_repeat=1)
    (episode,) = harness.claim()
    suspend(harness)
    harness.call(episode)
    assert isinstance(harness.end(episode), inbox.Done)
    assert list(harness.engine.pool) == [episode]
    harness.tick(after_s=3600)
    assert (harness.phase(), harness.engine.batch) == (Phase.ROLLING, None)
    resume(harness)
    assert harness.phase() == Phase.WEIGHT_SYNCING
    assert harness.engine.batch is not None


def test_a_claim_of_a_suspended_run_waits_and_is_then_refused_in_the_contracts_words_with_the_reason() -> None:
    harness = rolling()
    suspend(harness)
    waiting = harness.claim_message(wait_s=2.0)
    harness.send(waiting)
    assert waiting.id not in harness.answers
    harness.tick(after_s=3)
    why = refused(harness.answers[waiting.id], Code.NO_EPISODES)
    assert why == (
        "No available episodes to claim. The run is suspended until its operator resumes it (`bombus resume` or "
        f"client.resume_engine()): {REASON}"
    )


def test_a_claim_that_waits_is_granted_when_the_run_is_resumed() -> None:
    harness = rolling()
    suspend(harness)
    waiting = harness.claim_message(wait_s=60.0)
    harness.send(waiting)
    resume(harness)
    assert isinstance(harness.answers[waiting.id], inbox.Granted)


def test_a_refusal_names_the_phase_that_the_contracts_clients_look_for() -> None:
    harness = rolling(batch_size=1, num_repeat=2)
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    suspend(harness)
    why = refused(harness.request(harness.claim_message()), Code.WRONG_PHASE)
    assert why.startswith("Engine not ready. Current status: [ENGINE.WEIGHT_SYNCING]. Engine is syncing weights")
    assert why.endswith(REASON)


def test_r11_a_step_that_fails_three_times_suspends_the_run_and_has_three_more_attempts_after_it_is_resumed() -> None:
    harness = rolling(batch_size=1, num_repeat=2)
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    batch = harness.engine.batch
    for _ in range(2):
        break_step(harness)
        assert harness.engine.suspended == ""
    failed, suspended = break_step(harness)
    assert isinstance(failed, ev.StepFailed)
    assert isinstance(suspended, ev.EngineSuspended)
    assert suspended.reason == f"step 1 failed 3 times, the last time because: {REASON}"
    assert (harness.engine.batch, harness.engine.step_failures) == (batch, 3)
    resume(harness)
    assert (harness.engine.batch, harness.engine.step_failures, harness.engine.suspended) == (batch, 0, "")
    break_step(harness)
    assert harness.engine.suspended == ""
    harness.train()
    assert (harness.phase(), harness.engine.version) == (Phase.ROLLING, 1)


def test_facts_of_a_suspended_run_are_taken_and_it_moves_on_only_when_it_is_resumed() -> None:
    harness = rolling(batch_size=1, num_repeat=2)
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    suspend(harness)
    harness.train()
    assert (harness.phase(), harness.engine.version) == (Phase.WEIGHT_SYNCING, 1)
    resume(harness)
    assert harness.phase() == Phase.ROLLING


def test_the_deadlines_of_a_phase_start_again_when_the_run_is_resumed() -> None:
    harness = CoreHarness()
    harness.configure(Collection(boot_s=60))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    harness.open_trainer()
    harness.tick(after_s=50)
    suspend(harness)
    assert harness.tick(after_s=3600) == []
    resume(harness)
    assert harness.tick(after_s=50) == []
    assert isinstance(harness.tick(after_s=10)[-1], ev.EngineSuspended)


def test_no_open_episode_is_superseded_by_the_time_that_its_run_was_suspended() -> None:
    harness = rolling(method=Method.ENOUGH_EPISODES, batch_size=1, num_repeat=1, drain_s=30.0)
    (slow,) = harness.claim(discard_timeout_s=86_400.0, claim="slow")
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=("slow",)))
    harness.play("a")
    assert harness.phase() == Phase.ROLLING_POST
    suspend(harness)
    harness.tick(after_s=3600)
    resume(harness)
    assert list(harness.engine.open) == [slow]
    harness.tick(after_s=31)
    assert harness.engine.open == {}


def test_an_idle_episode_of_a_suspended_run_is_taken_away() -> None:
    harness = rolling()
    harness.claim(discard_timeout_s=10.0)
    suspend(harness)
    harness.tick(after_s=11)
    assert harness.engine.open == {}


def test_a_suspended_run_can_be_stopped_and_the_next_one_is_not_suspended() -> None:
    harness = rolling()
    harness.claim()
    suspend(harness)
    assert isinstance(harness.request(inbox.Stop(id="stop", engine=ENGINE)), inbox.Done)
    assert (harness.phase(), harness.engine.suspended, harness.engine.open) == (Phase.OFFLINE, "", {})
    harness.send(inbox.Start(id="start", engine=ENGINE))
    assert (harness.engine.run, harness.engine.suspended, harness.engine.suspensions) == (2, "", 0)


def test_a_fault_of_the_job_ends_the_run_also_while_it_is_suspended() -> None:
    harness = rolling()
    suspend(harness)
    harness.send(inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason="the losses were not finite", trainer_epoch=1))
    assert (harness.phase(), harness.engine.failure) == (Phase.OFFLINE, "the losses were not finite")
    assert harness.engine.suspended == ""


def test_a_trainer_that_was_superseded_cannot_suspend_the_run_of_its_successor() -> None:
    harness = rolling()
    harness.open_trainer()
    broke = inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason=REASON, trainer_epoch=1, may_pass=True)
    assert harness.send(broke) == []


@pytest.mark.parametrize("repeat_after", ["another leader", "the same leader"])
def test_the_outcome_of_a_resume_is_on_the_log_so_that_a_late_repeat_does_nothing(repeat_after: str) -> None:
    harness = rolling()
    suspend(harness)
    answer = resume(harness, "first")
    assert answer == inbox.Done(run=1)
    suspend(harness, "again")
    if repeat_after == "another leader":
        harness.core.live.answers.clear()
    assert harness.send(inbox.Resume(id="first", engine=ENGINE)) == []
    assert harness.answers["first"] == answer
    assert harness.engine.suspended == "again"


def test_a_run_that_goes_on_has_nothing_to_resume_and_an_engine_without_one_says_so() -> None:
    harness = rolling()
    (answered,) = harness.send(inbox.Resume(id="needless", engine=ENGINE))
    assert answered == ev.CommandAnswered(at_ns=harness.now_ns, engine=ENGINE, run=1, command="needless")
    assert harness.answers["needless"] == inbox.Done(run=1)
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    why = refused(resume(harness), Code.WRONG_PHASE)
    assert why == "Cannot resume the engine: the engine's status is ENGINE.OFFLINE. It has no run to resume; start one."


def test_starting_a_suspended_engine_is_refused_with_both_ways_out() -> None:
    harness = rolling()
    suspend(harness)
    why = refused(harness.request(inbox.Start(id="again", engine=ENGINE)), Code.WRONG_PHASE)
    assert why.endswith(f"Its run is suspended: {REASON}. `bombus resume` lets it continue, `bombus stop` ends it.")


def test_the_status_says_that_a_run_is_suspended_why_and_what_to_do() -> None:
    harness = rolling()
    suspend(harness)
    assert detail_of(harness.engine, harness.now_ns) == f"suspended: {REASON}"
    text = render_status(harness.core.hive, ENGINE, harness.now_ns)
    assert "ROLLING for 0.0 s (suspended)\n  waiting for the operator: the run of engine main has been" in text
    assert f": {REASON}; once the cause is gone, `bombus resume` lets the run continue\n" in text


# ---- two reasons at once --------------------------------------------------------------------------------------


def waiting_for_a_replica() -> CoreHarness:
    """Return a hive whose only replica cannot load, in a run whose trainer has a batch to train."""
    harness = rolling(method=Method.ENOUGH_EPISODES, batch_size=1, num_repeat=1, max_staleness=1)
    harness.play("a")
    assert harness.engine.batch is not None
    harness.send(inbox.ReplicaLeaves(id=harness.id(), engine=ENGINE, replica="r1"))
    alive(harness, version=-1)
    why = "the mount is gone"
    harness.send(inbox.LoadBroke(id=harness.id(), engine=ENGINE, run=1, version=0, replica="r1", reason=why))
    assert harness.engine.until_served
    return harness


def alive(harness: CoreHarness, version: int) -> list[ev.AnyEvent]:
    beat = inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1", run=1, version=version)
    return harness.send(beat)


def test_a_run_that_waits_for_a_replica_waits_for_its_operator_when_its_trainer_says_so() -> None:
    """What the trainer reported was swallowed: the replica came back, and the run went on."""
    harness = waiting_for_a_replica()
    (suspended,) = suspend(harness)
    assert isinstance(suspended, ev.EngineSuspended)
    assert not suspended.until_served
    alive(harness, version=0)
    assert harness.engine.suspended == REASON
    assert suspend(harness) == [], "a run that waits for its operator goes on waiting"
    resume(harness)
    assert not harness.engine.suspended


def test_a_replica_that_serves_again_does_not_make_the_failures_of_a_step_forgotten() -> None:
    harness = waiting_for_a_replica()
    break_step(harness)
    alive(harness, version=0)
    assert (harness.engine.suspended, harness.engine.step_failures, harness.engine.resumed_ns) == ("", 1, 0)
    break_step(harness)
    break_step(harness)
    assert harness.engine.suspended == f"step 1 failed 3 times, the last time because: {REASON}"
    resume(harness)
    assert (harness.engine.step_failures, harness.engine.resumed_ns) == (0, harness.now_ns)


# ---- trainers that end without a word -------------------------------------------------------------------------


def lose_trainers(harness: CoreHarness, count: int = TRAINERS_LOST_MAX) -> None:
    """Let so many trainers open the run that each finds what the one before has left."""
    for _ in range(count):
        harness.open_trainer()


def test_trainers_that_end_without_a_word_in_the_same_step_suspend_the_run() -> None:
    """Two hundred were killed by the kernel in one step, and the run stood without a failure."""
    harness = rolling(method=Method.ENOUGH_EPISODES, batch_size=1, num_repeat=1)
    harness.play("a")
    lose_trainers(harness, TRAINERS_LOST_MAX - 1)
    assert not harness.engine.suspended
    lose_trainers(harness, 1)
    assert f"{TRAINERS_LOST_MAX} trainers in a row ended without reporting an error before they had made step 1" in (
        harness.engine.suspended
    )
    assert harness.engine.batch is not None
    resume(harness)
    lose_trainers(harness, TRAINERS_LOST_MAX - 1)
    assert not harness.engine.suspended, "each resume has the whole patience"


def test_trainers_that_end_without_a_word_before_the_first_version_suspend_the_run() -> None:
    harness = CoreHarness()
    harness.configure(Collection(boot_s=1e6))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    lose_trainers(harness, TRAINERS_LOST_MAX)
    assert not harness.engine.suspended, "the last one lives"
    lose_trainers(harness, 1)
    assert "before they had made version 0" in harness.engine.suspended


def test_a_run_that_makes_progress_survives_any_number_of_lost_trainers() -> None:
    harness = rolling(method=Method.ENOUGH_EPISODES, batch_size=1, num_repeat=1)
    for step in (1, 2, 3):
        harness.play("a")
        lose_trainers(harness, TRAINERS_LOST_MAX - 1)
        harness.step_done(step)
        lose_trainers(harness, TRAINERS_LOST_MAX - 1)
        harness.save_weights(step)
        harness.load(step)
    assert not harness.engine.suspended
    lose_trainers(harness)
    assert not harness.engine.suspended, "nothing waits for a trainer"
