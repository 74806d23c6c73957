"""The coordinator's decisions: one behaviour per test."""

import copy
import math
from typing import Any

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.describe import line_of
from bombus.hive.events import AbortReason, Collection, DropReason, EpisodeType, Method, NotedCall
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Done, Found, Granted, Refusal
from bombus.hive.records import CallRef, CallStatus
from bombus.hive.state import DATA_SETS_MAX, FORMATS_MAX, Hive, Phase
from bombus.hive.status.text import render_status
from bombus_coordinator import storage
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, SECOND, CoreHarness


@pytest.fixture
def harness() -> CoreHarness:
    harness = CoreHarness()
    harness.boot()
    return harness


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
    harness = CoreHarness()
    harness.boot()
    assert harness.kinds() == [
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


def test_configuring_is_refused_unless_offline_and_the_phase_is_named(harness: CoreHarness) -> None:
    assert "ENGINE.ROLLING" in refused(harness.configure(Collection()), Code.WRONG_PHASE)


def test_the_latest_configuration_wins() -> None:
    harness = CoreHarness()
    harness.configure(Collection(batch_size=7))
    harness.configure(Collection(batch_size=9))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    assert harness.engine.collection.batch_size == 9


def test_starting_without_a_configuration_is_refused() -> None:
    assert "sync_train_config" in refused(CoreHarness().request(inbox.Start(id="s", engine=ENGINE)), Code.NO_CONFIG)


def test_the_same_start_command_gets_the_same_answer_even_after_a_recovery(harness: CoreHarness) -> None:
    start = inbox.Start(id="again", engine=ENGINE)
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    first = harness.request(start)
    harness.core.live.answers.clear()
    assert harness.request(start) == first
    assert harness.engine.run == 2


def test_commands_repeated_under_another_leader_change_nothing_and_get_their_original_answers(
    harness: CoreHarness,
) -> None:
    configure = inbox.Configure(
        id="c", engine=ENGINE, config="{}", config_digest="d", collection=Collection(), model="tiny"
    )
    stop, start = inbox.Stop(id="first stop", engine=ENGINE), inbox.Start(id="second start", engine=ENGINE)
    answers = [harness.request(message) for message in (stop, configure, start)]
    harness.core.live.answers.clear()
    log = list(harness.log)
    assert [harness.request(message) for message in (stop, configure, start)] == answers
    assert harness.log == log, "the second run continues"
    assert answers == [inbox.Done(run=1), inbox.Done(run=1), inbox.Done(run=2)]


def test_a_refused_start_and_a_needless_stop_that_come_again_late_do_nothing() -> None:
    harness = CoreHarness()
    start, stop = inbox.Start(id="early", engine=ENGINE), inbox.Stop(id="needless", engine=ENGINE)
    answers = [harness.request(message) for message in (start, stop)]
    refused(answers[0], Code.NO_CONFIG)
    assert answers[1] == Done(run=0)
    harness.boot()
    harness = CoreHarness(Core(harness.core.hive))
    assert [harness.request(message) for message in (start, stop)] == answers
    assert harness.phase() == Phase.ROLLING
    harness.request(inbox.Stop(id="stop", engine=ENGINE))
    assert harness.request(start) == answers[0], "it is refused as before, although it could be carried out now"
    assert harness.phase() == Phase.OFFLINE


def test_a_trainers_opening_repeated_under_another_leader_does_not_supersede_anybody(harness: CoreHarness) -> None:
    first = inbox.TrainerOpens(id="first", engine=ENGINE, run=1, trainer="t1")
    opened = harness.request(first)
    harness.request(inbox.TrainerOpens(id="second", engine=ENGINE, run=1, trainer="t2"))
    harness.core.live.answers.clear()
    assert harness.request(first) == opened
    assert harness.engine.trainer == "t2"


def test_booting_names_its_stage_and_suspends_the_run_when_it_takes_too_long() -> None:
    harness = CoreHarness()
    harness.configure(Collection(boot_s=60))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    assert "trainer" in harness.engine.stage
    harness.send(inbox.StageReached(id="x", engine=ENGINE, run=1, stage="loading the model"))
    assert harness.engine.stage == "loading the model"
    suspended = only(harness.tick(after_s=61), ev.EngineSuspended)
    assert isinstance(suspended, ev.EngineSuspended)
    assert suspended.reason == "booting took longer than 60 s; it was still 'loading the model'"
    assert harness.phase() == Phase.BOOTING


def test_stopping_aborts_open_episodes_in_the_same_decision(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    aborted, stopped = harness.send(inbox.Stop(id="s", engine=ENGINE))
    assert aborted == ev.EpisodeAborted(
        at_ns=harness.now_ns, engine=ENGINE, run=1, episodes=(episode,), reason=AbortReason.ENGINE_STOPPED
    )
    assert isinstance(stopped, ev.EngineStopped)


def test_a_new_run_starts_with_an_empty_pool_and_ignores_facts_of_the_old_one(harness: CoreHarness) -> None:
    harness.play("t1")
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    harness.send(inbox.Start(id="start", engine=ENGINE))
    assert harness.engine.pool == {}
    assert harness.engine.version == -1
    old = inbox.WeightsSaved(id="w", engine=ENGINE, run=1, step=0, trainer_epoch=1, weights=ev.Weights(where="/old"))
    assert harness.send(old) == []


def test_a_broken_engine_goes_offline_with_the_reason(harness: CoreHarness) -> None:
    harness.send(
        inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason="the model's folder has no config.json", trainer_epoch=1)
    )
    assert harness.phase() == Phase.OFFLINE
    assert "config.json" in refused(harness.request(harness.claim_message()), Code.WRONG_PHASE)


# ---- claims ----


def test_a_claim_is_granted_with_a_fresh_id_each_time(harness: CoreHarness) -> None:
    (first,) = harness.claim()
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(first,)))
    (second,) = harness.claim()
    assert first != second


