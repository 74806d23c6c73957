"""The coordinator's decisions, one behaviour a test."""

import math

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason, Collection, DropReason, EpisodeType, Method
from bombus.hive.inbox import Done, Found, Granted, Refusal
from bombus.hive.state import Phase
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, SECOND, Desk


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.boot()
    return desk


def refused(answer: inbox.AnyAnswer, code: Code) -> str:
    assert isinstance(answer, Refusal), answer
    assert answer.code == code
    return answer.why


def aborts(events: list[ev.AnyEvent]) -> list[tuple[tuple[str, ...], AbortReason]]:
    return [(event.episodes, event.reason) for event in events if isinstance(event, ev.EpisodeAborted)]


def only(events: list[ev.AnyEvent], kind: type[ev.Event]) -> ev.Event:
    (found,) = [event for event in events if isinstance(event, kind)]
    return found


# ---- the engine's life ----


def test_an_engine_boots_once_the_first_weights_are_loaded() -> None:
    desk = Desk()
    desk.boot()
    assert desk.kinds() == [
        "epoch.opened",
        "engine.configured",
        "engine.started",
        "replica.joined",
        "trainer.opened",
        "weights.ready",
        "weights.loaded",
        "engine.booted",
        "rolling.started",
    ]


def test_configuring_is_refused_unless_offline_and_the_phase_is_named(desk: Desk) -> None:
    assert "ENGINE.ROLLING" in refused(desk.configure(Collection()), Code.WRONG_PHASE)


def test_the_latest_configuration_wins() -> None:
    desk = Desk()
    desk.configure(Collection(batch_size=7))
    desk.configure(Collection(batch_size=9))
    desk.say(inbox.Start(id="s", engine=ENGINE))
    assert desk.engine.collection.batch_size == 9


def test_starting_without_a_configuration_is_refused() -> None:
    assert "sync_train_config" in refused(Desk().ask(inbox.Start(id="s", engine=ENGINE)), Code.NO_CONFIG)


def test_the_same_start_command_is_answered_the_same_even_after_a_recovery(desk: Desk) -> None:
    start = inbox.Start(id="again", engine=ENGINE)
    desk.say(inbox.Stop(id=desk.id(), engine=ENGINE))
    first = desk.ask(start)
    desk.core.live.answers.clear()
    assert desk.ask(start) == first
    assert desk.engine.run == 2


def test_commands_that_are_repeated_under_another_leader_change_nothing_and_get_their_own_answers(desk: Desk) -> None:
    configure = inbox.Configure(
        id="c", engine=ENGINE, config="{}", config_digest="d", collection=Collection(), model="tiny"
    )
    stop, start = inbox.Stop(id="first stop", engine=ENGINE), inbox.Start(id="second start", engine=ENGINE)
    said = [desk.ask(message) for message in (stop, configure, start)]
    desk.core.live.answers.clear()
    log = list(desk.log)
    assert [desk.ask(message) for message in (stop, configure, start)] == said
    assert desk.log == log, "the second run goes on"
    assert said == [inbox.Done(run=1), inbox.Done(run=1), inbox.Done(run=2)]


def test_a_trainers_opening_that_is_repeated_under_another_leader_takes_the_run_from_nobody(desk: Desk) -> None:
    first = inbox.TrainerOpens(id="first", engine=ENGINE, run=1, trainer="t1")
    opened = desk.ask(first)
    desk.ask(inbox.TrainerOpens(id="second", engine=ENGINE, run=1, trainer="t2"))
    desk.core.live.answers.clear()
    assert desk.ask(first) == opened
    assert desk.engine.trainer == "t2"


def test_booting_names_its_stage_and_fails_when_it_takes_too_long() -> None:
    desk = Desk()
    desk.configure(Collection(boot_s=60))
    desk.say(inbox.Start(id="s", engine=ENGINE))
    assert "trainer" in desk.engine.stage
    desk.say(inbox.StageReached(id="x", engine=ENGINE, run=1, stage="loading the model"))
    assert desk.engine.stage == "loading the model"
    failed = only(desk.tick(after_s=61), ev.EngineFailed)
    assert isinstance(failed, ev.EngineFailed)
    assert "loading the model" in failed.reason
    assert desk.engine.phase == Phase.OFFLINE


