"""math_rl of tinker-cookbook on sums, unmodified and offline, against a whole hive."""

import math
from typing import Any

import pytest

from tests.tinker.cookbook.alphabet_model import write_alphabet_model
from tests.tinker.cookbook.data_sets import write_sums
from tests.tinker.cookbook.recipes import MODEL, SL, Recipes
from tests.tinker.whole_hive import PYTHON

SUMS: dict[str, Any] = {
    "env": "arithmetic",
    "groups_per_batch": 4,
    "group_size": 16,
    "learning_rate": 1e-3,
    "max_tokens": 12,
    "eval_every": 0,
    "behavior_if_log_dir_exists": "resume",
}
CUT_OFF = -0.1  # the reward of an answer that does not end, and is wrong

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


@pytest.fixture(scope="module")
def sums(recipes: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """Return recipes whose log `taught` has a model that answers sums with 7, one in four of them briefly."""
    folder = tmp_path_factory.mktemp("sums")
    write_alphabet_model(folder / MODEL)
    write_sums(folder)
    found = Recipes(folder, recipes.url)
    found.run("sl_loop", "taught", **SL, save_every=0)
    return found


def run(sums: Recipes, log: str, **options: Any) -> list[dict[str, float]]:
    started = sums.checkpoints("taught")[-1]["state_path"]
    metrics = sums.run("math_rl.train", log, **SUMS, **options, load_checkpoint_path=started)
    for each in metrics:
        assert all(math.isfinite(value) for value in each.values() if isinstance(value, int | float))
    return metrics


def test_answers_that_end_are_reinforced_and_the_loop_is_resumed(sums: Recipes) -> None:
    metrics = run(sums, "resumed", max_steps=5, save_every=2)
    assert [each["step"] for each in metrics] == list(range(5))
    metrics = run(sums, "resumed", max_steps=10, save_every=2)
    assert [each["step"] for each in metrics] == list(range(10))
    assert [each["optimizer_step"] for each in metrics] == list(range(1, 11)), "the optimizer went on too"
    rewards = [each["env/all/reward/total"] for each in metrics]
    assert CUT_OFF < rewards[0] < -0.035
    assert max(rewards[-3:]) > rewards[0] / 2  # one of them may be low
    assert max(abs(each["optim/kl_sample_train_v1"]) for each in metrics) < 1e-4, "samplers score as the trainer does"
    names = [each["name"] for each in sums.checkpoints("resumed")]
    assert names == ["000002", "000004", "final", "000006", "000008", "000010", "final"]


def test_a_batch_is_trained_in_several_steps_with_ppo_and_scored_after_them(sums: Recipes) -> None:
    metrics = run(sums, "ppo", loss_fn="ppo", num_substeps=2, compute_post_kl=True, max_steps=3)
    assert [each["optimizer_step"] for each in metrics] == [2, 4, 6]
    assert all(each["kl_pre_post_v2"] >= 0 for each in metrics)


def test_samples_of_older_weights_are_trained_while_newer_ones_are_drawn(sums: Recipes) -> None:
    """A run of four steps has none older than three, so the recipe leaves none out: how fast it samples is chance."""
    metrics = run(sums, "off", loss_fn="cispo", max_steps_off_policy=3, max_steps=4)
    assert [each["step"] for each in metrics] == list(range(4))
    ages = [each["training_client/step"] - each["sampling_client/step_min"] for each in metrics]
    assert ages[:2] == [0, 1], "what is drawn during the first step is trained in the second"


def test_a_batch_is_trained_in_parts_as_its_samples_come(sums: Recipes) -> None:
    parts = {"stream_minibatch_config.groups_per_batch": 4, "stream_minibatch_config.num_minibatches": 2}
    metrics = run(sums, "parts", **parts, max_steps=3)
    assert [each["optimizer_step"] for each in metrics] == [1, 2, 3]
