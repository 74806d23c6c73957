"""Episodes in a run of training operations: they sample from a saved model, and their client takes them."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, DropReason, EpisodeType, OperationLimits, SamplerWeights
from bombus.hive.inbox import BASE_SAMPLER, Accepted, Done, Granted
from bombus.hive.state import Phase
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.operations_in_memory import MODEL, SESSION, OperationHarness, saved

SNAPSHOT = f"{MODEL}/sampler/step-1"
DAY_S = 86_400.0


def with_snapshot(owner: str = "", **rules: object) -> OperationHarness:
    """Return a run with one saved model. Its clients show no life, so they have to live for long."""
    harness = OperationHarness()
    if rules:
        harness.configure(Collection(**rules))  # type: ignore[arg-type]
    harness.open_session(idle_s=7 * DAY_S, owner=owner)
    harness.create()
    harness.serve()
    harness.done("0", made=ev.ModelShape(adapter=ev.AdapterShape(rank=8, alpha=16.0)))
    save(harness, "1", "step-1")
    return harness


def save(harness: OperationHarness, key: str, name: str, ttl_s: float = 0.0) -> None:
    harness.operate(key, "save_weights")
    harness.done(key, saved=saved(name, "sampler", ttl_s))


def refused(answer: inbox.AnyAnswer, code: Code) -> str:
    assert isinstance(answer, inbox.Refusal), answer
    assert answer.code == code
    return answer.why


def take(harness: CoreHarness, *episodes: str, client: str = "c1") -> inbox.AnyAnswer:
    return harness.request(inbox.Take(id=harness.id(), engine=ENGINE, client=client, episodes=episodes))


def played(harness: OperationHarness, reward: float = 1.0, client: str = "c1", owner: str = "") -> str:
    (episode,) = harness.claim(client, sampler=SNAPSHOT, owner=owner)
    harness.call(episode, 0)
    assert isinstance(harness.end(episode, reward=reward, client=client), Done)
    return episode


def test_an_episode_is_claimed_from_a_saved_model_whose_address_is_on_the_log() -> None:
    harness = with_snapshot()
    answer = harness.request(harness.claim_message(count=2, sampler=SNAPSHOT))
    assert isinstance(answer, Granted)
    assert (answer.episodes, answer.version) == (("main-1-1", "main-1-2"), 0)
    weights = SamplerWeights(checkpoint=SNAPSHOT, address="aa", folder="/weights/step-1")
    claimed = harness.log[-1]
    assert isinstance(claimed, ev.EpisodeClaimed)
    assert claimed.sampler == weights
    assert harness.engine.open["main-1-2"].sampler == weights


def test_an_episode_can_play_with_the_base_of_the_run() -> None:
    harness = with_snapshot()
    (episode,) = harness.claim(sampler=BASE_SAMPLER)
    assert harness.engine.open[episode].sampler == SamplerWeights()


def test_a_claim_that_names_no_saved_model_of_the_run_is_refused_in_words() -> None:
    harness = with_snapshot()
    why = refused(harness.request(harness.claim_message()), Code.UNSUPPORTED)
    assert "say which of its saved models the episodes sample from" in why
    why = refused(harness.request(harness.claim_message(sampler=f"{MODEL}/sampler/none")), Code.UNKNOWN_MODEL)
    assert why == f"There is no saved model {MODEL}/sampler/none here, or it was removed: save one."


def test_a_saved_model_of_all_weights_or_on_another_base_is_refused_in_words() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    harness.serve()
    harness.done("0", made=ev.ModelShape())
    save(harness, "1", "whole")
    why = refused(harness.request(harness.claim_message(sampler=f"{MODEL}/sampler/whole")), Code.UNSUPPORTED)
    assert "contains all the weights of its model" in why

    harness = with_snapshot()
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    harness.create("s:train:1", base="org/other")
    harness.serve()
    why = refused(harness.request(harness.claim_message(sampler=SNAPSHOT)), Code.UNKNOWN_MODEL)
    assert why == f"{SNAPSHOT} is an adapter on tiny, but engine main now runs org/other."


def test_episodes_play_with_saved_models_of_their_own_clients_and_with_those_that_are_published() -> None:
    harness = with_snapshot(owner="ann")
    why = refused(harness.request(harness.claim_message(sampler=SNAPSHOT, owner="eve")), Code.UNKNOWN_MODEL)
    assert why == f"There is no saved model {SNAPSHOT} here, or it was removed: save one."
    for owner in ("ann", ""):
        assert isinstance(harness.request(harness.claim_message(sampler=SNAPSHOT, owner=owner)), Granted)
    mark = {"model": MODEL, "use": "sampler", "name": "step-1", "public": True}
    harness.request(inbox.PublishWeights(id=harness.id(), engine=ENGINE, **mark))  # type: ignore[arg-type]
    assert isinstance(harness.request(harness.claim_message(sampler=SNAPSHOT, owner="eve")), Granted)


def test_a_run_that_trains_its_own_policy_takes_no_sampler_and_an_engine_that_is_offline_neither() -> None:
    harness = CoreHarness()
    refused(harness.request(harness.claim_message(sampler=BASE_SAMPLER)), Code.WRONG_PHASE)
    harness.boot()
    why = refused(harness.request(harness.claim_message(sampler=BASE_SAMPLER)), Code.UNSUPPORTED)
    assert "trains the model that its episodes sample from: leave out `sampler`" in why


def test_r17_ended_episodes_make_no_batch_however_many_they_are_and_their_client_takes_them() -> None:
    harness = with_snapshot(batch_size=1, num_repeat=2)
    episodes = [played(harness, reward) for reward in (0.0, 1.0, 1.0)]
    assert harness.phase() == Phase.ROLLING
    assert harness.engine.batch is None
    assert [harness.engine.pool[each].sampler for each in episodes] == [SNAPSHOT] * 3
    assert isinstance(take(harness, *episodes[:2], "main-1-99"), Done)
    taken = harness.log[-1]
    assert isinstance(taken, ev.EpisodesTaken)
    assert (taken.client, taken.episodes) == ("c1", tuple(episodes[:2]))
    assert list(harness.engine.pool) == episodes[2:]
    assert harness.engine.counters.taken == 2
    before = len(harness.log)
    assert isinstance(take(harness, *episodes[:2]), Done)
    assert len(harness.log) == before, "those that are gone are skipped"


def test_episodes_can_be_taken_after_the_run_but_not_those_of_others_or_of_a_job() -> None:
    harness = with_snapshot()
    episode = played(harness)
    refused(take(harness, episode, client="c2"), Code.NOT_YOUR_EPISODE)
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert isinstance(take(harness, episode), Done)
    assert not harness.engine.pool

    harness2 = CoreHarness()
    harness2.boot()
    refused(take(harness2, harness2.play("t1")), Code.UNSUPPORTED)


def test_episodes_are_aborted_and_time_out_there_as_elsewhere() -> None:
    harness = with_snapshot()
    first, second = harness.claim(count=2, sampler=SNAPSHOT, discard_timeout_s=10.0)
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=(harness.engine.open[first].claim,)))
    harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=(first,)))
    assert list(harness.engine.open) == [second]
    harness.tick(after_s=11.0)
    assert harness.engine.closed[second].aborted == ev.AbortReason.IDLE


def test_what_is_too_much_is_dropped_of_whoever_has_most_by_the_name_of_its_key() -> None:
    harness = with_snapshot(max_pool_episodes=4)
    anns = [played(harness, client="a1", owner="ann"), played(harness, client="a2", owner="ann")]
    eves = [played(harness, client=f"e{number}", owner="eve") for number in range(6)]
    assert list(harness.engine.pool) == [*anns, *eves[-2:]]
    nameless = [played(harness, client=f"c{number}") for number in range(2)]
    assert list(harness.engine.pool) == [anns[1], eves[-1], *nameless]


def test_what_nobody_takes_is_dropped_after_its_time_and_beyond_the_limits_the_oldest_first() -> None:
    harness = with_snapshot(max_pool_episodes=2, operations=OperationLimits(episodes_s=100.0))
    first, second, third = (played(harness) for _ in range(3))
    dropped = harness.log[-1]
    assert isinstance(dropped, ev.GroupDropped)
    assert (dropped.reason, dropped.episodes) == (DropReason.OVERFLOW, (first,))
    assert list(harness.engine.pool) == [second, third]
    harness.tick(after_s=99.0)
    assert list(harness.engine.pool) == [second, third]
    harness.tick(after_s=1.0)
    dropped = harness.log[-1]
    assert isinstance(dropped, ev.GroupDropped)
    assert (dropped.reason, dropped.episodes) == (DropReason.UNTAKEN, (second, third))


def test_evaluation_episodes_of_saved_models_are_in_no_statistics_of_versions() -> None:
    harness = with_snapshot()
    (episode,) = harness.claim(sampler=SNAPSHOT, type=EpisodeType.EVAL)
    assert isinstance(harness.end(episode), Done)
    assert (harness.engine.evals, harness.engine.pool) == ({}, {})


def test_a_saved_model_outlives_its_time_while_an_open_episode_samples_from_it() -> None:
    harness = with_snapshot()
    save(harness, "2", "short", ttl_s=100.0)
    name = f"{MODEL}/sampler/short"
    (episode,) = harness.claim(sampler=name, discard_timeout_s=1000.0)
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=(harness.engine.open[episode].claim,)))
    harness.tick(after_s=200.0)
    assert name in harness.clients.kept
    harness.end(episode)
    harness.tick()
    assert name not in harness.clients.kept


def test_a_claim_that_waited_until_its_saved_model_was_removed_is_refused() -> None:
    harness = with_snapshot(max_open_claims=1)
    (episode,) = harness.claim(sampler=SNAPSHOT)
    waiting = harness.claim_message("c2", sampler=SNAPSHOT, wait_s=60.0)
    harness.send(waiting)
    assert waiting.id not in harness.answers
    harness.send(inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="sampler", name="step-1"))
    harness.end(episode)
    refused(harness.answers[waiting.id], Code.UNKNOWN_MODEL)


def test_room_for_a_save_is_not_made_of_one_that_an_open_episode_samples_from() -> None:
    harness = with_snapshot(operations=OperationLimits(checkpoints_max=3))  # one of which has a name
    save(harness, "2", "sample-2", DAY_S)
    save(harness, "3", "sample-3", DAY_S)
    (episode,) = harness.claim(sampler=f"{MODEL}/sampler/sample-2")
    save(harness, "4", "sample-4", DAY_S)
    assert [each.noted.saved.name for each in harness.clients.kept.values()] == ["step-1", "sample-2", "sample-4"]
    harness.claim(sampler=f"{MODEL}/sampler/sample-4")
    why = refused(harness.operate("5", "save_weights"), Code.QUOTA)
    assert why.startswith("3 saved models are kept, 3 of them by this key")
    assert why.endswith("remove some that are no longer needed.")
    assert isinstance(harness.end(episode, reward=1.0), Done)
    save(harness, "5", "sample-5", DAY_S)
    assert [each.noted.saved.name for each in harness.clients.kept.values()] == ["step-1", "sample-4", "sample-5"]


def test_room_for_a_save_is_made_first_of_what_models_that_have_ended_left_behind() -> None:
    harness = OperationHarness()
    harness.limits(checkpoints_max=4)
    for session, owner in (("ended", "ann"), ("others", "eve"), ("now", "ann")):
        harness.open_session(session, idle_s=7 * DAY_S, owner=owner)
        assert isinstance(harness.create(session, session), Accepted)
    harness.serve()
    for model in ("ended", "others", "now"):
        harness.done("0", model, made=ev.ModelShape(adapter=ev.AdapterShape(rank=8, alpha=16.0)))

    def sampled(key: str, model: str) -> set[str]:
        assert isinstance(harness.operate(key, "save_weights", model, session=model), Accepted)
        harness.done(key, model, saved=saved(f"sample-{key}", "sampler", DAY_S))
        return {name.replace("/sampler/sample", "") for name in harness.clients.kept}

    for key, model in (("1", "now"), ("1", "ended"), ("1", "others")):
        sampled(key, model)
    assert sampled("2", "ended") == {"now-1", "ended-1", "others-1", "ended-2"}
    assert sampled("3", "ended") == {"now-1", "ended-2", "others-1", "ended-3"}, "its own oldest: none has ended"
    harness.close_session("ended", save=False)
    (ends,) = [key for key, each in harness.clients.models["ended"].operations.items() if each.waits]
    harness.done(ends, "ended", closes=True)
    assert sampled("2", "now") == {"now-1", "ended-3", "others-1", "now-2"}
    assert sampled("3", "now") == {"now-1", "now-3", "others-1", "now-2"}
    assert sampled("4", "now") == {"now-4", "now-3", "others-1", "now-2"}, "another key's is not touched"


@pytest.mark.parametrize("plays", [True, False])
def test_a_run_without_models_goes_on_while_an_episode_plays(plays: bool) -> None:
    harness = with_snapshot()
    if plays:
        (episode,) = harness.claim(sampler=SNAPSHOT, discard_timeout_s=DAY_S)
        harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=(harness.engine.open[episode].claim,)))
    harness.close_session(SESSION, save=False)
    (ends,) = [key for key, each in harness.model.operations.items() if each.waits]
    harness.done(ends, closes=True)
    harness.tick(after_s=400.0)
    assert harness.phase() == (Phase.ROLLING if plays else Phase.OFFLINE)
