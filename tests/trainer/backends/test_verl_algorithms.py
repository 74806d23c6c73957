"""What functions of verl's registries get from a batch, and which of them are refused. verl itself is not needed."""

import pytest
import torch
from torch import Tensor

from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus_trainer.backends.verl.algorithms import (
    VerlEstimator,
    VerlPolicyLoss,
    try_estimator,
    try_loss,
    with_advantages,
)
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch, prepare
from bombus_trainer.data.samples import Origin, samples_of
from bombus_trainer.replay.formulas import call_advantages
from bombus_trainer.settings import TrainerSettings
from tests.trainer.algorithms.test_overlong import cut
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings

LIMIT = 4  # tokens of a turn


def centred(
    token_level_rewards: Tensor, response_mask: Tensor, index: object, norm_adv_by_std_in_grpo: bool = True, **_: object
) -> tuple[Tensor, Tensor]:
    """Estimate GRPO's advantages of one group."""
    scores_B = token_level_rewards.sum(-1)
    scores_B = scores_B - scores_B.mean()
    if norm_adv_by_std_in_grpo:
        scores_B = scores_B / scores_B.std()
    return scores_B[:, None] * response_mask, scores_B


def estimator(settings: TrainerSettings) -> VerlEstimator:
    return VerlEstimator(centred, None, settings.config.normalise_by_std)


def cut_group() -> EpisodeGroup:
    """Return four episodes, the first of which was cut at the limit of a turn."""
    long, *others = (call(name, [1], of) for name, of in zip("abcd", ([2] * LIMIT, [3], [4, 5], [6]), strict=True))
    first = episode("a", 1.0, cut(long))
    return EpisodeGroup("t", (first, *(episode(each.id, float(each.id == "b"), each) for each in others)))


def advantages(settings: TrainerSettings, *groups: EpisodeGroup) -> dict[str, float]:
    batch = with_advantages(prepare(groups, settings, VOCAB), groups, estimator(settings), settings)
    return last_advantages(batch)


def last_advantages(batch: PreparedBatch) -> dict[str, float]:
    lines = [entry for group in batch.groups for entry in group.sequences]
    return {entry.sequence.episode: float(entry.advantages_T[-1]) for entry in lines}


def overlong_settings(**changes: object) -> TrainerSettings:
    limits = {"max_response_length_in_one_turn": LIMIT, "max_response_length": 64}
    return tiny_settings(limits, overlong_buffer=2, normalise_by_std=False, **changes)


@pytest.mark.parametrize("overlong", ["keep", "mask", "penalty"])
def test_verls_estimators_see_overlong_episodes_as_ours_do(overlong: str) -> None:
    settings = overlong_settings(overlong=overlong)
    ours = last_advantages(prepare([cut_group()], settings, VOCAB))
    assert advantages(settings, cut_group()) == pytest.approx(ours)
    expected = {
        "keep": {"a": 0.5, "b": 0.5, "c": -0.5, "d": -0.5},
        "mask": {"b": 0.5, "c": -0.5, "d": -0.5},  # its reward stays in the mean
        "penalty": {"a": -0.25, "b": 0.75, "c": -0.25, "d": -0.25},  # its reward is 0
    }
    assert ours == pytest.approx(expected[overlong])


def test_verls_estimators_divide_by_the_deviation_only_where_the_job_says_so() -> None:
    plain = advantages(overlong_settings(), cut_group())
    scaled = advantages(tiny_settings(), cut_group())
    deviation = (1 / 3) ** 0.5
    assert scaled == pytest.approx({name: value / deviation for name, value in plain.items()})


def test_a_group_of_one_has_nothing_to_compare() -> None:
    settings, alone = tiny_settings(), EpisodeGroup("u", (episode("e", 5.0, call("e", [1], [2])),))
    assert advantages(settings, alone) == {"e": 0.0}
    assert advantages(settings, alone, cut_group())["e"] == 0.0


def test_advantages_of_verls_estimators_are_not_shown_as_those_of_another() -> None:
    job = RunConfig.model_validate({"trainer": {"backend": "verl", "adv_estimator": "gpg"}})
    with pytest.raises(ValueError, match="gpg is verl's estimator"):
        call_advantages([], job)
    settings = TrainerSettings.of_job(job)
    batch = prepare([cut_group()], settings, VOCAB)
    origin, groups = Origin("main", 1, 1), [cut_group()]
    assert all("advantages" not in each.metadata["bombus"] for each in samples_of(origin, groups, batch))
    estimated = with_advantages(batch, groups, estimator(settings), settings)
    assert all("advantages" in each.metadata["bombus"] for each in samples_of(origin, groups, estimated))


def failing(**_: object) -> tuple[Tensor, Tensor]:
    raise AssertionError("give me more")


def needing(token_level_rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return token_level_rewards, values


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (centred, ""),
        (failing, "'it' is refused, since it fails on this trainer's inputs: AssertionError: give me more"),
        (needing, "'it' is refused: it needs values, which this trainer does not compute"),
    ],
)
def test_an_estimator_is_tried_before_it_is_needed(function: object, why: str) -> None:
    said = ""
    try:
        try_estimator("it", VerlEstimator(function, None, normalise_by_std=True))  # type: ignore[arg-type]
    except EngineFault as error:
        said = str(error)
    assert said.endswith(why)
    assert bool(said) == bool(why)


def loss(kind: str) -> VerlPolicyLoss:
    """Return a policy gradient with something that this trainer cannot do, if it is of such a kind."""

    def function(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, rollout_is_weights: Tensor, **_: object
    ) -> tuple[Tensor, dict[str, float]]:
        if kind == "failing":
            raise ValueError("beta must be positive")
        seen_ST = advantages - advantages.mean() if kind == "comparing" else advantages
        terms_ST = -torch.exp(log_prob - old_log_prob) * seen_ST
        return (terms_ST if kind == "unweighted" else terms_ST * rollout_is_weights).mean(), {}

    return VerlPolicyLoss(function, None)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("plain", ""),
        ("failing", "fails on this trainer's inputs: ValueError: beta must be positive"),
        ("unweighted", "it takes no weights, so no correction of the sampler's logprobs would have an effect"),
        ("comparing", "it compares the sequences of a batch with each other"),
    ],
)
def test_a_loss_is_tried_before_it_is_needed(kind: str, why: str) -> None:
    said = ""
    try:
        try_loss(kind, loss(kind))
    except EngineFault as error:
        said = str(error)
    assert why in said
    assert bool(said) == bool(why)
