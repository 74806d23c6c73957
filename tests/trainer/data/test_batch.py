"""From groups to terms: what is normalised over a batch, and the weight of each token."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bombus.datums.differences import differences_of_calls
from bombus.hive.records import CallRecord, pack_logprobs, unpack_logprobs
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup, answer_ends, mini_batches, prepare
from bombus_trainer.data.fates import TrainedTerms
from bombus_trainer.data.sequences import merge_calls
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings


def two_groups() -> list[EpisodeGroup]:
    return [
        EpisodeGroup("t", (episode("a", 0.0, call("a", [1], [2, 3])), episode("b", 4.0, call("b", [1], [4])))),
        EpisodeGroup("u", (episode("c", 2.0, call("c", [5], [6])),)),
    ]


def advantages(estimator: str) -> list[float]:
    found = prepare(two_groups(), tiny_settings(adv_estimator=estimator), VOCAB)
    return [float(entry.advantages_T[-1]) for group in found.groups for entry in group.sequences]


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
        for entry in group.sequences:
            assert entry.advantages_T.dtype == np.float32
            assert not entry.advantages_T[entry.sequence.calls_T < 0].any()


def test_the_ends_of_answers_are_known_among_the_terms_of_a_batch() -> None:
    turns = episode("d", 1.0, call("d", [1], [2, 3, 4]), call("d", [1, 2, 3, 4, 9], [5, 6]))
    batch = prepare([*two_groups(), EpisodeGroup("v", (turns,))], tiny_settings(), VOCAB)
    ends = {name: np.flatnonzero(of_class).tolist() for name, of_class in answer_ends(batch).items()}
    assert ends == {"first": [0, 2, 3, 4, 7], "last": [1, 2, 3, 6, 8]}


def test_equal_rewards_in_all_groups_give_no_signal() -> None:
    same = [EpisodeGroup("t", (episode("a", 1.0, call("a", [1], [2])), episode("b", 1.0, call("b", [1], [4]))))]
    assert not prepare(same, tiny_settings(adv_estimator="reinforce_plus_plus"), VOCAB).groups[0].signal


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("episode", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),  # three episodes, of 2, 1 and 1 tokens
        ("token", [1 / 4] * 4),
        ("constant", [1 / 30] * 4),  # three episodes, 10 tokens each
        ("episode_sum", [1 / 3] * 4),
        ("token_sum", [1.0] * 4),
    ],
)
def test_each_aggregation_gives_tokens_their_weights(aggregation: str, weights: list[float]) -> None:
    lengths = {"max_response_length": 10, "max_response_length_in_one_turn": 10}
    settings = tiny_settings(lengths, loss_aggregation=aggregation, kl_coef=0.1)
    found = prepare(two_groups(), settings, VOCAB)
    (items,) = mini_batches(found, settings, 1, 0)
    assert np.concatenate([item.terms.weights_N for item in items]).tolist() == pytest.approx(weights)


def with_auxiliary_calls() -> EpisodeCalls:
    """Return an episode that begins with a title, and whose last turn continues a compaction."""
    title = call("title", [9, 9], [5, 5, 5], auxiliary_call="title")
    first = call("first", [1, 2], [3])
    compaction = call("compaction", [7], [8, 8], parent=first, auxiliary_call="compaction")
    last = call("last", [4], [6, 6], parent=compaction)
    return episode("a", 1.0, title, first, compaction, last, call_rewards=(9.0, 1.0, 9.0, 0.0))


def test_auxiliary_calls_are_read_where_others_continue_them_and_never_trained() -> None:
    given = with_auxiliary_calls()
    found = given.without_auxiliary_calls()
    assert [record.id for record in found.records] == ["first", "last"]
    assert found.call_rewards == (1.0, 0.0)
    (sequence,) = merge_calls("a", found.records, found.context).sequences
    assert sequence.tokens_T.tolist() == [1, 2, 3, 7, 8, 8, 4, 6, 6]
    assert np.flatnonzero(sequence.loss_mask_T).tolist() == [2, 7, 8]
    batch = prepare([EpisodeGroup("t", (found, episode("b", 0.0, call("b1", [1], [2]))))], tiny_settings(), VOCAB)
    assert (batch.calls, batch.merged_calls, batch.left_out) == (3, 1, ())


def test_auxiliary_calls_that_are_trained_are_calls_like_others() -> None:
    given = with_auxiliary_calls()
    sequences = merge_calls("a", given.records).sequences
    assert [np.flatnonzero(sequence.loss_mask_T).tolist() for sequence in sequences] == [[2, 3, 4], [2, 4, 5, 7, 8]]


def test_an_episode_without_auxiliary_calls_stays_as_it_is() -> None:
    given = episode("a", 1.0, call("a1", [1], [2]))
    assert given.without_auxiliary_calls() is given


def test_rewards_for_the_calls_that_are_trained_stay_as_they_are() -> None:
    found = replace(with_auxiliary_calls(), call_rewards=(1.0, 0.0)).without_auxiliary_calls()
    assert ([record.id for record in found.records], found.call_rewards) == (["first", "last"], (1.0, 0.0))


def test_an_episode_with_wrong_rewards_is_left_out_whatever_its_auxiliary_calls_are() -> None:
    given = episode(
        "a", 1.0, call("a1", [1], [2], auxiliary_call="title"), call("a2", [1], [2]), call_rewards=(1.0,) * 3
    )
    batch = prepare([EpisodeGroup("t", (given.without_auxiliary_calls(),))], tiny_settings(), VOCAB)
    assert batch.left_out == ("a",)


def test_an_episode_of_auxiliary_calls_alone_counts_in_its_group_and_has_nothing_to_train() -> None:
    aside = episode("a", 0.0, call("a1", [1], [2], auxiliary_call="title")).without_auxiliary_calls()
    others = episode("b", 1.0, call("b1", [1], [2, 3])), episode("c", 0.5, call("c1", [1], [2]))
    batch = prepare([EpisodeGroup("t", (aside, *others))], tiny_settings(), VOCAB)
    (group,) = batch.groups
    assert group.tokens == {"a": 0, "b": 2, "c": 1}
    assert [entry.advantages_T[entry.sequence.loss_mask_T][0] for entry in group.sequences] == pytest.approx(
        [1, 0], abs=1e-5
    )
    assert mini_batches(batch, tiny_settings(), 1, 0)


@pytest.mark.parametrize("pull", ["kl_coef", "entropy_coef"])
def test_a_group_without_signal_is_computed_where_a_kl_term_or_a_bonus_trains_it(pull: str) -> None:
    for value, computed in ((0.0, 2), (0.1, 3)):
        settings = tiny_settings(**{pull: value})
        (items,) = mini_batches(prepare(two_groups(), settings, VOCAB), settings, 1, 0)
        assert len(items) == computed


def test_groups_without_signal_are_spread_over_a_batchs_updates_so_that_each_is_as_strong_as_the_others() -> None:
    rewards = {"a": (0.0, 1.0), "b": (0.0, 1.0), "c": (1.0, 1.0), "d": (1.0, 1.0)}
    groups = [
        EpisodeGroup(
            task, tuple(episode(f"{task}{n}", each, call(f"{task}{n}", [1], [2])) for n, each in enumerate(of))
        )
        for task, of in rewards.items()
    ]
    settings = tiny_settings(mini_batch_num=2)
    updates = mini_batches(prepare(groups, settings, VOCAB), settings, 1, 0)
    # each update has a group of two episodes that is computed, and one that only counts
    weights = [[float(weight) for item in items for weight in item.terms.weights_N] for items in updates]
    assert weights == [[0.25, 0.25], [0.25, 0.25]]


def test_each_difference_is_that_of_its_own_token_whatever_branches_and_choices_its_episode_has() -> None:
    seen = 0

    def numbered(record: CallRecord) -> CallRecord:
        """Give each token a logprob of its own."""
        nonlocal seen
        choices = []
        for choice in record.choices:
            count = len(choice.token_ids())
            logprobs = pack_logprobs([-float(seen + each) for each in range(count)])
            choices.append(msgspec.structs.replace(choice, logprobs=logprobs))
            seen += count
        return msgspec.structs.replace(record, choices=tuple(choices))

    first = numbered(call("a", [1, 2], [3, 4], [5]))
    second = numbered(call("b", [6], [7, 8, 9], parent=first, parent_choice=1))
    third = numbered(call("c", [7], [8], parent=first))
    nothing = numbered(call("d", [], [3, 2]))
    records = (third, first, nothing, second)
    batch = prepare(
        [EpisodeGroup("t", (episode("e", 1.0, *records), episode("f", 0.0, third)))], tiny_settings(), VOCAB
    )
    terms = TrainedTerms(batch)
    for entry in batch.groups[0].sequences:
        mask = entry.sequence.loss_mask_T
        own = slice(entry.first_id, entry.first_id + int(mask.sum()))
        terms.differences_N[own], terms.computed_N[own] = -entry.sequence.logprobs_T[mask], 1.0
    found = differences_of_calls(terms.differences(batch)["e"], records, ())
    expected = {
        (record.id, number): {index: -logprob for index, logprob in enumerate(unpack_logprobs(choice.logprobs))}
        for record in records
        for number, choice in enumerate(record.choices)
    }
    del expected["d", 0][0]  # nothing predicts the first token after an empty prompt
    assert found == expected
