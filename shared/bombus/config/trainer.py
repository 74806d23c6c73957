"""The trainer's part of a job: how a batch becomes an optimizer step."""

from typing import Annotated, Literal, assert_never

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from bombus.config.algorithms import (
    CRITIC_ESTIMATORS,
    Aggregation,
    Algorithm,
    Correction,
    Estimator,
    KlEstimator,
    Loss,
    Overlong,
    named,
)
from bombus.config.groups import Beta, ConfigGroup, Float, Tree

FULL_LR, LORA_LR = 1e-6, 1e-5
FLASH = "flash_attention_"  # the prefix of attention implementations from the flash-attn package


def _aggregation(value: object) -> object:
    return (named(Aggregation, value) if isinstance(value, str) else None) or value


def _kl_estimator(value: object) -> object:
    return (named(KlEstimator, value) if isinstance(value, str) else None) or value


def _known(kind: type[Algorithm], name: str, info: ValidationInfo) -> str:
    """Return our spelling of a name. Raises `ValueError` if the torch backend does not know the name; verl checks its
    own names."""
    if info.data.get("backend") != "torch":
        return name
    found = named(kind, name)
    if found is None:
        raise ValueError(f"it must be one of {', '.join(kind)}; with backend verl, any name that verl knows")
    return found.value


def _own_aggregation(given: Tree) -> Aggregation:
    """Return the estimator's default aggregation."""
    dr_grpo = named(Estimator, given.get("adv_estimator", "")) is Estimator.DR_GRPO
    return Aggregation.CONSTANT if dr_grpo else Aggregation.EPISODE


def _own_clip_low(given: Tree) -> float:
    return _loss(given).clip_range[0]


def _own_clip_high(given: Tree) -> float:
    return _loss(given).clip_range[1]


def _own_correction(given: Tree) -> Correction:
    """Return the loss's default correction. importance_sampling needs none: its ratio is already relative to the
    sampler."""
    match loss := _loss(given):
        case Loss.IMPORTANCE_SAMPLING:
            return Correction.NONE
        case Loss.CLIPPED | Loss.GSPO | Loss.CISPO:
            return Correction.TOKEN_TIS
        case _:
            assert_never(loss)


def _own_lr(given: Tree) -> float:
    """Return the default learning rate: adapters need about ten times the rate for full training
    (docs/algorithms.md)."""
    return LORA_LR if given["lora_rank"] else FULL_LR


def _loss(given: Tree) -> Loss:
    return named(Loss, given["loss"]) or Loss.CLIPPED  # verl's losses have the same defaults


