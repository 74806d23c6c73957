"""What the coordinator decides when `max_staleness` is above 0: rolling goes on while a step is made (R14)."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, DropReason, EpisodeType, Method
from bombus.hive.inbox import Granted, Refusal
from bombus.hive.state import Phase
from bombus.hive.status import detail_of, engine_status, render_status
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, Desk


def rolling(max_staleness: int = 1, batch_size: int = 1, num_repeat: int = 2, **rules: object) -> Desk:
    desk = Desk()
    given: dict[str, object] = {"max_open_claims": 64, **rules}
    desk.boot(batch_size=batch_size, num_repeat=num_repeat, max_staleness=max_staleness, **given)  # type: ignore[arg-type]
    return desk


def group(desk: Desk, task: str, version: int | None = None) -> None:
    """A task's two episodes are claimed, sampled and ended."""
    for reward, episode in enumerate(desk.claim(count=2)):
        desk.call(episode, version)
        desk.end(episode, task, float(reward))


def refused(desk: Desk, **claim: object) -> str:
    answer = desk.ask(desk.claim_message(**claim))  # type: ignore[arg-type]
    assert isinstance(answer, Refusal), answer
    assert answer.code == Code.NO_EPISODES
    return answer.why


def drops(desk: Desk) -> list[tuple[DropReason, int]]:
    return [(event.reason, len(event.episodes)) for event in desk.log if isinstance(event, ev.GroupDropped)]


def sealed(desk: Desk) -> list[list[str]]:
    return [[group.task for group in event.groups] for event in desk.log if isinstance(event, ev.BatchReady)]


# ---- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Method.ANY_CLIENT_AGREES, Method.ALL_CLIENTS_AGREE])
def test_methods_in_which_clients_agree_are_refused_and_the_engine_stays_offline(method: Method) -> None:
    answer = Desk().configure(Collection(method=method, max_staleness=1))
    assert isinstance(answer, Refusal)
    assert answer.code == Code.BAD_CONFIG
    assert "max_staleness = 0" in answer.why


def test_a_pool_that_cannot_hold_what_waits_for_training_is_refused_with_the_number_that_it_takes() -> None:
    answer = Desk().configure(Collection(max_staleness=2, batch_size=4, num_repeat=2, max_pool_episodes=23))
    assert isinstance(answer, Refusal)
    assert "at least 24" in answer.why
    assert isinstance(
        Desk().configure(Collection(max_staleness=2, batch_size=4, num_repeat=2, max_pool_episodes=24)), inbox.Done
    )


# ---- rolling goes on ------------------------------------------------------------------------------------------------


def test_a_batch_is_sealed_trained_and_loaded_while_the_engine_rolls_and_episodes_are_open() -> None:
    desk = rolling()
    (bystander,) = desk.claim()
    group(desk, "a")
    assert desk.engine.batch is not None
    assert desk.engine.phase == Phase.ROLLING
    desk.train()
    assert desk.engine.version == 1
    assert desk.engine.phase == Phase.ROLLING
    assert bystander in desk.engine.open
    assert {"rolling.closed", "syncing.started"}.isdisjoint(desk.kinds())
    assert desk.kinds().count("rolling.started") == 1


def test_the_next_batch_waits_for_the_weights_of_the_one_before() -> None:
    desk = rolling()
    group(desk, "a")
    group(desk, "b")
    assert sealed(desk) == [["a"]]
    desk.step_done(1)
    assert sealed(desk) == [["a"]]
    desk.save_weights(1)
    assert sealed(desk) == [["a"], ["b"]]


def test_what_has_the_oldest_tokens_is_trained_first() -> None:
    desk = rolling(max_staleness=2)
    early, late = desk.claim(count=2)
    desk.call(early)
    group(desk, "a")
    desk.train()
    group(desk, "b")
    group(desk, "c")
    desk.end(early, "old", 0.0)
    desk.end(late, "old", 1.0)
    assert sealed(desk) == [["a"], ["b"]]
    desk.train()
    assert sealed(desk)[2:] == [["old"]], "c was complete before"


# ---- pacing ---------------------------------------------------------------------------------------------------------


def test_a_claim_waits_once_its_samples_would_be_too_old_and_is_granted_when_the_weights_are_served() -> None:
    """One step of slack, batches of two: two are trained, two wait, the fifth would be trained at the age of 2."""
    desk = rolling()
    group(desk, "a")
    desk.claim(count=2)
    waiting = desk.claim_message(wait_s=60)
    desk.say(waiting)
    desk.step_done(1)
    desk.save_weights(1)
    assert waiting.id not in desk.answers, "nobody serves them yet"
    desk.load(1)
    granted = desk.answers[waiting.id]
    assert isinstance(granted, Granted)
    assert granted.version == 1