def test_stopping_aborts_what_is_open_in_the_same_decision(desk: Desk) -> None:
    (episode,) = desk.claim()
    aborted, stopped = desk.say(inbox.Stop(id="s", engine=ENGINE))
    assert aborted == ev.EpisodeAborted(
        at_ns=desk.now_ns, engine=ENGINE, run=1, episodes=(episode,), reason=AbortReason.ENGINE_STOPPED
    )
    assert isinstance(stopped, ev.EngineStopped)


def test_a_new_run_starts_with_an_empty_pool_and_ignores_facts_of_the_old_one(desk: Desk) -> None:
    desk.play("t1")
    desk.say(inbox.Stop(id="stop", engine=ENGINE))
    desk.say(inbox.Start(id="start", engine=ENGINE))
    assert desk.engine.pool == {}
    assert desk.engine.version == -1
    old = inbox.WeightsSaved(id="w", engine=ENGINE, run=1, step=0, trainer_epoch=1, weights=ev.Weights(where="/old"))
    assert desk.say(old) == []


def test_a_broken_engine_goes_offline_with_the_reason(desk: Desk) -> None:
    desk.say(inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason="the model's folder has no config.json"))
    assert desk.engine.phase == Phase.OFFLINE
    assert "config.json" in refused(desk.ask(desk.claim_message()), Code.WRONG_PHASE)


# ---- claims ----


def test_a_claim_is_granted_with_a_fresh_id_each_time(desk: Desk) -> None:
    (first,) = desk.claim()
    desk.say(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(first,)))
    (second,) = desk.claim()
    assert first != second


def test_the_same_claim_gets_the_same_episode(desk: Desk) -> None:
    first = desk.ask(desk.claim_message(claim="k"))
    assert desk.ask(desk.claim_message(claim="k")) == first
    assert len(desk.engine.open) == 1


def test_a_claim_id_whose_episodes_are_over_is_refused(desk: Desk) -> None:
    (episode,) = desk.claim(claim="k")
    desk.end(episode)
    refused(desk.ask(desk.claim_message(claim="k")), Code.OTHER_CLAIM)


def test_another_clients_claim_id_is_refused(desk: Desk) -> None:
    desk.claim(client="c1", claim="k")
    refused(desk.ask(desk.claim_message(client="c2", claim="k")), Code.OTHER_CLAIM)


def test_a_group_is_claimed_whole_or_not_at_all() -> None:
    desk = Desk()
    desk.boot(max_open_claims=4)
    assert len(desk.claim(count=3)) == 3
    assert "No available episodes to claim." in refused(desk.ask(desk.claim_message(count=2)), Code.NO_EPISODES)
    assert len(desk.engine.open) == 3
    refused(desk.ask(desk.claim_message(count=5)), Code.MALFORMED)


def test_a_waiting_claim_is_granted_when_room_appears() -> None:
    desk = Desk()
    desk.boot(max_open_claims=1)
    (episode,) = desk.claim()
    waiting = desk.claim_message(client="c2", wait_s=2)
    desk.say(waiting)
    assert waiting.id not in desk.answers
    desk.call(episode)
    desk.end(episode)
    assert isinstance(desk.answers[waiting.id], Granted)


def test_a_waiting_claim_is_refused_when_its_slice_is_over() -> None:
    desk = Desk()
    desk.boot(max_open_claims=1)
    desk.claim()
    waiting = desk.claim_message(wait_s=2)
    desk.say(waiting)
    desk.tick(after_s=1)
    assert waiting.id not in desk.answers
    desk.tick(after_s=1)
    refused(desk.answers[waiting.id], Code.NO_EPISODES)


def test_claims_are_fair_between_a_greedy_client_and_a_modest_one() -> None:
    desk = Desk()
    desk.boot(max_open_claims=2)
    episodes = desk.claim("greedy", count=2)
    greedy = [desk.claim_message("greedy", wait_s=10) for _ in range(3)]
    modest = desk.claim_message("modest", wait_s=10)
    for message in [*greedy, modest]:
        desk.say(message)
    desk.say(inbox.Abort(id="a", engine=ENGINE, client="greedy", episodes=episodes[:1]))
    assert isinstance(desk.answers[modest.id], Granted)
    assert not any(message.id in desk.answers for message in greedy)


