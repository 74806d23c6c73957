"""Which rollout groups our own trainer trains, and what it tells the senders of the others."""

import pytest
from msgspec.structs import replace

from bombus.hive.trajectories.records import PackedCandidates, PackedFloats, RolloutGroup, pack_ints
from bombus.hive.trajectories.training import Handling, handling_of, why_not_trained

# Two sequences, of three tokens and of two; the first of each is a prompt.
GROUP = RolloutGroup(
    lengths=pack_ints([3, 2]),
    tokens=pack_ints([5, 6, 7, 5, 8]),
    masks=pack_ints([-100, 6, 7, -100, 8]),
    scores=PackedFloats.of([1.0, 0.0]),
    inference_logprobs=PackedFloats.of([1.0, -0.5, -0.25, 1.0, -2.0]),
)
CANDIDATES = PackedCandidates(counts=pack_ints([0, 0, 0, 0, 0]))


def test_a_group_of_tokens_masks_and_scores_is_trained() -> None:
    assert why_not_trained(GROUP) == ""
    assert why_not_trained(replace(GROUP, inference_logprobs=None, images=b"[null,null]"), tokens_max=3) == ""


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (
            replace(GROUP, ref_logprobs=PackedFloats.of([0.0] * 5)),
            "ref_logprobs is not accepted by this run's own trainer",
        ),
        (replace(GROUP, distill_token_ids=CANDIDATES), "distill_token_ids is not accepted by this run's own trainer"),
        (replace(GROUP, distill_logprobs=CANDIDATES), "distill_logprobs is not accepted by this run's own trainer"),
        (replace(GROUP, images=b'[null,"aGk="]'), "images is not accepted by this run's own trainer"),
        (replace(GROUP, overrides=b'[{"kl_beta":0.1},{}]'), "overrides[0].kl_beta is not known"),
        (replace(GROUP, overrides=b"[{}]"), "overrides must be a list with one entry for each of 2 sequences"),
        (
            replace(GROUP, overrides=b'[null,{"temperature":"hot"}]'),
            "overrides[1].temperature must be a number from 0 to",
        ),
        (replace(GROUP, overrides=b'[null,{"set_advantage_to_zero":1}]'), "overrides[1].set_advantage_to_zero must be"),
        (replace(GROUP, group_overrides=b'{"lr":1}'), "group_overrides.lr is not known"),
        (replace(GROUP, masks=pack_ints([-100, 6, 1, -100, 8])), "masks[0][2] is 1: a mask must be -100 if the token"),
        (
            replace(GROUP, inference_logprobs=PackedFloats.of([1.0, -1.0, -1.0, 1.0, 1.0])),
            "inference_logprobs[1][1] is",
        ),
        (
            replace(GROUP, advantages=PackedFloats.of([1.0] * 4), advantage_lengths=pack_ints([3, 1])),
            "advantages[1] does not have one number for each token",
        ),
        (replace(GROUP, advantages=PackedFloats.of([1e39, 0, 0, 0, 0])), "advantages[0] has a number that does not"),
    ],
)
def test_what_would_be_trained_otherwise_than_it_was_meant_is_refused_by_name(group: RolloutGroup, why: str) -> None:
    assert why_not_trained(group).startswith(why)


def test_a_sequence_over_the_runs_length_is_refused() -> None:
    assert why_not_trained(GROUP, tokens_max=2).startswith("A sequence has 3 tokens, but the run's max_token_len is 2")


def test_the_nearest_temperature_counts() -> None:
    group = replace(GROUP, group_overrides=b'{"temperature":0.5}')
    assert handling_of(group) == [Handling(0.5), Handling(0.5)]
    group = replace(group, generation_params=b'{"temperature":0.7,"top_p":1}')
    assert handling_of(group) == [Handling(0.7), Handling(0.7)]
    group = replace(group, overrides=b'[{"temperature":0.9},{"set_advantage_to_zero":true}]')
    assert handling_of(group) == [Handling(0.9), Handling(0.7, zeroed=True)]


def test_greedy_sampling_counts_as_temperature_one() -> None:
    assert handling_of(replace(GROUP, generation_params=b'{"temperature":0}')) == [Handling(), Handling()]