def test_who_waits_is_told_why_in_plain_words_and_so_is_the_operator() -> None:
    desk = rolling()
    group(desk, "a")
    desk.claim(count=2)
    why = refused(desk)
    assert "No available episodes to claim." in why
    assert "unfinished batches (1) and those under way (1) are over collection.max_staleness (1)" in why
    assert "new episodes wait: unfinished batches (1)" in detail_of(desk.engine, desk.now_ns)
    now = engine_status(desk.engine, desk.now_ns).pace
    assert now is not None
    assert (now.unfinished, now.sealable, now.max_staleness) == (1, 1, 1)
    text = render_status(desk.core.hive)
    assert "ahead of training: 1 unfinished and 1 sealable batches, bound 1, new episodes wait" in text


def test_the_bound_is_the_number_of_batches_that_may_come_before() -> None:
    for bound in (1, 2, 3):
        desk = rolling(max_staleness=bound)
        granted = 0
        while isinstance(desk.ask(desk.claim_message()), Granted):
            granted += 1
        assert granted == 2 * (bound + 1)


def test_evaluation_is_not_paced_and_goes_past_training_that_waits() -> None:
    desk = rolling()
    group(desk, "a")
    desk.claim(count=2)
    desk.say(desk.claim_message("trains", wait_s=60))
    (episode,) = desk.claim("evaluates", type=EpisodeType.EVAL)
    desk.end(episode, "held-out", 1.0, "evaluates")
    assert desk.engine.evals[0].episodes == 1


def test_nobody_overtakes_the_training_claim_whose_turn_it_is() -> None:
    desk = rolling(batch_size=2)
    desk.claim("busy", count=6)
    whole = desk.claim_message("whole group", count=4, wait_s=60)
    single = desk.claim_message("single", wait_s=60)
    desk.say(whole)
    desk.say(single, after_s=1)
    assert whole.id not in desk.answers
    assert single.id not in desk.answers


def test_claims_wait_while_no_replica_keeps_up_instead_of_making_what_would_be_dropped() -> None:
    desk = rolling()
    desk.say(inbox.ReplicaLeaves(id="x", engine=ENGINE, replica="r1"))
    assert "no inference replica serves version 0" in refused(desk)
    desk.say(inbox.ReplicaAlive(id="y", engine=ENGINE, replica="r2", url="http://r2"))
    assert "no inference replica" in refused(desk), "it has not loaded anything"
    desk.load(0, "r2")
    assert desk.claim()


def test_a_claim_for_more_than_fits_into_the_bound_is_granted_when_nothing_else_is_under_way() -> None:
    desk = rolling()
    (first,) = desk.claim()
    large = desk.claim_message(count=9, wait_s=60)
    desk.say(large)
    assert large.id not in desk.answers
    desk.end(first, "a")
    assert isinstance(desk.answers[large.id], Granted)


def test_half_groups_that_nobody_completes_hold_up_no_whole_group_for_ever() -> None:
    desk = rolling()
    for task in "abcdef":
        (episode,) = desk.claim()
        desk.call(episode)
        desk.end(episode, task)
    assert desk.engine.open == {}
    group(desk, "whole")
    assert sealed(desk) == [["whole"]]


def test_a_named_task_counts_for_its_own_group_alone() -> None:
    desk = rolling()
    for task in "ab":
        (episode,) = desk.claim()
        desk.end(episode, task)
    assert len(desk.claim(task_hint="c")) == 1
    assert len(desk.claim(task_hint="d")) == 1
    assert len(desk.claim(task_hint="e")) == 1, "three groups begun, none complete"
    desk.claim(task_hint="a")
    desk.claim(task_hint="b")
    assert "those under way (2)" in refused(desk)


# ---- what is too old ------------------------------------------------------------------------------------------------


def test_a_complete_batch_waits_for_episodes_that_would_be_too_old_for_the_next_one() -> None:
    desk = rolling()
    slow = desk.claim(count=2)
    desk.call(slow[0])
    group(desk, "a")
    desk.train()
    group(desk, "b")
    assert sealed(desk) == [["a"]]
    assert "waiting for 2 running episodes" in detail_of(desk.engine, desk.now_ns)
    desk.end(slow[0], "slow", 0.0)
    assert sealed(desk) == [["a"]], "the other one may have a call in flight that began at version 0"
    desk.end(slow[1], "slow", 1.0)
    assert sealed(desk) == [["a"], ["slow"]], "what is oldest first"
    assert drops(desk) == []