def test_the_same_claim_gets_the_same_episode(harness: CoreHarness) -> None:
    first = harness.request(harness.claim_message(claim="k"))
    assert harness.request(harness.claim_message(claim="k")) == first
    assert len(harness.engine.open) == 1


def test_a_claim_id_whose_episodes_are_over_is_refused(harness: CoreHarness) -> None:
    (episode,) = harness.claim(claim="k")
    harness.end(episode)
    refused(harness.request(harness.claim_message(claim="k")), Code.OTHER_CLAIM)


def test_another_clients_claim_id_is_refused(harness: CoreHarness) -> None:
    harness.claim(client="c1", claim="k")
    refused(harness.request(harness.claim_message(client="c2", claim="k")), Code.OTHER_CLAIM)


def test_a_group_is_claimed_as_a_whole_or_not_at_all() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=4)
    assert len(harness.claim(count=3)) == 3
    assert "No available episodes to claim." in refused(
        harness.request(harness.claim_message(count=2)), Code.NO_EPISODES
    )
    assert len(harness.engine.open) == 3
    refused(harness.request(harness.claim_message(count=5)), Code.MALFORMED)


def test_a_waiting_claim_is_granted_when_room_appears() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=1)
    (episode,) = harness.claim()
    waiting = harness.claim_message(client="c2", wait_s=2)
    harness.send(waiting)
    assert waiting.id not in harness.answers
    harness.call(episode)
    harness.end(episode)
    assert isinstance(harness.answers[waiting.id], Granted)


def test_a_waiting_claim_is_refused_when_its_slice_is_over() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=1)
    harness.claim()
    waiting = harness.claim_message(wait_s=2)
    harness.send(waiting)
    harness.tick(after_s=1)
    assert waiting.id not in harness.answers
    harness.tick(after_s=1)
    refused(harness.answers[waiting.id], Code.NO_EPISODES)


def test_a_claim_that_is_sent_again_without_a_wait_ends_its_wait() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=1)
    (episode,) = harness.claim()
    waiting = harness.claim_message(wait_s=2)
    harness.send(waiting)
    given_up = msgspec.structs.replace(waiting, id="again", wait_s=0.0)
    harness.send(given_up)
    for message in (waiting, given_up):
        refused(harness.answers[message.id], Code.NO_EPISODES)
    harness.call(episode)
    harness.end(episode)
    assert not harness.engine.open, "nobody waits for it any more"


def test_r13_claims_are_fair_between_a_greedy_client_and_a_modest_one() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=2)
    episodes = harness.claim("greedy", count=2)
    greedy = [harness.claim_message("greedy", wait_s=10) for _ in range(3)]
    modest = harness.claim_message("modest", wait_s=10)
    for message in [*greedy, modest]:
        harness.send(message)
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="greedy", episodes=episodes[:1]))
    assert isinstance(harness.answers[modest.id], Granted)
    assert not any(message.id in harness.answers for message in greedy)


def test_r13_a_client_gains_nothing_by_taking_another_id_under_its_key() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=2)
    episodes = harness.claim("id-1", owner="greedy") + harness.claim("id-2", owner="greedy")
    greedy = harness.claim_message("id-3", wait_s=10, owner="greedy")
    modest = harness.claim_message("modest", wait_s=10, owner="modest")
    harness.send(greedy)
    harness.send(modest)
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="id-1", episodes=episodes[:1]))
    assert isinstance(harness.answers[modest.id], Granted)
    assert greedy.id not in harness.answers
    assert [episode.owner for episode in harness.engine.open.values()] == ["greedy", "modest"]


def test_a_key_at_its_cap_waits_while_others_are_served_and_goes_on_when_one_of_its_own_ends() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=8)
    cap: dict[str, Any] = {"owner": "small", "open_max": 2}
    held, _ = harness.claim("a", **cap) + harness.claim("b", **cap)
    waiting = harness.claim_message("c", wait_s=30, **cap)
    harness.send(waiting)
    harness.claim("d", owner="large")
    assert waiting.id not in harness.answers
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="a", episodes=(held,)))
    assert isinstance(harness.answers[waiting.id], Granted)
    lapsed = harness.request(harness.claim_message("e", **cap))
    assert "Key small has 2 of at most 2 open" in refused(lapsed, Code.NO_EPISODES)
    assert "at most 2 open" in refused(harness.request(harness.claim_message(count=3, **cap)), Code.MALFORMED)


def test_a_cap_holds_under_the_next_leader() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=8)
    harness.claim("a", owner="small", open_max=1)
    after = CoreHarness(Core(harness.core.hive))
    refused(after.request(after.claim_message("b", owner="small", open_max=1)), Code.NO_EPISODES)


def test_among_equal_claims_the_oldest_is_granted_first_even_over_several_slices() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=1)
    (episode,) = harness.claim("c0")
    late = harness.claim_message("late", wait_s=10, first_asked_ns=harness.now_ns)
    early = harness.claim_message("early", wait_s=10, first_asked_ns=harness.now_ns - 60 * SECOND)
    harness.send(late)
    harness.send(early)
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="c0", episodes=(episode,)))
    assert isinstance(harness.answers[early.id], Granted)
    assert late.id not in harness.answers


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.ROLLING_POST, "Engine is in post-rolling phase"),
        (Phase.WEIGHT_SYNCING, "Engine is syncing weights"),
        (Phase.BOOTING, "ENGINE.BOOTING"),
        (Phase.OFFLINE, "start_engine"),
    ],
)
def test_a_claim_out_of_phase_is_refused_with_the_contracts_sentences(phase: Phase, words: str) -> None:
    why = refused(at(phase).request(at(phase).claim_message()), Code.WRONG_PHASE)
    assert words in why


