"""The optimizer of one tenant: AdamW whose parameters come with each step."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bombus.errors import Code, Refused
from bombus.operations import AdamParams, RateSchedule
from bombus_trainer.backends.torch.optim import NamedAdamW

KINDS = ("constant", "linear", "cosine")  # of a schedule of the learning rate
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
EPS_MIN = 1e-30  # less is 0 in float32, and 0 divides by 0 where there is no gradient


class TenantOptimizer(NamedAdamW):
    """AdamW. Its state is made with the first step."""

    @property
    def full_bytes(self) -> int:
        """How many bytes the state takes once it is there."""
        return sum(2 * parameter.nbytes + 4 for parameter in self.parameters.values())

    @property
    def held_bytes(self) -> int:
        """How many bytes the state takes now."""
        return sum(value.nbytes for value in self.state().values())

    def step(self, adam: AdamParams) -> None:
        """Update all parameters with their gradients."""
        self.make_state()
        for group in self._adam.param_groups:
            group["lr"], group["betas"], group["eps"] = adam.learning_rate, (adam.beta1, adam.beta2), adam.eps
            decays = group["params"][0].ndim >= 2
            group["weight_decay"] = adam.weight_decay if decays else 0.0
        self._adam.step()

    def make_state(self) -> None:
        """Make all of the state, unless it is there: a step that has no memory for it then fails before it begins."""
        if self._adam.state:
            return
        self.restore(
            {
                f"{name}.{moment}": torch.zeros_like(parameter, memory_format=torch.preserve_format)
                for name, parameter in self.parameters.items()
                for moment in ("exp_avg", "exp_avg_sq")
            }
            | {f"{name}.step": torch.zeros((), dtype=torch.float32) for name in self.parameters}
        )

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `Refused` unless this is the state of such an optimizer: as many moments, each of the same shape."""
        wanted = {
            f"{name}.{moment}": parameter.shape if moment != "step" else torch.Size(())
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }
        if state and {name: value.shape for name, value in state.items()} != wanted:
            raise Refused(Code.BAD_CONFIG, "the checkpoint's optimizer is of another model: load it without")

    def drop(self) -> None:
        """Forget the state."""
        self.restore({})


def check_adam(adam: AdamParams) -> None:
    """Raise `Refused` for parameters that are no step of AdamW."""
    wrong = ""
    if not math.isfinite(adam.learning_rate) or adam.learning_rate < 0.0:
        wrong = f"learning_rate is {adam.learning_rate}: it has to be a number from 0"
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        if not 0.0 <= beta < 1.0:
            wrong = wrong or f"{name} is {beta}: it has to be from 0 to below 1"
    if not EPS_MIN <= adam.eps < math.inf:
        wrong = wrong or f"eps is {adam.eps}: it has to be a number from {EPS_MIN}"
    for name, value in (("weight_decay", adam.weight_decay), ("grad_clip_norm", adam.grad_clip_norm)):
        if not math.isfinite(value) or value < 0.0:
            wrong = wrong or f"{name} is {value}: it has to be a number from 0"
    if adam.schedule is not None:
        wrong = wrong or _why_no_schedule(adam.schedule)
    if wrong:
        raise Refused(Code.BAD_CONFIG, f"no step was taken: {wrong}")


def _why_no_schedule(schedule: RateSchedule) -> str:
    """Return why there is no such schedule, "" where there is."""
    if schedule.kind not in KINDS:
        return f"the schedule of the learning rate is {schedule.kind[:40]!r}: it has to be {', '.join(KINDS)}"
    if schedule.warmup_steps < 0 or not 0.0 <= schedule.min_ratio <= 1.0:
        return f"warmup_steps is {schedule.warmup_steps} and min_lr_ratio {schedule.min_ratio}: from 0, and 0 to 1"
    if schedule.kind != KINDS[0] and schedule.total_steps <= schedule.warmup_steps:
        return f"total_steps is {schedule.total_steps}: it has to be above warmup_steps, {schedule.warmup_steps}"
    return ""
