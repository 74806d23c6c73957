"""Everything that we use from verl: its FSDP engine, its registries, and its names for weights.

Only this file and cpu_platform.py import verl.
"""

import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from bombus.architectures.miniatures import empty_model
from bombus.architectures.probing import (
    Disagreement,
    probe_sequences,
    probe_tokens,
    refusing,
    sequence_limit,
)
from bombus.config.trainer import FLASH
from bombus.errors import EngineFault, in_one_line
from bombus.weights.models import load_config, persistent_buffers
from bombus_trainer.algorithms.losses import PolicyLoss
from bombus_trainer.backends.torch.executor import loss_of_terms
from bombus_trainer.backends.torch.flops import cost_of
from bombus_trainer.backends.torch.lora import layers_to_adapt
from bombus_trainer.backends.torch.model import ScoredTerms, probe, recompute_layers
from bombus_trainer.backends.verl.algorithms import (
    VerlEstimator,
    VerlPolicyLoss,
    look_up,
    try_estimator,
    try_loss,
    with_advantages,
)
from bombus_trainer.backends.verl.head import TermsHead, of_sequences, query_of, tensors_of
from bombus_trainer.backends.verl.ulysses import NAME as ULYSSES
from bombus_trainer.backends.verl.ulysses import SplitRow, check_heads, joined, split_row
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch
from bombus_trainer.data.sharding import MicroBatch
from bombus_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VERSION = "0.9.1"  # its engines "may still change", so this file is written for one version
DTYPES_COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXPERT = "mlp.experts.*.gate_proj.weight"  # transformers' pattern for families that name experts in files as verl does
FLASH_PACKAGES: dict[str, tuple[str, Callable[[], bool]]] = {
    "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
    "flash_attention_4": ("flash-attn-4", is_flash_attn_4_available),
}
Advantages = Callable[[PreparedBatch, list[EpisodeGroup]], PreparedBatch]
TermLoss = Callable[[ScoredTerms, Tensor, Tensor | None, TrainerSettings], PolicyLoss]
LossOfBatch = Callable[..., tuple[Tensor, dict[str, float]]]


def prepare_process(device: str) -> None:
    """Set up what an engine needs in this process. Raises `EngineFault` for any other version of verl."""
    found = importlib.metadata.version("verl")
    if found != VERSION:
        raise EngineFault(
            f"verl {found} is installed, but this backend needs {VERSION}: run `bombus install verl` again"
        )
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    warnings.filterwarnings("ignore", ".* engine is not available", UserWarning)  # about engines that we do not use
    on_cpu = device == "cpu"
    if not dist.is_initialized():  # a single rank
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    if on_cpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        importlib.import_module("bombus_trainer.backends.verl.cpu_platform")  # importing registers it


def attention_of(settings: TrainerSettings) -> str | None:
    """Return transformers' name for an attention implementation, or None for its default (`sdpa`, or else `eager`).

    Raises `EngineFault` if the implementation is not installed here.
    """
    wanted = settings.config.attn_implementation
    if settings.config.ulysses_parallel_size > 1:
        return ULYSSES
    on_gpu = settings.device != "cpu"
    if wanted == "auto":
        return "flash_attention_2" if on_gpu and find_spec("flash_attn") is not None else None
    if wanted in FLASH_PACKAGES:
        package, is_installed = FLASH_PACKAGES[wanted]
        if not (on_gpu and is_installed()):
            raise EngineFault(
                f"trainer.attn_implementation is {wanted}, which needs a GPU and the package {package} in verl's "
                f"environment, but this trainer (--device {settings.device}) does not have both: install it, or set "
                "attn_implementation to auto"
            )
    return "sdpa" if wanted == "native" else wanted


def packs(settings: TrainerSettings) -> bool:
    """Return whether to pack a micro-batch into one row: only if attention separates the sequences at no extra cost."""
    attention = attention_of(settings) or ""
    return attention == ULYSSES or attention.startswith(FLASH)