def at(phase: Phase) -> CoreHarness:
    """Return a harness whose engine has reached `phase` in the usual way."""
    harness = CoreHarness()
    if phase == Phase.OFFLINE:
        return harness
    if phase == Phase.BOOTING:
        harness.configure(Collection())
        harness.send(inbox.Start(id=harness.id(), engine=ENGINE))
        return harness
    harness.boot(batch_size=1, num_repeat=1)
    if phase == Phase.ROLLING_POST:
        harness.claim("straggler")
    harness.play("a")
    assert harness.phase() == phase
    return harness


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 1e9])
def test_an_invalid_discard_timeout_is_refused(harness: CoreHarness, timeout_s: float) -> None:
    refused(harness.request(harness.claim_message(discard_timeout_s=timeout_s)), Code.MALFORMED)


def test_r13_an_unconfirmed_grant_is_taken_back_after_five_seconds(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    assert aborts(harness.tick(after_s=4)) == []
    assert aborts(harness.tick(after_s=1)) == [((episode,), AbortReason.UNCONFIRMED)]


def test_a_confirmed_grant_stays_until_its_idle_limit(harness: CoreHarness) -> None:
    (episode,) = harness.claim(claim="k", discard_timeout_s=240)
    harness.send(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    assert aborts(harness.tick(after_s=239)) == []
    assert aborts(harness.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


def test_a_touch_keeps_an_episode_alive(harness: CoreHarness) -> None:
    (episode,) = harness.claim(claim="k", discard_timeout_s=240)
    harness.send(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    harness.send(inbox.Touch(id="t2", engine=ENGINE, episodes=(episode,)), after_s=200)
    assert aborts(harness.tick(after_s=239)) == []
    assert aborts(harness.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


def test_deadlines_start_again_when_an_epoch_opens(harness: CoreHarness) -> None:
    (episode,) = harness.claim(claim="k", discard_timeout_s=240)
    harness.send(inbox.Touch(id="t", engine=ENGINE, confirmed=("k",)))
    harness.tick(after_s=239)
    harness.core.open_epoch("another")
    assert aborts(harness.tick(after_s=239)) == []
    assert aborts(harness.tick(after_s=1)) == [((episode,), AbortReason.IDLE)]


# ---- ending ----


def test_an_ended_episode_lists_its_calls_and_a_later_call_is_late(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    harness.call(episode, name="first")
    ended = only(harness.send(harness.end_message(episode)), ev.EpisodeEnded)
    assert isinstance(ended, ev.EpisodeEnded)
    assert not ended.outcomes[0].calls, "they are on the log already"
    assert [ref.id for ref in harness.engine.pool[episode].calls] == ["first"]
    noted = only(harness.call(episode, name="second"), ev.CallsNoted)
    assert isinstance(noted, ev.CallsNoted)
    assert noted.calls[0].late
    assert [ref.id for ref in harness.engine.pool[episode].calls] == ["first"]


def test_a_call_that_is_reported_again_after_its_episode_counts_once_under_any_leader(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    harness.call(episode, name="in time")
    harness.end(episode)
    noted = only(harness.call(episode, name="late"), ev.CallsNoted)
    before = msgspec.msgpack.encode(harness.core.hive)
    successor = CoreHarness(Core(msgspec.msgpack.decode(before, type=Hive)))
    for leader in (harness, successor):
        assert leader.call(episode, name="in time") == leader.call(episode, name="late") == []
    evolve(successor.core.hive, noted)  # as earlier versions noted it
    assert successor.core.hive == msgspec.msgpack.decode(before, type=Hive)


def test_a_cut_off_call_is_noted_but_never_belongs_to_the_outcome(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    noted = NotedCall(episode, CallRef(1, "cut", b"d"), 5, 2, 0, 0, status=CallStatus.CUT_OFF)
    harness.send(inbox.CallRecorded(id="x", engine=ENGINE, run=1, call=noted))
    harness.end(episode)
    assert harness.engine.pool[episode].calls == ()


def test_a_masked_auxiliary_call_belongs_to_the_outcome_and_has_no_reward_and_no_age(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    for number, masked in enumerate((True, False, True)):
        noted = NotedCall(
            episode,
            CallRef(number, f"n{number}", b"d"),
            5,
            2,
            number,
            number,
            merged=True,
            masked=masked,
            incomplete=True,
        )
        harness.send(inbox.CallRecorded(id=f"m{number}", engine=ENGINE, run=1, call=noted))
    counters = harness.engine.counters
    assert (counters.calls, counters.calls_masked, counters.calls_merged, counters.calls_incomplete) == (3, 2, 1, 3)
    why = refused(harness.end(episode, reward=None, call_rewards=(1.0, 1.0, 1.0)), Code.BAD_REWARD)
    assert "3 rewards for 1 completed calls (auxiliary calls of its harness, 2 here, have none)" in why
    assert isinstance(harness.end(episode, reward=None, call_rewards=(0.5,)), Done)
    ended = harness.engine.pool[episode]
    assert ([ref.id for ref in ended.calls], ended.reward, ended.oldest) == (["n0", "n1", "n2"], 0.5, 1)


def test_ending_twice_with_the_same_outcome_gets_the_same_answer(harness: CoreHarness) -> None:
    episode = harness.play("t1", 1.0)
    harness.core.live.answers.clear()
    assert isinstance(harness.end(episode, "t1", 1.0), Done)
    assert harness.engine.counters.ended == 1


def test_a_second_different_outcome_is_a_conflict(harness: CoreHarness) -> None:
    episode = harness.play("t1", 1.0)
    refused(harness.end(episode, "t1", 0.5), Code.OTHER_OUTCOME)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1.7e308, -1.1e9, None])
def test_a_reward_that_is_not_a_finite_number_is_refused_and_the_episode_stays_open(
    harness: CoreHarness, reward: float | None
) -> None:
    (episode,) = harness.claim()
    refused(harness.end(episode, reward=reward), Code.BAD_REWARD)
    assert isinstance(harness.end(episode, reward=1.0), Done)


def test_there_must_be_as_many_call_rewards_as_calls(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    harness.call(episode)
    harness.call(episode)
    refused(harness.end(episode, reward=None, call_rewards=(1.0,)), Code.BAD_REWARD)
    assert isinstance(harness.end(episode, reward=None, call_rewards=(1.0, 0.0)), Done)
    assert harness.engine.pool[episode].reward == 0.5


def test_rewards_by_the_ids_of_calls_are_put_into_their_order(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    for number, masked in enumerate((False, True, False)):
        noted = NotedCall(episode, CallRef(number, f"n{number}", b"d"), 5, 2, 0, 0, masked=masked)
        harness.send(inbox.CallRecorded(id=f"m{number}", engine=ENGINE, run=1, call=noted))
    for given in ({"n0": 1.0}, {"n0": 1.0, "n1": 1.0, "n2": 1.0}, {"n0": 1.0, "else": 1.0}, {}):
        why = refused(harness.end(episode, reward=None, rewards_by_call=given), Code.BAD_REWARD)
        assert f"{len(given)} rewards by call for 2 completed calls (auxiliary calls of its harness, 1 here" in why
    assert "1 calls have none, and 1 ids belong to none of its calls" in refused(
        harness.end(episode, reward=None, rewards_by_call={"n0": 1.0, "else": 1.0}), Code.BAD_REWARD
    )
    given = {"n2": 0.5, "n0": 0.0}
    assert isinstance(harness.end(episode, reward=None, rewards_by_call=given), Done)
    ended = harness.engine.pool[episode]
    assert (ended.call_rewards, ended.reward) == ((0.0, 0.5), 0.25)
    harness.core.live.answers.clear()
    again = dict(reversed(given.items()))
    assert isinstance(harness.end(episode, reward=None, rewards_by_call=again), Done), "the same report"
    refused(harness.end(episode, reward=None, call_rewards=(0.0, 0.5)), Code.OTHER_OUTCOME)


def test_another_clients_episode_cannot_be_ended_or_aborted(harness: CoreHarness) -> None:
    (episode,) = harness.claim("c1")
    refused(harness.end(episode, client="c2"), Code.NOT_YOUR_EPISODE)
    refused(
        harness.request(inbox.Abort(id="a", engine=ENGINE, client="c2", episodes=(episode,))), Code.NOT_YOUR_EPISODE
    )
    assert episode in harness.engine.open


def test_an_unknown_or_aborted_episode_is_not_in_claimed_status(harness: CoreHarness) -> None:
    refused(harness.end("main-1-999"), Code.UNKNOWN_EPISODE)
    (episode,) = harness.claim()
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode,)))
    assert "is not in claimed status" in refused(harness.end(episode), Code.UNKNOWN_EPISODE)


def test_a_group_ends_as_a_whole_or_not_at_all(harness: CoreHarness) -> None:
    first, second = harness.claim(count=2)
    good = inbox.EpisodeResult(episode=first, task="t1", reward=1.0)
    bad = inbox.EpisodeResult(episode=second, task="t1", reward=math.nan)
    refused(harness.request(inbox.End(id="e", engine=ENGINE, client="c1", results=(good, bad))), Code.BAD_REWARD)
    assert set(harness.engine.open) == {first, second}


def test_ending_is_refused_while_syncing_and_the_status_is_named() -> None:
    harness = at(Phase.WEIGHT_SYNCING)
    assert "WEIGHT_SYNCING" in refused(harness.end("main-1-99"), Code.WRONG_PHASE)


def test_aborting_a_closed_episode_succeeds(harness: CoreHarness) -> None:
    episode = harness.play("t1")
    assert isinstance(
        harness.request(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode, "nonsense"))), Done
    )


def test_an_infra_abort_leaves_its_groups_statistics_alone(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    gone = only(
        harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode,), infra=True)),
        ev.EpisodeAborted,
    )
    assert isinstance(gone, ev.EpisodeAborted)
    assert gone.reason == AbortReason.INFRA
    assert harness.engine.pool == {}


def test_a_lookup_returns_the_calls_of_an_open_episode(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    harness.call(episode, name="a")
    found = harness.request(inbox.Lookup(id="l", engine=ENGINE, episode=episode))
    assert isinstance(found, Found)
    assert [call.ref.id for call in found.calls] == ["a"]
    harness.end(episode)
    refused(harness.request(inbox.Lookup(id="l2", engine=ENGINE, episode=episode)), Code.EPISODE_OVER)


def test_a_call_that_is_reported_twice_counts_once_under_any_leader(harness: CoreHarness) -> None:
    (episode,) = harness.claim()
    harness.call(episode, name="same")
    successor = CoreHarness(Core(copy.deepcopy(harness.core.hive)))
    for leader in (harness, successor):
        assert leader.call(episode, name="same") == []
        assert leader.engine.counters.calls == 1


# ---- batches ----


def test_enough_tasks_seals_exactly_the_required_groups_and_keeps_the_rest() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=2, num_repeat=2, max_open_claims=16)
    open_ = harness.claim(count=6)
    for episode, task in zip(open_, ["a", "a", "a", "b", "c", "b"]):
        harness.end(episode, task)
    batch = harness.engine.batch
    assert batch is not None
    assert [(group.task, len(group.episodes)) for group in batch.groups] == [("a", 2), ("b", 2)]
    assert set(harness.engine.by_task) == {"a", "c"}
    assert harness.phase() == Phase.WEIGHT_SYNCING


def test_enough_episodes_counts_episodes_of_any_task() -> None:
    harness = CoreHarness()
    harness.boot(Method.ENOUGH_EPISODES, batch_size=2, num_repeat=2)
    for task in ["a", "b", "c", "d"]:
        harness.play(task)
    assert harness.engine.batch is not None
    assert [group.task for group in harness.engine.batch.groups] == ["a", "b", "c", "d"]


def test_tasks_whose_rewards_are_all_equal_do_not_count_and_are_dropped_with_the_reason() -> None:
    harness = CoreHarness()
    harness.boot(Method.ENOUGH_NON_DUMMY_TASKS, batch_size=1, num_repeat=2)
    harness.play("dull", 1.0)
    harness.play("dull", 1.0)
    assert harness.phase() == Phase.ROLLING
    harness.play("lively", 1.0)
    harness.play("lively", 0.0)
    assert harness.engine.batch is not None
    assert [group.task for group in harness.engine.batch.groups] == ["lively"]
    (dropped,) = [event for event in harness.log if isinstance(event, ev.GroupDropped)]
    assert (dropped.reason, dropped.tasks) == (DropReason.NO_SIGNAL, ("dull",))


def test_a_surplus_episode_that_gives_a_group_its_signal_is_taken_into_it() -> None:
    harness = CoreHarness()
    harness.boot(Method.ENOUGH_NON_DUMMY_TASKS, batch_size=1, num_repeat=2)
    for reward in [1.0, 1.0, 0.0]:
        harness.play("a", reward)
    assert harness.engine.batch is not None
    assert [episode.reward for episode in harness.engine.batch.groups[0].episodes] == [1.0, 0.0]


def test_any_client_may_request_the_sync() -> None:
    harness = CoreHarness()
    harness.boot(Method.ANY_CLIENT_AGREES)
    harness.play("a", client="c1")
    harness.play("b", client="c2")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="c2"))
    assert harness.engine.batch is not None
    assert len(harness.engine.batch.groups) == 2


