"""The coordinator's decisions when `max_staleness` is above 0: rolling continues during a step (R14)."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, DropReason, EpisodeType, Method
from bombus.hive.inbox import Granted, Refusal
from bombus.hive.state import Phase
from bombus.hive.status.data import engine_status
from bombus.hive.status.text import render_status
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, CoreHarness


def rolling(max_staleness: int = 1, batch_size: int = 1, num_repeat: int = 2, **rules: object) -> CoreHarness:
    harness = CoreHarness()
    given: dict[str, object] = {"max_open_claims": 64, **rules}
    harness.boot(batch_size=batch_size, num_repeat=num_repeat, max_staleness=max_staleness, **given)  # type: ignore[arg-type]
    return harness


def group(harness: CoreHarness, task: str, version: int | None = None) -> None:
    """Claim, sample and end the two episodes of a task."""
    for reward, episode in enumerate(harness.claim(count=2)):
        harness.call(episode, version)
        harness.end(episode, task, float(reward))


def refused(harness: CoreHarness, **claim: object) -> str:
    answer = harness.request(harness.claim_message(**claim))  # type: ignore[arg-type]
    assert isinstance(answer, Refusal), answer
    assert answer.code == Code.NO_EPISODES
    return answer.why


def drops(harness: CoreHarness) -> list[tuple[DropReason, int]]:
    return [(event.reason, len(event.episodes)) for event in harness.log if isinstance(event, ev.GroupDropped)]


def sealed(harness: CoreHarness) -> list[list[str]]:
    return [[group.task for group in event.groups] for event in harness.log if isinstance(event, ev.BatchReady)]


# ---- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Method.ANY_CLIENT_AGREES, Method.ALL_CLIENTS_AGREE])
def test_methods_by_agreement_are_refused_and_the_engine_stays_offline(method: Method) -> None:
    answer = CoreHarness().configure(Collection(method=method, max_staleness=1))
    assert isinstance(answer, Refusal)
    assert answer.code == Code.BAD_CONFIG
    assert "max_staleness = 0" in answer.why


def test_a_pool_too_small_for_what_waits_for_training_is_refused_with_the_required_size() -> None:
    answer = CoreHarness().configure(Collection(max_staleness=2, batch_size=4, num_repeat=2, max_pool_episodes=23))
    assert isinstance(answer, Refusal)
    assert "at least 24" in answer.why
    assert isinstance(
        CoreHarness().configure(Collection(max_staleness=2, batch_size=4, num_repeat=2, max_pool_episodes=24)),
        inbox.Done,
    )


# ---- rolling continues ----------------------------------------------------------------------------------------------


def test_a_batch_is_sealed_trained_and_loaded_while_the_engine_rolls_and_episodes_are_open() -> None:
    harness = rolling()
    (bystander,) = harness.claim()
    group(harness, "a")
    assert harness.engine.batch is not None
    assert harness.engine.phase == Phase.ROLLING
    harness.train()
    assert harness.engine.version == 1
    assert harness.engine.phase == Phase.ROLLING
    assert bystander in harness.engine.open
    assert {"rolling.closed", "syncing.started"}.isdisjoint(harness.kinds())
    assert harness.kinds().count("rolling.started") == 1


def test_the_next_batch_waits_for_the_weights_of_the_one_before() -> None:
    harness = rolling()
    group(harness, "a")
    group(harness, "b")
    assert sealed(harness) == [["a"]]
    harness.step_done(1)
    assert sealed(harness) == [["a"]]
    harness.save_weights(1)
    assert sealed(harness) == [["a"], ["b"]]


def test_groups_with_the_oldest_tokens_are_trained_first() -> None:
    harness = rolling(max_staleness=2)
    early, late = harness.claim(count=2)
    harness.call(early)
    group(harness, "a")
    harness.train()
    group(harness, "b")
    group(harness, "c")
    harness.end(early, "old", 0.0)
    harness.end(late, "old", 1.0)
    assert sealed(harness) == [["a"], ["b"]]
    harness.train()
    assert sealed(harness)[2:] == [["old"]], "c was complete before"


# ---- pacing ---------------------------------------------------------------------------------------------------------


def test_a_claim_waits_once_its_samples_would_be_too_old_and_is_granted_when_the_weights_are_served() -> None:
    """One step of slack, batches of two: two are trained, two wait, the fifth would be trained at the age of 2."""
    harness = rolling()
    group(harness, "a")
    harness.claim(count=2)
    waiting = harness.claim_message(wait_s=60)
    harness.send(waiting)
    harness.step_done(1)
    harness.save_weights(1)
    assert waiting.id not in harness.answers, "no replica serves them yet"
    harness.load(1)
    granted = harness.answers[waiting.id]
    assert isinstance(granted, Granted)
    assert granted.version == 1


def test_a_waiting_client_and_the_operator_learn_the_reason() -> None:
    harness = rolling()
    group(harness, "a")
    harness.claim(count=2)
    why = refused(harness)
    assert "No available episodes to claim." in why
    assert "unfinished batches (1) and those under way (1) exceed collection.max_staleness (1)" in why
    now = engine_status(harness.engine, harness.now_ns).pace
    assert now is not None
    assert (now.unfinished, now.sealable, now.max_staleness) == (1, 1, 1)
    text = render_status(harness.core.hive)
    assert "ahead of training: 1 unfinished and 1 sealable batches, limit 1, new episodes are waiting" in text


def test_r14_the_bound_is_the_number_of_batches_that_may_come_first() -> None:
    for bound in (1, 2, 3):
        harness = rolling(max_staleness=bound)
        granted = 0
        while isinstance(harness.request(harness.claim_message()), Granted):
            granted += 1
        assert granted == 2 * (bound + 1)


def test_evaluation_is_not_paced_and_overtakes_waiting_training_claims() -> None:
    harness = rolling()
    group(harness, "a")
    harness.claim(count=2)
    harness.send(harness.claim_message("trains", wait_s=60))
    (episode,) = harness.claim("evaluates", type=EpisodeType.EVAL)
    harness.end(episode, "held-out", 1.0, "evaluates")
    assert harness.engine.evals[0].episodes == 1


def test_an_evaluation_counts_for_the_version_that_has_sampled_it_and_in_no_mean_where_several_have() -> None:
    harness = rolling()
    kept, changed, later, silent = harness.claim("evaluates", count=4, type=EpisodeType.EVAL)
    harness.call(kept)
    harness.call(changed)
    group(harness, "a")
    harness.train()
    harness.call(changed)
    harness.call(later)
    for episode, reward in ((kept, 1.0), (changed, 0.25), (later, 0.5), (silent, 0.0)):
        harness.end(episode, "held-out", reward, "evaluates", data_set="legs")
    for figures in (harness.engine.evals[0], harness.engine.evals[0].data_sets["legs"]):
        assert (figures.episodes, figures.mean) == (2, 0.5), "the one without a call is of its claim's version"
        assert (figures.mixed.episodes, figures.mixed.mean) == (1, 0.25)
    of_the_later = harness.engine.evals[1].data_sets["legs"]
    assert (of_the_later.episodes, of_the_later.mean, of_the_later.mixed.episodes) == (1, 0.5, 0)
    text = render_status(harness.core.hive)
    assert "0.500  legs (2 episodes; 1 partly sampled by a later version: 0.250)" in text
    assert "0.500  legs (1 episodes)" in text


def test_a_version_of_which_no_evaluation_is_whole_has_no_mean() -> None:
    harness = rolling()
    (changed,) = harness.claim("evaluates", type=EpisodeType.EVAL)
    harness.call(changed)
    group(harness, "a")
    harness.train()
    harness.call(changed)
    harness.end(changed, "held-out", 0.75, "evaluates")
    assert "    0  -      (0 episodes; 1 partly sampled by a later version: 0.750)" in render_status(harness.core.hive)


def test_no_training_claim_overtakes_the_one_that_is_next() -> None:
    harness = rolling(batch_size=2)
    harness.claim("busy", count=6)
    whole = harness.claim_message("whole group", count=4, wait_s=60)
    single = harness.claim_message("single", wait_s=60)
    harness.send(whole)
    harness.send(single, after_s=1)
    assert whole.id not in harness.answers
    assert single.id not in harness.answers


def test_claims_wait_while_no_replica_keeps_up_instead_of_sampling_what_would_be_dropped() -> None:
    harness = rolling()
    harness.send(inbox.ReplicaLeaves(id="x", engine=ENGINE, replica="r1"))
    assert "no inference replica serves version 0" in refused(harness)
    harness.send(inbox.ReplicaAlive(id="y", engine=ENGINE, replica="r2", url="http://r2"))
    assert "no inference replica" in refused(harness), "it has not loaded anything"
    harness.load(0, "r2")
    assert harness.claim()


def test_a_claim_larger_than_the_bound_is_granted_when_the_engine_is_idle() -> None:
    harness = rolling()
    (first,) = harness.claim()
    large = harness.claim_message(count=9, wait_s=60)
    harness.send(large)
    assert large.id not in harness.answers
    harness.end(first, "a")
    assert isinstance(harness.answers[large.id], Granted)


def test_incomplete_groups_do_not_hold_up_complete_ones_for_ever() -> None:
    harness = rolling()
    for task in "abcdef":
        (episode,) = harness.claim()
        harness.call(episode)
        harness.end(episode, task)
    assert harness.engine.open == {}
    group(harness, "whole")
    assert sealed(harness) == [["whole"]]


def test_a_named_task_counts_only_for_its_own_group() -> None:
    harness = rolling()
    for task in "ab":
        (episode,) = harness.claim()
        harness.end(episode, task)
    assert len(harness.claim(task_hint="c")) == 1
    assert len(harness.claim(task_hint="d")) == 1
    assert len(harness.claim(task_hint="e")) == 1, "three groups begun, none complete"
    harness.claim(task_hint="a")
    harness.claim(task_hint="b")
    assert "those under way (2)" in refused(harness)


# ---- staleness ------------------------------------------------------------------------------------------------------


def test_a_complete_batch_waits_for_episodes_that_would_be_too_old_for_the_next_one() -> None:
    harness = rolling()
    slow = harness.claim(count=2)
    harness.call(slow[0])
    group(harness, "a")
    harness.train()
    group(harness, "b")
    assert sealed(harness) == [["a"]]
    text = render_status(harness.core.hive, now_ns=harness.now_ns)
    waits = "engine main is rolling: the batch of step 2 is complete, and is waiting for 2 episodes"
    too_old = f"that would be too old for the batch after it; the longest idle is episode {slow[0]}"
    assert f"\n  waiting for client c1: {waits} {too_old}" in text
    harness.end(slow[0], "slow", 0.0)
    assert sealed(harness) == [["a"]], "the other one may have a call in flight that began at version 0"
    harness.end(slow[1], "slow", 1.0)
    assert sealed(harness) == [["a"], ["slow"]], "the oldest first"
    assert drops(harness) == []


def test_a_complete_batch_waits_at_most_drain_s() -> None:
    harness = rolling(drain_s=5)
    (slow,) = harness.claim(claim="k")
    harness.send(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    harness.call(slow)
    group(harness, "a")
    harness.train()
    harness.tick(after_s=4)
    group(harness, "b")
    harness.tick(after_s=4)
    assert sealed(harness) == [["a"]], "since it is complete"
    harness.tick(after_s=1)
    assert sealed(harness) == [["a"], ["b"]]
    assert slow in harness.engine.open, "a slow episode is not aborted"


def stepped_past(harness: CoreHarness) -> None:
    """Make two steps, after which version 2 is served."""
    for task in "ab":
        group(harness, task)
        harness.tick(after_s=3)
        harness.train()
    assert harness.engine.version == 2


def test_r14_an_episode_slower_than_the_bound_is_dropped_by_an_event_and_never_trained() -> None:
    harness = rolling(drain_s=2)
    slow, slower = harness.claim(claim="k", count=2)
    harness.send(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    harness.call(slow)
    stepped_past(harness)
    harness.end(slow, "c", 0.0)
    assert drops(harness) == [(DropReason.STALE, 1)], "sampled at version 0; the next step trains version 2"
    harness.call(slower)
    harness.end(slower, "c", 1.0)
    assert list(harness.engine.pool) == [slower], "the one that was sampled late is fresh"


def test_the_age_is_that_of_the_oldest_token_and_counts_from_the_step_that_would_train_it() -> None:
    harness = rolling(max_staleness=2)
    (episode,) = harness.claim()
    harness.call(episode, version=0)
    for task in "ab":
        group(harness, task)
        harness.train()
    harness.call(episode)
    harness.end(episode, "c")
    assert harness.engine.pool[episode].oldest == 0
    assert drops(harness) == []
    group(harness, "d")
    assert drops(harness) == [(DropReason.STALE, 1)], "as soon as a batch is sealed without it"


def test_open_episodes_that_are_too_old_do_not_hold_up_claims() -> None:
    harness = rolling(drain_s=2)
    for episode in harness.claim(count=2):
        harness.call(episode)
    stepped_past(harness)
    assert len(harness.claim(count=2)) == 2
    assert len(harness.claim(count=2)) == 2, "the two that are too old do not make a batch"
    refused(harness)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_for_good_suspends_the_run_and_leaves_open_episodes_alone() -> None:
    harness = rolling()
    (episode,) = harness.claim()
    group(harness, "a")
    for _ in range(3):
        harness.send(
            inbox.StepBroke(id=harness.id(), engine=ENGINE, run=1, step=1, trainer_epoch=1, reason="loss is NaN")
        )
    assert harness.engine.phase == Phase.ROLLING
    assert list(harness.engine.open) == [episode]
    assert "loss is NaN" in harness.engine.suspended


def test_a_trainer_that_dies_between_step_and_weights_leaves_no_gap() -> None:
    harness = rolling()
    group(harness, "a")
    group(harness, "b")
    harness.step_done(1)
    harness.open_trainer()
    assert harness.save_weights(1, epoch=1) == [], "of the one before"
    harness.save_weights(1)
    assert harness.engine.version == 1
    assert harness.engine.batch is not None
    assert harness.engine.batch.step == 2


def test_a_leader_that_died_before_a_batch_was_sealed_leaves_it_to_the_next() -> None:
    harness = rolling()
    group(harness, "a")
    group(harness, "b")
    harness.step_done(1)
    message = inbox.WeightsSaved(
        id="w", engine=ENGINE, run=1, step=1, trainer_epoch=1, weights=ev.Weights(where="/weights/1")
    )
    landed = next(iter(harness.core.receive(message, harness.seq + 1, harness.now_ns)))
    assert isinstance(landed.decision.events[0], ev.WeightsReady)
    assert harness.engine.batch is None
    after = Core(harness.core.hive)
    after.open_epoch("another")
    (due,) = after.recover()
    assert isinstance(due.events[0], ev.BatchReady)


def test_stopping_in_the_middle_of_a_step_closes_everything() -> None:
    harness = rolling()
    group(harness, "a")
    harness.claim(count=2)
    harness.send(inbox.Stop(id="s", engine=ENGINE))
    assert harness.engine.phase == Phase.OFFLINE
    assert harness.engine.open == {}
    assert harness.step_done(1) == []
