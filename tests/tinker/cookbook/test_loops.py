"""sl_loop and rl_loop of tinker-cookbook, unmodified and offline, against a whole hive."""

from statistics import mean

import pytest

import tinker
from tests.tinker.cookbook.recipes import MODEL, SL, Recipes
from tests.tinker.whole_hive import PYTHON

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


def test_sl_loop_learns_all_that_can_be_learnt_and_saves(recipes: Recipes, taught: list[dict[str, float]]) -> None:
    """Each answer is a digit of nine between 15 characters that are always the same: ln 9 in 16 tokens is 0.137."""
    assert [metrics["step"] for metrics in taught] == list(range(40))
    losses = [metrics["train_mean_nll"] for metrics in taught]
    assert losses[0] > 4
    assert 0.12 < mean(losses[-5:]) < 0.17
    assert [(each["name"], each["batch"]) for each in recipes.checkpoints("taught")] == [("000020", 20), ("final", 40)]


def test_sl_loop_that_is_killed_goes_on_from_its_checkpoint_as_if_nothing_had_happened(recipes: Recipes) -> None:
    recipes.run_until(24, "sl_loop", "killed", **SL, save_every=20)
    before = recipes.metrics("killed")
    assert 23 < len(before) < 40
    resumed = recipes.run("sl_loop", "killed", **SL, save_every=0)[len(before) :]
    assert [metrics["step"] for metrics in resumed] == list(range(20, 40))
    told = ("train_mean_nll", "grad_norm", "optimizer_step")
    first, again = ([[metrics[name] for name in told] for metrics in each] for each in (before[20:], resumed))
    assert again[: len(first)] == first, "the steps after the checkpoint are made again with the same figures"


def test_rl_loop_reinforces_what_is_rewarded_and_is_resumed(recipes: Recipes, taught: list[dict[str, float]]) -> None:
    """The model that answers with any of nine digits learns which one is right."""
    recipes.begin_at("rewarded", recipes.checkpoints("taught")[-1])
    options = {"batch_size": 4, "group_size": 16, "learning_rate": 2e-3, "max_tokens": 20, "save_every": 8}
    recipes.run_until(10, "rl_loop", "rewarded", **options)
    before = len(recipes.metrics("rewarded"))
    metrics = recipes.run("rl_loop", "rewarded", **options, max_steps=16)
    assert [each["progress/batch"] for each in metrics[before:]] == list(range(8, 16))
    rewards = [each["reward/total"] for each in metrics]
    assert rewards[0] < 0.3, "one answer of nine, as far as 64 of them show"
    assert mean(rewards[-3:]) > 0.5
    assert recipes.checkpoints("rewarded")[-1]["name"] == "final"


def test_get_tokenizer_and_the_base_are_what_the_recipe_asked_for(
    recipes: Recipes, taught: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=recipes.url, api_key="tml-any")
    capabilities = tinker.RestClient(base_url=recipes.url, api_key="tml-any").get_server_capabilities().result()
    assert MODEL in [each.model_name for each in capabilities.supported_models]
    final = recipes.checkpoints("taught")[-1]
    model = service.create_training_client_from_state(final["state_path"]).result()
    assert model.get_info().model_data.model_name == MODEL
    text = "User: \\boxed{3}\n\nAssistant:"
    assert model.get_tokenizer().decode(model.get_tokenizer().encode(text)) == text
    sampler = service.create_sampling_client(model_path=final["sampler_path"]).result()
    assert sampler.get_base_model() == MODEL
