"""Ranks that compute parts of the same rows find what one process finds alone."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer.small_batches import tiny_model_folder
from tests.verl.given import model_folder
from tests.verl.processes import found_by_ranks
from tests.verl.splitting import CASES, FAMILIES, OF_FOUR

TOLERANCE = 1e-5
# Ranks, and how many of them share a row. The model has 4 heads, and 2 of keys, which four ranks have twice.
SPLITS = [(case, 2, 2) for case in CASES] + [(case, 4, sharing) for case in OF_FOUR for sharing in (2, 4)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return what `tests.verl.splitting` computes, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model_folder(model_folder(folder))
    return {size: found_by_ranks("tests.verl.splitting", size, folder) for size in (1, 2, 4)}


@pytest.mark.parametrize(("case", "ranks", "sharing"), SPLITS + [(family, 2, 2) for family in FAMILIES])
def test_gradients_are_those_of_one_process(
    found: dict[int, dict[str, Any]], case: str, ranks: int, sharing: int
) -> None:
    one, split = (load_file(each[case]["gradients"]) for each in (found[1]["1"], found[ranks][str(sharing)]))
    assert list(one) == list(split)
    assert any(float(values.abs().max()) > 1e-3 for values in one.values())
    for name, values in one.items():
        assert float((values - split[name]).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize(("case", "ranks", "sharing"), SPLITS)
def test_steps_are_those_of_one_process(found: dict[int, dict[str, Any]], case: str, ranks: int, sharing: int) -> None:
    one, split = found[1]["1"][case]["steps"], found[ranks][str(sharing)][case]["steps"]
    assert len(one) == len(split) == 3
    if case != "an adapter":
        assert one[0]["sha256"] == split[0]["sha256"], "before the first step: the same bytes"
    for alone, together in zip(one[1:], split[1:], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl_sampler"):
            assert together[name] == pytest.approx(alone[name], abs=TOLERANCE, rel=TOLERANCE), name
        for name in ("tokens_trained", "sequences", "updates", "lr"):
            assert together[name] == alone[name]
        for name in ("importance_capped", "masked_share", "clip_fraction"):
            assert together[name] == pytest.approx(alone[name], abs=1e-9), name
        left, right = (load_file(Path(each["where"]) / "model.safetensors") for each in (alone, together))
        # A twentieth of what a step of Adam moves every weight by, also where the gradient is next to nothing.
        assert max(float((left[name] - right[name]).abs().max()) for name in left) < 5e-4


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_model_with_layers_that_begin_anew_in_each_part_is_refused(
    found: dict[int, dict[str, Any]], family: str
) -> None:
    said = found[2]["refused"][family]
    assert said.startswith(f"this model's architecture ({family}) cannot be trained here: its logprobs differ by up to")


def test_a_model_with_a_tower_is_refused(found: dict[int, dict[str, Any]]) -> None:
    said = found[2]["refused"]["gemma3"]
    assert "trainer.ulysses_parallel_size is 2, but the model has an image tower, whose rows" in said


def test_a_model_that_takes_no_attention_from_outside_is_refused(found: dict[int, dict[str, Any]]) -> None:
    assert "its layers accept no external attention, which trainer.ulysses_parallel_siz" in found[2]["refused"]["gptj"]


def test_whatever_verl_raises_about_a_model_is_said_in_one_sentence(found: dict[int, dict[str, Any]]) -> None:
    said = found[2]["refused"]["gpt_neox"]
    assert said.startswith("verl cannot load the model at ")
    assert "has no attribute 'num_key_value_heads'; docs/models.md lists what backend torch trains" in said


def test_more_parts_than_ranks_are_refused(found: dict[int, dict[str, Any]]) -> None:
    refusal = "trainer.ulysses_parallel_size is 4, but this trainer has 2 ranks: set it to a number that divides 2, or"
    assert found[2]["too many"].startswith(refusal)


def test_attention_of_a_package_that_is_not_installed_is_refused(found: dict[int, dict[str, Any]]) -> None:
    said = found[2]["flash"]
    assert said.startswith("trainer.attn_implementation is flash_attention_3, which needs a GPU and the package flash-")
    assert said.endswith("(--device cpu) does not have both: install it, or set attn_implementation to auto")
