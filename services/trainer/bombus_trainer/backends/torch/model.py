"""The model that is trained: computes the logprobs of a bin's terms, with gradients, and yields the weights for
inference servers."""

import copy
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from bombus.architectures.canary import canary_logprobs
from bombus.architectures.logits import LogitsForm
from bombus.architectures.miniatures import WINDOW, miniature
from bombus.architectures.probing import (
    PROBE_TOKENS,
    Disagreement,
    check_gradients,
    compared,
    probe_sequences,
    probe_tokens,
    reference_logprobs,
    refusing,
    sequence_limit,
    uneven_sequences,
)
from bombus.architectures.shapes import layer_shapes
from bombus.errors import EngineFault
from bombus.weights.adapters import merged
from bombus.weights.models import load_config, load_model, persistent_buffers
from bombus_trainer.backends.torch.attention import NAME, plan
from bombus_trainer.backends.torch.flops import attention_pairs, cost_of, flops_of_step, peak_of
from bombus_trainer.backends.torch.head import HeadPlan, OutputLayer, chosen_logits, chosen_logprobs
from bombus_trainer.backends.torch.lora import BASE, LoraLinear, adapters_of
from bombus_trainer.backends.torch.transfer import to_device
from bombus_trainer.data.packing import Bin, Terms, TrainingItem, pack
from bombus_trainer.data.sequences import Ints
from bombus_trainer.publish.export import ModelPart
from bombus_trainer.publish.tensorfile import Shape
from bombus_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_gradients_compared: set[tuple[str, str, str]] = set()  # (configuration, attention implementation, device)
LOSS_TERMS = ("sampler_logprobs_N", "advantages_N", "weights_N")


