"""Finds the layers of a model that can have a separate adapter per row, by watching a forward pass, and checks that
adapters fit these layers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bombus.architectures.shapes import ShapeRecorder
from bombus.errors import Code, Refused
from bombus_inference.backends.torch.adapters.own import AdaptedLinear, LowRank
from bombus_inference.backends.torch.attention import PLAN

PROBE_TOKENS = 3  # few layers that compute other rows would see exactly this many


def adaptable_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return the layers that can have a separate adapter for each row, including the output layer, with shapes [out,
    in].

    These are plain linear layers that are called once with all rows of a pass. Other layers do not qualify. In some
    models another module reads a layer's weight directly, so an adapter would be ignored; in others a layer computes
    only the rows of one expert, so an adapter would be applied to the wrong rows.
    """
    output = model.get_output_embeddings()
    plain = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in (nn.Linear, AdaptedLinear) and isinstance(layer, nn.Linear)
    }
    rows: dict[str, set[int]] = {}

    def watch(name: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows.setdefault(name, set()).add(inputs[0].shape[:-1].numel())

        return layer.register_forward_pre_hook(note)

    handles = [watch(name, layer) for name, layer in plain.items() if layer is not output]
    ids_1T = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)[None]
    try:
        with torch.no_grad():
            model.get_decoder()(input_ids=ids_1T, position_ids=ids_1T, use_cache=False, **{PLAN: ShapeRecorder()})
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: (layer.weight.shape[0], layer.weight.shape[1])
        for name, layer in plain.items()
        if layer is output or rows.get(name) == {PROBE_TOKENS}
    }


def check_fits(layers: Mapping[str, LowRank], adaptable: Mapping[str, tuple[int, int]]) -> None:
    """Raise `Refused` for an adapter with a layer that is not in `adaptable` or has a different shape there."""
    for name, low_rank in layers.items():
        if name not in adaptable:
            raise Refused(
                Code.MALFORMED, f"the adapter has {name}, but this model has no such layer that can take an adapter"
            )
        out, inside = adaptable[name]
        rank = len(low_rank.low_a)
        if low_rank.low_a.shape != (rank, inside) or low_rank.low_b.shape != (out, rank):
            shapes = f"{list(low_rank.low_b.shape)} times {list(low_rank.low_a.shape)}"
            why = f"the adapter's {name} is {shapes}, but this model's is {[out, inside]}"
            raise Refused(Code.MALFORMED, why)
