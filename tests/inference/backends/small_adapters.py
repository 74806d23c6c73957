"""Helpers for tests of adapters: random ones for the small models, as folders, loaded, and merged into a model."""

import json
from collections.abc import Sequence
from copy import deepcopy
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, AdapterConfig, adapter_names
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 2.0


def address_of(number: int) -> str:
    """Return a made-up address for tests that do not read files."""
    return f"{number:064x}"


def random_adapter(
    model: PreTrainedModel, seed: int, rank: int = 4, targets: Sequence[str] = ALL
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and B [out, rank] by layer, large enough to change what the model says."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: (
            0.2 * torch.randn(rank, layer.in_features, generator=random),
            0.2 * torch.randn(layer.out_features, rank, generator=random),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets
    }


def loaded(factors: dict[str, tuple[Tensor, Tensor]], dtype: torch.dtype = torch.float32) -> LoadedAdapter:
    layers = {name: LowRank(low_a.to(dtype), (SCALE * low_b).to(dtype)) for name, (low_a, low_b) in factors.items()}
    return LoadedAdapter(layers, dict.fromkeys(layers, SCALE))


def with_merged(model: PreTrainedModel, factors: dict[str, tuple[Tensor, Tensor]]) -> PreTrainedModel:
    """Return a copy of a model with W + scale B A in place of W."""
    copy = deepcopy(model)
    with torch.no_grad():
        for name, (low_a, low_b) in factors.items():
            copy.get_parameter(f"{name}.weight").add_(SCALE * (low_b @ low_a))
    return copy


def write_adapter(folder: Path, factors: dict[str, tuple[Tensor, Tensor]], scale: float = SCALE) -> str:
    """Write an adapter as our trainer does, and return its address."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(factors.values()))[0])
    targets = sorted({name.rpartition(".")[2] for name in factors})
    config = AdapterConfig(r=rank, lora_alpha=scale * rank, target_modules=targets).to_json()
    tensors = {
        key: side.contiguous()
        for name, sides in factors.items()
        for key, side in zip(adapter_names(name), sides, strict=True)
    }
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt", ADAPTER_CONFIG: config})
    (folder / ADAPTER_CONFIG).write_text(config)
    return sha256((folder / ADAPTER_FILE).read_bytes()).hexdigest()


def write_with_patterns(folder: Path, model: PreTrainedModel) -> tuple[str, dict[str, tuple[Tensor, Tensor]], str]:
    """Write an adapter of rank 4 as peft does, of rank 2 and scale 6 in one layer: (address, with B scaled, which)."""
    factors = random_adapter(model, 1, rank=4)
    first = next(iter(factors))
    factors[first] = random_adapter(model, 2, rank=2)[first]
    write_adapter(folder, factors)
    save_file(load_file(folder / ADAPTER_FILE), folder / ADAPTER_FILE)  # without a configuration in its metadata
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": SCALE * 4}
    config |= {"rank_pattern": {first: 2}, "alpha_pattern": {first: 12}}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    scaled = {name: (a, (6 if name == first else SCALE) * b) for name, (a, b) in factors.items()}
    return sha256((folder / ADAPTER_FILE).read_bytes()).hexdigest(), scaled, first
