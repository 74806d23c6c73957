"""What the trainer can be told, checked at birth."""

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from bombus.config.algorithms import Aggregation, Correction, Estimator, KlEstimator, Loss, Overlong, named
from bombus.config.job import RunConfig

CPU_BIN_TOKENS = 4096  # what a micro-batch on a CPU holds at most, unless its operator says more


class Precision(StrEnum):
    """Of the exported weights, and of the frozen base under LoRA.

    `auto` exports in the precision that the model came in and, on a CPU, computes in float32: without AMX a CPU
    multiplies bfloat16 matrices at a quarter of the speed. Weights that are trained are always kept in float32: a
    step is often smaller than bfloat16 can tell apart.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class TrainerSettings(BaseModel):
    """Everything that decides what a step computes. Token counts are per micro-batch unless they say otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    precision: Precision = Precision.AUTO
    gradient_checkpointing: bool = False

    lora_rank: int = Field(default=0, ge=0, le=1024, description="0: full fine-tuning")
    lora_alpha: float = Field(default=16.0, gt=0.0, le=65_536.0)
    lora_targets: tuple[str, ...] = Field(default=(), description="names of linear layers; none: all of them")

    learning_rate: float = Field(default=1e-6, ge=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    schedule: Schedule = Schedule.CONSTANT
    total_steps: int = Field(default=0, ge=0, le=10_000_000, description="where decay ends; 0: no decay")
    weight_decay: float = Field(default=0.01, ge=0.0, le=1.0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0.0, le=1e6)

    mini_batch_num: int = Field(default=1, ge=1, le=1024, description="updates for each pass over a batch")
    ppo_epochs: int = Field(default=1, ge=1, le=64, description="passes over a batch")
    estimator: Estimator = Estimator.GRPO
    normalise_std: bool = True
    aggregation: Aggregation = Aggregation.EPISODE
    response_tokens_max: int = Field(default=15_000, ge=1, le=1 << 22, description="of an episode: a constant length")
    loss: Loss = Loss.CLIPPED
    verl_adv_estimator: str = Field(default="", description="of verl's registry, in place of `estimator`")
    verl_policy_loss: str = Field(default="", description="of verl's registry, in place of `loss`")
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    clip_high: float = Field(default=0.2, ge=0.0, le=10.0)
    dual_clip: float = Field(default=0.0, ge=0.0, le=100.0, description="0: none")
    correction: Correction = Correction.TOKEN_TIS
    importance_cap: float = Field(default=2.0, ge=0.0, le=100.0, description="0: no correction for the sampler")
    importance_floor: float = Field(default=0.0, ge=0.0, le=100.0)
    use_opsm: bool = False
    opsm_delta: float = Field(default=1e-4, ge=0.0, le=100.0)
    kl_coef: float = Field(default=0.0, ge=0.0, le=100.0)
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = Field(default=0.0, ge=0.0, le=100.0)
    overlong: Overlong = Overlong.KEEP
    turn_tokens_max: int = Field(default=4096, ge=1, le=1 << 22, description="of a call")
    model_len_max: int = Field(default=18_000, ge=1, le=1 << 23, description="of a call's prompt and completion")
    overlong_buffer: int = Field(default=1, ge=1, le=1 << 22)
    overlong_penalty: float = Field(default=1.0, ge=0.0, le=1000.0)

    bin_tokens: int = Field(default=4096, ge=16, le=1 << 24)
    packing: bool = Field(default=True, description="false: a bin for each sequence, and no prefixes shared")
    share_prefixes: bool = True
    shared_tokens_min: int = Field(default=16, ge=1, le=4096)
    logits_bytes_max: int = Field(default=128 << 20, ge=1 << 16, le=1 << 36, description="the largest slice of logits")

    @property
    def updates(self) -> int:
        """Optimizer updates for each batch."""
        return self.mini_batch_num * self.ppo_epochs

    @property
    def corrects(self) -> bool:
        """Whether the sampler's logprobs are corrected for by a weight beside the loss."""
        return self.correction != Correction.NONE and self.importance_cap > 0.0

    @property
    def pulls_everywhere(self) -> bool:
        """Whether a token without advantage is trained too."""
        return self.kl_coef > 0.0 or self.entropy_coef > 0.0

    @classmethod
    def of_job(cls, job: RunConfig, device: str = "cpu", bin_tokens_max: int = 0) -> Self:
        """What a job asks of this trainer. `bin_tokens_max` is this machine's: a bin has to fit its memory. 0 leaves it
        to the job, on a CPU up to `CPU_BIN_TOKENS`.

        Estimators and losses that we do not know are verl's: a job for the torch backend has none.
        """
        asked = job.trainer
        fitting = bin_tokens_max or (CPU_BIN_TOKENS if device == "cpu" else asked.max_tokens_per_bin)
        estimator = named(Estimator, asked.adv_estimator)
        loss = named(Loss, asked.loss)
        everything = asked.target_modules in ("all-linear", "all")
        names = () if everything else tuple(name.strip() for name in asked.target_modules.split(","))
        return cls(
            seed=job.model.seed,
            device=device,
            precision=Precision(job.model.dtype),
            gradient_checkpointing=asked.gradient_checkpointing,
            lora_rank=asked.lora_rank,
            lora_alpha=asked.lora_alpha,
            lora_targets=names,
            learning_rate=asked.lr,
            warmup_steps=asked.warmup_steps,
            schedule=Schedule(asked.lr_schedule),
            total_steps=asked.total_steps,
            weight_decay=asked.weight_decay,
            betas=asked.betas,
            grad_clip=asked.grad_clip,
            mini_batch_num=asked.mini_batch_num,
            ppo_epochs=asked.ppo_epochs,
            estimator=estimator or Estimator.GRPO,
            verl_adv_estimator="" if estimator else asked.adv_estimator,
            normalise_std=asked.normalise_by_std,
            aggregation=asked.loss_aggregation,
            response_tokens_max=job.rollout.max_response_length,
            loss=loss or Loss.CLIPPED,
            verl_policy_loss="" if loss else asked.loss,
            clip_low=asked.clip_low,
            clip_high=asked.clip_high,
            dual_clip=asked.dual_clip,
            correction=asked.correction,
            importance_cap=asked.tis_clip,
            importance_floor=asked.tis_clip_low,
            use_opsm=asked.use_opsm,
            opsm_delta=asked.opsm_delta,
            kl_coef=asked.kl_coef,
            kl_estimator=asked.kl_estimator,
            entropy_coef=asked.entropy_coef,
            overlong=asked.overlong,
            turn_tokens_max=job.rollout.max_response_length_in_one_turn,
            model_len_max=job.rollout.max_model_len,
            overlong_buffer=max(asked.overlong_buffer, 1),
            overlong_penalty=asked.overlong_penalty,
            bin_tokens=min(asked.max_tokens_per_bin, fitting),
            packing=asked.enable_packing,
        )
