"""Multi-model episodes: one episode on each of several engines, claimed together, ended together or aborted."""

import random
import re
from typing import Any

import msgspec
import pytest

from bombus.bus import snapshots
from bombus.bus.snapshots import Snapshot
from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason, EpisodeType
from bombus.hive.failures import FailureKind
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Done, EpisodeResult, Granted, MultiModelGranted, Refusal
from bombus.hive.records import CallRef
from bombus.hive.state import FOLD, Hive, Phase, engine_of
from bombus.hive.status.data import hive_status
from bombus.hive.status.text import render_status
from bombus_coordinator.core import Core
from bombus_coordinator.rules.multi_model import claims
from tests.coordinator.multi_model_in_memory import BIG, SMALL, THIRD, Episodes, MultiModelHarness, told
from tests.effort import effort

ABORTED = [("episode.aborted", BIG), ("episode.aborted", SMALL)]


@pytest.fixture
def harness() -> MultiModelHarness:
    return MultiModelHarness()


def refused(answer: inbox.AnyAnswer, code: Code) -> str:
    assert isinstance(answer, Refusal), answer
    assert answer.code == code, answer
    return answer.why


def reasons(events: list[ev.AnyEvent]) -> dict[str, AbortReason]:
    return {event.engine: event.reason for event in events if isinstance(event, ev.EpisodeAborted)}


def folded(harness: MultiModelHarness) -> Hive:
    hive = Hive()
    for event in harness.log:
        evolve(hive, event)
    return hive


# ---- claims ----


def test_r13_a_multi_model_claim_is_granted_on_all_engines_by_one_decision_in_which_each_knows_the_others(
    harness: MultiModelHarness,
) -> None:
    message = harness.multi_model_message(SMALL, BIG, count=2, task_hint="t1")
    decisions = list(harness.core.receive(message, harness.seq + 1, harness.now_ns))
    assert len(decisions) == 1, "it is stored as a whole or not at all"
    big, small = decisions[0].decision.events
    assert isinstance(big, ev.EpisodeClaimed)
    assert isinstance(small, ev.EpisodeClaimed)
    assert (big.engine, big.episodes, big.partners) == (BIG, ("big-1-1", "big-1-2"), {SMALL: small.episodes})
    assert (small.engine, small.episodes, small.partners) == (SMALL, ("small-1-1", "small-1-2"), {BIG: big.episodes})
    assert harness.core.hive.engine(SMALL).open["small-1-2"].partners == {BIG: "big-1-2"}
    (reply,) = decisions[0].decision.replies
    assert isinstance(reply.answer, MultiModelGranted)
    assert [(each.engine, each.run, each.version) for each in reply.answer.grants] == [(BIG, 1, 0), (SMALL, 1, 0)]


def test_an_episode_says_on_which_engine_it_is() -> None:
    assert engine_of("a-long-name-12-345") == "a-long-name"
    assert engine_of("nonsense") == ""


def test_a_claim_that_is_sent_again_gets_the_same_multi_model_episodes_also_from_another_leader(
    harness: MultiModelHarness,
) -> None:
    message = harness.multi_model_message(count=2)
    first = harness.request(message)
    harness.core = Core(folded(harness))
    assert harness.request(msgspec.structs.replace(message, id="again")) == first
    other = msgspec.structs.replace(message, id="other client", client="c2")
    refused(harness.request(other), Code.OTHER_CLAIM)


def test_the_id_of_a_claim_is_of_its_engines_alone() -> None:
    harness = MultiModelHarness(BIG, SMALL, THIRD)
    message = harness.multi_model_message(BIG, SMALL)
    harness.request(message)
    more = msgspec.structs.replace(message, id="more", engines=(BIG, SMALL, THIRD))
    refused(harness.request(more), Code.OTHER_CLAIM)
    single = inbox.Claim(id="single", engine=SMALL, claim=message.claim, client=message.client)
    refused(harness.request(single), Code.OTHER_CLAIM)


def test_a_waiting_claims_id_is_not_taken_for_other_engines() -> None:
    harness = MultiModelHarness(BIG, SMALL, THIRD, max_open_claims=1)
    harness.claim_on(BIG)
    waiting = harness.multi_model_message(BIG, SMALL, wait_s=30)
    harness.send(waiting)
    other = msgspec.structs.replace(waiting, id="other", engines=(BIG, THIRD))
    refused(harness.request(other), Code.OTHER_CLAIM)
    single = inbox.Claim(id="single", engine=BIG, claim=waiting.claim, client="c1", wait_s=30)
    refused(harness.request(single), Code.OTHER_CLAIM)


def test_a_claim_whose_episodes_are_over_is_refused_when_it_comes_again(harness: MultiModelHarness) -> None:
    message = harness.multi_model_message()
    harness.request(message)
    harness.abort(BIG, "big-1-1")
    again = harness.request(msgspec.structs.replace(message, id="again"))
    assert "fresh id" in refused(again, Code.OTHER_CLAIM)


