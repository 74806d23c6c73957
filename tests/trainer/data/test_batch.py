"""From groups to terms: what is normalised over a batch, and the weight of each token."""

import numpy as np
import pytest

from bombus_trainer.data.batch import EpisodeGroup, mini_batches, prepare
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings


def two_groups() -> list[EpisodeGroup]:
    return [
        EpisodeGroup("t", (episode("a", 0.0, call("a", [1], [2, 3])), episode("b", 4.0, call("b", [1], [4])))),
        EpisodeGroup("u", (episode("c", 2.0, call("c", [5], [6])),)),
    ]


def advantages(estimator: str) -> list[float]:
    found = prepare(two_groups(), tiny_settings(adv_estimator=estimator), VOCAB)
    return [float(line.advantages_T[-1]) for group in found.groups for line in group.lines]


def test_reinforce_plus_plus_normalises_over_the_tokens_of_all_groups() -> None:
    # tokens 0, 0, 4, 2: mean 1.5, variance (2.25 + 2.25 + 6.25 + 0.25) / 3 = 11 / 3
    std = (11 / 3) ** 0.5
    assert advantages("reinforce_plus_plus") == pytest.approx([-1.5 / std, 2.5 / std, 0.5 / std])


def test_its_baseline_takes_the_groups_mean_away_first() -> None:
    # tokens -2, -2, 2, 0: mean -0.5, variance (2.25 + 2.25 + 6.25 + 0.25) / 3; a group of one is at its own mean
    std = (11 / 3) ** 0.5
    assert advantages("reinforce_plus_plus_baseline") == pytest.approx([-1.5 / std, 2.5 / std, 0.5 / std])


def test_tokens_that_were_not_sampled_have_no_advantage_after_normalisation() -> None:
    found = prepare(two_groups(), tiny_settings(adv_estimator="reinforce_plus_plus"), VOCAB)
    for group in found.groups:
        for line in group.lines:
            assert line.advantages_T.dtype == np.float32
            assert not line.advantages_T[line.sequence.calls_T < 0].any()


def test_equal_rewards_in_all_groups_give_no_signal() -> None:
    same = [EpisodeGroup("t", (episode("a", 1.0, call("a", [1], [2])), episode("b", 1.0, call("b", [1], [4]))))]
    assert not prepare(same, tiny_settings(adv_estimator="reinforce_plus_plus"), VOCAB).groups[0].signal


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("episode", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),  # three episodes, of 2, 1 and 1 tokens
        ("token", [1 / 4] * 4),
        ("constant", [1 / 30] * 4),  # three episodes, 10 tokens each
    ],
)
def test_each_aggregation_gives_tokens_their_weights(aggregation: str, weights: list[float]) -> None:
    lengths = {"max_response_length": 10, "max_response_length_in_one_turn": 10}
    settings = tiny_settings(lengths, loss_aggregation=aggregation, kl_coef=0.1)
    found = prepare(two_groups(), settings, VOCAB)
    (items,) = mini_batches(found, settings, 1, 0)
    assert np.concatenate([item.terms.weights_N for item in items]).tolist() == pytest.approx(weights)


@pytest.mark.parametrize("pull", ["kl_coef", "entropy_coef"])
def test_a_group_without_signal_is_computed_where_a_kl_term_or_a_bonus_trains_it(pull: str) -> None:
    for value, computed in ((0.0, 2), (0.1, 3)):
        settings = tiny_settings(**{pull: value})
        (items,) = mini_batches(prepare(two_groups(), settings, VOCAB), settings, 1, 0)
        assert len(items) == computed
