"""Low-rank adapters over the linear layers of a transformer (Hu et al. 2021, arXiv:2106.09685)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bombus.errors import EngineFault
from bombus.weights.adapters import AdapterConfig, adapter_names, merged

OUTPUT_LAYER = "lm_head"  # gets no adapter: with tied embeddings it is not a layer of its own
BASE = ".base."  # in the name of a wrapped layer's own parameters


class LoraLinear(nn.Module):
    """y = base(x) + (alpha / rank) B A x, with A [rank, in] and B [out, rank] in float32 and the base frozen."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.enabled = True
        bound = 1.0 / math.sqrt(base.in_features)
        lora_a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(lora_a.to(base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if not self.enabled:
            return out
        low = linear(x, self.lora_a.to(x.dtype))
        return out + linear(low, (self.scale * self.lora_b).to(x.dtype))

    def merged(self) -> Tensor:
        """Return the dense weight [out, in] that computes the same, in float32."""
        with torch.no_grad():
            return merged(self.base.weight, self.lora_a, self.lora_b, self.scale)


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze `model` and put an adapter on each linear layer but the output layer, or on those named in `targets`.

    Raises `EngineFault` when a target names no layer.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] != OUTPUT_LAYER
    }
    found = {name.rsplit(".", 1)[-1] for name in layers}
    if unknown := [target for target in targets if target not in found]:
        raise EngineFault(f"target module {unknown[0]!r} is none of this model's: {', '.join(sorted(found))}")
    for name, layer in layers.items():
        owner, _, attribute = name.rpartition(".")
        if not targets or attribute in targets:
            setattr(model.get_submodule(owner), attribute, LoraLinear(layer, rank, alpha, generator))


def adapters_of(model: nn.Module) -> dict[str, LoraLinear]:
    """Return a model's adapters by the name of the layer that each is on."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_config(model: nn.Module, rank: int, alpha: float) -> AdapterConfig:
    targets = sorted({name.rpartition(".")[2] for name in adapters_of(model)})
    return AdapterConfig(r=rank, lora_alpha=float(alpha), target_modules=targets)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapters' factors under their names in a file, in float32."""
    for name, adapter in adapters_of(model).items():
        low_a, low_b = adapter_names(name)
        yield low_a, adapter.lora_a.detach()
        yield low_b, adapter.lora_b.detach()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapters off for a block: it is then the model that training began with."""
    adapters = adapters_of(model).values()
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