@pytest.mark.parametrize(
    ("wrong", "code", "why"),
    [
        ({"engines": (BIG,)}, Code.MALFORMED, "2 to 8 engines, not 1"),
        ({"engines": tuple(f"e{number}" for number in range(9))}, Code.MALFORMED, "2 to 8 engines, not 9"),
        ({"engines": (BIG, BIG)}, Code.MALFORMED, "each engine only once"),
        ({"engines": (BIG, "none")}, Code.WRONG_PHASE, "Engine none: .*ENGINE.OFFLINE"),
        ({"count": 0}, Code.MALFORMED, "Engine big: A claim must be for 1 to 128 episodes, not 0"),
        ({"count": 129}, Code.MALFORMED, "Engine big: A claim must be for 1 to 128 episodes, not 129"),
        ({"count": 2501}, Code.MALFORMED, "at most 2500 multi-model episodes at once, not 2501"),
        ({"sampler": "base"}, Code.UNSUPPORTED, "leave out `sampler`"),
        ({"discard_timeout_s": 0.0}, Code.MALFORMED, "discard_episode_timeout"),
    ],
)
def test_a_multi_model_claim_that_could_never_be_granted_is_refused(
    harness: MultiModelHarness, wrong: dict[str, Any], code: Code, why: str
) -> None:
    message = msgspec.structs.replace(harness.multi_model_message(), **wrong)
    answer = harness.request(message)
    assert isinstance(answer, Refusal)
    assert answer.code == code
    assert re.search(why, answer.why), answer.why


# ---- waiting ----


def test_r13_while_one_engine_does_not_roll_a_multi_model_claim_waits_and_holds_nothing_on_the_other() -> None:
    harness = MultiModelHarness(BIG)
    with harness.on(SMALL):
        harness.configure(ev.Collection(batch_size=1000))
        harness.send(inbox.Start(id=harness.id(), engine=SMALL))
    with harness.on(BIG):
        harness.claim("c2", count=126)
    multi = harness.multi_model_message(BIG, SMALL, count=2, wait_s=30)
    harness.send(multi)
    assert harness.claim_on(BIG, "c2", count=2), "all of the other engine is free for others"
    assert harness.open() == {BIG: [f"big-1-{number}" for number in range(1, 129)]}
    assert not harness.was_granted(multi)


def test_a_multi_model_claim_is_granted_by_whatever_lets_the_last_of_its_engines_go_on() -> None:
    harness = MultiModelHarness(BIG)
    with harness.on(SMALL):
        harness.configure(ev.Collection(batch_size=1000))
        harness.send(inbox.Start(id=harness.id(), engine=SMALL))
        multi = harness.multi_model_message(BIG, SMALL, wait_s=30)
        harness.send(multi)
        harness.send(inbox.ReplicaAlive(id=harness.id(), engine=SMALL, replica="r1", url="http://r1"))
        harness.open_trainer()
        harness.save_weights(0)
        loaded = harness.load(0)
    assert told(loaded)[-3:] == [("rolling.started", SMALL), ("episode.claimed", BIG), ("episode.claimed", SMALL)]
    assert harness.was_granted(multi)


def test_two_clients_that_name_the_same_engines_in_opposite_order_are_served_one_after_the_other() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    (first,) = harness.claim_multi_model()
    ann = harness.multi_model_message(BIG, SMALL, client="ann", wait_s=30)
    bob = harness.multi_model_message(SMALL, BIG, client="bob", wait_s=30)
    harness.send(ann)
    harness.send(bob, after_s=1)
    harness.end_multi_model(first)
    assert (harness.was_granted(ann), harness.was_granted(bob)) == (True, False)
    answer = harness.answers[ann.id]
    assert isinstance(answer, MultiModelGranted)
    harness.end_multi_model({each.engine: each.episodes[0] for each in answer.grants}, client="ann")
    assert harness.was_granted(bob)


def test_r13_three_clients_that_each_want_two_of_three_engines_in_a_ring_are_all_served() -> None:
    harness = MultiModelHarness(BIG, SMALL, THIRD, max_open_claims=1)
    held = {name: harness.claim_on(name, "holder")[0] for name in (BIG, SMALL, THIRD)}
    pairs = {"ann": (BIG, SMALL), "bob": (SMALL, THIRD), "eve": (THIRD, BIG)}
    waiting = {name: harness.multi_model_message(*pair, client=name, wait_s=60) for name, pair in pairs.items()}
    for message in waiting.values():
        harness.send(message, after_s=1)
    for name, episode in held.items():
        with harness.on(name):
            harness.end(episode, client="holder")
    served: list[str] = []
    while len(served) < 3:
        (client,) = [name for name, message in waiting.items() if name not in served and harness.was_granted(message)]
        served.append(client)
        answer = harness.answers[waiting[client].id]
        assert isinstance(answer, MultiModelGranted)
        harness.end_multi_model({each.engine: each.episodes[0] for each in answer.grants}, client=client)
    assert served == ["ann", "bob", "eve"], "the one that asked first is first"


