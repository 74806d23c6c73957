"""The model below all tenants: frozen with adapters switched in and out, or with all of its weights trained by one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from bombus.architectures.probing import sequence_limit
from bombus.errors import Code, EngineFault, Refused
from bombus.operations import AdapterPart, AdapterSpec
from bombus.weights.models import persistent_buffers
from bombus_trainer.backends.torch.lora import LoraLinear, layers_to_adapt, linear_layers
from bombus_trainer.backends.torch.model import PolicyModel, recompute_layers
from bombus_trainer.settings import TrainerSettings

SEED_MIN, SEED_MAX = -(1 << 63), (1 << 63) - 1
ATTENTION_WORDS = ("attn", "attention")  # in the names of modules, whatever the family


class TenantBase:
    """A loaded model. With `all_weights` they are trained, otherwise they never change."""

    def __init__(self, folder: Path, settings: TrainerSettings, all_weights: bool) -> None:
        """Load the model in `folder`. Raises `EngineFault` when it cannot be loaded or trained."""
        self.settings = settings
        self.all_weights = all_weights
        self.policy = PolicyModel.load_plain(folder, settings, all_weights)
        self.network = self.policy.network
        if settings.config.gradient_checkpointing:
            recompute_layers(self.network)
        self.context = sequence_limit(self.network.config, settings.job.rollout.max_model_len)

    def adapters(self, spec: AdapterSpec, rank_max: int) -> dict[str, LoraLinear]:
        """Make new adapters by the name of the layer that each is for, none of them switched on.

        Raises `Refused` where the model has no such layers.
        """
        _check_spec(spec, rank_max)
        generator = torch.Generator().manual_seed(spec.seed)
        return {name: LoraLinear(layer, spec.rank, spec.alpha, generator) for name, layer in self._layers(spec).items()}

    def numbers(self, spec: AdapterSpec | None, rank_max: int) -> int:
        """Return how many numbers an adapter trains, or a model of all weights. Raises `Refused` as `adapters` does."""
        if spec is None:
            return sum(parameter.numel() for parameter in self.network.parameters())
        _check_spec(spec, rank_max)
        return sum(spec.rank * (each.in_features + each.out_features) for each in self._layers(spec).values())

    def _layers(self, spec: AdapterSpec) -> dict[str, nn.Linear]:
        every = not spec.targets and AdapterPart.MLP in spec.parts
        try:
            if every or spec.targets:
                layers = layers_to_adapt(self.network, spec.targets)
            else:
                layers = linear_layers(self.network)
        except EngineFault as error:
            hint = ". Leave mlp out of the adapter's parts, or give its targets" if every else ""
            raise Refused(Code.BAD_CONFIG, f"no adapter like this can be made here: {error}{hint}") from error
        if not spec.targets:
            layers = {name: layer for name, layer in layers.items() if part_of(name) in spec.parts}
        if not layers:
            raise Refused(Code.BAD_CONFIG, f"this model has no layers of the parts {', '.join(spec.parts)} to adapt")
        return layers

    def everything(self) -> dict[str, Tensor]:
        """Return all weights in the precision that they are trained in, and the buffers that belong to them.

        Wide elements come first: so each tensor begins at a multiple of its element's size.
        """
        found = {name: value.detach() for name, value in self.network.named_parameters()}
        found |= persistent_buffers(self.network)
        return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))

    @contextmanager
    def switched_on(self, adapters: Mapping[str, LoraLinear]) -> Iterator[None]:
        """Compute with these adapters for a block, each in the place of the layer that it is for."""
        places = [(self.network.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in adapters]
        try:
            for (owner, attribute), adapter in zip(places, adapters.values(), strict=True):
                setattr(owner, attribute, adapter)
            yield
        finally:
            for (owner, attribute), adapter in zip(places, adapters.values(), strict=True):
                setattr(owner, attribute, adapter.base)


def part_of(layer: str) -> AdapterPart:
    """Return the part that a layer of a decoder belongs to, by its name: attention, or else the MLP."""
    words = layer.lower().split(".")[:-1]
    attends = any(word in part for part in words for word in ATTENTION_WORDS)
    return AdapterPart.ATTENTION if attends else AdapterPart.MLP


def _check_spec(spec: AdapterSpec, rank_max: int) -> None:
    if not 1 <= spec.rank <= rank_max:
        raise Refused(Code.BAD_CONFIG, f"the rank of an adapter is {spec.rank}: it has to be 1 to {rank_max}")
    if not 0.0 < spec.alpha < 1e6:
        raise Refused(Code.BAD_CONFIG, f"the alpha of an adapter is {spec.alpha}: it has to be above 0 and below 1e6")
    if not SEED_MIN <= spec.seed <= SEED_MAX:
        raise Refused(Code.BAD_CONFIG, f"the seed of an adapter is {spec.seed}: it has to be an integer of 64 bits")
    if AdapterPart.UNEMBEDDING in spec.parts and not spec.targets:
        raise Refused(
            Code.UNSUPPORTED,
            "an adapter on the output layer (unembedding) is not trained here, because the engines do not serve one: "
            "leave unembedding out of its parts",
        )
