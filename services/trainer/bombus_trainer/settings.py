"""The settings that determine what a step computes: the job's configuration, and what this process adds to it."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from bombus.config.algorithms import Aggregation, Correction, Estimator, Loss, named
from bombus.config.job import RunConfig
from bombus.config.parts import Device
from bombus.config.trainer import TrainerConfig
from bombus.operations import AdapterSpec

ADAM_EPSILON = 1e-8  # torch's default
CPU_BIN_TOKENS = 4096  # maximum per micro-batch on a CPU, unless the operator allows more


class TrainerSettings(BaseModel):
    """All settings that determine what a step computes. Those that a job can set are declared only in `RunConfig`.

    `bin_tokens` is the maximum number of tokens in a micro-batch, limited by the job's `max_tokens_per_bin` and this
    machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: RunConfig = RunConfig()
    device: Device = "cpu"
    bin_tokens: int = Field(default=CPU_BIN_TOKENS, ge=16, le=1 << 24)
    logits_bytes_max: int = Field(default=128 << 20, ge=1 << 16, le=1 << 36, description="the largest slice of logits")

    @classmethod
    def of_job(cls, job: RunConfig, device: str = "cpu", bin_tokens_max: int = 0) -> Self:
        """Return a job's settings on a machine that can process micro-batches of up to `bin_tokens_max` tokens.

        If that is 0, the job determines the size of micro-batches, on a CPU only up to `CPU_BIN_TOKENS`.
        """
        wanted = job.trainer.max_tokens_per_bin
        fitting = bin_tokens_max or (CPU_BIN_TOKENS if device == "cpu" else wanted)
        return cls(job=job, device=device, bin_tokens=min(wanted, fitting))

    @property
    def config(self) -> TrainerConfig:
        """The trainer's part of the job."""
        return self.job.trainer

    @property
    def estimator(self) -> Estimator:
        """Our estimator of advantages; GRPO if the job names one of verl's (see `verl_adv_estimator`)."""
        return named(Estimator, self.config.adv_estimator) or Estimator.GRPO

    @property
    def loss(self) -> Loss:
        """Our policy loss; the clipped loss if the job names one of verl's (see `verl_policy_loss`)."""
        return named(Loss, self.config.loss) or Loss.CLIPPED

    @property
    def verl_adv_estimator(self) -> str:
        """The name of the job's estimator in verl's registry, or empty if the estimator is not one of verl's."""
        return "" if named(Estimator, self.config.adv_estimator) else self.config.adv_estimator

    @property
    def verl_policy_loss(self) -> str:
        """The name of the job's loss in verl's registry, or empty if the loss is not one of verl's."""
        return "" if named(Loss, self.config.loss) else self.config.loss

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter to train; None if all weights are trained."""
        config = self.config
        if not config.lora_rank:
            return None
        named = () if config.target_modules in ("all-linear", "all") else config.target_modules.split(",")
        return AdapterSpec(
            rank=config.lora_rank,
            alpha=float(config.lora_alpha),
            seed=self.job.model.seed,
            targets=tuple(name.strip() for name in named),
        )

    @property
    def constant_length(self) -> int:
        """The length in tokens that the aggregation `constant` assumes for every episode: Dr. GRPO's divisor."""
        return self.job.rollout.max_response_length

    @property
    def adam_epsilon(self) -> float:
        """Adam's epsilon, scaled like the gradient.

        With the aggregation `constant`, the gradient and epsilon are both divided by `constant_length`, which cancels
        out in Adam's update. An unscaled epsilon would be larger than the gradient when answers are short and the
        divisor is, say, 15,000.
        """
        constant = self.config.loss_aggregation is Aggregation.CONSTANT
        return ADAM_EPSILON / self.constant_length if constant else ADAM_EPSILON

    @property
    def corrects(self) -> bool:
        """Whether a separate weight on the loss corrects for the sampler's logprobs."""
        return self.config.correction != Correction.NONE and self.config.tis_clip > 0.0

    @property
    def trains_every_token(self) -> bool:
        """Whether tokens without an advantage are trained on too, because of a KL term or an entropy bonus."""
        return self.config.kl_coef > 0.0 or self.config.entropy_coef > 0.0