def test_single_claims_do_not_overtake_a_multi_model_claim_that_waits_for_room_alone(
    harness: MultiModelHarness,
) -> None:
    harness = MultiModelHarness(max_open_claims=2)
    on_big = harness.claim_on(BIG, "c2", count=2)
    multi = harness.multi_model_message(wait_s=60)
    harness.send(multi)
    assert harness.claim_on(SMALL, "c3"), "there is room for both"
    with harness.on(SMALL):
        late = harness.claim_message("c4", wait_s=60)
        harness.send(late, after_s=1)
    assert not harness.was_granted(late), "the last place of the other engine is kept"
    with harness.on(BIG):
        harness.end(on_big[0], client="c2")
    assert harness.was_granted(multi)
    assert not harness.was_granted(late)


def test_a_multi_model_claim_does_not_overtake_a_single_group_that_waits_for_room() -> None:
    harness = MultiModelHarness(max_open_claims=4)
    held = harness.claim_on(BIG, "c2", count=3)
    with harness.on(BIG):
        group = harness.claim_message("c3", count=4, wait_s=60)
        harness.send(group)
    multi = harness.multi_model_message(wait_s=60)
    harness.send(multi, after_s=1)
    assert not harness.was_granted(multi), "although each engine has room for one episode"
    assert harness.claim_on(SMALL, "c4", count=4), "nothing is kept for it meanwhile"
    with harness.on(BIG):
        for episode in held:
            harness.end(episode, client="c2")
    assert harness.was_granted(group)


def test_claims_are_shared_out_by_what_clients_have_open_multi_model_or_not() -> None:
    harness = MultiModelHarness(max_open_claims=2)
    (multi,) = harness.claim_multi_model(client="greedy")
    harness.claim_on(BIG, "other")
    greedy = harness.multi_model_message(client="greedy", wait_s=60)
    harness.send(greedy)
    with harness.on(BIG):
        modest = harness.claim_message("modest", wait_s=60)
        harness.send(modest, after_s=1)
    harness.abort(BIG, "big-1-2", client="other")
    assert harness.was_granted(modest), "it has nothing open on the engine"
    assert not harness.was_granted(greedy)
    harness.end_multi_model(multi, client="greedy")
    assert harness.was_granted(greedy)


def test_what_an_asynchronous_engine_holds_back_for_training_keeps_nothing_elsewhere() -> None:
    harness = MultiModelHarness(batch_size=1, num_repeat=2, max_staleness=1, max_open_claims=4)
    with harness.on(BIG):
        harness.claim("c2", count=4)
    with harness.on(SMALL):
        for _ in range(4):
            harness.play("t1")
        paced = harness.claim_message("c5")
        refused(harness.request(paced), Code.NO_EPISODES)
    multi = harness.multi_model_message(wait_s=60)
    harness.send(multi)
    harness.abort(BIG, "big-1-1", client="c2")
    assert not harness.was_granted(multi)
    assert harness.claim_on(BIG, "c3"), "the place is given to somebody else"


def test_a_multi_model_claim_that_has_waited_long_enough_is_told_which_engine_it_waits_for() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    held = harness.claim_on(SMALL, "c2")
    multi = harness.multi_model_message(wait_s=2)
    harness.send(multi)
    harness.tick(after_s=3)
    why = refused(harness.answers[multi.id], Code.NO_EPISODES)
    assert why.startswith("Engine small: No available episodes to claim. 1 of at most 1 are open")
    assert not harness.core.live.multi_model, "it waits no more"
    assert harness.claim_on(BIG, "c3")
    assert held


def test_multi_model_claims_for_an_engine_that_is_stopped_are_refused_and_its_other_engines_serve_others() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    harness.claim_on(SMALL, "c2")
    multi = harness.multi_model_message(wait_s=60)
    harness.send(multi)
    with harness.on(BIG):
        single = harness.claim_message("c3", wait_s=60)
        harness.send(single, after_s=1)
    assert not harness.was_granted(single)
    harness.stop(SMALL)
    assert harness.was_granted(single), "at once: nothing is kept for a claim of an engine that is not there"
    harness.tick()
    assert "ENGINE.OFFLINE" in refused(harness.answers[multi.id], Code.WRONG_PHASE)