def test_all_active_clients_must_agree_and_ten_minutes_of_silence_make_a_client_inactive() -> None:
    harness = CoreHarness()
    harness.boot(Method.ALL_CLIENTS_AGREE)
    harness.play("a", client="gone")
    harness.send(inbox.ReplicaAlive(id="alive", engine=ENGINE, replica="r1", url="http://r1"), after_s=595)
    harness.play("b", client="here")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="here"))
    assert harness.phase() == Phase.ROLLING
    harness.send(inbox.Tick(id="t"), after_s=6)
    assert harness.phase() == Phase.WEIGHT_SYNCING


def test_clients_that_come_and_go_are_forgotten() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=10_000)
    for number in range(60):
        harness.now_ns += 60 * SECOND
        harness.tick()
        harness.play(f"t{number}", client=f"c{number}")
    assert list(harness.engine.rewarded_ns)[-1] == "c59"
    assert 10 <= len(harness.engine.rewarded_ns) <= 21


def test_agreeing_out_of_phase_is_refused() -> None:
    refused(CoreHarness().request(inbox.AgreeSync(id="x", engine=ENGINE, client="c")), Code.WRONG_PHASE)


def test_only_a_client_that_has_ended_an_episode_recently_can_agree() -> None:
    harness = CoreHarness()
    harness.boot(Method.ANY_CLIENT_AGREES)
    refused(harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="idler")), Code.NOT_ACTIVE)
    harness.play("a", client="worker")
    assert harness.phase() == Phase.ROLLING