def new_engine(folder: Path, settings: TrainerSettings, export_dtype: torch.dtype, packed: bool) -> Any:
    """Create verl's engine with the model in `folder`, or this rank's part of it.

    If `packed`, a micro-batch is one row without padding, and attention tells sequences apart by their positions.
    Weights are kept in float32, as in the torch backend. The learning rate is set at each step, because verl's
    schedules start their warm-up at a different step than ours and have no linear decay. Raises `EngineFault` if verl
    cannot load or train the model.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    on_cpu = settings.device == "cpu"
    ulysses = settings.config.ulysses_parallel_size
    if ulysses > 1:
        _check_splitting(load_config(folder), ulysses)
    computed = "fp32" if on_cpu or export_dtype == torch.float32 else "bf16"
    config = settings.config
    try:
        adapter = settings.adapter
        adapted = {} if adapter is None else layers_to_adapt(empty_model(load_config(folder)), adapter.targets)
        model = HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": attention_of(settings)},
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,  # our own checkpointing also works in evaluation mode
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=list(adapted),
        )
        engine = _engine_class()(
            settings,
            model_config=model,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                mixed_precision={"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,  # would only compile an entropy that we do not use
                use_remove_padding=packed,
                use_dynamic_bsz=False,
                ulysses_sequence_parallel_size=ulysses,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=config.lr,
                weight_decay=config.weight_decay,
                betas=config.betas,
                clip_grad=config.grad_clip,
                lr_warmup_steps=0,
                total_training_steps=1,
                override_optimizer_config={"fused": True, "eps": settings.adam_epsilon},
            ),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
    except EngineFault:
        raise
    except Exception as error:  # verl, and the code of a model family, may raise anything
        raise EngineFault(f"verl cannot load the model at {folder}: {_sentence(error)}") from error
    _decay_matrices_only(engine.optimizer)
    hf_config = engine.model_config.hf_config
    tokens = probe_tokens(hf_config, sequence_limit(hf_config, settings.job.rollout.max_model_len))
    with engine.eval_mode(), refusing(hf_config, "trained"):
        found = _check_parts(engine, tokens) if ulysses > 1 else _check_packing(engine, tokens)
        found.check(DTYPES_COMPUTED[computed])
    return engine


def _sentence(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (ULYSSES,):  # the family's code looked for ours among its own
        return "its layers accept no external attention, which trainer.ulysses_parallel_size needs: set it to 1"
    return f"{in_one_line(error)}; docs/models.md lists what backend torch trains"


def _check_splitting(config: "PretrainedConfig", ranks: int) -> None:
    """Raise `EngineFault` if `ranks` ranks cannot share rows of a model with this configuration."""
    with refusing(config, "trained"):
        if hasattr(config, "vision_config"):
            raise EngineFault(
                f"trainer.ulysses_parallel_size is {ranks}, but the model has an image tower, whose rows verl does "
                "not split in the same way: set it to 1"
            )
        check_heads(int(config.get_text_config().num_attention_heads), ranks)


def _check_packing(engine: Any, tokens: int) -> Disagreement:
    """Compare the logprobs of two sequences (of about `tokens` tokens each) computed in one micro-batch with those
    computed for each sequence alone.

    verl computes with transformers' own attention, so the possible errors are that sequences in a row see each other,
    or that a window is counted from the beginning of the row. Raises `EngineFault` if the model changes its head's
    output.
    """
    sequences = _probe_items(engine, tokens)
    return Disagreement.between([_scored(engine, sequences)], [_scored(engine, [sequence]) for sequence in sequences])


def _check_parts(engine: Any, tokens: int) -> Disagreement:
    """Compare the logprobs of sequences whose rows are split over ranks with those from transformers' own forward pass,
    in which one rank computes each sequence alone.

    A layer that uses earlier tokens other than through attention would start over in each part of a row. To detect
    this, each sequence is also computed as a separate row, which is then split in the middle of the sequence.
    """
    sequences = _probe_items(engine, tokens)
    ours = [_scored(engine, sequences), *(_scored(engine, [sequence]) for sequence in sequences)]
    with _whole_rows(engine):
        alone = [_scored(engine, [sequence]) for sequence in sequences]
    return Disagreement.between(ours, alone + alone)


def _probe_items(engine: Any, tokens: int) -> MicroBatch:
    vocabulary = int(engine.model_config.hf_config.get_text_config().vocab_size)
    return [probe(sequence.numpy(), 0) for sequence in probe_sequences(vocabulary, tokens)]


def _scored(engine: Any, micro_batch: MicroBatch) -> Tensor:
    found: list[Tensor] = []

    def keep(model_output: dict[str, Tensor], **_: object) -> tuple[Tensor, dict[str, float]]:
        found.append(model_output["log_probs"].values().detach().float().cpu())
        return torch.zeros(()), {}

    compute(engine, micro_batch, keep, backward=False)
    return found[0]


@cache
def _engine_class() -> Any:
    from verl.workers.engine import FSDPEngineWithLMHead

    class Engine(FSDPEngineWithLMHead):  # type: ignore[misc]
        """verl's engine with our head: `log_probs` and `entropy` have one value per term of the micro-batch, jagged [B,
        N].

        `cost` is the cost of the whole model, not only of this rank's part.
        """

        def __init__(self, settings: TrainerSettings, **configs: object) -> None:
            super().__init__(**configs)
            self._settings = settings
            self._in_full = settings.config.attn_implementation == "eager"
            self._row: SplitRow | None = None  # the current micro-batch, if ranks share rows

        def _build_module(self) -> Any:
            module, settings = super()._build_module(), self._settings
            self.cost = cost_of(module, trained=settings.config.lora_rank == 0)
            output = module.get_output_embeddings()
            self._head = TermsHead(output, settings.logits_bytes_max, settings.config.entropy_coef > 0.0)
            module.set_output_embeddings(self._head)
            if settings.config.gradient_checkpointing:
                recompute_layers(module)
            return module

        def _build_lora_module(self, module: Any) -> Any:
            adapted = super()._build_lora_module(module)
            if experts := adapted.peft_config["default"].target_parameters:
                raise EngineFault(
                    f"trainer.target_modules has names that peft also matches to the experts of this model "
                    f"({module.config.model_type}), {' and '.join(sorted(experts))}, whose adapters could not be "
                    "published: leave out gate_proj, up_proj and down_proj, or set trainer.backend to torch"
                )
            return adapted

        def prepare_model_inputs(self, micro_batch: Any) -> Any:
            packed = self.model_config.use_remove_padding
            query = query_of(micro_batch, packed, self._head.rows_max)
            inputs, arguments = super().prepare_model_inputs(micro_batch)
            self._row = row = _row_of(micro_batch, self, self._in_full)
            self._query = self._head.query = query if row is None else query.within(row.start, row.end)
            return inputs if row is None else {**inputs, "row": row}, arguments

        def prepare_model_outputs(self, output: Any, micro_batch: Any, **_: object) -> dict[str, Tensor]:
            result, self._head.result = self._head.result, None
            if result is None or output.logits is not result:
                raise EngineFault("it does more to its logits than multiply by a matrix")
            mask = micro_batch["loss_mask"]
            if self._row is not None:
                result = joined(result, self._query.first, int((mask.values() > 0).sum()), self._row.group)
            logprobs_N, entropy_N = result
            return {"log_probs": of_sequences(logprobs_N, mask), "entropy": of_sequences(entropy_N, mask)}

    return Engine


@contextmanager
def _whole_rows(engine: Any) -> Iterator[None]:
    """Within the block, make each rank compute whole rows, with transformers' own attention."""
    engine.use_ulysses_sp = False
    engine.module.set_attn_implementation("eager")
    try:
        yield
    finally:
        engine.use_ulysses_sp = True
        engine.module.set_attn_implementation(ULYSSES)