def test_evaluation_is_not_held_up_by_multi_model_claims_that_wait_for_training() -> None:
    harness = MultiModelHarness(batch_size=1, num_repeat=1, max_staleness=1)
    with harness.on(SMALL):
        for number in range(2):
            harness.play(f"t{number}")
    training = harness.multi_model_message(wait_s=60)
    harness.send(training)
    assert not harness.was_granted(training)
    assert harness.claim_multi_model(type=EpisodeType.EVAL, client="c2")


def test_multi_model_claims_that_wait_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MULTI_MODEL_WAITING_MAX", 2)
    harness = MultiModelHarness(max_open_claims=1)
    harness.claim_multi_model()
    for number in range(2):
        harness.send(harness.multi_model_message(client=f"w{number}", wait_s=60))
    assert "2 multi-model claims are already waiting" in refused(
        harness.request(harness.multi_model_message(client="late", wait_s=60)), Code.OVERLOADED
    )


def test_a_keys_caps_hold_on_each_engine() -> None:
    harness = MultiModelHarness()
    harness.claim_on(SMALL, owner="k", open_max=2)
    harness.claim_multi_model(owner="k", open_max=2)
    full = harness.multi_model_message(owner="k", open_max=2)
    assert "Engine small: " in refused(harness.request(full), Code.NO_EPISODES)
    assert harness.claim_on(BIG, owner="k", open_max=2), "it has one open there"
    never = harness.multi_model_message(owner="k", open_max=2, count=3)
    assert "at most 2 open" in refused(harness.request(never), Code.MALFORMED)


def test_a_keys_cap_on_waiting_claims_counts_multi_model_ones_too() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    harness.claim_multi_model()
    harness.send(harness.multi_model_message(owner="k", waiting_max=1, wait_s=60))
    with harness.on(SMALL):
        single = harness.claim_message(owner="k", waiting_max=1, wait_s=60)
        assert "1 of at most 1 claims waiting" in refused(harness.request(single), Code.NO_EPISODES)
    multi = harness.multi_model_message(owner="k", waiting_max=1, wait_s=60)
    assert "1 of at most 1 claims waiting" in refused(harness.request(multi), Code.NO_EPISODES)


def test_a_keys_cap_on_waiting_claims_counts_those_of_the_engine_where_most_wait() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    harness.claim_multi_model()
    with harness.on(SMALL):
        harness.send(harness.claim_message(owner="k", waiting_max=1, wait_s=60))
    multi = harness.multi_model_message(owner="k", waiting_max=1, wait_s=60)
    assert "1 of at most 1 claims waiting" in refused(harness.request(multi), Code.NO_EPISODES)


def test_a_multi_model_claim_is_refused_at_once_while_storage_is_full(harness: MultiModelHarness) -> None:
    harness.send(inbox.StorageSeen(id="full", what="calls", used=91, size=100, reserve=10))
    assert "calls" in refused(harness.request(harness.multi_model_message(wait_s=60)), Code.STORAGE_FULL)


def test_a_key_at_its_cap_does_not_hold_up_the_multi_model_claims_of_others() -> None:
    harness = MultiModelHarness()
    harness.claim_on(SMALL, owner="k", open_max=1)
    harness.send(harness.multi_model_message(owner="k", open_max=1, wait_s=60))
    assert harness.claim_multi_model(client="c2")


# ---- ends ----


def test_r13_multi_model_episodes_end_on_all_engines_by_one_decision(harness: MultiModelHarness) -> None:
    multi, other = harness.claim_multi_model(count=2)
    message = harness.multi_model_end(multi, other)
    decisions = list(harness.core.receive(message, harness.seq + 1, harness.now_ns))
    assert [(ev.kind_of(event), event.engine) for event in decisions[0].decision.events] == [
        ("episode.ended", BIG),
        ("episode.ended", SMALL),
    ]
    for name in (BIG, SMALL):
        assert list(harness.core.hive.engine(name).pool) == [f"{name}-1-1", f"{name}-1-2"]


def test_each_episode_of_a_multi_model_one_has_its_own_reward(harness: MultiModelHarness) -> None:
    (multi,) = harness.claim_multi_model()
    results = {
        BIG: EpisodeResult(episode=multi[BIG], task="plan", reward=0.25),
        SMALL: EpisodeResult(episode=multi[SMALL], task="work", reward=-1.0),
    }
    assert harness.request(inbox.MultiModelEnd(id="end", client="c1", results=(results,))) == Done()
    pools = [harness.core.hive.engine(name).pool for name in (BIG, SMALL)]
    assert [(done.task, done.reward) for pool in pools for done in pool.values()] == [("plan", 0.25), ("work", -1.0)]


def test_the_same_report_again_changes_nothing_and_another_one_is_refused(harness: MultiModelHarness) -> None:
    (multi,) = harness.claim_multi_model()
    assert harness.end_multi_model(multi) == Done()
    log = list(harness.log)
    assert harness.end_multi_model(multi) == Done()
    assert harness.log == log
    assert "another outcome" in refused(harness.end_multi_model(multi, reward=0.5), Code.OTHER_OUTCOME)
    assert harness.log == log