def test_a_vote_while_its_batch_is_trained_does_not_count_for_the_next_one() -> None:
    harness = CoreHarness()
    harness.boot(Method.ANY_CLIENT_AGREES, agreed_sync_s=0.0)
    harness.play("a", client="c1")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    assert isinstance(harness.request(inbox.AgreeSync(id="y", engine=ENGINE, client="c1")), Done)
    harness.train()
    harness.play("b", client="c1")
    assert harness.phase() == Phase.ROLLING


def test_clients_that_agreed_have_time_to_see_the_sync() -> None:
    harness = CoreHarness()
    harness.boot(Method.ANY_CLIENT_AGREES)
    harness.play("a", client="c1")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    harness.train()
    assert harness.phase() == Phase.WEIGHT_SYNCING
    harness.tick(after_s=7)
    assert harness.phase() == Phase.ROLLING


def test_draining_lets_running_episodes_finish_and_aborts_stragglers_at_the_deadline() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, drain_s=30, max_open_claims=8)
    runner, straggler, first = harness.claim(count=3)
    harness.call(straggler)
    harness.end(first, "a")
    assert harness.phase() == Phase.ROLLING_POST
    assert isinstance(harness.end(runner, "b"), Done)
    assert aborts(harness.tick(after_s=1)) == []
    assert aborts(harness.tick(after_s=29)) == [((straggler,), AbortReason.SUPERSEDED)]
    assert harness.phase() == Phase.WEIGHT_SYNCING
    assert list(harness.engine.by_task) == ["b"]
    late = harness.end(straggler, "c")
    assert "ENGINE.WEIGHT_SYNCING" in refused(
        late, Code.UNKNOWN_EPISODE
    )  # a client of the swarm contract ignores this refusal


def test_the_safety_valve_clears_the_pool_and_counts_the_episodes() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=100, num_repeat=1, max_pool_episodes=3)
    for index in range(4):
        harness.play(f"t{index}")
    (cleared,) = [event for event in harness.log if isinstance(event, ev.PoolCleared)]
    assert (cleared.episodes, cleared.reason) == (4, DropReason.OVERFLOW)
    assert harness.engine.pool == {}
    assert harness.engine.pool_bytes == 0


def test_episodes_carried_over_for_too_long_are_dropped_as_stale() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2, max_carry_staleness=1)
    harness.play("left over")
    for _ in range(2):
        harness.play("a", 1.0)
        harness.play("a", 0.0)
        harness.train()
    assert harness.engine.version == 2
    (dropped,) = [event for event in harness.log if isinstance(event, ev.GroupDropped)]
    assert (dropped.reason, dropped.tasks) == (DropReason.STALE, ("left over",))