def _row_of(micro_batch: Any, engine: Any, in_full: bool) -> SplitRow | None:
    """Return a micro-batch as a row that is split over the ranks of the group, or None if ranks do not share rows."""
    if not engine.use_ulysses_sp:
        return None
    tokens = micro_batch["input_ids"]
    return split_row(tokens.offsets().diff().tolist(), engine.ulysses_parallel_group, tokens.device, in_full)


@contextmanager
def training(engine: Any) -> Iterator[None]:
    """Put the engine into training mode within the block, but keep its model in evaluation mode: see
    `recompute_layers`."""
    with engine.train_mode():
        engine.module.eval()
        yield


def compute(engine: Any, micro_batch: MicroBatch, loss: LossOfBatch, backward: bool) -> None:
    """Pass a micro-batch through the model. verl passes the `model_output` to `loss`, which returns the loss and its
    metrics."""
    from verl.utils.tensordict_utils import get_tensordict

    options = {
        "use_remove_padding": engine.model_config.use_remove_padding,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(micro_batch),
        "temperature": 1.0,  # the head applies each term's own temperature
    }
    engine.forward_backward_batch(get_tensordict(tensors_of(micro_batch), options), loss, forward_only=not backward)


def _decay_matrices_only(optimizer: torch.optim.Optimizer) -> None:
    """Exempt vectors (norms, biases) from weight decay, as our own optimizer does."""
    (group,) = optimizer.param_groups
    vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
    if vectors and group["weight_decay"]:
        group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})


