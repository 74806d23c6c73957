"""The model that is trained: logprobs of a bin's terms with gradients, and its weights for inference servers."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.weights.adapters import AdapterConfig
from bombus.weights.models import load_model
from bombus_trainer.backends.torch.attention import NAME, plan
from bombus_trainer.backends.torch.flops import attention_pairs, cost_of, flops_of_step, peak_of
from bombus_trainer.backends.torch.head import HeadPlan, chosen_logprobs
from bombus_trainer.backends.torch.lora import (
    BASE,
    LoraLinear,
    adapter_config,
    adapter_weights,
    adapters_of,
    adapters_off,
    add_adapters,
)
from bombus_trainer.backends.torch.transfer import to_device
from bombus_trainer.data.packing import Bin, Terms, TrainingItem, pack
from bombus_trainer.data.sequences import Ints
from bombus_trainer.publish.tensorfile import Shape
from bombus_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOSS_TERMS = ("sampler_logprobs_N", "advantages_N", "weights_N")
CHECK_TOKENS = 12
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True, eq=False)
class ScoredTerms:
    """The logprob of each term of a bin [N], with gradient unless it was switched off, and its entropy.

    The entropy has a gradient if there is a bonus for it. `terms` has what a loss also needs, on the model's device:
    `LOSS_TERMS`, and `lines_N`, which numbers the sequence that each belongs to, below `lines`.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    terms: dict[str, Tensor]
    lines: int