def test_a_report_that_comes_again_after_an_engine_was_started_again_is_known_by_the_others(
    harness: MultiModelHarness,
) -> None:
    (multi,) = harness.claim_multi_model()
    harness.end_multi_model(multi)
    harness.stop(BIG)
    with harness.on(BIG):
        harness.boot(batch_size=1000)
    assert harness.end_multi_model(multi) == Done()
    refused(harness.end_multi_model(multi, reward=0.0), Code.OTHER_OUTCOME)


def test_a_part_of_a_multi_model_episode_cannot_be_ended_without_the_rest(harness: MultiModelHarness) -> None:
    multi, other = harness.claim_multi_model(count=2)
    with harness.on(BIG):
        why = refused(harness.end(multi[BIG]), Code.MALFORMED)
    assert "part of a multi-model episode, with small-1-1: report all of them at once" in why
    refused(harness.end_multi_model({BIG: multi[BIG]}), Code.MALFORMED)
    refused(harness.end_multi_model({BIG: multi[BIG], SMALL: other[SMALL]}), Code.MALFORMED)
    refused(harness.end_multi_model({SMALL: multi[BIG], BIG: multi[SMALL]}), Code.UNKNOWN_EPISODE)
    assert harness.open() == {BIG: ["big-1-1", "big-1-2"], SMALL: ["small-1-1", "small-1-2"]}


def test_an_episode_of_its_own_is_no_multi_model_episode(harness: MultiModelHarness) -> None:
    (episode,) = harness.claim_on(BIG)
    assert "end it on its own" in refused(harness.end_multi_model({BIG: episode}), Code.MALFORMED)


def test_what_is_wrong_with_one_result_lets_none_of_a_report_end(harness: MultiModelHarness) -> None:
    multi, other = harness.claim_multi_model(count=2)
    wrong = harness.multi_model_end(multi, other)
    nan = msgspec.structs.replace(wrong.results[1][SMALL], reward=float("nan"))
    wrong = msgspec.structs.replace(wrong, results=(wrong.results[0], wrong.results[1] | {SMALL: nan}))
    refused(harness.request(wrong), Code.BAD_REWARD)
    assert harness.open() == {BIG: ["big-1-1", "big-1-2"], SMALL: ["small-1-1", "small-1-2"]}
    twice = harness.multi_model_end(multi, multi)
    assert "listed twice" in refused(harness.request(twice), Code.MALFORMED)
    refused(harness.request(inbox.MultiModelEnd(id="none", client="c1", results=())), Code.MALFORMED)
    refused(harness.end_multi_model(multi, client="c2"), Code.NOT_YOUR_EPISODE)
    assert harness.end_multi_model(multi, other) == Done()


def test_a_multi_model_episode_ends_while_one_of_its_engines_drains() -> None:
    harness = MultiModelHarness(batch_size=1, num_repeat=1)
    (multi,) = harness.claim_multi_model()
    with harness.on(BIG):
        harness.play("t1")
        assert harness.phase() == Phase.ROLLING_POST
    decided = harness.send(harness.multi_model_end(multi))
    kinds = [("episode.ended", BIG), ("episode.ended", SMALL), ("batch.ready", BIG), ("rolling.closed", SMALL)]
    assert set(kinds) <= set(told(decided)), "what follows in each engine follows at once"
    assert harness.core.hive.engine(SMALL).phase == Phase.WEIGHT_SYNCING


# ---- aborts ----


def test_r13_the_abort_of_one_episode_is_the_abort_of_its_multi_model_episode(harness: MultiModelHarness) -> None:
    multi, other = harness.claim_multi_model(count=2)
    events = harness.abort(SMALL, multi[SMALL])
    assert told(events) == [("episode.aborted", SMALL), ("episode.aborted", BIG)]
    assert reasons(events) == {SMALL: AbortReason.CLIENT, BIG: AbortReason.MULTI_MODEL}
    assert harness.open() == {BIG: [other[BIG]], SMALL: [other[SMALL]]}
    assert "its client has aborted it" in refused(harness.end_multi_model(multi), Code.UNKNOWN_EPISODE)
    assert harness.end_multi_model(other) == Done()


def test_episodes_that_are_aborted_together_are_aborted_once(harness: MultiModelHarness) -> None:
    several = harness.claim_multi_model(count=2)
    events = harness.abort(BIG, *(multi[BIG] for multi in several), infra=True)
    assert [event.episodes for event in events if isinstance(event, ev.EpisodeAborted)] == [
        ("big-1-1", "big-1-2"),
        ("small-1-1", "small-1-2"),
    ]
    assert reasons(events) == {BIG: AbortReason.INFRA, SMALL: AbortReason.MULTI_MODEL}