def test_among_equals_the_first_asked_goes_first_even_over_several_slices() -> None:
    desk = Desk()
    desk.boot(max_open_claims=1)
    (episode,) = desk.claim("c0")
    late = desk.claim_message("late", wait_s=10, first_asked_ns=desk.now_ns)
    early = desk.claim_message("early", wait_s=10, first_asked_ns=desk.now_ns - 60 * SECOND)
    desk.say(late)
    desk.say(early)
    desk.say(inbox.Abort(id="a", engine=ENGINE, client="c0", episodes=(episode,)))
    assert isinstance(desk.answers[early.id], Granted)
    assert late.id not in desk.answers


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.ROLLING_POST, "Engine is in post-rolling phase"),
        (Phase.WEIGHT_SYNCING, "Engine is syncing weights"),
        (Phase.BOOTING, "ENGINE.BOOTING"),
        (Phase.OFFLINE, "start_engine"),
    ],
)
def test_a_claim_out_of_phase_is_refused_in_the_contracts_words(phase: Phase, words: str) -> None:
    why = refused(at(phase).ask(at(phase).claim_message()), Code.WRONG_PHASE)
    assert words in why


def at(phase: Phase) -> Desk:
    """A desk whose engine has come to `phase` by the usual course of things."""
    desk = Desk()
    if phase == Phase.OFFLINE:
        return desk
    if phase == Phase.BOOTING:
        desk.configure(Collection())
        desk.say(inbox.Start(id=desk.id(), engine=ENGINE))
        return desk
    desk.boot(batch_size=1, num_repeat=1)
    if phase == Phase.ROLLING_POST:
        desk.claim("straggler")
    desk.play("a")
    assert desk.engine.phase == phase
    return desk


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 1e9])
def test_a_senseless_discard_timeout_is_refused(desk: Desk, timeout_s: float) -> None:
    refused(desk.ask(desk.claim_message(discard_timeout_s=timeout_s)), Code.MALFORMED)


def test_a_grant_that_reaches_nobody_goes_back_after_five_seconds(desk: Desk) -> None:
    (episode,) = desk.claim()
    assert aborts(desk.tick(after_s=4)) == []
    assert aborts(desk.tick(after_s=1)) == [((episode,), AbortReason.UNCONFIRMED)]


