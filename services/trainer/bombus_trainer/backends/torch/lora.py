"""Low-rank adapters over the linear layers of a transformer (Hu et al. 2021, arXiv:2106.09685)."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bombus.errors import EngineFault
from bombus.weights.adapters import merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS_SHARE = 0.01  # share of the decoder's weights that may be in fused experts and not be adapted
BASE = ".base."  # part of the names of a wrapped layer's own parameters


class RoundedOnce(torch.autograd.Function):
    """Computes a frozen layer's W x plus B l in half precision as one matrix product, [W, B] [x, l].

    Otherwise W x would be rounded first, and adding less than half a unit in its last place would have no effect. Most
    of what an adapter adds in its first steps is that small. The torch engine's replicas do the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, low_b: Tensor, base: nn.Linear) -> Tensor:
        ctx.save_for_backward(low, low_b, base.weight)
        return linear(torch.cat((x, low), dim=-1), torch.cat((base.weight, low_b), dim=1), base.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad,) = grads
        low, low_b, weight = ctx.saved_tensors
        return grad @ weight, grad @ low_b, grad.flatten(0, -2).T @ low.flatten(0, -2), None


class LoraLinear(nn.Module):
    """y = base(x) + (alpha / rank) B A x, with A [rank, in] and B [out, rank] in float32 and the base frozen."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        bound = 1.0 / math.sqrt(base.in_features)
        lora_a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(lora_a.to(base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        low, low_b = linear(x, self.lora_a.to(x.dtype)), (self.scale * self.lora_b).to(x.dtype)
        if x.dtype == torch.float32:
            added: Tensor = self.base(x) + linear(low, low_b)
            return added
        once: Tensor = RoundedOnce.apply(x, low, low_b, self.base)  # type: ignore[no-untyped-call]
        return once

    def merged(self) -> Tensor:
        """Return the dense weight [out, in] that computes the same result, in float32."""
        with torch.no_grad():
            return merged(self.base.weight, self.lora_a, self.lora_b, self.scale)


def layers_to_adapt(model: "PreTrainedModel", targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder by name: those that `targets` name, or all if there are no targets.

    The output layer is left out, because with tied embeddings it is not a separate layer. Raises `EngineFault` if a
    target matches no layer, if there are no linear layers, or if adapting all of them would leave fused experts
    untrained.
    """
    layers = linear_layers(model)
    found = {name.rsplit(".", 1)[-1] for name in layers}
    if unknown := [target for target in targets if target not in found]:
        raise EngineFault(f"target module {unknown[0]!r} is not in this model, which has {', '.join(sorted(found))}")
    if not targets:
        _check_covered(model)
        return layers
    return {name: layer for name, layer in layers.items() if name.rsplit(".", 1)[-1] in targets}


def linear_layers(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """Return the linear layers of the decoder by name, without the output layer and without towers for images or sound.

    Raises `EngineFault` if there are none.
    """
    inside = set(model.get_decoder().modules()) - {model.get_output_embeddings()}
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module in inside
    }
    if not layers:
        kinds = {
            type(module).__name__
            for module in inside
            if not isinstance(module, nn.Embedding)
            and any(value.ndim == 2 for value in module.parameters(recurse=False))
        }
        raise EngineFault(
            f"LoRA adapts linear layers, but this model ({model.config.model_type}) has none: its layers are "
            f"{', '.join(sorted(kinds)) or 'of other kinds'}; set trainer.lora_rank to 0 to train all weights"
        )
    return layers


def _check_covered(model: "PreTrainedModel") -> None:
    """Raise `EngineFault` if a model fuses experts into one tensor [experts, ...], which adapters of layers do not
    cover."""
    inside = set(model.get_decoder().modules())
    fused = {
        f"{owner}.{name}": value.numel()
        for owner, module in model.named_modules()
        for name, value in module.named_parameters(recurse=False)
        if module in inside and value.ndim == 3 and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
    }
    names = sorted({name.rpartition(".")[2] for name in fused})
    share = sum(fused.values()) / sum(value.numel() for value in model.get_decoder().parameters())
    if share <= EXPERTS_SHARE:
        return
    raise EngineFault(
        f"trainer.target_modules all-linear would leave {100 * share:.0f} % of this model's decoder untrained: the "
        f"experts in {' and '.join(names)} (such as {next(iter(fused))}) are fused into tensors and are not linear "
        "layers; name the layers to train in trainer.target_modules, such as q_proj,k_proj,v_proj,o_proj, or train all "
        "weights with lora_rank 0"
    )


def adapters_of(model: nn.Module) -> dict[str, LoraLinear]:
    """Return a model's adapters, by the name of the layer that each one adapts."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def target_modules(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return names by which peft finds these layers of a model and no other modules.

    Each is the last part of a layer's name, or the whole name if another module's name ends in the same part.
    """
    adapted = set(layers)
    others = {
        end
        for owner, _, end in (name.rpartition(".") for name, _ in model.named_modules())
        if owner not in adapted and (f"{owner}.{end}" if owner else end) not in adapted
    }
    ends = {layer: layer.rpartition(".")[2] for layer in adapted}
    return sorted({layer if end in others else end for layer, end in ends.items()})
