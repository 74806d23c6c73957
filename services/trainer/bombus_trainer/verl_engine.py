"""All that we use of verl, and the one file that imports it: its FSDP engine, its registries, its names of weights.

On a CPU verl lacks a platform and a registered engine: both are given to it here, through its own registries.
"""

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bombus.errors import EngineFault
from bombus_trainer.batch import Group, PreparedBatch
from bombus_trainer.executor import loss_of_terms
from bombus_trainer.losses import PolicyLoss
from bombus_trainer.model import Scored
from bombus_trainer.settings import TrainerSettings
from bombus_trainer.verl_algorithms import check_estimator, look_up, loss_of_row, with_advantages

VERSION = "0.9.1"  # its engines "may still change": another version is another file to write
Advantages = Callable[[PreparedBatch, list[Group]], PreparedBatch]
Loss = Callable[[Scored, Tensor, Tensor | None, TrainerSettings], PolicyLoss]


def prepare_process(device: str) -> None:
    """Have all that has to be there before an engine is made. Raises `EngineFault` for another version of verl."""
    found = importlib.metadata.version("verl")
    if found != VERSION:
        raise EngineFault(
            f"verl {found} is installed, and this backend is written for {VERSION}: run `bombus install verl` again"
        )
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    warnings.filterwarnings("ignore", ".* engine is not available", UserWarning)  # of engines that are not ours
    on_cpu = device == "cpu"
    if not dist.is_initialized():  # one rank, alone
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    if on_cpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        _register_cpu()


def has_flash_attention(settings: TrainerSettings) -> bool:
    return settings.device != "cpu" and find_spec("flash_attn") is not None


def new_engine(folder: Path, settings: TrainerSettings, export_dtype: torch.dtype, packed: bool) -> Any:
    """verl's engine with the model in `folder`, whole or this rank's part of it. Raises `EngineFault`.

    `packed`: a micro-batch is one row without padding, and attention tells sequences apart by their positions.
    Weights are kept in float32, as by our own trainer. The rate of learning is set at each step: verl's schedules
    count their warm-up from another step than ours, and have no linear decay.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    on_cpu = settings.device == "cpu"
    attention = "flash_attention_2" if has_flash_attention(settings) else "sdpa"
    computed = "fp32" if on_cpu or export_dtype == torch.float32 else "bf16"
    try:
        model = HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": attention},
            use_remove_padding=packed,
            enable_gradient_checkpointing=settings.gradient_checkpointing,
            lora_rank=settings.lora_rank,
            lora_alpha=int(settings.lora_alpha),
            target_modules=list(settings.lora_targets) or "all-linear",
        )
        engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=model,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                mixed_precision={"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=not on_cpu,
                use_remove_padding=packed,
                use_dynamic_bsz=False,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                betas=settings.betas,
                clip_grad=settings.grad_clip,
                lr_warmup_steps=0,
                total_training_steps=1,
                override_optimizer_config={"fused": True},
            ),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise EngineFault(f"verl cannot load the model at {folder}: {error}") from error
    _decay_matrices_only(engine.optimizer)
    return engine


def _decay_matrices_only(optimizer: torch.optim.Optimizer) -> None:
    """As our own optimizer does: vectors (norms, biases) do not decay."""
    (group,) = optimizer.param_groups
    vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
    if vectors and group["weight_decay"]:
        group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})


def batch_of(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> Any:
    from verl.utils.tensordict_utils import get_tensordict

    return get_tensordict(dict(tensors), dict(settings))


def named_parameters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Sharded parameters by the names that a checkpoint on the hub has; tied ones once, under their first name."""
    from verl.utils.model import convert_weight_keys

    yield from convert_weight_keys(dict(engine.module.named_parameters()), engine.module).items()


def as_stored(tensors: Iterator[tuple[str, Tensor]], engine: Any) -> Iterator[tuple[str, Tensor]]:
    """As verl gives weights out: experts that transformers keeps in one tensor are one tensor each."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    yield from unfuse_moe_params(tensors, engine.model_config.hf_config.model_type)


def algorithms(settings: TrainerSettings) -> tuple[Advantages | None, Loss]:
    """What gives advantages in place of ours, if anything, and the loss. Raises `EngineFault` for unknown names."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig

    estimate: Advantages | None = None
    loss: Loss = loss_of_terms
    if name := settings.verl_adv_estimator:
        function = look_up("trainer.adv_estimator", name, ADV_ESTIMATOR_REGISTRY)
        check_estimator(name, function)
        config = AlgoConfig(adv_estimator=name, norm_adv_by_std_in_grpo=settings.normalise_std)
        estimate = partial(with_advantages, estimate=function, config=config)
    if name := settings.verl_policy_loss:
        if settings.use_opsm or settings.dual_clip:
            option = "use_opsm" if settings.use_opsm else "dual_clip"
            raise EngineFault(f"trainer.{option} is refused with trainer.loss {name!r}: it belongs to our own losses")
        actor = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=settings.clip_low,
            clip_ratio_high=settings.clip_high,
        )
        loss = partial(loss_of_row, look_up("trainer.loss", name, POLICY_LOSS_REGISTRY), actor)
    return estimate, loss


def _register_cpu() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if PlatformRegistry.get("cpu") is not None:
        return

    @PlatformRegistry.register(platform="cpu")
    class Cpu(PlatformBase):  # type: ignore[misc]
        """What verl asks of a device. Most answers are that there is nothing to do."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return False  # no accelerator: verl then leaves its generator and its memory alone

        def current_device(self) -> str:
            return "cpu"  # verl hands it to Tensor.to, which takes a number for a GPU's

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        def nvtx_range(self, msg: str) -> nullcontext[None]:
            return nullcontext()

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp2"], "cpu")(FSDPEngineWithLMHead)