def test_a_confirmed_grant_stays_until_its_idle_limit(desk: Desk) -> None:
    (episode,) = desk.claim(claim="k", discard_timeout_s=240)
    desk.say(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    assert aborts(desk.tick(after_s=239)) == []
    assert aborts(desk.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


def test_a_touch_keeps_an_episode_alive(desk: Desk) -> None:
    (episode,) = desk.claim(claim="k", discard_timeout_s=240)
    desk.say(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    desk.say(inbox.Touch(id="t2", engine=ENGINE, episodes=(episode,)), after_s=200)
    assert aborts(desk.tick(after_s=239)) == []
    assert aborts(desk.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


def test_deadlines_start_again_when_an_epoch_opens(desk: Desk) -> None:
    (episode,) = desk.claim(claim="k", discard_timeout_s=240)
    desk.say(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    desk.tick(after_s=239)
    desk.core.open_epoch("another")
    assert aborts(desk.tick(after_s=239)) == []
    assert aborts(desk.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


# ---- ending ----


def test_an_ended_episode_lists_its_calls_and_a_later_call_is_late(desk: Desk) -> None:
    (episode,) = desk.claim()
    desk.call(episode, name="first")
    ended = only(desk.say(desk.end_message(episode)), ev.EpisodeEnded)
    assert isinstance(ended, ev.EpisodeEnded)
    assert [ref.id for ref in ended.outcomes[0].calls] == ["first"]
    noted = only(desk.call(episode, name="second"), ev.CallsNoted)
    assert isinstance(noted, ev.CallsNoted)
    assert noted.calls[0].late
    assert [ref.id for ref in desk.engine.pool[episode].calls] == ["first"]


def test_a_cut_off_call_is_noted_but_never_belongs_to_the_outcome(desk: Desk) -> None:
    (episode,) = desk.claim()
    noted = ev.NotedCall(episode, ev.CallRef(1, "cut", b"d"), 5, 2, 0, 0, status=ev.CallStatus.CUT_OFF)
    desk.say(inbox.CallRecorded(id="x", engine=ENGINE, run=1, call=noted))
    desk.end(episode)
    assert desk.engine.pool[episode].calls == ()


def test_ending_twice_with_the_same_outcome_is_answered_the_same(desk: Desk) -> None:
    episode = desk.play("t1", 1.0)
    desk.core.live.answers.clear()
    assert isinstance(desk.end(episode, "t1", 1.0), Done)
    assert desk.engine.counters.ended == 1


def test_a_second_different_outcome_is_a_conflict(desk: Desk) -> None:
    episode = desk.play("t1", 1.0)
    refused(desk.end(episode, "t1", 0.5), Code.OTHER_OUTCOME)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
def test_a_reward_that_is_no_finite_number_is_refused_and_loses_nothing(desk: Desk, reward: float | None) -> None:
    (episode,) = desk.claim()
    refused(desk.end(episode, reward=reward), Code.BAD_REWARD)
    assert isinstance(desk.end(episode, reward=1.0), Done)


def test_rewards_for_each_call_must_be_as_many_as_the_calls(desk: Desk) -> None:
    (episode,) = desk.claim()
    desk.call(episode)
    desk.call(episode)
    refused(desk.end(episode, reward=None, call_rewards=(1.0,)), Code.BAD_REWARD)
    assert isinstance(desk.end(episode, reward=None, call_rewards=(1.0, 0.0)), Done)
    assert desk.engine.pool[episode].reward == 0.5


def test_a_strangers_episode_cannot_be_ended_or_aborted(desk: Desk) -> None:
    (episode,) = desk.claim("c1")
    refused(desk.end(episode, client="c2"), Code.NOT_YOUR_EPISODE)
    refused(desk.ask(inbox.Abort(id="a", engine=ENGINE, client="c2", episodes=(episode,))), Code.NOT_YOUR_EPISODE)
    assert episode in desk.engine.open


def test_an_unknown_or_aborted_episode_is_not_in_claimed_status(desk: Desk) -> None:
    refused(desk.end("main-1-999"), Code.UNKNOWN_EPISODE)
    (episode,) = desk.claim()
    desk.say(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode,)))
    assert "is not in claimed status" in refused(desk.end(episode), Code.UNKNOWN_EPISODE)


def test_a_group_ends_whole_or_not_at_all(desk: Desk) -> None:
    first, second = desk.claim(count=2)
    good = inbox.EpisodeResult(episode=first, task="t1", reward=1.0)
    bad = inbox.EpisodeResult(episode=second, task="t1", reward=math.nan)
    refused(desk.ask(inbox.End(id="e", engine=ENGINE, client="c1", results=(good, bad))), Code.BAD_REWARD)
    assert set(desk.engine.open) == {first, second}


def test_ending_is_refused_while_syncing_and_the_status_is_named() -> None:
    desk = at(Phase.WEIGHT_SYNCING)
    assert "WEIGHT_SYNCING" in refused(desk.end("main-1-99"), Code.WRONG_PHASE)


def test_aborting_what_is_over_already_succeeds(desk: Desk) -> None:
    episode = desk.play("t1")
    assert isinstance(desk.ask(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode, "nonsense"))), Done)


def test_an_infra_abort_leaves_its_groups_statistics_alone(desk: Desk) -> None:
    (episode,) = desk.claim()
    gone = only(
        desk.say(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode,), infra=True)), ev.EpisodeAborted
    )
    assert isinstance(gone, ev.EpisodeAborted)
    assert gone.reason == AbortReason.INFRA
    assert desk.engine.pool == {}


def test_a_lookup_gives_an_open_episodes_calls(desk: Desk) -> None:
    (episode,) = desk.claim()
    desk.call(episode, name="a")
    found = desk.ask(inbox.Lookup(id="l", engine=ENGINE, episode=episode))
    assert isinstance(found, Found)
    assert [call.ref.id for call in found.calls] == ["a"]
    desk.end(episode)
    refused(desk.ask(inbox.Lookup(id="l2", engine=ENGINE, episode=episode)), Code.EPISODE_OVER)


