"""Two runs side by side, against numbers worked out by hand and against chance."""

from random import Random

import pytest

from bombus.config.job import RunConfig
from bombus.insight.compare import figure_differences, job_differences
from bombus.replay.diagnosis.statistics import Spread
from bombus.replay.diagnosis.steps import RunSeries, StepFigures


def run_of(*steps: StepFigures) -> RunSeries:
    series = RunSeries("main", 1, RunConfig())
    series.steps = list(steps)
    return series


def step(number: int, rewards: list[float], **trainer: float) -> StepFigures:
    """Return a step whose groups have these mean rewards."""
    spread = Spread(sum(rewards), len(rewards), sum(each * each for each in rewards))
    return StepFigures(step=number, rewards=spread, lowest=0, highest=1, data_sets={"": spread}, trainer=trainer)


def test_only_the_settings_that_differ_are_listed_with_each_runs_value() -> None:
    first, second = RunConfig(), RunConfig.model_validate({"rollout": {"num_repeat": 5}, "trainer": {"lr": 0.5}})
    found = job_differences([first, second, first])
    assert set(found) == {"rollout.num_repeat", "trainer.lr"}
    assert found["trainer.lr"][1] == "0.5"
    assert found["trainer.lr"][0] == found["trainer.lr"][2]
    assert job_differences([first, first]) == {}


def test_a_difference_is_over_the_newest_steps_that_both_runs_have() -> None:
    before = run_of(*(step(number, [0.0, 1.0]) for number in range(1, 8)))
    after = run_of(*(step(number, [1.0, 1.0]) for number in range(3, 6)))
    (reward,) = (each for each in figure_differences(before, after, 2) if each.name == "reward/mean")
    assert (reward.first, reward.last, reward.means, reward.difference) == (4, 5, (0.5, 1.0), 0.5)
    assert reward.low is not None
    assert reward.low == pytest.approx(0.5 - 1.96 * (0.25 / 3) ** 0.5), "four groups, of which two have the reward 1"
    assert figure_differences(before, run_of(step(99, [1.0]))) == []


def test_other_figures_take_their_noise_from_their_changes_and_a_trend_is_not_noise() -> None:
    before = run_of(*(step(number, [0.0], loss=1.0) for number in range(1, 6)))
    after = run_of(*(step(number, [0.0], loss=2.0 + 0.1 * (number % 2)) for number in range(1, 6)))
    (loss,) = (each for each in figure_differences(before, after) if each.name == "train/loss")
    assert loss.difference == pytest.approx(1.06)
    assert loss.high == pytest.approx(1.06 + 1.96 * (0.005 / 5) ** 0.5)
    assert loss.is_certain


def test_equal_runs_are_called_different_about_as_often_as_promised() -> None:
    chance = Random(7)

    def played() -> RunSeries:
        return run_of(*(step(number, [float(chance.random() < 0.5) for _ in range(16)]) for number in range(1, 11)))

    found = [
        each.is_certain
        for _ in range(400)
        for each in figure_differences(played(), played())
        if each.name == "reward/mean"
    ]
    assert len(found) == 400
    assert 0.02 <= sum(found) / len(found) <= 0.09
