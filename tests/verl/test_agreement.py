"""verl's engine on one rank and on two gives the results of the torch backend on the same batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.small_batches import tiny_model_folder
from tests.verl.given import CASES, model_folder
from tests.verl.processes import found_by_ranks

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return everything that `tests.verl.rank` computes, once for each number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with_dropout(tiny_model_folder(model_folder(folder)))
    return found_by_ranks("tests.verl.rank", request.param, folder)


def with_dropout(folder: Path) -> None:
    """Make a model one of those that drop activations in training mode. Neither backend trains in that mode."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_norm_are_those_of_the_torch_backend(found: dict[str, Any], case: str) -> None:
    verl, ours = found[case]["verl"], found[case]["torch"]
    assert len(verl) == len(ours) == 3
    for here, there in zip(verl[1:], ours[1:], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=TOLERANCE)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=TOLERANCE)
        assert here["entropy"] == pytest.approx(there["entropy"], rel=TOLERANCE)
        assert here["kl_sampler"] == pytest.approx(there["kl_sampler"], rel=TOLERANCE)
        for name in ("tokens_trained", "sequences", "lr", "updates"):
            assert here[name] == there[name]
        for name in ("importance_capped", "masked_share", "clip_fraction"):
            assert here[name] == pytest.approx(there[name], abs=1e-9), name


@pytest.mark.parametrize(
    ("case", "share"),
    [
        ("gspo", "clip_fraction"),
        ("cispo", "clip_fraction"),
        ("sequence mask", "masked_share"),
        ("off-policy sequence masking", "masked_share"),
    ],
)
def test_what_depends_on_sequences_had_an_effect(found: dict[str, Any], case: str, share: str) -> None:
    assert found[case]["verl"][1][share] > 0.05


def test_a_rank_for_which_nothing_is_left_adds_nothing(found: dict[str, Any]) -> None:
    few = found["few"]
    assert few["bins"] == (3 if found["ranks"] == 1 else 4)
    for name in ("ours", "ours, kl", "verl's"):
        assert few[name] == pytest.approx(few["torch"], abs=TOLERANCE), name


def test_a_steps_work_is_counted_as_by_the_torch_backend(found: dict[str, Any]) -> None:
    assert found["work"]["verl"] == pytest.approx(found["work"]["torch"], rel=1e-6)
    assert found["work"]["torch"] > 0


def test_a_model_that_transforms_its_logits_is_refused_at_once(found: dict[str, Any]) -> None:
    refusal = "this model's architecture (gemma2) cannot be trained here: it does more to its logits than multiply"
    assert found["soft-capped"].startswith(refusal)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_torch_backend(found: dict[str, Any], case: str) -> None:
    verl, ours = found[case]["verl"], found[case]["torch"]
    assert verl[0]["sha256"] == ours[0]["sha256"], "before the first step: the same bytes"
    for here, there in zip(verl[1:], ours[1:], strict=True):
        left, right = (load_file(Path(each["where"]) / "model.safetensors") for each in (here, there))
        assert list(left) == list(right)
        moved = max(float((left[name] - right[name]).abs().max()) for name in left)
        assert moved < 5e-4  # a twentieth of what a step of Adam moves every weight by
        assert here["sha256"] != verl[0]["sha256"]


def test_adapters_are_trained_and_merged(found: dict[str, Any]) -> None:
    """peft draws other adapters than ours, so only the step's loss is compared, which does not depend on them."""
    before, first, second = found["lora"]["verl"]
    assert before["sha256"] == found["plain"]["torch"][0]["sha256"]
    assert first["loss"] == pytest.approx(found["plain"]["torch"][1]["loss"], abs=TOLERANCE)
    assert len({before["sha256"], first["sha256"], second["sha256"]}) == 3
    base, merged = (
        load_file(Path(each["where"]) / "model.safetensors")
        for each in (found["lora"]["verl"][1], found["lora"]["verl"][2])
    )
    assert torch.equal(base["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(base[changed], merged[changed])


def test_an_adapter_published_alone_gives_the_weights_that_are_published_merged(found: dict[str, Any]) -> None:
    assert found["lora"]["merged_sha256"] == found["lora"]["verl"][-1]["sha256"]


@pytest.mark.parametrize("way", ["all weights", "half precision", "an adapter"])
def test_the_canary_is_what_a_replica_of_the_published_weights_computes(found: dict[str, Any], way: str) -> None:
    canary = found["canary"][way]
    assert canary["difference"] < 2e-5
    assert canary["changed"] > 1e-2, "it is of the weights after the step"
    assert (canary.get("effect", 0.0) > 1e-3) == ("bits" not in canary) == (way == "an adapter")
    assert canary["dtype"] == ("bfloat16" if way == "half precision" else "float32")


def test_a_step_after_a_restart_is_the_step_without_one(found: dict[str, Any]) -> None:
    restart = found["restart"]
    assert restart["again_sha256"] == restart["straight_sha256"]
    for name in ("loss", "grad_norm"):
        assert restart["again"][name] == pytest.approx(restart["straight"][name], abs=1e-6)


def test_losses_and_advantages_of_verls_registries_are_chosen_by_name(found: dict[str, Any]) -> None:
    algorithms = found["algorithms"]
    ours = algorithms["ours"]
    assert algorithms["vanilla"] == pytest.approx(ours, abs=TOLERANCE), "PPO with one update is PPO"
    entropy = found["an entropy bonus"]["torch"][1]
    assert algorithms["vanilla, entropy"] == pytest.approx([entropy["loss"], entropy["grad_norm"]], abs=TOLERANCE)
    assert algorithms["grpo"] == pytest.approx(ours, abs=TOLERANCE), "GRPO is GRPO"
    gspo = found["gspo"]["torch"][1]
    assert algorithms["gspo"] == pytest.approx([gspo["loss"], gspo["grad_norm"]], abs=TOLERANCE), "GSPO is GSPO"
    for name in ("sapo", "reinforce_plus_plus"):
        assert algorithms[name] != pytest.approx(ours, abs=TOLERANCE)


def test_an_unknown_name_is_refused_with_all_known_ones(found: dict[str, Any]) -> None:
    said = found["algorithms"]
    assert said["unknown loss"].startswith("trainer.loss = 'clever' is not in verl's registry, which has ")
    assert "gspo" in said["unknown loss"]
    assert "reinforce_plus_plus" in said["unknown estimator"]
    refusal = "trainer.adv_estimator = 'gae' is refused: it needs values, gamma, lam, which this trainer does not"
    assert said["critic"].startswith(refusal)
