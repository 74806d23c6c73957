"""Versions of verl's engine are complete for families with buffers, and LoRA adapts what the torch backend adapts."""

from typing import Any

import pytest

from tests.verl.families import WITH_BUFFERS, WITH_TOWER
from tests.verl.processes import found_by_ranks


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return everything that `tests.verl.families` computes, once for each number of ranks."""
    return found_by_ranks("tests.verl.families", request.param, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", WITH_BUFFERS)
@pytest.mark.parametrize("way", ["all weights", "an adapter", "below the adapter"])
def test_the_first_version_has_every_tensor_of_the_given_model(found: dict[str, Any], family: str, way: str) -> None:
    assert found["versions"][family]["buffers"]
    assert found["versions"][family][way] == []


@pytest.mark.parametrize("family", WITH_BUFFERS)
@pytest.mark.parametrize("way", ["all weights", "an adapter"])
def test_a_step_changes_weights_and_leaves_persistent_buffers(found: dict[str, Any], family: str, way: str) -> None:
    versions = found["versions"][family]
    changed = versions[f"{way}, after a step"]
    assert changed
    assert set(changed).isdisjoint(versions["buffers"])
    if way == "an adapter":
        assert all("o_proj" in name for name in changed)


@pytest.mark.parametrize("family", WITH_BUFFERS)
def test_a_buffer_has_the_precision_that_the_torch_backend_gives_it(found: dict[str, Any], family: str) -> None:
    verl, ours = found["versions"][family]["dtypes"]
    assert "torch.bfloat16" in verl.values()
    for name in found["versions"][family]["buffers"]:
        assert verl[name] == ours[name], name


def test_a_file_without_experts_is_the_torch_backends_byte_for_byte(found: dict[str, Any]) -> None:
    verl, ours = found["versions"]["apertus"]["sha256"]
    assert verl == ours


def test_a_checkpoint_puts_buffers_back(found: dict[str, Any]) -> None:
    assert found["restarted"] == []


def test_adapters_that_would_leave_experts_out_are_refused_as_by_the_torch_backend(found: dict[str, Any]) -> None:
    verl, ours = found["refused"]["all layers"]
    assert verl == ours
    assert "would leave" in verl
    assert "(such as model.layers.1.mlp.experts.gate_up_proj)" in verl


def test_an_unknown_layer_is_refused_as_by_the_torch_backend(found: dict[str, Any]) -> None:
    verl, ours = found["refused"]["unknown"]
    assert verl == ours
    assert verl.startswith("target module 'w9' is not in this model, which has ")


def test_adapters_that_peft_would_put_on_experts_are_refused(found: dict[str, Any]) -> None:
    verl, ours = found["refused"]["experts"]
    assert ours == ""
    assert "peft also matches to the experts of this model (deepseek_v3), down_proj and gate_up_proj" in verl


@pytest.mark.parametrize("family", ["apertus", WITH_TOWER])
def test_all_linear_adapts_the_layers_that_the_torch_backend_adapts(found: dict[str, Any], family: str) -> None:
    verl, ours = found["adapted"][family]
    assert verl == ours
    assert len(verl) > 2
