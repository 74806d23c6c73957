"""The command line of Tinker's SDK, unmodified, on what a recipe has made."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tinker.cookbook.recipes import MODEL, Recipes
from tests.tinker.whole_hive import PYTHON

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker"),
    pytest.mark.usefixtures("taught"),
]


def tinker(recipes: Recipes, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tinker.cli", "--format", "json", *words]
    return subprocess.run(command, env=recipes.environment, capture_output=True, text=True, timeout=120)


def listed(recipes: Recipes, *words: str) -> Any:
    found = tinker(recipes, *words)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def checkpoints_of(recipes: Recipes, model: str) -> set[str]:
    found = listed(recipes, "checkpoint", "list", "--run-id", model)["checkpoints"]
    return {each["checkpoint_id"] for each in found}


def taught_model(recipes: Recipes) -> str:
    return str(recipes.checkpoints("taught")[-1]["state_path"]).split("/")[2]


def test_runs_are_listed_and_shown_with_the_base_that_the_recipe_named(recipes: Recipes) -> None:
    name = taught_model(recipes)
    assert name in [run["training_run_id"] for run in listed(recipes, "run", "list")["runs"]]
    run = listed(recipes, "run", "info", name)
    assert (run["base_model"], run["is_lora"], run["lora_rank"], run["corrupted"]) == (MODEL, True, 32, False)
    assert MODEL in [model["model_name"] for model in listed(recipes, "model", "list")["models"]]


def test_checkpoints_are_listed_shown_and_deleted(recipes: Recipes) -> None:
    recipes.run("sl_loop", "deleted", batch_size=4, max_steps=2, save_every=1)
    first, final = recipes.checkpoints("deleted")
    name = first["state_path"].split("/")[2]
    saved = checkpoints_of(recipes, name)
    (at_the_end,) = (each for each in saved if each.startswith("weights/ended-"))  # when its session was finished
    assert saved == {"weights/000001", "weights/final", "sampler_weights/final", at_the_end}
    shown = listed(recipes, "checkpoint", "info", final["state_path"])
    assert shown["tinker_path"] == final["state_path"]
    assert shown["expires_at"] is None
    assert listed(recipes, "checkpoint", "info", first["state_path"])["expires_at"] is not None
    assert tinker(recipes, "checkpoint", "delete", "--yes", first["state_path"]).returncode == 0
    assert checkpoints_of(recipes, name) == saved - {"weights/000001"}


def test_what_is_not_there_is_said_in_words(recipes: Recipes) -> None:
    missing = tinker(recipes, "run", "info", "s-none:train:0")
    assert missing.returncode != 0
    assert "There is no model s-none:train:0 here" in missing.stderr
