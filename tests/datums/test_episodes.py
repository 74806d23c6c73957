"""Ended episodes as data for a loss."""

import json
from array import array

import msgspec
import pytest

from bombus.config.algorithms import Estimator
from bombus.datums.episodes import EndedEpisode, datums_of, learnt_sequences, read_ended
from bombus.datums.groups import GroupedEpisode, group_of_episodes, sequences_of
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, CallStatus, unpack_logprobs, unpack_tokens
from bombus_trainer.data.batch import EpisodeGroup, prepare
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings


def ended(
    name: str,
    reward: float,
    *records: CallRecord,
    task: str = "t",
    call_rewards: tuple[float, ...] | None = None,
    sampler: str = "",
) -> EndedEpisode:
    return EndedEpisode(
        episode_uuid=name,
        task_id=task,
        reward=reward,
        calls=len(records),
        sequences=learnt_sequences(records),
        call_rewards=call_rewards,
        sampler=sampler,
    )


def test_a_line_has_the_exact_tokens_of_its_calls_and_ends_after_the_last_that_is_learnt() -> None:
    first = call("a", [1, 2], [3, 4], logprob=-0.5)
    second = call("b", [5], [6], parent=first, logprob=-0.25)
    greedy = call("c", [7], [8], parent=second, temperature=0.0)
    (sequence,) = learnt_sequences([first, second, greedy])
    assert unpack_tokens(sequence.tokens) == [1, 2, 3, 4, 5, 6]
    assert unpack_logprobs(sequence.logprobs) == [0.0, 0.0, -0.5, -0.5, 0.0, -0.25]
    assert array("i", sequence.calls).tolist() == [-1, -1, 0, 0, -1, 1]
    assert list(sequence.mask) == [0, 0, 1, 1, 0, 1]


def test_what_two_branches_share_is_learnt_in_the_first_and_a_parent_outside_is_not_learnt() -> None:
    outside = call("late", [1], [2])
    left, right = call("b", [4], [5], parent=outside), call("c", [6], [7], parent=outside)
    first, second = learnt_sequences([left, right], [outside])
    assert (unpack_tokens(first.tokens), list(first.mask)) == ([1, 2, 4, 5], [0, 0, 0, 1])
    assert (unpack_tokens(second.tokens), list(second.mask)) == ([1, 2, 6, 7], [0, 0, 0, 1])
    root = call("a", [1], [2])
    first, second = learnt_sequences([root, call("b", [4], [5], parent=root), call("c", [6], [7], parent=root)])
    assert (list(first.mask), list(second.mask)) == ([0, 1, 0, 1], [0, 0, 0, 1])


def test_an_episode_without_anything_to_learn_has_no_line_and_a_logprob_that_is_no_number_is_refused() -> None:
    assert learnt_sequences([]) == ()
    assert learnt_sequences([call("a", [1], [2], temperature=0.0)]) == ()
    assert learnt_sequences([call("a", [], [2])]) == (), "nothing comes before its first token"
    with pytest.raises(LogCorrupted, match="logprob is not finite"):
        learnt_sequences([call("a", [1], [2], logprob=float("nan"))])


def test_a_datum_is_shifted_by_one_and_has_the_reward_less_the_mean_of_its_task() -> None:
    good, bad = call("a", [1, 2], [3, 4], logprob=-0.5), call("b", [1, 2], [5], logprob=-1.5)
    other = call("c", [9], [8], logprob=-2.0)
    found = datums_of([ended("e1", 1.0, good), ended("x", 7.0, other, task="u"), ended("e2", 0.0, bad)])
    assert [datum.episode for datum in found] == ["e1", "e2", "x"]
    first, second, alone = found
    assert (first.tokens, first.target_tokens) == ([1, 2, 3], [2, 3, 4])
    assert (first.logprobs, first.mask, first.advantages) == ([0.0, -0.5, -0.5], [0.0, 1.0, 1.0], [0.0, 0.5, 0.5])
    assert (second.target_tokens, second.logprobs, second.advantages) == ([2, 5], [0.0, -1.5], [0.0, -0.5])
    assert (alone.task, alone.reward, alone.advantages) == ("u", 7.0, [0.0]), "there is nothing to compare it with"


