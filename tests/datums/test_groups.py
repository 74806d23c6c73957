"""Ended episodes as a rollout group, which our own trainer and outside ones read."""

import json
from time import process_time

import pytest

from bombus.datums.groups import EpisodeSequences, GroupedEpisode, group_of_episodes, sequences_of
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord
from bombus.hive.trajectories.records import RolloutGroup, int_rows
from bombus.hive.trajectories.training import why_not_trained
from bombus_trainer.data.batch import prepare
from bombus_trainer.data.rollout_groups import group_of
from tests.trainer.small_batches import VOCAB, call, tiny_settings


def played(reward: float, *records: CallRecord, call_rewards: tuple[float, ...] | None = None) -> EpisodeSequences:
    return sequences_of(GroupedEpisode(reward=reward, records=records, call_rewards=call_rewards))


def rows(group: RolloutGroup, packed: bytes) -> list[list[int]]:
    return int_rows(packed, group.sequence_lengths())


def test_each_episode_of_one_conversation_is_a_sequence_with_its_reward_as_score() -> None:
    first = call("a", [1, 2], [3, 4], logprob=-0.5)
    second = call("b", [5], [6], parent=first, logprob=-0.25)
    group = group_of_episodes([played(1.0, first, second), played(0.0, call("c", [1, 2], [7], logprob=-1.0))])
    assert rows(group, group.tokens) == [[1, 2, 3, 4, 5, 6], [1, 2, 7]]
    assert rows(group, group.masks) == [[-100, -100, 3, 4, -100, 6], [-100, -100, 7]]
    assert group.scores.rows([2]) == [[1.0, 0.0]]
    assert group.inference_logprobs is not None
    assert group.inference_logprobs.rows([6, 3]) == [[1.0, 1.0, -0.5, -0.5, 1.0, -0.25], [1.0, 1.0, -1.0]]
    assert (group.advantages, group.overrides, group.environment) == (None, b"", None)
    assert why_not_trained(group) == ""


def test_the_first_token_of_a_conversation_is_not_learnt_as_nothing_predicts_it() -> None:
    group = group_of_episodes([played(1.0, call("a", [], [2, 3]))])
    assert rows(group, group.masks) == [[-100, 3]]


def test_an_episode_of_several_conversations_counts_once_by_the_advantages_of_its_tokens() -> None:
    root = call("a", [1], [2])
    branches = [call("b", [4], [5], parent=root), call("c", [6], [7], parent=root)]
    group = group_of_episodes([played(3.0, root, *branches), played(1.0, call("d", [1], [8]))])
    assert group.sequences == 3
    assert group.scores.rows([3]) == [[3.0, 3.0, 1.0]]
    assert group.advantages is not None  # rewards 3 and 1 of two episodes: the mean is 2, and not 7/3
    assert group.advantages.rows([4, 4, 2]) == [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, -1.0]]
    assert why_not_trained(group) == ""
    sequences = prepare([group_of("g", group)], tiny_settings(adv_estimator="dr_grpo"), VOCAB).groups[0].sequences
    learnt = [sequence.advantages_T[sequence.sequence.loss_mask_T].tolist() for sequence in sequences]
    assert learnt == [[1.0, 1.0], [1.0], [-1.0]]


def test_rewards_of_calls_become_advantages_of_their_tokens() -> None:
    episodes = []
    for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 0.0))):
        first = call(name, [1], [2])
        episodes.append(played(0.5, first, call(name * 2, [3], [4], parent=first), call_rewards=rewards))
    group = group_of_episodes(episodes)
    assert group.advantages is not None  # turn 1 has rewards 1 and 0, turn 2 has 0 and 0
    assert group.advantages.rows([4, 4]) == [[0.0, 0.5, 0.0, 0.0], [0.0, -0.5, 0.0, 0.0]]


def test_rewards_of_many_calls_cost_little_more_than_the_episodes_themselves() -> None:
    records = [call("a0", [1], [2])]
    for number in range(1, 2_000):
        records.append(call(f"a{number}", [1] * 9, [2] * 9, parent=records[-1]))
    times = []
    for rewards in (None, (0.0,) * len(records)):
        began = process_time()
        group_of_episodes([played(1.0, *records, call_rewards=rewards)] * 4)
        times.append(process_time() - began)
    assert times[1] < 3 * times[0]


def test_a_temperature_is_told_for_each_sequence() -> None:
    group = group_of_episodes([played(1.0, call("a", [1], [2], temperature=0.7)), played(0.0, call("b", [1], [3]))])
    assert json.loads(group.overrides) == [{"temperature": 0.7}, {"temperature": 1.0}]
    assert why_not_trained(group) == ""


def test_episodes_that_cannot_be_a_group_say_why() -> None:
    with pytest.raises(ValueError, match="no token of its episodes can be trained on"):
        group_of_episodes([played(1.0, call("a", [1], [2], temperature=0.0))])
    first = call("a", [1], [2], temperature=0.5)
    with pytest.raises(ValueError, match="sampled at 2 temperatures"):
        group_of_episodes([played(1.0, first, call("b", [3], [4], parent=first))])
    with pytest.raises(LogCorrupted, match="logprob is not finite"):
        group_of_episodes([played(1.0, call("a", [1], [2], logprob=float("nan")))])