def test_the_partners_of_an_episode_that_failed_have_the_kind_of_its_failure(harness: MultiModelHarness) -> None:
    (multi,) = harness.claim_multi_model()
    names, kind = (multi[BIG],), FailureKind.GRADER
    events = harness.send(inbox.Abort(id="a", engine=BIG, client="c1", episodes=names, failure=kind))
    assert [event.failed_by for event in events if isinstance(event, ev.EpisodeAborted)] == [kind, kind]
    assert harness.core.hive.engine(SMALL).counters.aborted_by == {kind: 1}


def test_a_run_that_is_stopped_takes_the_partners_with_it(harness: MultiModelHarness) -> None:
    (multi,) = harness.claim_multi_model()
    decisions = list(harness.core.receive(inbox.Stop(id="stop", engine=BIG), harness.seq + 1, harness.now_ns))
    assert [(ev.kind_of(event), event.engine) for event in decisions[0].decision.events] == [
        *ABORTED,
        ("engine.stopped", BIG),
    ]
    why = refused(harness.end_multi_model(multi), Code.UNKNOWN_EPISODE)
    assert "engine_stopped" in why


def test_a_partner_is_aborted_in_the_run_of_its_own_engine(harness: MultiModelHarness) -> None:
    harness.stop(SMALL)
    with harness.on(SMALL):
        harness.boot(batch_size=1000)
    (multi,) = harness.claim_multi_model()
    aborts = [event for event in harness.abort(BIG, multi[BIG]) if isinstance(event, ev.EpisodeAborted)]
    assert {event.engine: event.run for event in aborts} == {BIG: 1, SMALL: 2}


def test_a_run_that_has_failed_takes_the_partners_with_it(harness: MultiModelHarness) -> None:
    harness.claim_multi_model()
    broke = inbox.EngineBroke(id="broke", engine=SMALL, run=1, reason="bad job", trainer_epoch=1)
    assert told(harness.send(broke)) == [
        ("episode.aborted", SMALL),
        ("episode.aborted", BIG),
        ("engine.failed", SMALL),
    ]


def test_a_batch_that_is_closed_without_an_episode_takes_its_partners_too() -> None:
    harness = MultiModelHarness(batch_size=1, num_repeat=1, drain_s=10.0)
    (multi,) = harness.claim_multi_model(discard_timeout_s=1000.0)
    with harness.on(BIG):
        harness.call(multi[BIG])
        harness.play("t1")
    events = harness.tick(after_s=11)
    assert reasons(events) == {BIG: AbortReason.SUPERSEDED, SMALL: AbortReason.MULTI_MODEL}
    assert harness.core.hive.engine(SMALL).phase == Phase.ROLLING


def test_an_abort_that_ends_the_drain_of_another_engine_seals_its_batch_at_once() -> None:
    harness = MultiModelHarness(batch_size=1, num_repeat=1)
    harness.claim_multi_model()
    with harness.on(BIG):
        harness.play("t1")
    events = harness.stop(SMALL)
    assert ("batch.ready", BIG) in told(events)


def test_multi_model_episodes_whose_claim_was_not_confirmed_are_taken_back(harness: MultiModelHarness) -> None:
    harness.claim_multi_model()
    events = harness.tick(after_s=6)
    assert reasons(events) == {BIG: AbortReason.UNCONFIRMED, SMALL: AbortReason.MULTI_MODEL}


@pytest.mark.parametrize("engine", [BIG, SMALL])
def test_a_call_of_any_part_shows_that_the_answer_to_the_claim_arrived(harness: MultiModelHarness, engine: str) -> None:
    (multi,) = harness.claim_multi_model()
    with harness.on(engine):
        harness.call(multi[engine])
    assert harness.tick(after_s=6) == []


def test_a_confirmation_confirms_the_whole_claim(harness: MultiModelHarness) -> None:
    message = harness.multi_model_message()
    harness.request(message)
    harness.send(inbox.Touch(id="t", engine=BIG, confirmed=(message.claim,)))
    assert harness.tick(after_s=6) == []


@pytest.mark.parametrize("engine", [BIG, SMALL])
def test_r13_activity_of_one_part_is_activity_of_all(harness: MultiModelHarness, engine: str) -> None:
    (multi,) = harness.claim_multi_model(discard_timeout_s=100.0)
    harness.send(inbox.Touch(id="t", engine=engine, episodes=(multi[engine],)), after_s=60)
    assert not reasons(harness.tick(after_s=60))
    with harness.on(engine):
        harness.call(multi[engine])
    assert not reasons(harness.tick(after_s=60))
    events = harness.tick(after_s=60)
    assert reasons(events) == {BIG: AbortReason.IDLE, SMALL: AbortReason.MULTI_MODEL}
    why = refused(harness.end_multi_model(multi), Code.UNKNOWN_EPISODE)
    assert "idle for too long" in why, "what is said is why it began, not that the rest followed"