def test_evaluation_is_not_in_batches_and_counts_for_the_version_it_ran_on(harness: CoreHarness) -> None:
    harness.play("held-out", 0.25, type=EpisodeType.EVAL)
    harness.play("held-out", 0.75, type=EpisodeType.EVAL)
    assert harness.engine.pool == {}
    assert harness.engine.evals[0].mean == 0.5
    assert harness.phase() == Phase.ROLLING


def evaluates(harness: CoreHarness, data_set: str, reward: float, is_success: bool | None = None) -> None:
    (episode,) = harness.claim(type=EpisodeType.EVAL)
    harness.call(episode)
    harness.end(episode, f"{data_set}/1", reward, data_set=data_set, is_success=is_success)


def test_evaluation_is_counted_by_data_set_too(harness: CoreHarness) -> None:
    evaluates(harness, "legs", 1.0, is_success=True)
    evaluates(harness, "sums", 0.5)
    evaluates(harness, "legs", 0.0, is_success=False)
    assert line_of(harness.log[-1]).endswith(" ended, held-out reward 0.000, task legs/1 of legs")
    harness.play("of no set", 0.1, type=EpisodeType.EVAL)
    stats = harness.engine.evals[0]
    assert (stats.episodes, stats.reward_sum, stats.successes) == (4, 1.6, 1)
    assert {name: (each.episodes, each.mean, each.success_rate) for name, each in stats.data_sets.items()} == {
        "legs": (2, 0.5, 0.5),
        "sums": (1, 0.5, 0.0),
    }
    lines = render_status(harness.core.hive, ENGINE).splitlines()
    at = lines.index("      0  0.400  (4 episodes)")
    assert lines[at + 1 : at + 3] == ["         0.500  legs (2 episodes)", "         0.500  sums (1 episodes)"]


def test_data_sets_of_a_version_over_the_limit_are_counted_in_the_sum_alone(harness: CoreHarness) -> None:
    for number in range(DATA_SETS_MAX + 1):
        evaluates(harness, f"set {number}", 1.0)
    evaluates(harness, "set 0", 1.0)
    stats = harness.engine.evals[0]
    assert (stats.episodes, len(stats.data_sets)) == (DATA_SETS_MAX + 2, DATA_SETS_MAX)
    assert stats.data_sets["set 0"].episodes == 2
    assert f"set {DATA_SETS_MAX}" not in stats.data_sets


# ---- training and weights ----


def sealed() -> CoreHarness:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2)
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    return harness


def test_a_step_becomes_the_next_version_when_its_weights_are_loaded() -> None:
    harness = sealed()
    harness.step_done(1)
    assert harness.phase() == Phase.WEIGHT_SYNCING
    harness.save_weights(1)
    assert harness.engine.version == 1
    harness.load(1)
    assert harness.phase() == Phase.ROLLING


def test_only_the_first_report_of_a_step_counts() -> None:
    harness = sealed()
    assert len(harness.step_done(1, digest="first")) == 1
    assert harness.step_done(1, digest="second") == []
    assert harness.engine.step_done is not None
    assert harness.engine.step_done.checkpoint_digest == "first"


def test_a_trainer_of_an_older_epoch_is_ignored() -> None:
    harness = sealed()
    old = harness.engine.trainer_epoch
    new = harness.open_trainer()
    assert new > old
    assert harness.step_done(1, epoch=old) == []
    assert len(harness.step_done(1, epoch=new)) == 1
    assert harness.save_weights(1, epoch=old) == []


def test_weights_without_their_step_on_the_log_are_ignored() -> None:
    harness = sealed()
    assert harness.save_weights(1) == []
    harness.step_done(1)
    assert len(harness.save_weights(1)) == 1
    assert harness.save_weights(1) == [], "a version that is not greater is ignored"


def test_rolling_resumes_when_all_live_replicas_have_loaded_or_the_sync_timed_out() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2, sync_s=5)
    harness.send(inbox.ReplicaAlive(id="x", engine=ENGINE, replica="slow", url="http://slow"))
    harness.play("a", 1.0)
    harness.play("a", 0.0)
    harness.step_done(1)
    harness.save_weights(1)
    harness.load(1, "r1")
    assert harness.phase() == Phase.WEIGHT_SYNCING
    harness.tick(after_s=5)
    assert harness.phase() == Phase.ROLLING


def test_rolling_waits_for_at_least_one_replica() -> None:
    harness = sealed()
    harness.send(inbox.ReplicaLeaves(id="x", engine=ENGINE, replica="r1"))
    harness.step_done(1)
    harness.save_weights(1)
    harness.tick(after_s=10_000)
    assert harness.phase() == Phase.WEIGHT_SYNCING
    alive = inbox.ReplicaAlive(
        id="y", engine=ENGINE, replica="r2", url="http://r2", run=1, version=1, sequence_tokens=99, constrains=True
    )
    harness.send(alive)
    assert harness.phase() == Phase.ROLLING
    assert harness.engine.replicas["r2"].sequence_tokens == 99
    assert harness.engine.replicas["r2"].constrains


def test_a_replica_without_heartbeats_leaves() -> None:
    harness = CoreHarness()
    harness.boot()
    left = only(harness.tick(after_s=10), ev.ReplicaLeft)
    assert isinstance(left, ev.ReplicaLeft)
    assert left.replica == "r1"


def read(harness: CoreHarness, template: str, gateway: str = "g1", run: int = 1) -> list[ev.AnyEvent]:
    found = ev.ConversationFormat(template=template, tool_calls="hermes", reasoning="text")
    message = inbox.ModelReadFact(id=harness.id(), engine=ENGINE, run=run, gateway=gateway, format=found)
    return harness.send(message)


