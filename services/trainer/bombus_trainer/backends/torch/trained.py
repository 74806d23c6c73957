"""A model in training: an adapter on a base, or all of the base's weights, with its optimizer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.operations import AdapterSpec
from bombus.weights.adapters import AdapterConfig, adapter_names
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.backends.torch.lora import LoraLinear, target_modules
from bombus_trainer.backends.torch.optim import AdamW


class TrainedModel:
    """An adapter on a base, or all weights of the base. `parameters` maps the name of each parameter in a file to the
    parameter."""

    def __init__(self, base: Base, spec: AdapterSpec | None) -> None:
        """Make a new model. Raises `EngineFault` if the base cannot have this adapter."""
        self.base = base
        self.spec = spec
        self.adapters: dict[str, LoraLinear] = {} if spec is None else base.adapters(spec)
        self.parameters = base.policy.trainable() if spec is None else factors(self.adapters)
        self.optimizer = AdamW(self.parameters)

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def add_up_gradients(self) -> None:
        """Sum the gradients over the ranks. A parameter that has a gradient on any rank then has one on every rank."""
        ranks = self.base.ranks
        if ranks.size == 1:
            return
        here = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        anywhere = set[str]().union(*ranks.gather(here))
        trained = [parameter for name, parameter in self.parameters.items() if name in anywhere]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        ranks.add_up([parameter.grad for parameter in trained if parameter.grad is not None])

    def adapter_config(self) -> AdapterConfig:
        """Return the configuration that peft reads. Raises `ValueError` for a model without an adapter."""
        if self.spec is None:
            raise ValueError("this model has no adapter")
        targets = target_modules(self.base.network, self.adapters)
        return AdapterConfig(r=self.spec.rank, lora_alpha=float(self.spec.alpha), target_modules=targets)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter, or the whole model, in full precision, by name and in the order of its file."""
        if self.spec is None:
            return self.base.everything()
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Load what `weights` returned, or only its trained part.

        Raises `EngineFault`, before anything changes, if the weights do not belong to this model.
        """
        every, trained = self.weights(), {name: value.detach() for name, value in self.parameters.items()}
        own = trained if weights.keys() == trained.keys() else every
        if odd := sorted(own.keys() ^ weights.keys()):
            raise EngineFault(f"the checkpoint belongs to another model: {odd[0]} is in only one of the two")
        for name, value in own.items():
            if value.shape != weights[name].shape:
                raise EngineFault(
                    f"the checkpoint belongs to another model: its {name} has shape {list(weights[name].shape)}, not "
                    f"{list(value.shape)}"
                )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])


def factors(adapters: Mapping[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """Return the adapters' trained factors, keyed by the names that they have in an adapter file."""
    found: dict[str, nn.Parameter] = {}
    for layer, adapter in adapters.items():
        low_a, low_b = adapter_names(layer)
        found |= {low_a: adapter.lora_a, low_b: adapter.lora_b}
    return found