class PolicyModel:
    """A causal language model, its trainable parameters in float32. Made by `PolicyModel.load`."""

    def __init__(self, model: "PreTrainedModel", export_dtype: torch.dtype, settings: TrainerSettings) -> None:
        self.device = torch.device(settings.device)
        self.export_dtype = export_dtype
        self.vocab_size = int(model.config.vocab_size)
        self._model = model
        self._settings = settings
        self._reference: PreTrainedModel | None = None
        self._autocast = False
        self._cost = cost_of(model, trained=settings.config.lora_rank == 0)
        width = torch.finfo(torch.float32).bits // 8
        self._head_rows_max = max(16, settings.logits_bytes_max // (width * self.vocab_size))

    @classmethod
    def load(cls, folder: Path, settings: TrainerSettings) -> "PolicyModel":
        """Load a Hugging Face folder and make the model trainable. The same folder and settings give the same weights.

        Raises `EngineFault` when it cannot be loaded, or computes something that this trainer does not reproduce.
        """
        export = export_dtype(folder, settings)
        on_cpu = settings.device == "cpu" and settings.job.model.dtype == "auto"
        loaded = torch.float32 if on_cpu or not settings.config.lora_rank else export
        model = load_model(folder, dtype=str(loaded).removeprefix("torch."), attn=NAME).to(settings.device)
        model.config.use_cache = False
        policy = cls(model, export, settings)
        policy._check_faithful()  # in the precision of the weights: bfloat16 would hide what this looks for
        # Trained weights stay in float32: a step is often smaller than bfloat16 can represent. On a GPU the layers
        # multiply in the precision that will be served.
        policy._autocast = settings.config.lora_rank == 0 and export != torch.float32 and policy.device.type == "cuda"
        config = settings.config
        if config.lora_rank:
            add_adapters(model, config.lora_rank, config.lora_alpha, settings.lora_targets, settings.job.model.seed)
        elif config.kl_coef > 0.0:
            policy._reference = copy.deepcopy(model).requires_grad_(False)
        if config.gradient_checkpointing:
            model.train()  # transformers checkpoints in training mode only; there is no dropout in an RL policy
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy

    # ---- computing --------------------------------------------------------------------------------------------

    def score(self, packed: Bin) -> ScoredTerms:
        """Compute the logprobs of a bin's terms under the current weights, at each term's temperature."""
        return self._score(self._model, packed)

    def score_reference(self, packed: Bin) -> Tensor:
        """Compute logprobs [N] under the weights that training began with, without gradient."""
        with torch.no_grad():
            if self._settings.config.lora_rank:
                with adapters_off(self._model):
                    return self._score(self._model, packed).logprobs_N
            if self._reference is None:
                raise EngineFault("there is no reference model: kl_coef was 0 when this model was loaded")
            return self._score(self._reference, packed).logprobs_N

    def flops(self, packed: Bin, backward: bool) -> float:
        """Return the FLOPs of a pass over a bin; see `flops.flops_of_step`."""
        pairs = attention_pairs(packed.segments)
        return flops_of_step(self._cost, len(packed.tokens_T), len(packed.head_rows_U), pairs, backward)

    @property
    def peak_flops(self) -> float | None:
        return peak_of(self.device)

    def _score(self, model: "PreTrainedModel", packed: Bin) -> ScoredTerms:
        layout, terms = plan(packed.segments), packed.terms
        moved = to_device(
            {
                "tokens": packed.tokens_T,
                "positions": packed.positions_T,
                "head_rows": packed.head_rows_U,
                "head_temperatures": packed.head_temperatures_U,
                "head_of_term": packed.head_of_term_N,
                "lines_N": packed.lines_N,
                **{name: getattr(terms, name) for name in ("targets_N", *LOSS_TERMS)},
                **layout.arrays,
            },
            self.device,
        )
        with self._precision():
            hidden_1TH = model.get_decoder()(
                input_ids=moved["tokens"][None],
                position_ids=moved["positions"][None],
                use_cache=False,
                tree=layout.tree(moved),
            ).last_hidden_state
        head = HeadPlan(
            head_of_term_N=moved["head_of_term"],
            targets_N=moved["targets_N"],
            temperatures_U=moved["head_temperatures"],
            rows_max=self._head_rows_max,
        )
        weight_VH = model.get_output_embeddings().weight
        entropy_grad = self._settings.config.entropy_coef > 0.0
        chosen_UH = hidden_1TH[0].index_select(0, moved["head_rows"])
        scores = chosen_logprobs(chosen_UH, weight_VH, head, entropy_grad)
        return ScoredTerms(*scores, {name: moved[name] for name in ("lines_N", *LOSS_TERMS)}, packed.sequences)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _check_faithful(self) -> None:
        """Compare a tree of two branches with the model's own forward pass: some families do more to their logits.

        Raises `EngineFault` for soft-capped or scaled logits, sliding windows, biases on the output layer and
        anything else that would make the trained distribution differ from the sampled one.
        """
        trunk = np.arange(CHECK_TOKENS) * 7 % self.vocab_size
        lines = [np.concatenate([trunk, (trunk + shift) % self.vocab_size]) for shift in (1, 3)]
        items = [probe(line, number) for number, line in enumerate(lines)]
        (packed,) = pack(items, bin_tokens=1 << 20, shared_tokens_min=4)
        with torch.no_grad():
            try:
                ours_N = self.score(packed).logprobs_N.cpu()[np.argsort(packed.terms.ids_N)]
            except (TypeError, NotImplementedError, AttributeError) as error:
                raise EngineFault(f"this model's architecture cannot be trained here: {error}") from error
            ids = torch.from_numpy(np.stack(lines)).to(self.device)
            self._model.set_attn_implementation("sdpa")
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            self._model.set_attn_implementation(NAME)
            theirs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0].cpu()
        worst = float((ours_N - theirs.flatten()).abs().max())
        if not worst <= CHECK_TOLERANCE[self._model.dtype]:
            raise EngineFault(
                f"this model's architecture ({self._model.config.model_type}) cannot be trained here: its logprobs "
                f"differ by {worst:.3g} from those that the trainer computes"
            )

    # ---- weights ----------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put trainable parameters back. Raises `EngineFault` unless these are exactly the model's."""
        own = self.trainable()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())[0]
            raise EngineFault(f"the checkpoint is of another model: {odd} is in only one of the two")
        with torch.no_grad():
            for name, parameter in own.items():
                if parameter.shape != tensors[name].shape:
                    raise EngineFault(f"the checkpoint's {name} has shape {tuple(tensors[name].shape)}")
                parameter.copy_(tensors[name])

    def dense_shapes(self) -> dict[str, Shape]:
        return {name: Shape(self.export_dtype, tuple(value.shape)) for name, value, _ in self._dense()}

    def dense_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole model under its Hugging Face names in the export precision, adapters `merged` or left out."""
        for name, value, adapter in self._dense():
            yield name, (adapter.merged() if adapter and merged else value.detach()).to(self.export_dtype)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield only the adapters, in float32."""
        return adapter_weights(self._model)

    def adapter_config(self) -> AdapterConfig:
        config = self._settings.config
        return adapter_config(self._model, config.lora_rank, config.lora_alpha)

    def _dense(self) -> Iterator[tuple[str, Tensor, LoraLinear | None]]:
        """Yield all weights but the adapters. Tied ones come once, under the first of their names."""
        adapters = adapters_of(self._model)
        for name, value in self._model.named_parameters():
            owner, wrapped, leaf = name.rpartition(BASE)
            if wrapped:
                yield f"{owner}.{leaf}", value, adapters[owner] if leaf == "weight" else None
            elif name.rpartition(".")[0] not in adapters:
                yield name, value, None


def export_dtype(folder: Path, settings: TrainerSettings) -> torch.dtype:
    """Return the precision of the weights that replicas get. Raises `EngineFault` when the model cannot be read.

    `auto` is the precision of the model's folder. (On a CPU such a model still computes in float32: without AMX a CPU
    multiplies bfloat16 matrices at a quarter of the speed.)
    """
    dtype = settings.job.model.dtype
    return _stored_dtype(folder) if dtype == "auto" else DTYPES[dtype]


def probe(line: Ints, number: int) -> TrainingItem:
    """Make a sequence that is only scored, the `number`-th of its length: all its tokens but the first are terms."""
    count = len(line) - 1
    ones = np.ones(count, dtype=np.float32)
    ids = np.arange(count) + number * count
    return TrainingItem(line, np.arange(1, len(line)), Terms(ids, line[1:], ones, ones, ones, ones))


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the precision that a model's folder names; float32 when it names none."""
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
    except (OSError, ValueError, KeyError) as error:
        raise EngineFault(f"the model at {folder} cannot be loaded: {error}") from error
    return torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) else torch.float32