def test_each_way_in_which_gateways_read_the_model_is_written_once_in_a_run(harness: CoreHarness) -> None:
    first = only(read(harness, "a"), ev.ModelRead)
    assert isinstance(first, ev.ModelRead)
    assert (first.run, first.gateway, first.format.template) == (1, "g1", "a")
    assert read(harness, "a", "g2") == []
    only(read(harness, "b", "g2"), ev.ModelRead)
    for _ in range(3):  # two that disagree, and say so again and again
        assert read(harness, "a", "g1") == read(harness, "b", "g2") == []
    assert [each.gateway for each in harness.engine.formats] == ["g1", "g2"]


def test_the_ways_of_reading_a_model_that_are_kept_are_few(harness: CoreHarness) -> None:
    written = [read(harness, template) for template in "abcdefgh"]
    assert [len(events) for events in written] == [1] * FORMATS_MAX + [0] * (8 - FORMATS_MAX)


def test_how_a_model_is_read_counts_for_the_run_that_goes_on(harness: CoreHarness) -> None:
    assert read(harness, "a", run=2) == []
    only(read(harness, "a"), ev.ModelRead)
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert read(harness, "b") == []
    harness.send(inbox.Start(id=harness.id(), engine=ENGINE))
    assert harness.engine.formats == []
    assert read(harness, "a", run=1) == []
    only(read(harness, "a", run=2), ev.ModelRead)


def test_the_same_command_gets_the_same_answer(harness: CoreHarness) -> None:
    message = harness.claim_message()
    first = harness.request(message)
    assert harness.request(message) == first
    lookup = inbox.Lookup(id="l", engine=ENGINE, episode="main-1-77")
    assert harness.request(lookup) == harness.request(lookup)


def test_calls_of_one_append_are_noted_in_one_event(harness: CoreHarness) -> None:
    first, second = harness.claim(count=2)
    pending = []
    for index, episode in enumerate([first, second, first]):
        noted = NotedCall(episode, CallRef(index, f"n{index}", b"d"), 5, 2, 0, 0)
        message = inbox.CallRecorded(id=f"x{index}", engine=ENGINE, run=1, call=noted)
        pending += list(harness.core.receive(message, 100 + index, harness.now_ns))
    assert pending == []
    (flush,) = harness.core.flush()
    (event,) = flush.decision.events
    assert isinstance(event, ev.CallsNoted)
    assert [call.ref.id for call in event.calls] == ["n0", "n1", "n2"]
    assert flush.answers == 102


def test_calls_of_two_engines_in_one_append_are_one_decision(harness: CoreHarness) -> None:
    """All of them answer one inbox position: a cut between two engines would lose the calls of the second one."""
    (episode,) = harness.claim()
    for number, engine in enumerate((ENGINE, "other")):
        noted = NotedCall(episode, CallRef(number, f"n{number}", b"d"), 5, 2, 0, 0)
        run = harness.engine.run if engine == ENGINE else 0
        message = inbox.CallRecorded(id=f"x{number}", engine=engine, run=run, call=noted)
        assert list(harness.core.receive(message, 100 + number, harness.now_ns)) == []
    (flush,) = harness.core.flush()
    assert [event.engine for event in flush.decision.events] == [ENGINE, "other"]
    assert flush.answers == 101
    assert list(harness.core.flush()) == []


def test_time_never_goes_backwards(harness: CoreHarness) -> None:
    before = harness.core.live.now_ns
    list(harness.core.receive(inbox.Tick(id="t"), 50, before - 5 * SECOND))
    assert harness.core.live.now_ns == before


# ---- outages ----


def confirmed_later(harness: CoreHarness, answered: int, after_s: float) -> list[ev.AnyEvent]:
    return harness.send(inbox.Tick(id=harness.id(), answered=answered), after_s)


def test_the_time_to_confirm_a_claim_starts_when_its_answer_is_sent(harness: CoreHarness) -> None:
    harness.claim(claim="k")
    before = harness.seq - 1
    for _ in range(5):
        assert confirmed_later(harness, before, after_s=1) == [], "its decision is not stored yet"
    assert confirmed_later(harness, harness.seq, after_s=4) == []
    assert aborts(confirmed_later(harness, harness.seq, after_s=1)) == [(("main-1-1",), AbortReason.UNCONFIRMED)]


def test_deadlines_do_not_run_while_the_bus_is_away(harness: CoreHarness) -> None:
    (episode,) = harness.claim(claim="k", discard_timeout_s=30)
    confirmed_later(harness, harness.seq, after_s=1)
    assert confirmed_later(harness, harness.seq, after_s=60) == [], (
        "neither the claim, nor the episode, nor the replica"
    )
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=("k",)))
    harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"), after_s=1)
    for _ in range(28):
        harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
        assert confirmed_later(harness, harness.seq, after_s=1) == []
    assert aborts(confirmed_later(harness, harness.seq, after_s=1)) == [((episode,), AbortReason.IDLE)]


def test_deadlines_run_when_the_clock_was_set_back_by_an_hour(harness: CoreHarness) -> None:
    (episode,) = harness.claim(discard_timeout_s=30)
    harness.tick()
    before_ns = harness.core.live.now_ns
    harness.now_ns -= 3600 * SECOND
    found = [(second, aborts(harness.tick())) for second in range(40)]
    ended = [(second, what) for second, what in found if what]
    assert [what for _, what in ended] == [[((episode,), AbortReason.UNCONFIRMED)]]
    (episode,) = harness.claim(claim="k", discard_timeout_s=30)
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=("k",)))
    idle_s = next(second for second in range(60) if aborts(harness.tick()))
    assert 29 <= idle_s <= 34, "a tenth slower"
    passed_s = (harness.core.live.now_ns - before_ns) / SECOND
    assert passed_s == pytest.approx(0.9 * (40 + idle_s + 1), abs=2)


def test_the_hives_time_is_that_of_the_clock_again_after_a_while(harness: CoreHarness) -> None:
    harness.tick()
    harness.now_ns -= 60 * SECOND
    for _ in range(590):
        harness.tick()
    assert harness.core.live.now_ns > harness.now_ns
    for _ in range(20):
        harness.tick()
    assert harness.core.live.now_ns == harness.now_ns


