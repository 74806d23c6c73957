"""The canary of a sharded model: computed by one rank, layer by layer, while all ranks gather the weights for it.

The whole tensors arrive in the order of the file, which is the order in which a forward pass uses them, so no more than
a layer and the embeddings are held at a time. This module does not import verl.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from bombus.architectures.canary import canary_logprobs, sum_of_bits
from bombus.architectures.miniatures import empty_model
from bombus.errors import EngineFault
from bombus.weights.adapters import adapter_names
from bombus_trainer.publish.export import Tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Arriving:
    """Whole tensors, read from a stream only as they are needed, and the sum of the bits of all tensors in the
    stream."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = iter(tensors)
        self._held: dict[str, Tensor] = {}
        self._sum = 0

    def take(self, name: str) -> Tensor:
        while name not in self._held:
            self._held.update([self._next()])
        return self._held.pop(name)

    def bits(self) -> str:
        """Read the rest, and return the same as `sum_of_bits` of the whole stream."""
        for each in self._tensors:
            self._add(each)
        return f"{self._sum % 2**64:016x}"

    def _next(self) -> tuple[str, Tensor]:
        for each in self._tensors:
            self._add(each)
            return each
        raise EngineFault("the model computes with a tensor for longer than it is held")

    def _add(self, each: tuple[str, Tensor]) -> None:
        self._sum += int(sum_of_bits([each]), 16)


def gathered_canary(
    model: "PreTrainedModel", tensors: Tensors, adapters: Mapping[str, Tensor], scale: float
) -> tuple[tuple[float, ...], str]:
    """Return the canary's logprobs with the parameters in `tensors`, and the sum of the bits of `tensors`.

    `model` is from `skeleton`, and keeps some of the parameters. `adapters` maps the names of adapter tensors in a file
    to the tensors.
    """
    arriving = Arriving(tensors)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight

    def arrived(module: nn.Module) -> nn.Parameter:
        return nn.Parameter(arriving.take(f"{names[module]}.weight"), requires_grad=False)

    def fill_head(*_: object) -> None:
        head.weight = embedding.weight if tied else arrived(head)

    def exact(module: nn.Module, name: str, value: Tensor) -> Tensor:
        if not value.is_meta:
            return value.double()
        whole = arriving.take(f"{names[module]}.{name}").double()
        low_a, low_b = adapter_names(names[module])
        if name == "weight" and low_a in adapters:
            whole += scale * (adapters[low_b].double() @ adapters[low_a].double())
        return whole

    embedding.weight = arrived(embedding)
    model.get_decoder().register_forward_hook(fill_head)
    return canary_logprobs(model, exact), arriving.bits()


def skeleton(
    config: "PretrainedConfig", stored: Mapping[str, object], buffers: Mapping[str, Tensor]
) -> "PreTrainedModel":
    """Return a model with these buffers, whose parameters have no values.

    Raises `EngineFault` if the model has an image tower, which would need weights too, or if a parameter's name is not
    in `stored`, the names in the model's files.
    """
    if hasattr(config, "vision_config"):
        raise EngineFault("this model has a tower for images")
    model = empty_model(config).eval()
    if other := [name for name, _ in model.named_parameters() if name not in stored]:
        raise EngineFault(f"this model's files name {other[0]} otherwise")
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value
    return model
