"""An adapter is served only if its folder has what its address says, and all of it can be computed."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bombus.errors import Code, Refused
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus_inference.backends.torch.adapters.reading import read_loaded
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_adapters import SCALE, random_adapter, write_adapter, write_with_patterns
from tests.inference.backends.small_engines import llama

SETTINGS = ComputeSettings()


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """Change the tensors of an adapter, and return its new address."""
    tensors = load_file(folder / ADAPTER_FILE)
    change(tensors)
    save_file(tensors, folder / ADAPTER_FILE)
    return sha256((folder / ADAPTER_FILE).read_bytes()).hexdigest()


def test_what_is_read_is_what_was_written_with_b_scaled(tmp_path: Path) -> None:
    factors = random_adapter(llama(), 1)
    made = read_loaded(write_adapter(tmp_path, factors), tmp_path, SETTINGS)
    assert made.layers.keys() == factors.keys()
    for name, (low_a, low_b) in factors.items():
        torch.testing.assert_close(made.layers[name].low_a, low_a)
        torch.testing.assert_close(made.layers[name].low_b, SCALE * low_b)


def test_an_adapter_of_pefts_without_metadata_is_read_too(tmp_path: Path) -> None:
    write_adapter(tmp_path, random_adapter(llama(), 1))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, "base_model_name_or_path": "x"}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    made = read_loaded(rewritten(tmp_path, lambda _: None), tmp_path, SETTINGS)
    assert set(made.scales.values()) == {3.0}  # alpha over the root of the rank


def test_a_layer_with_a_rank_and_an_alpha_of_its_own_is_read_with_these(tmp_path: Path) -> None:
    address, scaled, first = write_with_patterns(tmp_path, llama())
    made = read_loaded(address, tmp_path, SETTINGS)
    assert (made.rank, len(made.layers[first].low_a), made.scales[first]) == (4, 2, 6.0)
    for name, (_, low_b) in scaled.items():
        torch.testing.assert_close(made.layers[name].low_b, low_b)


def refusal(address: str, folder: Path, settings: ComputeSettings = SETTINGS) -> Refused:
    with pytest.raises(Refused) as refused:
        read_loaded(address, folder, settings)
    return refused.value


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    address = write_adapter(tmp_path, random_adapter(llama(), 1))
    data = bytearray((tmp_path / ADAPTER_FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / ADAPTER_FILE).write_bytes(data)
    refused = refusal(address, tmp_path)
    assert refused.code == Code.MALFORMED
    assert f"not {address}: it was damaged" in refused.why


def test_a_file_that_was_cut_off_is_refused_even_under_its_own_address(tmp_path: Path) -> None:
    write_adapter(tmp_path, random_adapter(llama(), 1))
    data = (tmp_path / ADAPTER_FILE).read_bytes()[:-100]
    (tmp_path / ADAPTER_FILE).write_bytes(data)
    assert "cannot be" in refusal(sha256(data).hexdigest(), tmp_path).why


def test_a_folder_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal("0" * 64, tmp_path / "none").why


@pytest.mark.parametrize("address", ["", "0" * 63, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n"])
def test_what_is_not_an_address_is_refused(tmp_path: Path, address: str) -> None:
    assert "64 hexadecimal digits" in refusal(address, tmp_path).why


def test_a_configuration_that_is_not_the_one_inside_is_refused(tmp_path: Path) -> None:
    address = write_adapter(tmp_path, random_adapter(llama(), 1))
    config = tmp_path / ADAPTER_CONFIG
    config.write_text(config.read_text().replace('"lora_alpha":8', '"lora_alpha":9'))
    assert "is not the one in the metadata" in refusal(address, tmp_path).why


@pytest.mark.parametrize("field", ["use_dora", "fan_in_fan_out"])
def test_what_is_not_computed_here_is_refused_by_its_name(tmp_path: Path, field: str) -> None:
    write_adapter(tmp_path, random_adapter(llama(), 1))
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 8, field: True}))
    assert field in refusal(rewritten(tmp_path, lambda _: None), tmp_path).why


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    write_adapter(tmp_path, random_adapter(llama(), 1))

    def spoil(tensors: dict[str, Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = value

    assert "not finite" in refusal(rewritten(tmp_path, spoil), tmp_path).why


def test_half_a_layer_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, random_adapter(llama(), 1))

    def halve(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]

    assert "no such layer" in refusal(rewritten(tmp_path, halve), tmp_path).why


def test_a_file_larger_than_all_the_room_is_refused_before_it_is_read(tmp_path: Path) -> None:
    address = write_adapter(tmp_path, random_adapter(llama(), 1))
    refused = refusal(address, tmp_path, ComputeSettings(adapters_bytes=1024))
    assert refused.code == Code.TOO_LARGE
    assert "--adapters-mb" in refused.why