def test_a_call_that_is_reported_twice_counts_once(desk: Desk) -> None:
    (episode,) = desk.claim()
    desk.call(episode, name="same")
    assert desk.call(episode, name="same") == []
    assert desk.engine.counters.calls == 1


# ---- batches ----


def test_enough_tasks_seals_exactly_the_groups_it_asks_for_and_keeps_the_rest() -> None:
    desk = Desk()
    desk.boot(batch_size=2, num_repeat=2, max_open_claims=16)
    open_ = desk.claim(count=6)
    for episode, task in zip(open_, ["a", "a", "a", "b", "c", "b"]):
        desk.end(episode, task)
    batch = desk.engine.batch
    assert batch is not None
    assert [(group.task, len(group.episodes)) for group in batch.groups] == [("a", 2), ("b", 2)]
    assert set(desk.engine.by_task) == {"a", "c"}
    assert desk.engine.phase == Phase.WEIGHT_SYNCING


def test_enough_episodes_counts_episodes_whatever_their_task() -> None:
    desk = Desk()
    desk.boot(Method.ENOUGH_EPISODES, batch_size=2, num_repeat=2)
    for task in ["a", "b", "c", "d"]:
        desk.play(task)
    assert desk.engine.batch is not None
    assert [group.task for group in desk.engine.batch.groups] == ["a", "b", "c", "d"]


def test_tasks_whose_rewards_are_all_equal_do_not_count_and_are_dropped_with_the_reason() -> None:
    desk = Desk()
    desk.boot(Method.ENOUGH_NON_DUMMY_TASKS, batch_size=1, num_repeat=2)
    desk.play("dull", 1.0)
    desk.play("dull", 1.0)
    assert desk.engine.phase == Phase.ROLLING
    desk.play("lively", 1.0)
    desk.play("lively", 0.0)
    assert desk.engine.batch is not None
    assert [group.task for group in desk.engine.batch.groups] == ["lively"]
    (dropped,) = [event for event in desk.log if isinstance(event, ev.GroupDropped)]
    assert (dropped.reason, dropped.tasks) == (DropReason.NO_SIGNAL, ("dull",))


def test_a_surplus_episode_that_gives_a_group_its_signal_is_taken_into_it() -> None:
    desk = Desk()
    desk.boot(Method.ENOUGH_NON_DUMMY_TASKS, batch_size=1, num_repeat=2)
    for reward in [1.0, 1.0, 0.0]:
        desk.play("a", reward)
    assert desk.engine.batch is not None
    assert [episode.reward for episode in desk.engine.batch.groups[0].episodes] == [1.0, 0.0]


def test_any_client_may_call_for_the_sync() -> None:
    desk = Desk()
    desk.boot(Method.ANY_CLIENT_AGREES)
    desk.play("a", client="c1")
    desk.play("b", client="c2")
    desk.ask(inbox.AgreeSync(id="x", engine=ENGINE, client="c2"))
    assert desk.engine.batch is not None
    assert len(desk.engine.batch.groups) == 2


def test_all_active_clients_must_agree_and_who_was_silent_for_ten_minutes_is_not_active() -> None:
    desk = Desk()
    desk.boot(Method.ALL_CLIENTS_AGREE)
    desk.play("a", client="gone")
    desk.say(inbox.ReplicaAlive(id="alive", engine=ENGINE, replica="r1", url="http://r1"), after_s=595)
    desk.play("b", client="here")
    desk.ask(inbox.AgreeSync(id="x", engine=ENGINE, client="here"))
    assert desk.engine.phase == Phase.ROLLING
    desk.say(inbox.Tick(id="t"), after_s=6)
    assert desk.engine.phase == Phase.WEIGHT_SYNCING


def test_agreeing_out_of_phase_is_refused() -> None:
    refused(Desk().ask(inbox.AgreeSync(id="x", engine=ENGINE, client="c")), Code.WRONG_PHASE)


def test_only_a_client_that_has_ended_an_episode_lately_can_agree() -> None:
    desk = Desk()
    desk.boot(Method.ANY_CLIENT_AGREES)
    refused(desk.ask(inbox.AgreeSync(id="x", engine=ENGINE, client="idler")), Code.NOT_ACTIVE)
    desk.play("a", client="worker")
    assert desk.engine.phase == Phase.ROLLING


