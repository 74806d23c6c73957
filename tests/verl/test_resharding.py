"""Training goes on from a checkpoint with another number of ranks than wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer.small_batches import tiny_model_folder
from tests.verl.given import model_folder
from tests.verl.processes import found_by_ranks
from tests.verl.resharding import CASES

OTHERS = {1: "2", 2: "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return what one rank finds after two have trained, and what two ranks find after that."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model_folder(model_folder(folder))
    tied(tiny_model_folder(model_folder(folder / "tied")))
    found_by_ranks("tests.verl.resharding", 2, folder)
    return {size: found_by_ranks("tests.verl.resharding", size, folder) for size in (1, 2)}


def tied(folder: Path) -> None:
    """Have a model whose output layer is its embeddings."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))


@pytest.mark.parametrize("size", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_the_step_after_is_the_one_without_a_restart(found: dict[int, dict[str, Any]], case: str, size: int) -> None:
    straight, resumed = found[size][case]["straight"], found[size][case][OTHERS[size]]
    assert resumed["loss"] == pytest.approx(straight["loss"], abs=1e-6)
    assert resumed["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-5)
    left, right = (load_file(Path(each["where"]) / "model.safetensors") for each in (straight, resumed))
    assert list(left) == list(right)
    # A twentieth of what a step of Adam moves every weight by, also where the gradient is next to nothing: the sums of
    # one rank and of two are of other orders.
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 5e-4


@pytest.mark.parametrize("case", CASES)
def test_as_many_ranks_go_on_bit_for_bit(found: dict[int, dict[str, Any]], case: str) -> None:
    straight, resumed = found[2][case]["straight"], found[2][case]["2"]
    left, right = (Path(each["where"], "model.safetensors").read_bytes() for each in (straight, resumed))
    assert left == right