def test_what_frees_room_on_several_engines_lets_others_in_at_once() -> None:
    harness = MultiModelHarness(max_open_claims=1)
    (multi,) = harness.claim_multi_model()
    singles = []
    for name in (BIG, SMALL):
        with harness.on(name):
            singles.append(harness.claim_message("c2", wait_s=60))
            harness.send(singles[-1])
    harness.end_multi_model(multi)
    assert all(harness.was_granted(single) for single in singles)


# ---- what an operator sees ----


def test_a_multi_model_claim_has_one_line_with_the_sums_over_its_engines() -> None:
    harness = MultiModelHarness(BIG, SMALL, THIRD)
    first, second = harness.claim_multi_model(BIG, SMALL, client="c1", count=2, discard_timeout_s=60.0)
    harness.claim_multi_model(SMALL, THIRD, client="c2", discard_timeout_s=90.0)
    (single,) = harness.claim_on(BIG, "c3")
    began_ns = harness.now_ns
    for engine, episode in ((BIG, first[BIG]), (SMALL, second[SMALL]), (SMALL, second[SMALL])):
        with harness.on(engine):
            harness.now_ns = began_ns + 7_000_000_000
            harness.call(episode)
    hive, now_ns = harness.core.hive, began_ns + 10_000_000_000
    both, other = sorted(hive_status(hive, now_ns).multi_model, key=lambda row: row.client)
    assert both.engines == (BIG, SMALL)
    assert both.episodes == ((first[BIG], first[SMALL]), (second[BIG], second[SMALL]))
    assert (both.calls, both.completion_tokens) == (3, 9)
    assert (both.idle_s, other.idle_s) == (3.0, 10.0), "a call of one engine keeps all parts from going idle"
    text = render_status(hive, now_ns=now_ns)
    lines = text.splitlines()
    assert "3 multi-model episodes of 2 claims:" in lines
    assert [line.split() for line in lines[-2:]] == [
        ["small", "+", "third", "c2", "train", "1", "0", "10.0", "90"],
        ["big", "+", "small", "c1", "train", "2", "3", "3.0", "60"],
    ]
    assert text.count(single) == 1
    assert first[BIG] not in text
    assert "  2 of them are parts of multi-model episodes, which are listed below" in lines
    assert render_status(hive, THIRD, now_ns).splitlines()[-2].split()[0] == "engines", "those of this engine alone"
    harness.end_multi_model(first, second)
    assert [row.client for row in hive_status(harness.core.hive).multi_model] == ["c2"]


# ---- leaders and snapshots ----


def test_a_snapshot_has_the_partners_of_open_episodes(harness: MultiModelHarness) -> None:
    (multi,) = harness.claim_multi_model()
    snapshot = Snapshot(fold=FOLD, position=1, event_id="e", answered=1, hive=harness.core.hive)
    hive = snapshots.decode(snapshots.encode(snapshot)).hive
    assert hive == harness.core.hive
    harness.core = Core(hive)
    assert reasons(harness.abort(BIG, multi[BIG])).keys() == {BIG, SMALL}


def test_an_episode_whose_partner_is_not_in_the_fold_is_aborted_alone() -> None:
    """A fold between two events of a decision may lack a partner for a moment; nothing fails by it."""
    hive = MultiModelHarness().core.hive
    claimed = ev.EpisodeClaimed(engine=BIG, run=1, claim="c", client="c1", episodes=("big-1-1",), partners={SMALL: ()})
    evolve(hive, claimed)
    assert hive.engine(BIG).open["big-1-1"].partners == {}
    evolve(hive, msgspec.structs.replace(claimed, episodes=("big-1-2",), partners={SMALL: ("small-1-1",)}))
    assert list(hive.partners(hive.engine(BIG).open["big-1-2"])) == []