class TrainerConfig(ConfigGroup):
    """How a batch becomes an optimizer step. docs/algorithms.md describes the algorithms and their settings.

    An estimator or loss is ours if we have one of that name; with the backend verl, any other name is looked up in
    verl. `processes` processes train together; 0 means as many as the trainer was started with. With the backend torch,
    each has the whole model and computes a share of the sequences; verl shards the model over them. With the backend
    verl, groups of `ulysses_parallel_size` processes split each sequence, and with it the activations of long
    sequences; this number must divide the model's number of heads.

    `attn_implementation` selects the attention kernels: `sdpa` and `native` are torch's own, `eager` holds all scores
    in memory in float32, and the flash-attn names are for verl on GPUs with that package installed. `auto` is
    `flash_attention_2` with verl if it is installed, and otherwise `sdpa`.

    The defaults of `clip_low`, `clip_high` and `correction` depend on `loss`, and the default of `loss_aggregation` on
    `adv_estimator`. `tis_clip` bounds the importance weight that corrects the sampler's logprobs (0: no correction). A
    schedule other than constant decays to `min_lr_ratio` x `lr` at `total_steps`, which it requires, and stays there:
    the run continues until it is stopped. With a `kl_coef` of 0 no reference model is kept, and with a `lora_rank` of 0
    all weights are trained. `lr` is 1e-6 by default, and 1e-5 with LoRA.

    An update whose loss or gradient is not finite is left out; after `max_nonfinite_steps` steps in a row with such an
    update, the run is suspended.

    Every `checkpoint_every`-th step saves a checkpoint, and so does a step a hundred steps after the newest checkpoint.
    After a crash, the steps since the newest checkpoint are repeated from the log. The newest `checkpoints_kept`
    checkpoints of a run stay on disk, but at least two.

    With `canary`, replicas compare each version that they load with what the trainer computes (docs/weights.md).

    With `resume: auto` a run continues where the last run of its job stopped: at the newest checkpoint on this engine,
    with its optimizer and version. Two jobs are the same if they have the same project and experiment, model,
    tokenizer, seed, backend and adapter; any other setting may change, such as `lr`. If the only checkpoints in the
    experiment are from other jobs, the start is refused; if the experiment has no name, the run begins with the model
    as loaded. `from 40` begins at version 40, or is refused if it cannot; `never` begins with the model as loaded.

    `overlong_buffer` is in tokens. A micro-batch has up to `max_tokens_per_bin` tokens (xorl calls that
    `sample_packing_sequence_len`), and on a CPU at most 4096 unless the trainer's `--bin-tokens` allows more; without
    `enable_packing`, a micro-batch has one sequence. With `share_prefixes`, the torch backend computes only once the
    prefixes that several sequences in a micro-batch have in common. Each step's samples are written to
    `save_debug_rollout_data`, a path on the trainer's machine below the run's folder, or below a folder that its
    operator allows.
    """

    backend: Literal["torch", "verl"] = "torch"
    processes: int = Field(default=0, ge=0, le=4096)
    ulysses_parallel_size: int = Field(default=1, ge=1, le=64)
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4"
    ] = "auto"
    adv_estimator: str = Field(default=Estimator.GRPO.value, min_length=1, max_length=64)
    normalise_by_std: bool = True
    enable_lora: bool | None = None  # None: follows lora_rank
    lora_rank: int = Field(default=0, ge=0, le=1024)
    lora_alpha: int = Field(default=16, ge=1, le=65_536)
    target_modules: str = Field(default="all-linear", min_length=1, max_length=1024)  # or comma-separated names
    lr: Float = Field(default_factory=_own_lr, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = Field(default=0, ge=0, le=10_000_000)
    min_lr_ratio: Float = Field(default=0.1, gt=0, le=1)
    weight_decay: Float = Field(default=0.01, ge=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    grad_clip: Float = Field(default=1.0, gt=0, le=1000)
    max_nonfinite_steps: int = Field(default=3, ge=1, le=1000)
    loss: str = Field(default=Loss.CLIPPED.value, min_length=1, max_length=64)
    clip_low: Float = Field(default_factory=_own_clip_low, ge=0, le=1)
    clip_high: Float = Field(default_factory=_own_clip_high, ge=0, le=10)
    dual_clip: Float = Field(default=0.0, ge=0, le=100)
    correction: Correction = Field(default_factory=_own_correction)
    tis_clip: Float = Field(default=2.0, ge=0, le=100)
    tis_clip_low: Float = Field(default=0.0, ge=0, le=100)
    use_opsm: bool = False
    opsm_delta: Float = Field(default=1e-4, ge=0, le=100)
    kl_coef: Float = Field(default=0.0, ge=0, le=10)
    kl_estimator: Annotated[KlEstimator, BeforeValidator(_kl_estimator)] = KlEstimator.K3_UNBIASED
    entropy_coef: Float = Field(default=0.0, ge=0, le=10)
    overlong: Overlong = Overlong.KEEP
    overlong_buffer: int = Field(default=0, ge=0, le=1 << 22)
    overlong_penalty: Float = Field(default=1.0, ge=0, le=1000)
    mini_batch_num: int = Field(default=1, ge=1, le=1024)
    ppo_epochs: int = Field(default=1, ge=1, le=64)
    loss_aggregation: Annotated[Aggregation, BeforeValidator(_aggregation)] = Field(default_factory=_own_aggregation)
    max_tokens_per_bin: int = Field(default=32_000, ge=16, le=1 << 24)
    enable_packing: bool = True
    share_prefixes: bool = True
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(default=1, ge=1, le=1_000_000)
    checkpoints_kept: int = Field(default=2, ge=1, le=100)
    canary: bool = True
    resume: str = Field(default="auto", pattern=r"^(never|auto|from [0-9]{1,9})$")
    save_debug_rollout_data: str = Field(
        default="",
        max_length=1024,
        pattern=r"^$|\{rollout_id\}.*\.pt$",
        description="a path like DIR/rollout_{rollout_id}.pt",
    )

    def own_choices(self) -> Tree:
        """Return the names of the algorithms, and the fields that differ from those algorithms' defaults."""
        names: Tree = {"backend": self.backend, "adv_estimator": self.adv_estimator, "loss": self.loss}
        defaults = TrainerConfig(**names).model_dump(mode="json")
        return names | {name: value for name, value in self.model_dump(mode="json").items() if value != defaults[name]}

    @field_validator("adv_estimator")
    @classmethod
    def _estimator_is_known(cls, name: str, info: ValidationInfo) -> str:
        if name.lower() in CRITIC_ESTIMATORS:
            raise ValueError(
                "it needs a critic, which bombus does not train: use verl's own trainer for it, or one of "
                f"{', '.join(Estimator)}"
            )
        return _known(Estimator, name, info)

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, name: str, info: ValidationInfo) -> str:
        return _known(Loss, name, info)

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainerConfig":
        if self.lr_schedule == "constant":
            return self
        if not self.total_steps:
            raise ValueError(
                f"lr_schedule {self.lr_schedule} needs total_steps, the step at which the decay ends: "
                "set it, or use `lr_schedule: constant`"
            )
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves none of the total_steps {self.total_steps} for the decay of "
                f"lr_schedule {self.lr_schedule}: lower it, or raise total_steps"
            )
        return self

    @model_validator(mode="after")
    def _backend_fits(self) -> "TrainerConfig":
        ulysses = self.ulysses_parallel_size
        if self.backend == "torch" and ulysses > 1:
            raise ValueError(
                f"ulysses_parallel_size {ulysses} is refused: backend torch computes each sequence in one process; "
                "set it to 1, or use backend verl, which splits sequences over several processes"
            )
        if self.attn_implementation.startswith(FLASH) and (self.backend == "torch" or ulysses > 1):
            why = "with backend torch, where it would need flash-attn kernels for sequences that share prefixes"
            if self.backend == "verl":
                why = (
                    f"with ulysses_parallel_size {ulysses}, where it would need an exchange of heads around flash-attn"
                )
            raise ValueError(
                f"attn_implementation {self.attn_implementation} is refused {why}: set it to auto, sdpa, native or "
                "eager"
            )
        if self.processes % ulysses:
            raise ValueError(
                f"processes {self.processes} is refused: it must be a multiple of ulysses_parallel_size {ulysses}, "
                "the processes that compute a sequence together"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit(self) -> "TrainerConfig":
        if self.enable_lora and not self.lora_rank:
            raise ValueError("enable_lora needs a lora_rank of at least 1")
        if self.enable_lora is False and self.lora_rank:
            raise ValueError(f"enable_lora is false, but lora_rank is {self.lora_rank}: give only one of them")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} is refused: it must be 0 (none) or more than 1")
        if self.dual_clip and self.loss != Loss.CLIPPED and self.backend == "torch":
            raise ValueError(f"dual_clip applies only to the loss `clipped`, not to `{self.loss}`")
        given = self.model_fields_set
        bounded = self.tis_clip > 0 and bool(given & {"tis_clip", "tis_clip_low"})
        if bounded and self.correction == Correction.NONE and "correction" not in given:
            raise ValueError(
                f"tis_clip bounds a correction, but the loss `{self.loss}` has none by default: set correction to "
                "token_tis too, or leave tis_clip out"
            )
        if self.tis_clip and self.tis_clip_low > self.tis_clip:
            raise ValueError(f"tis_clip_low {self.tis_clip_low} exceeds tis_clip {self.tis_clip}")
        if self.correction == Correction.ICEPOP and not self.tis_clip_low * self.tis_clip:
            raise ValueError(
                "`correction: icepop` needs a tis_clip_low and a tis_clip above 0; its paper uses 0.5 and 5.0"
            )
        if self.overlong == Overlong.PENALTY and not self.overlong_buffer:
            raise ValueError("`overlong: penalty` needs an overlong_buffer of at least 1 token")
        return self