def test_a_complete_batch_waits_no_longer_than_a_drain_may_take() -> None:
    desk = rolling(drain_s=5)
    (slow,) = desk.claim(claim="k")
    desk.say(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    desk.call(slow)
    group(desk, "a")
    desk.train()
    desk.tick(after_s=4)
    group(desk, "b")
    desk.tick(after_s=4)
    assert sealed(desk) == [["a"]], "since it is complete"
    desk.tick(after_s=1)
    assert sealed(desk) == [["a"], ["b"]]
    assert slow in desk.engine.open, "nobody is taken away for being slow"


def stepped_past(desk: Desk) -> None:
    """Two steps are made, whoever is slow; afterwards version 2 is served."""
    for task in "ab":
        group(desk, task)
        desk.tick(after_s=3)
        desk.train()
    assert desk.engine.version == 2


def test_what_dawdled_over_the_bound_is_dropped_by_an_event_and_never_trained() -> None:
    desk = rolling(drain_s=2)
    slow, slower = desk.claim(claim="k", count=2)
    desk.say(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    desk.call(slow)
    stepped_past(desk)
    desk.end(slow, "c", 0.0)
    assert drops(desk) == [(DropReason.STALE, 1)], "sampled at version 0; the next step trains version 2"
    desk.call(slower)
    desk.end(slower, "c", 1.0)
    assert list(desk.engine.pool) == [slower], "the one that was sampled late is fresh"


def test_the_age_is_that_of_the_oldest_token_and_counts_from_the_step_that_would_train_it() -> None:
    desk = rolling(max_staleness=2)
    (episode,) = desk.claim()
    desk.call(episode, version=0)
    for task in "ab":
        group(desk, task)
        desk.train()
    desk.call(episode)
    desk.end(episode, "c")
    assert desk.engine.pool[episode].oldest == 0
    assert drops(desk) == []
    group(desk, "d")
    assert drops(desk) == [(DropReason.STALE, 1)], "as soon as a batch is sealed without it"


def test_open_episodes_that_are_too_old_hold_up_nobody() -> None:
    desk = rolling(drain_s=2)
    for episode in desk.claim(count=2):
        desk.call(episode)
    stepped_past(desk)
    assert len(desk.claim(count=2)) == 2
    assert len(desk.claim(count=2)) == 2, "the two that are too old make no batch"
    refused(desk)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_step_that_fails_for_good_stops_the_engine_and_takes_what_is_open_with_it() -> None:
    desk = rolling()
    (episode,) = desk.claim()
    group(desk, "a")
    for _ in range(3):
        desk.say(inbox.StepBroke(id=desk.id(), engine=ENGINE, run=1, step=1, trainer_epoch=1, reason="loss is NaN"))
    assert desk.engine.phase == Phase.OFFLINE
    assert desk.engine.open == {}
    assert "loss is NaN" in desk.engine.failure
    assert episode in desk.engine.closed


def test_a_trainer_that_dies_between_step_and_weights_leaves_no_gap() -> None:
    desk = rolling()
    group(desk, "a")
    group(desk, "b")
    desk.step_done(1)
    desk.open_trainer()
    assert desk.save_weights(1, epoch=1) == [], "of the one before"
    desk.save_weights(1)
    assert desk.engine.version == 1
    assert desk.engine.batch is not None
    assert desk.engine.batch.step == 2


def test_a_leader_that_died_before_a_batch_was_sealed_leaves_it_to_the_next() -> None:
    desk = rolling()
    group(desk, "a")
    group(desk, "b")
    desk.step_done(1)
    message = inbox.WeightsSaved(
        id="w", engine=ENGINE, run=1, step=1, trainer_epoch=1, weights=ev.Weights(where="/weights/1")
    )
    landed = next(iter(desk.core.receive(message, desk.seq + 1, desk.now_ns)))
    assert isinstance(landed.decision.events[0], ev.WeightsReady)
    assert desk.engine.batch is None
    after = Core(desk.core.hive)
    after.open_epoch("another")
    (due,) = after.recover()
    assert isinstance(due.events[0], ev.BatchReady)


def test_stopping_in_the_middle_of_a_step_closes_everything() -> None:
    desk = rolling()
    group(desk, "a")
    desk.claim(count=2)
    desk.say(inbox.Stop(id="s", engine=ENGINE))
    assert desk.engine.phase == Phase.OFFLINE
    assert desk.engine.open == {}
    assert desk.step_done(1) == []