def test_a_vote_while_its_batch_is_trained_does_not_count_for_the_next_one() -> None:
    desk = Desk()
    desk.boot(Method.ANY_CLIENT_AGREES, agreed_sync_s=0.0)
    desk.play("a", client="c1")
    desk.ask(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    assert isinstance(desk.ask(inbox.AgreeSync(id="y", engine=ENGINE, client="c1")), Done)
    desk.train()
    desk.play("b", client="c1")
    assert desk.engine.phase == Phase.ROLLING


def test_clients_that_agreed_have_the_time_to_see_the_sync() -> None:
    desk = Desk()
    desk.boot(Method.ANY_CLIENT_AGREES)
    desk.play("a", client="c1")
    desk.ask(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    desk.train()
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    desk.tick(after_s=7)
    assert desk.engine.phase == Phase.ROLLING


def test_draining_lets_running_episodes_finish_and_aborts_stragglers_at_the_deadline() -> None:
    desk = Desk()
    desk.boot(batch_size=1, num_repeat=1, drain_s=30, max_open_claims=8)
    runner, straggler, first = desk.claim(count=3)
    desk.call(straggler)
    desk.end(first, "a")
    assert desk.engine.phase == Phase.ROLLING_POST
    assert isinstance(desk.end(runner, "b"), Done)
    assert aborts(desk.tick(after_s=1)) == []
    assert aborts(desk.tick(after_s=29)) == [((straggler,), AbortReason.SUPERSEDED)]
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    assert list(desk.engine.by_task) == ["b"]
    late = desk.end(straggler, "c")
    assert "ENGINE.WEIGHT_SYNCING" in refused(late, Code.UNKNOWN_EPISODE)  # a contract client passes over such a one


def test_the_safety_valve_clears_the_pool_and_says_how_many() -> None:
    desk = Desk()
    desk.boot(batch_size=100, num_repeat=1, max_pool_episodes=3)
    for index in range(4):
        desk.play(f"t{index}")
    (cleared,) = [event for event in desk.log if isinstance(event, ev.PoolCleared)]
    assert (cleared.episodes, cleared.reason) == (4, DropReason.OVERFLOW)
    assert desk.engine.pool == {}
    assert desk.engine.pool_bytes == 0


def test_what_is_carried_over_too_long_is_dropped_as_stale() -> None:
    desk = Desk()
    desk.boot(batch_size=1, num_repeat=2, max_carry_staleness=1)
    desk.play("left over")
    for _ in range(2):
        desk.play("a", 1.0)
        desk.play("a", 0.0)
        desk.train()
    assert desk.engine.version == 2
    (dropped,) = [event for event in desk.log if isinstance(event, ev.GroupDropped)]
    assert (dropped.reason, dropped.tasks) == (DropReason.STALE, ("left over",))


def test_evaluation_takes_no_place_in_a_batch_and_counts_for_the_version_it_ran_on(desk: Desk) -> None:
    desk.play("held-out", 0.25, type=EpisodeType.EVAL)
    desk.play("held-out", 0.75, type=EpisodeType.EVAL)
    assert desk.engine.pool == {}
    assert desk.engine.evals[0].mean == 0.5
    assert desk.engine.phase == Phase.ROLLING


# ---- training and weights ----


def sealed() -> Desk:
    desk = Desk()
    desk.boot(batch_size=1, num_repeat=2)
    desk.play("a", 1.0)
    desk.play("a", 0.0)
    return desk


def test_a_step_becomes_the_next_version_when_its_weights_are_loaded() -> None:
    desk = sealed()
    desk.step_done(1)
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    desk.save_weights(1)
    assert desk.engine.version == 1
    desk.load(1)
    assert desk.engine.phase == Phase.ROLLING


def test_only_the_first_report_of_a_step_counts() -> None:
    desk = sealed()
    assert len(desk.step_done(1, digest="first")) == 1
    assert desk.step_done(1, digest="second") == []
    assert desk.engine.step_done is not None
    assert desk.engine.step_done.checkpoint_digest == "first"


def test_a_trainer_of_an_older_epoch_is_not_listened_to() -> None:
    desk = sealed()
    old = desk.engine.trainer_epoch
    new = desk.open_trainer()
    assert new > old
    assert desk.step_done(1, epoch=old) == []
    assert len(desk.step_done(1, epoch=new)) == 1
    assert desk.save_weights(1, epoch=old) == []


def test_weights_without_their_step_on_the_log_are_ignored() -> None:
    desk = sealed()
    assert desk.save_weights(1) == []
    desk.step_done(1)
    assert len(desk.save_weights(1)) == 1
    assert desk.save_weights(1) == [], "a version that is not greater is ignored"


def test_a_step_that_fails_three_times_stops_the_engine_with_the_reason_and_keeps_the_batch() -> None:
    desk = sealed()
    for _ in range(3):
        assert desk.engine.phase == Phase.WEIGHT_SYNCING
        desk.say(inbox.StepBroke(id=desk.id(), engine=ENGINE, run=1, step=1, trainer_epoch=1, reason="loss is NaN"))
    assert desk.engine.phase == Phase.OFFLINE
    assert "loss is NaN" in desk.engine.failure
    assert desk.engine.batch is not None


def test_rolling_resumes_when_all_live_replicas_have_loaded_or_had_their_time() -> None:
    desk = Desk()
    desk.boot(batch_size=1, num_repeat=2, sync_s=5)
    desk.say(inbox.ReplicaAlive(id="x", engine=ENGINE, replica="slow", url="http://slow"))
    desk.play("a", 1.0)
    desk.play("a", 0.0)
    desk.step_done(1)
    desk.save_weights(1)
    desk.load(1, "r1")
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    desk.tick(after_s=5)
    assert desk.engine.phase == Phase.ROLLING


def test_rolling_waits_for_at_least_one_replica() -> None:
    desk = sealed()
    desk.say(inbox.ReplicaLeaves(id="x", engine=ENGINE, replica="r1"))
    desk.step_done(1)
    desk.save_weights(1)
    desk.tick(after_s=10_000)
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    desk.say(inbox.ReplicaAlive(id="y", engine=ENGINE, replica="r2", url="http://r2", run=1, version=1))
    assert desk.engine.phase == Phase.ROLLING


def test_a_replica_that_is_not_heard_of_leaves() -> None:
    desk = Desk()
    desk.boot()
    left = only(desk.tick(after_s=10), ev.ReplicaLeft)
    assert isinstance(left, ev.ReplicaLeft)
    assert left.replica == "r1"


def test_the_same_command_gets_the_same_answer(desk: Desk) -> None:
    message = desk.claim_message()
    first = desk.ask(message)
    assert desk.ask(message) == first
    lookup = inbox.Lookup(id="l", engine=ENGINE, episode="main-1-77")
    assert desk.ask(lookup) == desk.ask(lookup)


def test_calls_of_one_flight_are_noted_in_one_event(desk: Desk) -> None:
    first, second = desk.claim(count=2)
    pending = []
    for index, episode in enumerate([first, second, first]):
        noted = ev.NotedCall(episode, ev.CallRef(index, f"n{index}", b"d"), 5, 2, 0, 0)
        message = inbox.CallRecorded(id=f"x{index}", engine=ENGINE, run=1, call=noted)
        pending += list(desk.core.receive(message, 100 + index, desk.now_ns))
    assert pending == []
    (flush,) = desk.core.flush()
    (event,) = flush.decision.events
    assert isinstance(event, ev.CallsNoted)
    assert [call.ref.id for call in event.calls] == ["n0", "n1", "n2"]
    assert flush.answers == 102


def test_time_never_goes_backwards(desk: Desk) -> None:
    before = desk.core.live.now_ns
    list(desk.core.receive(inbox.Tick(id="t"), 50, before - 5 * SECOND))
    assert desk.core.live.now_ns == before


# ---- time that nobody could use ----


def confirmed_later(desk: Desk, answered: int, after_s: float) -> list[ev.AnyEvent]:
    return desk.say(inbox.Tick(id=desk.id(), answered=answered), after_s)


def test_a_claim_has_its_time_to_be_confirmed_from_when_its_answer_left(desk: Desk) -> None:
    desk.claim(claim="k")
    before = desk.seq - 1
    for _ in range(5):
        assert confirmed_later(desk, before, after_s=1) == [], "its decision has not landed yet"
    assert confirmed_later(desk, desk.seq, after_s=4) == []
    assert aborts(confirmed_later(desk, desk.seq, after_s=1)) == [(("main-1-1",), AbortReason.UNCONFIRMED)]


def test_the_time_in_which_the_bus_was_away_ends_nothing(desk: Desk) -> None:
    (episode,) = desk.claim(claim="k", discard_timeout_s=30)
    confirmed_later(desk, desk.seq, after_s=1)
    assert confirmed_later(desk, desk.seq, after_s=60) == [], "neither the claim, nor the episode, nor the replica"
    desk.say(inbox.Touch(id=desk.id(), engine=ENGINE, confirmed=("k",)))
    desk.say(inbox.ReplicaAlive(id=desk.id(), engine=ENGINE, replica="r1", url="http://r1"), after_s=1)
    for _ in range(28):
        desk.say(inbox.ReplicaAlive(id=desk.id(), engine=ENGINE, replica="r1", url="http://r1"))
        assert confirmed_later(desk, desk.seq, after_s=1) == []
    assert aborts(confirmed_later(desk, desk.seq, after_s=1)) == [((episode,), AbortReason.IDLE)]


# ---- storage ----


def sees(desk: Desk, used: int, what: str = "calls") -> list[ev.AnyEvent]:
    return desk.say(inbox.StorageSeen(id=desk.id(), what=what, used=used, size=100, reserve=10))


def test_new_work_is_refused_while_less_than_the_reserve_is_left(desk: Desk) -> None:
    assert sees(desk, 90) == []
    filled = only(sees(desk, 91), ev.StorageFilled)
    assert isinstance(filled, ev.StorageFilled)
    assert "calls" in filled.why
    assert "calls" in refused(desk.ask(desk.claim_message()), Code.STORAGE_FULL)
    assert sees(desk, 95) == [], "said once"


def test_work_is_taken_again_when_half_as_much_more_is_free(desk: Desk) -> None:
    sees(desk, 91)
    assert sees(desk, 86) == []
    assert [ev.kind_of(event) for event in sees(desk, 85)] == ["storage.freed"]
    assert desk.claim()


def test_what_is_under_way_goes_on_while_storage_is_full(desk: Desk) -> None:
    ended, aborted = desk.claim(count=2)
    desk.play("t1")
    desk.play("t2")
    desk.play("t2")
    sees(desk, 99)
    desk.call(ended)
    assert isinstance(desk.end(ended, "t1"), Done)
    desk.say(inbox.Abort(id=desk.id(), engine=ENGINE, client="c1", episodes=(aborted,)))
    assert desk.engine.phase == Phase.WEIGHT_SYNCING
    desk.train()
    assert desk.engine.version == 1


def test_a_claim_that_waits_is_told_that_storage_is_full_and_gets_nothing(desk: Desk) -> None:
    desk.claim(count=desk.engine.collection.max_open_claims)
    waiting = desk.claim_message(client="c2", wait_s=1.5)
    desk.say(waiting)
    sees(desk, 99)
    desk.say(inbox.Abort(id=desk.id(), engine=ENGINE, client="c1", episodes=("main-1-1",)))
    desk.tick(after_s=2)
    refused(desk.answers[waiting.id], Code.STORAGE_FULL)


def test_an_engine_is_not_started_while_storage_is_full(desk: Desk) -> None:
    sees(desk, 99)
    desk.say(inbox.Stop(id=desk.id(), engine=ENGINE))
    refused(desk.ask(inbox.Start(id=desk.id(), engine=ENGINE)), Code.STORAGE_FULL)


def test_every_place_that_is_full_has_to_be_freed_and_a_recovery_knows_them(desk: Desk) -> None:
    sees(desk, 99, "calls")
    sees(desk, 99, "the disk")
    sees(desk, 0, "calls")
    after = Desk(Core(desk.core.hive))
    after.now_ns = desk.now_ns
    assert "the disk" in refused(after.ask(after.claim_message()), Code.STORAGE_FULL)
    sees(after, 0, "the disk")
    assert after.claim()
