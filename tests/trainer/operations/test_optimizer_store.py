"""Optimizers in files: which, when, and that nothing of them is lost."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bombus.errors import EngineFault
from bombus.operations import AdamParams
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.operations.optimizer_store import OptimizerStore

EACH = 2 * 40 + 4  # bytes of an optimizer of ten numbers


def optimizer(value: float) -> AdamW:
    """Make the optimizer of ten numbers, after a step with that gradient."""
    parameter = nn.Parameter(torch.zeros(2, 5))
    adam = AdamW({"w": parameter})
    parameter.grad = torch.full((2, 5), value)
    adam.step(AdamParams(learning_rate=0.1))
    return adam


def store(folder: Path, bytes_max: int, models: str = "abc") -> OptimizerStore:
    made = OptimizerStore(folder, bytes_max)
    for number, model in enumerate(models):
        made.add(model, optimizer(number + 1.0))
    return made


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 2 * EACH)
    made.bring("a")
    assert made.offloaded == ["b"]
    made.bring("b")
    assert made.offloaded == ["c"]
    made.bring("a")
    assert made.offloaded == ["c"]
    made.bring("c")
    assert made.offloaded == ["b"]


def test_what_comes_back_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 0)
    kept = {name: value.clone() for name, value in optimizer(1.0).state().items()}
    made.bring("b")
    assert made.offloaded == ["a", "c"]
    back = made.bring("a").state()
    assert back.keys() == kept.keys()
    assert all(torch.equal(back[name], kept[name]) and back[name].dtype == kept[name].dtype for name in kept)
    assert len(list((tmp_path / "s").iterdir())) == 2


def test_the_one_in_use_is_in_memory_even_where_it_is_larger_than_the_bound(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 1)
    assert made.bring("a").held_bytes == EACH
    assert made.offloaded == ["b", "c"]


def test_within_the_bound_nothing_is_written(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 3 * EACH)
    for model in "abc":
        made.bring(model)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_damaged_file_is_a_fault_and_a_new_state_mends_it(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 0, "ab")
    made.bring("b")
    (file,) = (tmp_path / "s").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(EngineFault, match=r"the optimizer of a is lost: .* is damaged; load a checkpoint"):
        made.bring("a")
    made.renew("a")
    assert made.offloaded == ["b"]
    assert made.bring("a").held_bytes == 0


def test_what_cannot_be_written_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = store(tmp_path / "s", 0, "ab")
    (tmp_path / "s").rmdir()
    (tmp_path / "s").write_text("no folder any more")
    made.bring("b")
    assert made.offloaded == []
    assert made.bring("a").held_bytes == EACH
    assert "the optimizer of a cannot be written" in caplog.text


def test_what_an_earlier_process_left_is_removed(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 0, "ab")
    made.bring("b")
    assert len(list((tmp_path / "s").iterdir())) == 1
    assert store(tmp_path / "s", 0).offloaded == []
    assert list((tmp_path / "s").iterdir()) == []


def test_a_model_that_has_ended_leaves_no_file(tmp_path: Path) -> None:
    made = store(tmp_path / "s", 0, "ab")
    made.bring("b")
    made.remove("a")
    made.remove("a")
    assert (made.offloaded, list((tmp_path / "s").iterdir())) == ([], [])
