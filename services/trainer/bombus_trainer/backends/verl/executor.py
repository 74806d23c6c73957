"""The verl backend: steps, checkpoints and weights of verl's FSDP engine, on one rank or many. See `engine`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bombus.errors import EngineFault
from bombus.weights.adapters import PREFIX, AdapterConfig, adapter_names, merged
from bombus.weights.checkpoints import Checkpoint, Seal
from bombus.weights.models import load_tokenizer_files
from bombus_trainer.backends.steps import StepBackend
from bombus_trainer.backends.torch.flops import flops_of_step, peak_of
from bombus_trainer.backends.torch.metrics import Tally
from bombus_trainer.backends.torch.model import LOSS_TERMS, ScoredTerms, export_dtype
from bombus_trainer.backends.torch.transfer import to_device
from bombus_trainer.backends.verl import engine as verl_engine
from bombus_trainer.backends.verl.canary import gathered_canary, skeleton
from bombus_trainer.backends.verl.state import load_state, save_state, writer_of
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch
from bombus_trainer.data.packing import Terms, TrainingItem
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.data.sharding import MicroBatch, computed_tokens, shard
from bombus_trainer.publish.checkpoint import seal_files, verify
from bombus_trainer.publish.export import ModelPart, Outline, Tensors, WeightsSource, adapter_outline
from bombus_trainer.publish.step_checkpoint import StepFacts, read_step, save_step
from bombus_trainer.publish.tensorfile import Shape
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

T = TypeVar("T")
NAME = "verl"
STATE = "verl"  # the folder with the ranks' files in a checkpoint


class VerlExecutor(StepBackend[MicroBatch]):
    """One rank's part of a model in training. Every method is called on all ranks. See `backend.TrainerBackend`."""

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        ranks: Ranks,
        files: Mapping[str, bytes] | None = None,
        packed: bool | None = None,
    ) -> None:
        """Load the model in `folder` at step 0, as `Executor` does. Raises `EngineFault` if it cannot be loaded or
        trained.

        By default, sequences are `packed` with flash attention or if ranks share rows, and padded otherwise: any other
        attention would compute the scores between all tokens of a packed row and then mask most of them.
        """
        verl_engine.prepare_process(settings.device)
        torch.manual_seed(settings.job.model.seed)
        self.settings = settings
        self.files = load_tokenizer_files(folder) if files is None else dict(files)
        self.ranks = ranks
        self._export_dtype = export_dtype(folder, settings)
        self._sharing = settings.config.ulysses_parallel_size  # how many consecutive ranks share rows
        if ranks.size % self._sharing:
            raise EngineFault(
                f"trainer.ulysses_parallel_size is {self._sharing}, but this trainer has {ranks.size} ranks: set it to "
                f"a number that divides {ranks.size}, or start the trainer with a multiple of {self._sharing}"
            )
        self._counts = ranks.rank % self._sharing == 0  # true only for the first of the ranks that share rows
        self._packed = verl_engine.packs(settings) if packed is None else packed
        self._estimate, self._loss = verl_engine.algorithms(settings)
        make = partial(verl_engine.new_engine, folder, settings, self._export_dtype, self._packed)
        self._engine = make()
        self._reference = make() if settings.config.kl_coef > 0.0 and not settings.config.lora_rank else None

    @property
    def vocab_size(self) -> int:
        return int(self._engine.model_config.hf_config.get_text_config().vocab_size)

    @property
    def peak_flops(self) -> float | None:
        return peak_of(torch.device(self.settings.device))

    # ---- steps ------------------------------------------------------------------------------------------------

    def prepared(self, groups: list[EpisodeGroup]) -> PreparedBatch:
        batch = super().prepared(groups)
        return batch if self._estimate is None else self._estimate(batch, groups)

    def training(self) -> AbstractContextManager[None]:
        return verl_engine.training(self._engine)

    def forward_backward(self, micro_batch: MicroBatch, old: Floats | None, tally: Tally) -> float:
        reference = None
        if self.settings.config.kl_coef > 0.0:
            with self._engine.disable_adapter() if self.settings.config.lora_rank else nullcontext():
                reference = self._score(self._reference or self._engine, micro_batch)
        counts = [len(item.terms) for item in micro_batch]
        terms = Terms.concatenate([item.terms for item in micro_batch])
        arrays = {name: getattr(terms, name) for name in LOSS_TERMS}
        arrays["sequences_N"] = np.repeat(np.arange(len(micro_batch)), counts)
        share = 0.0

        def loss(model_output: Mapping[str, Tensor], **_: object) -> tuple[Tensor, dict[str, float]]:
            nonlocal share
            logprobs_N, entropy_N = (model_output[name].values() for name in ("log_probs", "entropy"))
            device = logprobs_N.device
            old_N = logprobs_N.detach() if old is None else torch.from_numpy(old[terms.ids_N]).to(device)
            moved = to_device(arrays, device)
            shares = [logprobs_N[:0].sum()]  # so that even a micro-batch without terms has a gradient (of zeros)
            for part in self._parts(counts):
                of_terms = {name: values_N[part] for name, values_N in moved.items()}
                scored = ScoredTerms(logprobs_N[part], entropy_N[part], of_terms, len(micro_batch))
                of_reference = reference[part] if reference is not None else None
                of_loss = self._loss(scored, old_N[part], of_reference, self.settings)
                if self._counts and of_loss.loss.isfinite():
                    of_sampler = of_terms["sampler_logprobs_N"]
                    tally.note_terms(terms.ids_N[part], of_loss, scored, old_N[part], of_sampler)
                shares.append(of_loss.loss)
            total = torch.stack(shares).sum()
            share = float(total.detach()) if self._counts else 0.0
            return total * self.ranks.size, {}  # verl's engine averages over ranks, but our loss is a sum

        verl_engine.compute(self._engine, micro_batch, loss, backward=True)
        return share

    def _parts(self, counts: list[int]) -> Iterator[slice]:
        """Yield slices of the terms: all at once for our loss, one sequence at a time for verl's."""
        if not self.settings.verl_policy_loss:
            yield slice(None)
            return
        start = 0
        for count in counts:
            if count:
                yield slice(start, start + count)
            start += count

    def logprobs(self, micro_batch: MicroBatch, tally: Tally) -> tuple[Ints, Floats]:
        found_N = self._score(self._engine, micro_batch).cpu().numpy()
        terms = [item.terms.ids_N for item in micro_batch] if self._counts else []
        ids_N = np.concatenate([np.zeros(0, dtype=np.int64), *terms])
        return ids_N, found_N[: len(ids_N)]

    def _score(self, engine: Any, micro_batch: MicroBatch) -> Tensor:
        """Compute the logprobs [N] of all sequences' terms, without gradient."""
        found: list[Tensor] = []

        def keep(model_output: Mapping[str, Tensor], **_: object) -> tuple[Tensor, dict[str, float]]:
            found.append(model_output["log_probs"].values().detach())
            return found[-1].sum(), {}

        verl_engine.compute(engine, micro_batch, keep, backward=False)
        return found[0]

    def micro_batches(self, items: list[TrainingItem], tally: Tally, backward: bool) -> list[MicroBatch]:
        settings = self.settings
        packing = settings.config.enable_packing
        tokens_max = settings.bin_tokens if packing else 1  # 1 gives each sequence its own pass, since no two fit
        shards = shard(
            items, self.ranks.size // self._sharing, tokens_max, self._packed, self._engine.cost.of_attention
        )
        if self.ranks.leads:
            lengths = [len(item.tokens_T) - 1 for item in items]
            terms, pairs = sum(len(item.terms) for item in items), sum(length * (length + 1) // 2 for length in lengths)
            tally.note_flops(flops_of_step(self._engine.cost, sum(lengths), terms, pairs, backward))
            if backward:
                everywhere = [micro_batch for of_rank in shards for micro_batch in of_rank]
                computed = sum(computed_tokens(each, self._packed) for each in everywhere)
                tally.note_tokens(len(everywhere), len(items), computed, sum(lengths), max(lengths, default=0))
        return shards[self.ranks.rank // self._sharing]

    def zero_grad(self) -> None:
        self._engine.optimizer_zero_grad()

    def take_step(self, rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return float(self._engine.optimizer_step())  # does nothing if the norm is not finite

    # ---- checkpoints and weights ------------------------------------------------------------------------------

    def save(self, root: Path, facts: StepFacts) -> Checkpoint[StepFacts]:
        """See `TrainerBackend.save`. Each rank writes its part of the state; the leader writes our manifest."""

        def fill(draft: Path) -> dict[str, Seal]:
            directory = Path(self.ranks.share(str(draft / STATE)))
            save_state(directory, self._engine.module, self._engine.optimizer)
            seals: dict[str, Seal] = {}
            for each in self.ranks.gather(seal_files(directory.parent, self._is_ours)):
                seals |= each
            return seals

        if not self.ranks.leads:
            fill(Path())
            return self.ranks.share()
        return self.ranks.share(save_step(root, msgspec.structs.replace(facts, backend=NAME), fill))

    def _is_ours(self, name: str) -> bool:
        """Return whether this rank seals and checks a file. The rank that does so is the writer's rank modulo the
        number of ranks."""
        return writer_of(name) % self.ranks.size == self.ranks.rank

    def restore(self, path: Path, digest: str) -> None:
        """See `TrainerBackend.restore`. Any number of ranks may have written the checkpoint; one of ours checks each
        file."""

        def verify_ours() -> None:
            found = read_step(path, digest, NAME)
            verify(found, filter(self._is_ours, found.files))

        self.ranks.of_all(verify_ours)
        load_state(path / STATE, self._engine.module, self._engine.optimizer)

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        if part == ModelPart.ADAPTER:
            return adapter_outline(self._adapter_config(), self._adapter_shards())
        return Outline(self._export_dtype, self._dense_shapes())

    def canary_figures(self, part: ModelPart, source: WeightsSource | None) -> tuple[tuple[float, ...], str]:
        """See `StepBackend.canary_figures`. No rank has all the weights, so they are gathered once more."""
        source = source or self
        adapters = source.read_weights(_by_name, ModelPart.ADAPTER) if part == ModelPart.ADAPTER else {}
        scale = self.settings.config.lora_alpha / self.settings.config.lora_rank if adapters else 0.0
        buffers = {_plain_name(name): value for name, value in self._engine.module.named_buffers()}
        model = skeleton(self._engine.model_config.hf_config, self._dense_shapes(), buffers)

        def computed(tensors: Tensors) -> tuple[tuple[float, ...], str] | Exception:
            try:
                return gathered_canary(model, tensors, adapters, scale)
            except Exception as error:  # raised here, it would end all ranks: the others do not fail
                return error

        found = source.read_weights(computed, ModelPart.BASE if part == ModelPart.ADAPTER else part)
        if isinstance(found, Exception):
            raise found
        return found

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """See `TrainerBackend.read_weights`. The leader calls this while the other ranks call `gather_weights`."""
        tensors = self._weights(part)
        with torch.no_grad():
            try:
                return use(tensors)
            finally:  # gather the unread tensors too, since the other ranks do
                for _ in tensors:
                    pass

    def gather_weights(self, part: ModelPart = ModelPart.MODEL) -> None:
        """Take part in the leader's `read_weights`."""
        with torch.no_grad():
            for _ in self._weights(part):
                pass

    def _weights(self, part: ModelPart) -> Iterator[tuple[str, Tensor]]:
        if part == ModelPart.ADAPTER:
            return ((name, _whole(value)) for name, value in self._adapter_shards())
        return self._dense_weights(with_adapters=part == ModelPart.MODEL)

    def _dense_shapes(self) -> dict[str, Shape]:
        empty = ((name, torch.empty(value.shape, dtype=dtype, device="meta")) for name, value, dtype in self._dense())
        stored = verl_engine.as_stored(empty, self._engine)
        return {name: Shape(value.dtype, tuple(value.shape)) for name, value in stored}

    def _dense_weights(self, with_adapters: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole model under its Hugging Face names, one tensor at a time, with adapters either merged or left
        out."""
        adapters = dict(self._adapter_shards()) if with_adapters else {}
        whole = ((name, self._merged(name, value, adapters).to(dtype)) for name, value, dtype in self._dense())
        return verl_engine.as_stored(whole, self._engine)

    def _dense(self) -> list[tuple[str, Tensor, torch.dtype]]:
        """Return sharded parameters without adapters, and persistent buffers, each with the dtype it is exported in.

        Tied weights appear once, under the first of their names. The order is the torch backend's: tensors with wide
        elements first.
        """
        dense = []
        for name, value in verl_engine.named_tensors(self._engine):
            if ".lora_" not in name:
                dense.append(
                    (_plain_name(name), value, self._export_dtype if isinstance(value, nn.Parameter) else value.dtype)
                )
        return sorted(dense, key=lambda each: -each[2].itemsize)

    def _merged(self, name: str, value: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
        """Return a whole tensor with its adapter, if any, merged. verl's own merge would copy the model, in bfloat16.

        `adapters` maps the file names of adapter tensors to this rank's parts of them.
        """
        low_a, low_b = adapter_names(name.removesuffix(".weight"))
        if low_a not in adapters:
            return _whole(value)
        scale = self.settings.config.lora_alpha / self.settings.config.lora_rank
        return merged(_whole(value), _whole(adapters[low_a]), _whole(adapters[low_b]), scale)

    def _adapter_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each adapter tensor, under its name in a file."""
        for name, value in self._engine.module.named_parameters():
            if ".lora_" in name:
                yield name.replace(".default.", "."), value

    def _adapter_config(self) -> AdapterConfig:
        config = self.settings.config
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in self._adapter_shards()}
        return AdapterConfig(r=config.lora_rank, lora_alpha=float(config.lora_alpha), target_modules=sorted(layers))


def _plain_name(name: str) -> str:
    """Return a tensor's name in the model without adapters."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _by_name(tensors: Tensors) -> dict[str, Tensor]:
    return dict(tensors)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