def named_tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield sharded parameters, then persistent buffers, under their names in a Hugging Face checkpoint.

    Tied parameters appear once, under the first of their names.
    """
    from verl.utils.model import convert_weight_keys

    buffers = persistent_buffers(engine.module)  # must come first, since it makes FSDP restore its sharded parameters
    yield from convert_weight_keys(dict(engine.module.named_parameters()) | buffers, engine.module).items()


def as_stored(tensors: Iterator[tuple[str, Tensor]], engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as verl exports them: experts that transformers fuses into one tensor are split into separate
    tensors.

    The tensors stay fused in families whose files use other names for experts than verl does (w1, for example).
    """
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    family = engine.model_config.hf_config.model_type
    sources = [name for each in get_checkpoint_conversion_mapping(family) or () for name in each.source_patterns]
    yield from unfuse_moe_params(tensors, family) if EXPERT in sources else tensors


def algorithms(settings: TrainerSettings) -> tuple[Advantages | None, TermLoss]:
    """Return the function that computes advantages, or None if our own code does, and the function that computes the
    loss.

    Raises `EngineFault` if a name is unknown, or if the function with that name cannot be used with these settings.
    """
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig

    estimate: Advantages | None = None
    loss: TermLoss = loss_of_terms
    job = settings.config
    if name := settings.verl_adv_estimator:
        function = look_up("trainer.adv_estimator", name, ADV_ESTIMATOR_REGISTRY)
        config = AlgoConfig(adv_estimator=name, norm_adv_by_std_in_grpo=job.normalise_by_std)
        estimator = VerlEstimator(function, config, job.normalise_by_std)
        try_estimator(name, estimator)
        estimate = partial(with_advantages, estimator=estimator, settings=settings)
    if name := settings.verl_policy_loss:
        if job.use_opsm or job.dual_clip:
            option = "use_opsm" if job.use_opsm else "dual_clip"
            raise EngineFault(f"trainer.{option} is refused with trainer.loss {name!r}: it needs one of our losses")
        actor = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=job.clip_low,
            clip_ratio_high=job.clip_high,
        )
        loss = chosen = VerlPolicyLoss(look_up("trainer.loss", name, POLICY_LOSS_REGISTRY), actor)
        try_loss(name, chosen)
    return estimate, loss
