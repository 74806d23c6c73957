"""The base model: either frozen, with adapters switched on and off, or with all of its weights trained."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from bombus.architectures.probing import sequence_limit
from bombus.operations import AdapterPart, AdapterSpec
from bombus.weights.models import persistent_buffers
from bombus_trainer.backends.torch.lora import LoraLinear, layers_to_adapt, linear_layers
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

ATTENTION_WORDS = ("attn", "attention")  # found in module names in every model family


class Base:
    """A loaded model. With `all_weights`, all of its weights are trained; otherwise they never change."""

    def __init__(self, folder: Path, settings: TrainerSettings, all_weights: bool, ranks: Ranks | None = None) -> None:
        """Load the model in `folder`. Raises `EngineFault` if it cannot be loaded or trained.

        Each of `ranks` (if None, only this process) has the whole model, and their gradients are summed.
        """
        self.settings = settings
        self.ranks = ranks or Ranks.alone()
        self.all_weights = all_weights
        self.policy = PolicyModel.load(folder, settings, all_weights)
        self.network = self.policy.network
        self.context = sequence_limit(self.network.config, settings.job.rollout.max_model_len)
        self._on: Mapping[str, LoraLinear] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}  # parent and attribute of each layer, by layer name

    def adapters(self, spec: AdapterSpec) -> dict[str, LoraLinear]:
        """Make new adapters, by the name of the layer that each adapts. All of them are switched off.

        Raises `EngineFault` in the same cases as `layers`.
        """
        generator = torch.Generator().manual_seed(spec.seed)
        return {name: LoraLinear(layer, spec.rank, spec.alpha, generator) for name, layer in self.layers(spec).items()}

    def numbers(self, spec: AdapterSpec | None) -> int:
        """Return the number of parameters in an adapter, or in the whole model if `spec` is None.

        Raises `EngineFault` in the same cases as `layers`.
        """
        if spec is None:
            return sum(parameter.numel() for parameter in self.network.parameters())
        return sum(spec.rank * (each.in_features + each.out_features) for each in self.layers(spec).values())

    def layers(self, spec: AdapterSpec) -> dict[str, nn.Linear]:
        """Return the layers that an adapter adapts, by name. Raises `EngineFault` if the model does not have them."""
        if spec.targets:
            return layers_to_adapt(self.network, spec.targets)
        every = AdapterPart.MLP in spec.parts
        layers = layers_to_adapt(self.network, ()) if every else linear_layers(self.network)
        return {name: layer for name, layer in layers.items() if part_of(name) in spec.parts}

    def everything(self) -> dict[str, Tensor]:
        """Return all weights in the precision in which they are trained, and the persistent buffers.

        Tensors with wide elements come first, so that each tensor begins at a multiple of its element size.
        """
        found = {name: value.detach() for name, value in self.network.named_parameters()}
        found |= persistent_buffers(self.network)
        return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))

    @contextmanager
    def switched_on(self, adapters: Mapping[str, LoraLinear]) -> Iterator[None]:
        """Within the block, compute with exactly these adapters, each in place of the layer that it adapts."""
        before = self._on
        try:
            self._switch(before, adapters)
            yield
        finally:
            self._switch(adapters, before)

    def _switch(self, off: Mapping[str, LoraLinear], on: Mapping[str, LoraLinear]) -> None:
        layers: dict[str, nn.Module] = {name: adapter.base for name, adapter in off.items()}
        for name, layer in {**layers, **on}.items():
            if name not in self._places:  # finding a layer is slower than switching it, and there are hundreds
                owner, _, attribute = name.rpartition(".")
                self._places[name] = self.network.get_submodule(owner), attribute
            setattr(*self._places[name], layer)
        self._on = on


def part_of(layer: str) -> AdapterPart:
    """Return the part to which a decoder layer belongs, judging by its name: attention, or else the MLP."""
    words = layer.lower().split(".")[:-1]
    attends = any(word in part for part in words for word in ATTENTION_WORDS)
    return AdapterPart.ATTENTION if attends else AdapterPart.MLP