def test_episodes_of_one_task_that_have_sampled_from_different_weights_are_not_compared() -> None:
    rewards = (("one", 0.0), ("one", 0.0), ("two", 1.0), ("two", 0.0))
    found = datums_of(
        [ended(str(n), reward, call(str(n), [1], [2]), sampler=of) for n, (of, reward) in enumerate(rewards)]
    )
    assert [datum.advantages for datum in found] == [[0.0], [0.0], [0.5], [-0.5]]


def test_rewards_of_calls_are_compared_turn_by_turn() -> None:
    a1 = call("a1", [1], [2])
    b1 = call("b1", [1], [4])
    first = ended("e1", 0.5, a1, call("a2", [3], [5], parent=a1), call_rewards=(1.0, 0.0))
    second = ended("e2", 0.5, b1, call("b2", [3], [6], parent=b1), call_rewards=(0.0, 1.0))
    found = datums_of([first, second])
    assert found[0].advantages == [0.5, 0.0, -0.5]
    assert found[1].advantages == [-0.5, 0.0, 0.5]


def test_the_estimator_is_the_callers_choice_and_one_over_batches_is_refused_in_words() -> None:
    pair = [ended("e1", 1.0, call("a", [1], [2])), ended("e2", 0.0, call("b", [1], [3]))]
    scaled = datums_of(pair, Estimator.GRPO)
    assert scaled[0].advantages == pytest.approx([0.5 / 0.5**0.5], rel=1e-5)
    assert datums_of(pair, Estimator.RLOO)[0].advantages == [1.0]
    with pytest.raises(ValueError, match="choose dr_grpo, grpo, rloo or opo"):
        datums_of([], Estimator.REINFORCE_PLUS_PLUS)


def test_an_episode_travels_as_json() -> None:
    episode = ended("e1", 1.0, call("a", [1], [2], logprob=-0.1))
    assert read_ended([json.loads(msgspec.json.encode(episode))]) == [episode]
    with pytest.raises(msgspec.MsgspecError):
        read_ended([{"episode_uuid": 1}])


def test_at_every_api_only_tokens_that_are_learnt_weigh_in_the_baseline_of_opo() -> None:
    greedy = call("a1", [1], [2, 3, 4, 5, 6], temperature=0.0)
    formed = call("a2", [7], [8, 9], [8, 8], parent=greedy, constrained=("response_format",))
    lost = call("a3", [1], [2, 3], status=CallStatus.CUT_OFF)
    unprompted = call("a4", [], [2, 3], [2, 4])  # nothing predicts the first token of each
    calls = ((greedy, formed, lost, unprompted), (call("b1", [1], [2, 3]),))
    sequences = datums_of([ended(f"e{n}", 1.0 - n, *of) for n, of in enumerate(calls)], Estimator.OPO)
    by_datum = {datum.episode: max(datum.advantages, key=abs) for datum in sequences}
    played = [sequences_of(GroupedEpisode(reward=1.0 - n, records=of)) for n, of in enumerate(calls)]
    given = group_of_episodes(played, Estimator.OPO).advantages
    assert given is not None
    (of_group,) = given.rows([len(given)])
    job = EpisodeGroup("t", tuple(episode(f"e{n}", 1.0 - n, *of) for n, of in enumerate(calls)))
    (prepared,) = prepare([job], tiny_settings(adv_estimator="opo"), VOCAB).groups
    of_job = {sequence.sequence.episode: float(sequence.advantages_T[-1]) for sequence in prepared.sequences}
    # two tokens of each episode are learnt, so the baseline is the mean
    assert by_datum == of_job == {"e0": 0.5, "e1": -0.5}
    assert {each for each in of_group if each} == {0.5, -0.5}
