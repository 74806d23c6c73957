"""Calls that were cut off at a limit of their job, and calls that came close to it."""

from dataclasses import replace

import msgspec
import pytest

from bombus.hive.records import CallRecord, FinishReason, LengthLimit
from bombus_trainer.algorithms.overlong import is_masked, soft_penalty
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup, prepare
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings

TURN_100 = {"max_response_length_in_one_turn": 100}
PENALTY = tiny_settings(TURN_100, overlong="penalty", overlong_buffer=20)


def cut(record: CallRecord, limit: str = "") -> CallRecord:
    """Return the call as one that ended for its length; without `limit`, as an earlier version recorded it."""
    choices = tuple(
        msgspec.structs.replace(choice, finish=FinishReason.LENGTH, limit=limit) for choice in record.choices
    )
    return msgspec.structs.replace(record, choices=choices)


def of_length(tokens: int, name: str = "c") -> CallRecord:
    return call(name, [1, 2], [3] * tokens)


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (95, -0.75), (100, -1.0)])
def test_the_penalty_of_a_call_grows_towards_its_limit(tokens: int, penalty: float) -> None:
    # at most 100 tokens, the last 20 of them penalised: (80 - tokens) / 20
    assert soft_penalty(of_length(tokens), PENALTY) == penalty


@pytest.mark.parametrize(("tokens", "penalty"), [(5, 0.0), (90, -0.5), (99, -0.95), (100, -1.0)])
def test_a_call_that_its_client_limited_is_penalised_only_for_its_length(tokens: int, penalty: float) -> None:
    assert soft_penalty(cut(of_length(tokens)), PENALTY) == penalty


def test_a_call_that_exhausted_the_models_length_gets_the_full_penalty() -> None:
    # a prompt of 2 tokens: 5 more fill a model of 7, and a model of 8 has room for another
    lengths = {"max_prompt_length": 1, "max_response_length": 6, "max_response_length_in_one_turn": 6}
    for length, penalty in ((7, -1.0), (8, 0.0)):
        settings = tiny_settings({**lengths, "max_model_len": length}, overlong="penalty", overlong_buffer=1)
        assert soft_penalty(cut(of_length(5)), settings) == penalty
        assert soft_penalty(of_length(5), settings) == 0.0, "it ended on its own"


@pytest.mark.parametrize("limit", list(LengthLimit))
def test_whatever_limit_cut_a_call_counts_but_its_own(limit: LengthLimit) -> None:
    record = cut(of_length(5), limit)
    masking = tiny_settings(TURN_100, overlong="mask")
    wanted = limit != LengthLimit.REQUEST
    assert is_masked((record,), masking) == wanted
    assert soft_penalty(record, PENALTY) == (-1.0 if wanted else 0.0)
    found = prepare(group(episode("a", 0.0, record), episode("b", 1.0, of_length(2))), masking, VOCAB)
    assert (found.cut, found.cut_by_request) == ((1, 0) if wanted else (0, 1))


def test_one_of_several_choices_is_enough_for_a_call_to_be_cut() -> None:
    both = cut(call("c", [1, 2], [3] * 4, [3] * 9))
    assert both.was_cut(turn_tokens_max=9, model_len_max=100)
    assert not both.was_cut(turn_tokens_max=10, model_len_max=100)
    assert both.was_cut(turn_tokens_max=10, model_len_max=11)


def group(*members: EpisodeCalls) -> list[EpisodeGroup]:
    return [EpisodeGroup("t", members)]


def test_a_penalty_lowers_the_reward_that_is_compared() -> None:
    settings = tiny_settings(
        TURN_100, overlong="penalty", overlong_buffer=20, overlong_penalty=2.0, normalise_by_std=False
    )
    # rewards 1 - 2 x 0.5 = 0 and 1: mean 0.5
    found = prepare(group(episode("a", 1.0, of_length(90)), episode("b", 1.0, of_length(2))), settings, VOCAB)
    assert [float(entry.advantages_T[-1]) for entry in found.groups[0].sequences] == [-0.5, 0.5]
    kept = prepare(group(episode("a", 1.0, of_length(90)), episode("b", 1.0, of_length(2))), tiny_settings(), VOCAB)
    assert not kept.groups[0].signal


def test_an_episodes_reward_is_lowered_by_the_penalty_of_its_worst_call_alone() -> None:
    settings = tiny_settings(TURN_100, overlong="penalty", overlong_buffer=20, normalise_by_std=False)
    long = [of_length(length, f"c{length}") for length in (90, 2, 95)]
    # rewards 1 - 0.75 and 1: the penalties of the other calls are 0.5 and 0
    found = prepare(group(episode("a", 1.0, *long), episode("b", 1.0, of_length(2))), settings, VOCAB)
    assert [float(entry.advantages_T[-1]) for entry in found.groups[0].sequences] == [-0.375] * 3 + [0.375]


def test_a_penalty_lowers_the_reward_of_that_call_only() -> None:
    settings = tiny_settings(TURN_100, overlong="penalty", overlong_buffer=20, normalise_by_std=False)
    first, second = of_length(2, "x"), call("y", [9], [4] * 90)
    other = replace(episode("b", 0.0, of_length(2, "z"), call("w", [8], [4])), call_rewards=(0.0, 0.0))
    # turn 1: 0 and 0; turn 2: -0.5 and 0, mean -0.25
    found = prepare(group(episode("a", 0.0, first, second, call_rewards=(0.0, 0.0)), other), settings, VOCAB)
    assert [float(entry.advantages_T[-1]) for entry in found.groups[0].sequences] == [0.0, -0.25, 0.0, 0.25]


def test_a_masked_episode_does_not_count_in_the_loss_and_still_counts_in_the_mean_reward() -> None:
    settings, longer = (
        tiny_settings({"max_response_length_in_one_turn": turn}, overlong="mask", normalise_by_std=False)
        for turn in (5, 6)
    )
    members = [episode("a", 0.0, cut(of_length(5))), episode("b", 1.0, of_length(2)), episode("c", 2.0, of_length(3))]
    found = prepare(group(*members), settings, VOCAB)
    (ready,) = found.groups
    assert [entry.sequence.episode for entry in ready.sequences] == ["b", "c"]
    assert [float(entry.advantages_T[-1]) for entry in ready.sequences] == [0.0, 1.0]  # the mean is 1
    assert ready.tokens == {"a": 0, "b": 2, "c": 3}
    assert [entry.first_id for entry in ready.sequences] == [0, 2]
    assert (found.terms, found.cut) == (5, 1)
    asked_for = prepare(group(*members), longer, VOCAB)
    assert (asked_for.terms, asked_for.cut, asked_for.cut_by_request) == (10, 0, 1)