class RandomMultiModel:
    """Clients that claim, end and abort at random, on three engines that are stopped and started."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.harness = MultiModelHarness(BIG, SMALL, THIRD, max_open_claims=3)
        self.waiting: list[inbox.Claim] = []
        self.hive = folded(self.harness)

    def send(self, message: inbox.AnyMessage) -> None:
        harness = self.harness
        harness.now_ns += self.pick.choice((0, 100_000_000, 3_000_000_000))
        harness.seq += 1
        for pending in [*harness.core.receive(message, harness.seq, harness.now_ns), *harness.core.flush()]:
            for event in pending.decision.events:
                evolve(self.hive, event)
            check_whole(self.hive)
            for reply in pending.decision.replies:
                harness.answers[reply.command] = reply.answer  # type: ignore[assignment]
        assert harness.core.hive == self.hive
        if self.pick.random() < 0.02:  # the leader dies: what waits is sent again
            harness.core = Core(snapshots.decode(snapshots.encode(self.snapshot())).hive)
            harness.core.open_epoch("next")
            harness.core.live.ticked_ns = None
            evolve(self.hive, ev.EpochOpened(at_ns=self.hive.now_ns, epoch=self.hive.epoch + 1, leader="next"))

    def snapshot(self) -> Snapshot:
        return Snapshot(fold=FOLD, position=1, event_id="e", answered=1, hive=self.harness.core.hive)

    def step(self) -> None:
        pick, harness = self.pick, self.harness
        client = pick.choice(("ann", "bob", "eve"))
        name = pick.choice(harness.engines)
        engine = harness.core.hive.engine(name)
        mine = [episode for episode in engine.open.values() if episode.client == client]
        match pick.choice(
            ("claim", "claim", "multi-model", "multi-model", "end", "end", "end", "abort", "tick", "call", "stop")
        ):
            case "claim":
                with harness.on(name):
                    self.send(harness.claim_message(client, pick.randint(1, 2), wait_s=20.0))
            case "multi-model":
                engines = pick.sample(harness.engines, pick.choice((2, 2, 3)))
                self.send(harness.multi_model_message(*engines, client=client, count=pick.randint(1, 2), wait_s=20.0))
            case "end" if mine:
                episode = pick.choice(mine)
                multi = {name: episode.id, **episode.partners}
                with harness.on(name):
                    self.send(harness.multi_model_end(multi, client=client))
                    self.send(harness.end_message(episode.id, client=client))
            case "abort" if mine:
                self.send(inbox.Abort(id=harness.id(), engine=name, client=client, episodes=(mine[0].id,)))
            case "tick":
                self.send(inbox.Tick(id=harness.id()))
            case "call" if mine:
                noted = ev.NotedCall(mine[0].id, CallRef(harness.seq, harness.id(), b"d"), 1, 1, 0, 0)
                self.send(inbox.CallRecorded(id=harness.id(), engine=name, run=engine.run, call=noted))
            case "stop" if pick.random() < 0.2:
                self.send(inbox.Stop(id=harness.id(), engine=name))
                self.start(name)

    def start(self, name: str) -> None:
        harness = self.harness
        self.send(inbox.Start(id=harness.id(), engine=name))
        run = harness.core.hive.engine(name).run
        opens = inbox.TrainerOpens(id=harness.id(), engine=name, run=run, trainer="t1")
        saved = inbox.WeightsSaved(
            id=harness.id(), engine=name, run=run, step=0, trainer_epoch=1, weights=ev.Weights(where="/w")
        )
        alive = inbox.ReplicaAlive(id=harness.id(), engine=name, replica="r1", url="http://r1")
        for message in (opens, alive, saved):
            self.send(message)
        self.send(inbox.WeightsLoadedFact(id=harness.id(), engine=name, run=run, version=0, replica="r1"))

    def let_all_end(self) -> None:
        """End everything that is open, until nothing waits."""
        harness = self.harness
        for _ in range(200):
            several = [
                ({name: episode.id, **episode.partners}, episode)
                for name in harness.engines
                for episode in harness.core.hive.engine(name).open.values()
            ]
            if not several:
                break
            multi, episode = several[0]
            ended = harness.multi_model_end(multi, client=episode.client)
            self.send(ended)
            if not isinstance(harness.answers[ended.id], Done):
                with harness.on(engine_of(episode.id)):
                    self.send(harness.end_message(episode.id, client=episode.client))
        assert not any(harness.core.hive.engine(name).open for name in harness.engines)
        live = harness.core.live
        assert not live.multi_model, "with nothing open, nothing waits"
        assert not any(live.queues.values())


def check_whole(hive: Hive) -> None:
    """Check that every open multi-model episode is open on all of its engines, and each names the others."""
    for engine in hive.engines.values():
        assert len(engine.open) <= engine.collection.max_open_claims
        for episode in engine.open.values():
            whole: Episodes = {engine.name: episode.id, **episode.partners}
            for name, partner in episode.partners.items():
                found = hive.engine(name).open[partner]
                assert {name: partner, **found.partners} == whole
                assert (found.client, found.claim) == (episode.client, episode.claim)


@pytest.mark.parametrize("first", range(0, effort(100, 200), 50))
def test_multi_model_episodes_are_whole_after_every_decision_and_nothing_waits_for_ever(first: int) -> None:
    for seed in range(first, first + 50):
        world = RandomMultiModel(seed)
        try:
            for _ in range(150):
                world.step()
            world.let_all_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_single_claim_waits_as_before_where_no_multi_model_claim_does(harness: MultiModelHarness) -> None:
    assert isinstance(harness.request(inbox.Claim(id="x", engine=BIG, claim="x", client="c1")), Granted)
