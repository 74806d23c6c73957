"""Counts the floating-point operations of a step, and their share of the device's peak (model FLOPs utilization).

Only operations that the model needs are counted, as in the PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B): those repeated by activation checkpointing count only once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from bombus_trainer.data.packing import Segment

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Dense bfloat16 FLOP/s by CUDA's device name, from the makers' data sheets. The first match is used.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class Cost:
    """The sizes that determine a dense transformer's FLOPs.

    `matrices` is the number of elements in the matrices of its layers, `head` the number in the output matrix, and
    `attention` is layers x heads x head size. `trained` says whether the matrices themselves get gradients.
    """

    matrices: int
    head: int
    attention: int
    trained: bool

    @property
    def of_attention(self) -> float:
        """The factor a such that T tokens cost about as much as T + a T^2 tokens would without attention.

        In the forward pass, a token costs 2 x matrices, and each of its T / 2 pairs costs 4 x attention. In the
        backward pass, both cost twice as much if the matrices are trained.
        """
        return self.attention / self.matrices


def cost_of(model: "PreTrainedModel", trained: bool) -> Cost:
    """Return the cost of a transformers causal language model, before adapters are added to it."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return Cost(
        matrices=sum(linear.weight.numel() for linear in linears),
        head=head.weight.numel(),
        attention=sum(_attended(layer) for layer in _layers(config)),
        trained=trained,
    )


def _layers(config: "PretrainedConfig") -> "list[PretrainedConfig]":
    """Return the configuration of each layer, since in some families the heads differ between layers."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(config.num_hidden_layers)


def _attended(layer: "PretrainedConfig") -> int:
    heads = int(layer.num_attention_heads)
    return heads * int(getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def flops_of_step(cost: Cost, tokens: int, heads: int, pairs: int, backward: bool = True) -> float:
    """Return the FLOPs of a pass over `tokens` rows, of which `heads` need logits, with `pairs` query-key pairs.

    The forward pass takes 2 for each matrix element and row, and 4 (keys, values) for each pair and element of a head.
    The backward pass takes as much for the rows' gradients, and as much again for the matrices' gradients if they are
    trained; for attention, it takes twice as much as the forward pass.
    """
    multiplied = 2.0 * (cost.matrices * tokens + cost.head * heads)
    attended = 4.0 * cost.attention * pairs
    if not backward:
        return multiplied + attended
    return multiplied * (3.0 if cost.trained else 2.0) + attended * 3.0


def attention_pairs(segments: Iterable[Segment]) -> int:
    """Count the query-key pairs of a row: each token attends to itself and to the tokens before it on its path."""
    return sum(segment.length * segment.depth + segment.length * (segment.length + 1) // 2 for segment in segments)


def peak_of(device: torch.device) -> float | None:
    """Return a device's peak FLOP/s in bfloat16, or None on a CPU or for an unknown device."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of the CUDA device with this name, or None if it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