@dataclass(frozen=True, eq=False)
class ScoredTerms:
    """The logprob and the entropy of each term of a bin [N].

    Logprobs have a gradient unless gradients are switched off; entropies have one if there is an entropy bonus. `terms`
    has the other inputs of a loss, on the model's device: `LOSS_TERMS`, and `sequences_N`, the number (below
    `sequences`) of the sequence that each term belongs to. `logits_N` are the targets' logits, if they were requested.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    terms: dict[str, Tensor]
    sequences: int
    logits_N: Tensor | None = None


class PolicyModel:
    """A causal language model with its trainable parameters in float32. Created by `PolicyModel.load`."""

    def __init__(self, model: "PreTrainedModel", export_dtype: torch.dtype, settings: TrainerSettings) -> None:
        self.device = torch.device(settings.device)
        self.export_dtype = export_dtype
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._model = model
        self._settings = settings
        self._autocast = False
        self._form = LogitsForm.of(model.config)
        self._cost = cost_of(model, trained=settings.config.lora_rank == 0)
        width = torch.finfo(torch.float32).bits // 8
        self._head_rows_max = max(16, settings.logits_bytes_max // (width * self.vocab_size))

    @classmethod
    def load(cls, folder: Path, settings: TrainerSettings, all_weights: bool = True) -> "PolicyModel":
        """Load a model from a Hugging Face folder. Either all of its weights are trained, or none.

        Raises `EngineFault` if the model cannot be loaded, or computes something that this trainer does not reproduce.
        """
        export = export_dtype(folder, settings)
        on_cpu = settings.device == "cpu" and settings.job.model.dtype == "auto"
        loaded = torch.float32 if on_cpu or all_weights else export
        model = load_model(folder, dtype=str(loaded).removeprefix("torch."), attn=NAME).to(settings.device)
        model.config.use_cache = False
        with refusing(model.config, "trained"):
            layer_shapes(model, "tree")
            policy = cls(model, export, settings)
        limit = sequence_limit(model.config, settings.job.rollout.max_model_len)
        with refusing(model.config, "trained"):  # in the weights' precision, since bfloat16 would hide differences
            policy.disagreement(limit).check(model.dtype)
            policy.check_gradients()
        # Trained weights stay in float32, because a step is often smaller than bfloat16 can represent. On a GPU, the
        # layers multiply in the precision that will be served.
        policy._autocast = all_weights and export != torch.float32 and policy.device.type == "cuda"
        if not all_weights:
            model.requires_grad_(False)
        if settings.config.gradient_checkpointing:
            recompute_layers(model)
        return policy

    def frozen_copy(self) -> "PolicyModel":
        """Return a copy of the model in its current state that is not trained."""
        copied = copy.copy(self)
        copied._model = copy.deepcopy(self._model).requires_grad_(False)
        return copied

    @property
    def network(self) -> "PreTrainedModel":
        """The model as transformers created it."""
        return self._model

    # ---- computing --------------------------------------------------------------------------------------------

    def score(self, packed: Bin, logits: bool = False) -> ScoredTerms:
        """Compute the logprobs of a bin's terms under the current weights, at each term's temperature.

        With `logits`, the result also has the targets' logits.
        """
        model = self._model
        layout = plan(packed.segments)
        moved = to_device(
            {
                "tokens": packed.tokens_T,
                "positions": packed.positions_T,
                "head_rows": packed.head_rows_U,
                "head_temperatures": packed.head_temperatures_U,
                "head_of_term": packed.head_of_term_N,
                "sequences_N": packed.sequences_N,
                **{name: getattr(packed.terms, name) for name in ("targets_N", *LOSS_TERMS)},
                **layout.arrays,
            },
            self.device,
        )
        with torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext():
            hidden_1TH = model.get_decoder()(
                input_ids=moved["tokens"][None],
                position_ids=moved["positions"][None],
                use_cache=False,
                tree=layout.tree(moved, in_full=self._settings.config.attn_implementation == "eager"),
            ).last_hidden_state
        head = HeadPlan(
            head_of_term_N=moved["head_of_term"],
            targets_N=moved["targets_N"],
            temperatures_U=moved["head_temperatures"],
            rows_max=self._head_rows_max,
        )
        layer = model.get_output_embeddings()
        output = OutputLayer(layer.weight, getattr(layer, "bias", None), self._form)
        entropy_grad = self._settings.config.entropy_coef > 0.0
        chosen_UH = hidden_1TH[0].index_select(0, moved["head_rows"])
        scores = chosen_logprobs(chosen_UH, output, head, entropy_grad)
        logits_N = chosen_logits(chosen_UH, output, head) if logits else None
        terms = {name: moved[name] for name in ("sequences_N", *LOSS_TERMS)}
        return ScoredTerms(*scores, terms, packed.sequences, logits_N)

    def flops(self, packed: Bin, backward: bool) -> float:
        """Return the FLOPs of a pass over a bin; see `flops.flops_of_step`."""
        pairs = attention_pairs(packed.segments)
        return flops_of_step(self._cost, len(packed.tokens_T), len(packed.head_rows_U), pairs, backward)

    @property
    def peak_flops(self) -> float | None:
        return peak_of(self.device)

    def disagreement(self, limit: int) -> Disagreement:
        """Compare logprobs from a tree of two branches with transformers' own forward pass of each branch.

        The branches are longer than each attention window that sequences of up to `limit` tokens can exceed.
        """
        sequences = probe_sequences(self.vocab_size, probe_tokens(self._model.config, limit, PROBE_TOKENS))
        with torch.no_grad():
            ours = self._last_logprobs(sequences)
            return Disagreement.between(ours, [reference_logprobs(self._model, sequence) for sequence in sequences])

    def check_gradients(self) -> None:
        """Raise `EngineFault` if the gradients computed for a miniature of this model differ from those of
        transformers' own passes.

        The miniature has windows short enough to end within the prefix that sequences share. The model itself is not
        used, because a backward pass may not fit in memory, and long windows may take too long at load. A process
        compares each configuration only once.
        """
        configuration = (
            self._model.config.to_json_string(),
            self._settings.config.attn_implementation,
            str(self.device),
        )
        if configuration in _gradients_compared:
            return
        try:
            small = miniature(self._model.config, NAME).to(self.device)
        except EngineFault as fault:
            log.info("gradients are not compared with those of transformers: %s", fault)
            return
        policy = PolicyModel(small, torch.float32, self._settings)
        sequences = uneven_sequences(policy.vocab_size, WINDOW)
        with torch.enable_grad():  # even if the caller has disabled gradients
            ours = policy._gradients(policy._last_logprobs(sequences))
            theirs = policy._gradients([reference_logprobs(small, sequence) for sequence in sequences])
        check_gradients(ours, theirs)
        _gradients_compared.add(configuration)

    def _last_logprobs(self, sequences: list[Tensor]) -> list[Tensor]:
        """Return the logprobs of each sequence's last tokens, computed in one tree, as CPU tensors."""
        starts = np.cumsum([0, *(len(sequence) - 1 for sequence in sequences)])
        items = [probe(sequence.numpy(), int(start)) for sequence, start in zip(sequences, starts)]
        (packed,) = pack(items, bin_tokens=1 << 24, shared_tokens_min=4)
        scored_N = self.score(packed).logprobs_N.cpu()[np.argsort(packed.terms.ids_N)]
        parts = scored_N.split([len(sequence) - 1 for sequence in sequences])
        return [part[-compared(sequence) :] for sequence, part in zip(sequences, parts, strict=True)]

    def _gradients(self, logprobs: list[Tensor]) -> list[Tensor]:
        parameters = list(self.trainable().values())
        return list(torch.autograd.grad(torch.cat(logprobs).sum(), parameters, materialize_grads=True))

    # ---- weights ----------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def dense_shapes(self) -> dict[str, Shape]:
        return {name: Shape(self._exported_as(value), tuple(value.shape)) for name, value, _ in self._dense()}

    def dense_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole model under its Hugging Face names, with the switched-on adapters merged.

        Parameters are in the export precision, persistent buffers in their own.
        """
        for name, value, adapter in self._dense():
            yield name, (value.detach() if adapter is None else adapter.merged()).to(self._exported_as(value))

    def canary_logprobs(self, part: ModelPart = ModelPart.MODEL) -> tuple[float, ...]:
        """Compute the canary's logprobs from the weights as published, with the adapters that are switched on.

        `part` is `MODEL` if the adapters are published merged into the model, in the export precision.
        """
        adapters = adapters_of(self._model).values() if part == ModelPart.MODEL else ()
        merges = {adapter.base: (adapter.lora_a, adapter.lora_b, adapter.scale) for adapter in adapters}

        def published(module: nn.Module, name: str, value: Tensor) -> Tensor:
            if isinstance(module, LoraLinear):
                return torch.zeros_like(value, dtype=torch.float64) if merges else value.double()
            if module in merges and name == "weight":
                return merged(value, *merges[module]).to(self.export_dtype).double()
            return (value.to(self.export_dtype) if name in module._parameters else value).double()

        return canary_logprobs(self._model, published)

    def _exported_as(self, value: Tensor) -> torch.dtype:
        return self.export_dtype if isinstance(value, nn.Parameter) else value.dtype

    def _dense(self) -> Iterator[tuple[str, Tensor, LoraLinear | None]]:
        """Yield all weights except those of adapters, each with its adapter if it has one, and the persistent buffers,
        in the order of the file.

        Tied weights appear once, under the first of their names. Tensors with wide elements come first, so that each
        tensor begins at a multiple of its element size.
        """
        adapters = adapters_of(self._model)
        weights = dict(self._model.named_parameters()) | persistent_buffers(self._model)
        for name, value in sorted(weights.items(), key=lambda item: -self._exported_as(item[1]).itemsize):
            owner, wrapped, leaf = name.rpartition(BASE)
            if wrapped:
                yield f"{owner}.{leaf}", value, adapters[owner] if leaf == "weight" else None
            elif name.rpartition(".")[0] not in adapters:
                yield name, value, None


def export_dtype(folder: Path, settings: TrainerSettings) -> torch.dtype:
    """Return the precision of the weights that replicas get. Raises `EngineFault` if the model cannot be read.

    `auto` is the precision of the model's folder. (A CPU computes in float32 even if that is bfloat16: without AMX, it
    multiplies bfloat16 matrices at a quarter of the speed.)
    """
    dtype = settings.job.model.dtype
    return _stored_dtype(folder) if dtype == "auto" else DTYPES[dtype]


def recompute_layers(model: "PreTrainedModel") -> None:
    """Keep only each layer's input for the backward pass, which recomputes the rest.

    transformers does this only in training mode, in which many families also apply dropout and router jitter: logprobs
    would be up to 2.5 nats off, and different in each pass. So the model stays in evaluation mode.
    """
    layers = [layer for layer in model.get_decoder().modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise EngineFault(
            f"trainer.gradient_checkpointing is on, but the code of this model's architecture "
            f"({model.config.model_type}) does not say which of its layers can be recomputed: set it to false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def probe(sequence: Ints, first_id: int) -> TrainingItem:
    """Make a sequence that is only scored. All its tokens but the first are terms, numbered from `first_id`."""
    count = len(sequence) - 1
    ones = np.ones(count, dtype=np.float32)
    ids = np.arange(count) + first_id
    return TrainingItem(sequence, np.arange(1, len(sequence)), Terms(ids, sequence[1:], ones, ones, ones, ones))


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return bfloat16 if the model's configuration names bfloat16 or float16, otherwise float32."""
    dtype = load_config(folder).dtype
    return torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) else torch.float32
