"""LoRA adapters that are computed apart from the weights of a half-precision engine, since merging them into the
weights would round them away."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bombus.errors import EngineFault
from bombus.weights.merging import Adapter
from bombus_inference.settings import ComputeSettings


@dataclass(frozen=True, eq=False)
class LowRank:
    """The term B A that an adapter adds to a linear layer's weight. A is [rank, in], and B is [out, rank] and includes
    the scale."""

    low_a: Tensor
    low_b: Tensor


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: y = [W, B] [x, A x], in one matrix product.

    The sum is therefore rounded only once. Adding B A x to W x in half precision, after W x has been rounded, would
    lose as much precision as merging the weights does.
    """

    def __init__(self, layer: nn.Linear, low_rank: LowRank) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.low_a = low_rank.low_a
        self.whole = torch.cat((layer.weight.data, low_rank.low_b), dim=1)  # [out, in + rank]
        self.weight.data = self.whole[:, : layer.in_features]

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.cat((x, linear(x, self.low_a)), dim=-1), self.whole, self.bias)

    def plain(self) -> nn.Linear:
        """Return the layer without its adapter."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        layer.weight.data = layer.weight.data.contiguous()
        return layer


def is_computed_beside(settings: ComputeSettings) -> bool:
    """Return whether adapters are computed separately from the weights. In float32, merging is accurate and free."""
    return settings.precision != "float32"


def read_adapter(folder: Path, settings: ComputeSettings) -> dict[str, LowRank]:
    """Return the adapter in `folder` by layer, in the engine's type and on its device. Raises `EngineFault` if it
    cannot be read."""
    device, dtype = settings.device, getattr(torch, settings.precision)
    layers = Adapter(folder).layers()
    return {name: LowRank(low_a.to(device, dtype), low_b.to(device, dtype)) for name, low_a, low_b in layers}


def check_adapter(model: PreTrainedModel, adapter: Mapping[str, LowRank]) -> None:
    """Raise `EngineFault` for an adapter that does not fit this model."""
    output, layers = model.get_output_embeddings(), dict(model.named_modules())
    for name, low_rank in adapter.items():
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear) or layer is output:
            raise EngineFault(f"the adapter has {name}, but this model has no such layer that can take an adapter")
        rank = len(low_rank.low_a)
        if low_rank.low_a.shape != (rank, layer.in_features) or low_rank.low_b.shape != (layer.out_features, rank):
            raise EngineFault(f"the adapter's {name} does not fit this model's")


def set_adapter(model: nn.Module, adapter: Mapping[str, LowRank]) -> None:
    """Replace a model's adapter with this one, which must have passed `check_adapter`. An empty `adapter` removes the
    model's adapter."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        if name in adapter:
            replace_layer(model, name, AdaptedLinear(layer, adapter[name]))
        elif isinstance(layer, AdaptedLinear):
            replace_layer(model, name, layer.plain())


def replace_layer(model: nn.Module, name: str, layer: nn.Linear) -> None:
    """Replace the layer `name` of a model."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)
