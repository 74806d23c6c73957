"""The model that is trained: logprobs of a bin's terms with gradients, and its weights as a server wants them."""

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
from bombus.models import load_model
from bombus_trainer.attention import NAME, Tree, plan
from bombus_trainer.head import HeadPlan, chosen_logprobs
from bombus_trainer.lora import BASE, LoraLinear, adapters_off, add_adapters
from bombus_trainer.packing import Bin, Item, Terms, pack
from bombus_trainer.sequences import Ints
from bombus_trainer.settings import Precision, TrainerSettings
from bombus_trainer.tensorfile import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
CHECK_TOKENS = 12
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True, eq=False)
class Scored:
    """For each term of a bin [N]: its logprob, with gradient unless it was switched off, and its entropy, with
    gradient if there is a bonus for it."""

    logprobs_N: Tensor
    entropy_N: Tensor


class PolicyModel:
    """A causal language model, its trainable parameters in float32. Made by `PolicyModel.load`."""

    def __init__(self, model: "PreTrainedModel", export_dtype: torch.dtype, settings: TrainerSettings) -> None:
        self.device = torch.device(settings.device)
        self.export_dtype = export_dtype
        self.vocab_size = int(model.config.vocab_size)
        self._model = model
        self._settings = settings
        self._reference: PreTrainedModel | None = None
        self._autocast = settings.lora_rank == 0 and export_dtype != torch.float32 and self.device.type == "cuda"
        width = torch.finfo(torch.float32).bits // 8
        self._head_rows_max = max(16, settings.logits_bytes_max // (width * self.vocab_size))

    @classmethod
    def load(cls, folder: Path, settings: TrainerSettings) -> "PolicyModel":
        """Load a Hugging Face folder and make it trainable. The same folder and settings give the same weights.

        Raises `EngineFault` when it cannot be loaded, or computes something that this trainer does not reproduce.
        """
        export = export_dtype(folder, settings)
        on_cpu = settings.device == "cpu" and settings.precision == Precision.AUTO
        held = torch.float32 if on_cpu or not settings.lora_rank else export
        model = load_model(folder, dtype=str(held).removeprefix("torch."), attn=NAME).to(settings.device)
        model.config.use_cache = False
        policy = cls(model, export, settings)
        policy._check_faithful()
        if settings.lora_rank:
            add_adapters(model, settings.lora_rank, settings.lora_alpha, settings.lora_targets, settings.seed)
        elif settings.kl_coef > 0.0:
            policy._reference = copy.deepcopy(model).requires_grad_(False)
        if settings.gradient_checkpointing:
            model.train()  # transformers checkpoints in training mode only; there is no dropout in an RL policy
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy

    # ---- computing --------------------------------------------------------------------------------------------

    def score(self, packed: Bin) -> Scored:
        """Logprobs of a bin's terms under the current weights, at each term's temperature."""
        return self._score(self._model, packed)

    def score_reference(self, packed: Bin) -> Tensor:
        """Logprobs [N] under the weights that training began with, without gradient."""
        with torch.no_grad():
            if self._settings.lora_rank:
                with adapters_off(self._model):
                    return self._score(self._model, packed).logprobs_N
            if self._reference is None:
                raise EngineFault("there is no reference model: kl_coef was 0 when this model was loaded")
            return self._score(self._reference, packed).logprobs_N

    def _score(self, model: "PreTrainedModel", packed: Bin) -> Scored:
        rows_U = torch.from_numpy(packed.head_rows_U).to(self.device)
        with self._precision():
            hidden_TH = self._hidden(model, packed.tokens_T, packed.positions_T, plan(packed.segments, self.device))
        head = HeadPlan(
            head_of_term_N=torch.from_numpy(packed.head_of_term_N).to(self.device),
            targets_N=torch.from_numpy(packed.terms.targets_N).to(self.device),
            temperatures_U=torch.from_numpy(packed.head_temperatures_U).to(self.device),
            rows_max=self._head_rows_max,
        )
        weight_VH = model.get_output_embeddings().weight
        entropy_grad = self._settings.entropy_coef > 0.0
        return Scored(*chosen_logprobs(hidden_TH.index_select(0, rows_U), weight_VH, head, entropy_grad))

    def _hidden(self, model: "PreTrainedModel", tokens_T: Ints, positions_T: Ints, tree: Tree) -> Tensor:
        hidden: Tensor = model.get_decoder()(
            input_ids=torch.from_numpy(tokens_T).to(self.device)[None],
            position_ids=torch.from_numpy(positions_T).to(self.device)[None],
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]
        return hidden

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self._autocast else nullcontext()

    def _check_faithful(self) -> None:
        """Compare a tree of two branches with the model's own forward: some families do more to their logits.

        Raises `EngineFault` for soft-capped or scaled logits, sliding windows, biases on the output layer and
        whatever else would make the trained distribution another one than the sampled one.
        """
        trunk = np.arange(CHECK_TOKENS) * 7 % self.vocab_size
        lines = [np.concatenate([trunk, (trunk + shift) % self.vocab_size]) for shift in (1, 3)]
        items = [_probe(line, number) for number, line in enumerate(lines)]
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

    def dense_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model under its Hugging Face names, adapters merged, in the export precision, one at a time."""
        for name, value, adapter in self._dense():
            yield name, (adapter.merged() if adapter else value.detach()).to(self.export_dtype)

    def _dense(self) -> Iterator[tuple[str, Tensor, LoraLinear | None]]:
        """Tied weights come once, under the first of their names."""
        adapters = {name: module for name, module in self._model.named_modules() if isinstance(module, LoraLinear)}
        for name, value in self._model.named_parameters():
            owner, wrapped, leaf = name.rpartition(BASE)
            if wrapped:
                yield f"{owner}.{leaf}", value, adapters[owner] if leaf == "weight" else None
            elif name.rpartition(".")[0] not in adapters:
                yield name, value, None


def export_dtype(folder: Path, settings: TrainerSettings) -> torch.dtype:
    """The precision of the weights that replicas get. Raises `EngineFault` when the model cannot be read."""
    return _stored_dtype(folder) if settings.precision == Precision.AUTO else DTYPES[settings.precision]


def _probe(line: Ints, number: int) -> Item:
    count = len(line) - 1
    ones = np.ones(count, dtype=np.float32)
    ids = np.arange(count) + number * count
    return Item(line, np.arange(1, len(line)), Terms(ids, line[1:], ones, ones, ones, ones))


def _stored_dtype(folder: Path) -> torch.dtype:
    """The precision a model's folder says it is in; float32 when it does not say."""
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
    except (OSError, ValueError, KeyError) as error:
        raise EngineFault(f"the model at {folder} cannot be loaded: {error}") from error
    return torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) else torch.float32
