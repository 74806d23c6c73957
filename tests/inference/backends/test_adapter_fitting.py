"""Which layers of a model take adapters for each row."""

from pathlib import Path

import pytest

from bombus.architectures.miniatures import write_miniature
from bombus_inference.backends.torch.adapters.fitting import adaptable_layers
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_engines import llama, paged
from tests.models.families import full_config


def test_all_linear_layers_of_a_llama_take_adapters() -> None:
    found = adaptable_layers(paged(llama()))
    assert len(found) == 2 * 7 + 1  # of two layers, and the output
    assert found["model.layers.1.mlp.down_proj"] == (32, 64)
    assert found["lm_head"] == (60, 32)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [("longcat_flash", "classifier"), ("phimoe", "router")],  # its weight is read elsewhere; it is not just linear
)
def test_routers_of_experts_take_none(tmp_path: Path, family: str, left_out: str) -> None:
    write_miniature(full_config(family), tmp_path)
    model = load_policy(tmp_path, ComputeSettings())
    assert any(name.endswith(left_out) for name, _ in model.named_modules())
    found = {name.rpartition(".")[2] for name in adaptable_layers(model)}
    assert left_out not in found
    assert "o_proj" in found