def test_a_new_leader_goes_on_from_the_time_of_the_log(harness: CoreHarness) -> None:
    harness.play("t1")
    last_ns = harness.core.hive.now_ns
    follower = CoreHarness(Core(harness.core.hive))
    follower.now_ns = harness.now_ns - 3600 * SECOND
    follower.tick()
    assert last_ns <= follower.core.live.now_ns <= last_ns + 2 * SECOND
    follower.tick()
    assert follower.core.live.now_ns >= last_ns + SECOND * 9 // 10


def test_no_message_that_comes_before_the_first_tick_after_an_outage_ends_a_wait(harness: CoreHarness) -> None:
    (straggler,) = harness.claim(claim="k")
    confirmed_later(harness, harness.seq, after_s=1)
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=("k",)))
    for task in ("t1", "t2"):
        for reward in (0.0, 1.0):
            harness.play(task, reward)
    assert harness.phase() == Phase.ROLLING_POST
    drain_s = harness.engine.collection.drain_s
    late = inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=())
    ticked_ns = harness.now_ns
    assert harness.send(late, drain_s + 60) == []
    (paused,) = harness.send(inbox.Tick(id=harness.id(), after_ns=ticked_ns))
    assert isinstance(paused, ev.LeadingPaused)
    assert straggler in harness.engine.open


# ---- streams that lost their ends ----


def test_r6_a_tick_of_an_earlier_leader_tells_that_the_log_was_longer_once(harness: CoreHarness) -> None:
    harness.core.live.began_after, harness.core.live.inherited = 10, harness.core.live.seq + 3
    assert harness.send(inbox.Tick(id=harness.id(), log_end=10)) == []
    (lost,) = harness.send(inbox.Tick(id=harness.id(), log_end=14))
    assert (lost.what, lost.known, lost.kept) == ("events", 14, 10)  # type: ignore[union-attr]
    assert harness.send(inbox.Tick(id=harness.id(), log_end=13)) == [], "only once"
    assert harness.send(inbox.Tick(id=harness.id(), log_end=99)) == [], "its own ticks are ahead of what was before it"
    assert "warning: stream events has lost its end: messages 11 to 14 are gone" in render_status(harness.core.hive)


# ---- storage ----


def sees(harness: CoreHarness, used: int, what: str = "calls") -> list[ev.AnyEvent]:
    return harness.send(inbox.StorageSeen(id=harness.id(), what=what, used=used, size=100, reserve=10))


def test_new_work_is_refused_while_less_than_the_reserve_is_left(harness: CoreHarness) -> None:
    assert sees(harness, 90) == []
    filled = only(sees(harness, 91), ev.StorageFilled)
    assert isinstance(filled, ev.StorageFilled)
    assert "calls" in filled.why
    assert "calls" in refused(harness.request(harness.claim_message()), Code.STORAGE_FULL)
    assert sees(harness, 95) == [], "only once"


def test_inodes_are_counted_and_not_said_in_bytes(harness: CoreHarness) -> None:
    filled = only(sees(harness, 91, storage.INODES), ev.StorageFilled)
    assert isinstance(filled, ev.StorageFilled)
    assert "only 9 of 100 were left of the disk's inodes." in filled.why
    assert "15 are free. Remove files" in filled.why


@pytest.mark.parametrize("stream", ["inbox", "events", "calls", "ops", "blobs", "trajectories"])
def test_a_refusal_for_want_of_storage_names_the_flag_that_raises_the_limit(harness: CoreHarness, stream: str) -> None:
    sees(harness, 91, stream)
    assert f"with --{stream}-bytes-max." in harness.core.hive.refusing_groups
    if stream != "trajectories":  # which no claim needs
        assert f"with --{stream}-bytes-max." in refused(harness.request(harness.claim_message()), Code.STORAGE_FULL)


def test_work_is_accepted_again_when_one_and_a_half_reserves_are_free(harness: CoreHarness) -> None:
    sees(harness, 91)
    assert sees(harness, 86) == []
    assert [ev.kind_of(event) for event in sees(harness, 85)] == ["storage.freed"]
    assert harness.claim()


def test_work_in_progress_continues_while_storage_is_full(harness: CoreHarness) -> None:
    ended, aborted = harness.claim(count=2)
    harness.play("t1")
    harness.play("t2")
    harness.play("t2")
    sees(harness, 99)
    harness.call(ended)
    assert isinstance(harness.end(ended, "t1"), Done)
    harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=(aborted,)))
    assert harness.phase() == Phase.WEIGHT_SYNCING
    harness.train()
    assert harness.engine.version == 1


def test_a_waiting_claim_is_refused_when_storage_is_full(harness: CoreHarness) -> None:
    harness.claim(count=harness.engine.collection.max_open_claims)
    waiting = harness.claim_message(client="c2", wait_s=1.5)
    harness.send(waiting)
    sees(harness, 99)
    harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=("main-1-1",)))
    harness.tick(after_s=2)
    refused(harness.answers[waiting.id], Code.STORAGE_FULL)


def test_an_engine_is_not_started_while_storage_is_full(harness: CoreHarness) -> None:
    sees(harness, 99)
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    refused(harness.request(inbox.Start(id=harness.id(), engine=ENGINE)), Code.STORAGE_FULL)


def test_every_full_place_has_to_be_freed_and_a_recovery_remembers_them(harness: CoreHarness) -> None:
    sees(harness, 99, "calls")
    sees(harness, 99, "the disk")
    sees(harness, 0, "calls")
    after = CoreHarness(Core(harness.core.hive))
    after.now_ns = harness.now_ns
    assert "the disk" in refused(after.request(after.claim_message()), Code.STORAGE_FULL)
    sees(after, 0, "the disk")
    assert after.claim()
