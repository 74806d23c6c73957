"""Recipes of tinker-cookbook that score what another model says: DPO and distillation."""

import math

import pytest

from tests.tinker.cookbook.recipes import MODEL, Recipes
from tests.tinker.whole_hive import PYTHON

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


def test_dpo_learns_which_of_two_answers_is_preferred(recipes: Recipes) -> None:
    """A loss of the recipe's own, from scores of the base: ln 2 where the model is the base yet."""
    metrics = recipes.run("preference.dpo.train", "dpo", batch_size=8, learning_rate=1e-3, max_steps=4)
    losses = [each["dpo_loss"] for each in metrics]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[-1] < 0.35
    assert metrics[-1]["accuracy"] == 1


def test_a_model_that_is_its_teacher_yet_has_nothing_to_learn_from_it(recipes: Recipes) -> None:
    """Its own samples have the same scores by the teacher, which is the base, until the first step."""
    options = {"groups_per_batch": 4, "group_size": 4, "max_tokens": 8, "eval_every": 0, "max_steps": 2}
    metrics = recipes.run("distillation.on_policy_distillation", "distilled", teacher_model=MODEL, **options)
    assert [each["step"] for each in metrics] == [0, 1]
    assert abs(metrics[0]["teacher_kl"]) < 1e-4
    assert metrics[0]["grad_norm"] < 1e-2
