"""Finds the shape of each layer's cache for one token by running the layers, instead of reading the configuration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bombus.errors import EngineFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_PASSED_ON = "its layers do not pass on extra arguments to their attention function"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's cache for one token: keys [kv_heads, key_dim] and values [kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class ShapeRecorder:
    """Records the shapes of the caches of a model's layers. It is passed to our attention function in place of the
    usual state."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def note(self, module: torch.nn.Module, query_1HTD: Tensor, key_1HTD: Tensor, value_1HTE: Tensor) -> Tensor:
        """Record a layer's shape, and return an output [1, T, H, E] of zeros."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise EngineFault("some of its layers share their attention, and so the place for their keys")
        if layer in self.shapes:
            raise EngineFault("a layer attends more than once, to different keys each time")
        self.shapes[layer] = LayerShape(key_1HTD.shape[1], key_1HTD.shape[3], value_1HTE.shape[3])
        heads, tokens = query_1HTD.shape[1:3]
        return query_1HTD.new_zeros(1, tokens, heads, value_1HTE.shape[3])


def layer_shapes(model: "PreTrainedModel", argument: str) -> list[LayerShape]:
    """Return the shape of each layer's cache for one token. Raises `EngineFault` if a layer is not attention.

    `argument` is the keyword argument through which the model's attention function receives a `ShapeRecorder`.
    """
    recorder = ShapeRecorder()
    ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, **{argument: recorder})
    if not recorder.shapes:
        raise EngineFault("its layers take no attention function from outside, or have no attention")
    layers = int(model.config.get_text_config().num_hidden_layers)
    if others := [layer for layer in range(layers) if layer not in recorder.shapes]:
        raise EngineFault(f"{len(others)} of its {layers} layers keep state other than attention keys and values")
    if len(recorder.shapes) > layers:
        raise EngineFault(f"it attends in {len(recorder.shapes)} layers, not only in its {layers}")
    return [recorder.shapes[layer] for layer in range(layers)]
