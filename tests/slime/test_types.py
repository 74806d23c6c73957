"""`Sample`, as hook files fill it in."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from bombus.slime.filters import as_filter_output, check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from bombus.slime.outcomes import output_of
from bombus.slime.relay import SampledCall
from bombus.slime.types import SlimeSample

ONE = Namespace(reward_key=None)


def sample_of(**more: object) -> SlimeSample:
    return SlimeSample(**{"tokens": [1, 2, 3, 4], "response_length": 2, "reward": 1.0, **more})  # type: ignore[arg-type]


def test_tokens_of_the_model_and_others_are_told_apart_by_the_mask() -> None:
    sample = SlimeSample(tokens=[1, 2])
    meta = {"finish_reason": {"type": "stop"}, "cached_tokens": 1, "prompt_tokens": 4}
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.25], meta_info=meta, text="ab")
    sample.append_response_tokens(tokens=[5], trainable=False, text="c")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4, 5], "abc", 3)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-0.5, -0.25, 0.0])
    assert sample.status is SlimeSample.Status.COMPLETED
    assert (sample.effective_response_length, sample.prefix_cache_info.prefix_cache_hit_rate) == (2, 0.25)


def test_a_hook_may_keep_the_lists_that_tokens_are_appended_to_as_retool_does() -> None:
    sample = SlimeSample(tokens=[1, 2], loss_mask=[], rollout_log_probs=[])
    tokens, mask, scores = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[3], log_probs=[-0.5])
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert (tokens, mask, scores) == ([1, 2, 3, 4], [1, 0], [-0.5, 0.0])


def test_masks_and_logprobs_begin_with_what_was_there_without_them() -> None:
    sample = SlimeSample(tokens=[1, 2], response_length=1)
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0], [0.0, 0.0])
    with pytest.raises(ValueError, match="has tokens without rollout_log_probs"):
        SlimeSample(tokens=[1, 2], response_length=1).append_response_tokens(tokens=[3], log_probs=[0.0])


def test_the_end_of_an_answer_is_taken_by_the_name_that_it_had_in_slime_before() -> None:
    sample = SlimeSample()
    sample.update_from_meta_info(ONE, {"finish_reason": {"type": "length"}, "weight_version": 3})
    assert (sample.status, sample.weight_versions) == (SlimeSample.Status.TRUNCATED, ["3"])


@pytest.mark.parametrize(
    ("reason", "status"),
    [("length", "truncated"), ("abort", "aborted"), ("stop", "completed"), ("unheard of", "pending")],
)
def test_the_reason_of_an_end_is_the_status(reason: str, status: str) -> None:
    sample = SlimeSample()
    sample.append_response_tokens(meta_info={"finish_reason": {"type": reason}})
    assert sample.status.value == status


@pytest.mark.parametrize(
    ("tokens", "log_probs", "trainable", "why"),
    [
        ([1, 2], [0.0], True, "1 log_probs were given for 2 tokens"),
        ([1], None, True, "need their log_probs"),
        ([1], [0.0], False, "have no log_probs"),
    ],
)
def test_tokens_and_logprobs_that_do_not_fit_are_refused(
    tokens: list[int], log_probs: list[float] | None, trainable: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        SlimeSample().append_response_tokens(tokens=tokens, log_probs=log_probs, trainable=trainable)


def test_a_sample_is_read_back_with_what_a_hook_has_added_to_it() -> None:
    sample = sample_of(status=SlimeSample.Status.TRUNCATED)
    sample.rounds = 3  # type: ignore[attr-defined]
    again = SlimeSample.from_dict(sample.to_dict())
    assert again == sample
    assert (vars(again)["rounds"], again.to_dict()["status"]) == (3, "truncated")


def test_a_group_of_equal_rewards_is_dropped_under_their_value() -> None:
    equal = [sample_of(reward=0.5), [sample_of(reward=0.5), sample_of(reward=0.5)]]
    output = check_reward_nonzero_std(ONE, equal)
    assert (output.keep, output.reason) == (False, "zero_std_0.5")
    assert check_reward_nonzero_std_with_fallback(ONE, [sample_of()]).keep_when_insufficient
    assert check_reward_nonzero_std(ONE, [sample_of(), sample_of(reward=0.0)]).keep
    assert check_reward_nonzero_std(ONE, [sample_of(reward=0.5), sample_of(reward=0.51)]).keep
    assert as_filter_output(False).keep is False


def test_samples_of_different_rewards_reward_the_calls_that_they_have() -> None:
    first, second = sample_of(reward=1.0), sample_of(tokens=[7, 8], response_length=1, reward=0.0)
    calls = [SampledCall("a", [1, 2], [3]), SampledCall("b", [7], [8])]
    assert output_of([first, second], calls, ONE).reward == {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match="a call is in none of the samples"):
        output_of([first, second], [*calls, SampledCall("c", [9], [9])], ONE)


def test_equal_calls_have_the_rewards_of_equal_samples_in_their_order() -> None:
    samples = [sample_of(reward=reward) for reward in (0.25, 1.0, 0.5)]
    calls = [SampledCall(name, [1, 2], [3, 4]) for name in "abc"]
    assert output_of(samples, calls, ONE).reward == {"a": 0.25, "b": 1.0, "c": 0.5}


def test_a_call_that_several_samples_begin_with_has_the_mean_of_their_rewards() -> None:
    samples = [sample_of(tokens=[1, 2, 3, 4], reward=1.0), sample_of(tokens=[1, 2, 3, 5], reward=0.5)]
    calls = [SampledCall("both", [1], [2]), SampledCall("first", [1, 2], [3, 4]), SampledCall("second", [1, 2], [3, 5])]
    assert output_of(samples, calls, ONE).reward == {"both": 0.75, "first": 1.0, "second": 0.5}


def test_answers_of_one_call_have_their_mean() -> None:
    samples = [sample_of(tokens=[1, 2, 3, 4], reward=1.0), sample_of(tokens=[1, 2, 3, 5], reward=0.5)]
    calls = [SampledCall("two", [1, 2], [3, 4]), SampledCall("two", [1, 2], [3, 5])]
    assert output_of(samples, calls, ONE).reward == {"two": 0.75}


def test_calls_of_the_same_tokens_are_not_equal_where_their_prompts_differ() -> None:
    samples = [sample_of(tokens=[1, 2, 3], reward=reward) for reward in (1.0, 0.5)]
    calls = [SampledCall("long", [1], [2, 3]), SampledCall("short", [1, 2], [3])]
    assert output_of(samples, calls, ONE).reward == {"long": 0.75, "short": 0.75}


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor([0.5])])
def test_a_number_of_numpy_or_torch_is_a_reward(reward: object) -> None:
    assert output_of([sample_of(reward=reward)], [], ONE).reward == 0.5
    assert output_of([sample_of(reward={"score": np.int64(1)})], [], Namespace(reward_key="score")).reward == 1.0


def test_a_status_may_be_a_text_but_no_other_than_slime_has() -> None:
    assert output_of([sample_of(status="truncated")], [], ONE).log_metrics["truncated"] == 1.0
    assert sample_of(status="completed").to_dict()["status"] == "completed"
    with pytest.raises(ValueError, match="'done', which is not one of pending, completed"):
        output_of([sample_of(status="done")], [], ONE)


def test_what_an_episode_cannot_say_of_a_sample_is_counted() -> None:
    calls = [SampledCall("a", [1, 2], [3, 4]), SampledCall("b", [9], [9])]
    output = output_of([sample_of(loss_mask=[1, 0])], calls, ONE)
    assert output.log_metrics["calls_not_in_samples"] == 1.0
    assert output.log_metrics["sampled_tokens_masked"] == 1.0


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (None, "not NoneType None$"),
        (float("nan"), "not a finite number$"),
        ("1", "not str '1'$"),
        ({"score": 1.0}, "choose one of several with --reward-key NAME"),
    ],
)
def test_a_reward_that_is_no_number_is_refused(reward: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        output_of([sample_of(reward=reward)], [], ONE)


@pytest.mark.parametrize("reward", [1.0, {"points": 1.0}])
def test_a_reward_without_the_value_that_counts_is_refused(reward: object) -> None:
    with pytest.raises(ValueError, match="without the --reward-key 'score'"):
        output_of([sample_of(reward=reward)], [], Namespace(reward_key="score"))
