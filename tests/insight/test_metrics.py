"""The figures of a run by name, against numbers worked out by hand, and what the charts show of them."""

import asyncio
from math import sqrt

import pytest

from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.events import EpisodeType
from bombus.insight.charts import CHARTS, OF, points, shows, spec
from bombus.insight.metrics import evaluation_metrics, pass_at, step_metrics
from bombus.insight.runs import read_runs
from bombus.replay.archive import FileSource
from bombus.replay.diagnosis.steps import EvaluatedEpisode, RunSeries
from tests.logs.facts import TINY
from tests.replay.diagnosis.test_steps import batch, completed, folded, outcome


def test_a_step_has_figures_of_its_batch_its_collection_and_its_training() -> None:
    ended = ev.EpisodeEnded(
        engine="main",
        run=1,
        client="x",
        outcomes=(outcome("a", "t", 1.0, 10, log_metrics={"format": 0.5}), outcome("b", "t", 0.0, 30)),
    )
    series = folded(ended, batch(1, ("t", {"a": 1.0, "b": 0.0})), completed(1, loss=0.25, seconds_merge=2.0, lr=0.1))
    found = step_metrics(series.steps[0])
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/max": 1.0,
        "reported/format": 0.5,
        "groups/without_signal": 0.0,
        "length/mean": 20.0,
        "length/std": 10.0,
        "train/loss": 0.25,
        "train/learning_rate": 0.1,
        "time/merge_s": 2.0,
        "time/training_s": 5.0,
        "episodes/ended": 2.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert "policy/entropy" not in found, "what is not known is left out"


@pytest.mark.parametrize(
    ("k", "count", "successes", "expected"), [(1, 4, 1, 0.25), (2, 4, 1, 0.5), (4, 4, 1, 1.0), (2, 4, 0, 0.0)]
)
def test_pass_at_k_is_the_share_of_sets_of_k_with_a_success(
    k: int, count: int, successes: int, expected: float
) -> None:
    assert pass_at(k, count, successes) == pytest.approx(expected)


def test_evaluations_are_counted_by_version_and_pass_at_k_only_where_every_task_was_tried_often_enough() -> None:
    played = [EvaluatedEpisode(9, 3, task, "gsm", reward, reward > 0.5) for task, reward in
              (("a", 1.0), ("a", 0.0), ("b", 0.0), ("b", 0.0))]  # fmt: skip
    played.append(EvaluatedEpisode(12, 4, "a", "", 0.5, None))
    found = evaluation_metrics(played)
    assert found[3]["held_out/mean"] == found[3]["held_out/gsm"] == found[3]["held_out/pass@1"] == 0.25
    assert found[3]["held_out/std"] == pytest.approx(sqrt(3) / 4)
    assert found[3]["held_out/pass@2"] == 0.5, "one of two tasks was solved in one of two attempts"
    assert set(found[4]) == {"held_out/mean", "held_out/std", "held_out/episodes"}


def test_figures_of_evaluations_are_finite_although_rewards_are_too_large_to_be_squared() -> None:
    played = [EvaluatedEpisode(1, 1, "a", "", reward, None) for reward in (1e200, -1e200)]
    assert evaluation_metrics(played) == {1: {"held_out/mean": 0.0, "held_out/episodes": 2.0}}


def test_a_data_set_that_is_called_like_a_figure_does_not_replace_it() -> None:
    played = [EvaluatedEpisode(1, 1, "a", name, reward, None) for name, reward in (("mean", 1.0), ("episodes", 0.0))]
    assert evaluation_metrics(played) == {1: {"held_out/mean": 0.5, "held_out/std": 0.5, "held_out/episodes": 2.0}}


def recorded() -> RunSeries:
    async def read() -> RunSeries:
        with FileSource.open(TINY) as source:
            return (await read_runs(source)).newest("main-1", source.title)

    return asyncio.run(read())


def test_charts_have_the_figures_of_the_steps_up_to_a_position_of_the_log() -> None:
    series = recorded()
    whole = points(OF["loss"], series)
    assert [point["y"] for point in whole] == [row.trainer["loss"] for row in series.steps]
    middle = series.steps[1].done_seq
    assert points(OF["loss"], series, until=middle) == whole[:2]
    assert points(OF["loss"], series, until=middle - 1) == whole[:1]
    tokens = [point["x"] for point in points(OF["loss"], series, "tokens")]
    assert tokens == sorted(tokens)
    band = points(OF["reward"], series)[0]
    assert band["low"] <= band["y"] <= band["high"]


def test_every_figure_of_a_recorded_run_but_counts_and_details_of_the_trainer_is_on_a_chart() -> None:
    names = {name for row in recorded().steps for name in step_metrics(row)}
    shown = {name for name in names if any(shows(chart, name) for chart in CHARTS)}
    left = {name for name in names - shown if not name.startswith("trainer/") and not name.endswith("/std")}
    assert left == {
        "reward/min", "reward/max", "groups/count", "episodes/ended", "tokens/sampled", "tokens/trained",
        "train/learning_rate",
    }  # fmt: skip
    empty = {chart.key for chart in CHARTS if not any(shows(chart, name) for name in names)}
    assert empty == {"held_out", "parts", "ratio"}, "this run has none of these figures"


def test_runs_are_compared_by_colour() -> None:
    series = recorded()
    both = [{**point, "run": run} for run in ("main-1", "main-2") for point in points(OF["loss"], series)]
    drawn = spec(OF["loss"], both)
    assert drawn["layer"][1]["encoding"]["color"]["field"] == "run"
    assert drawn["data"] == {"name": "points", "values": both}


def test_a_log_without_episodes_has_no_figures() -> None:
    series = RunSeries("main", 1, RunConfig())
    ended = ev.EpisodeEnded(engine="main", run=1, client="x", type=EpisodeType.EVAL, outcomes=(outcome("a", "t", 1.0),))
    series.note(1, ended)
    assert [points(chart, series) for chart in CHARTS if not chart.by_version] == [[]] * (len(CHARTS) - 1)
    assert len(points(OF["held_out"], series)) == 2, "the mean and pass@1"
