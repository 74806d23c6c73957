"""The optimizer: AdamW over named parameters, gradient clipping, and the learning rate of each step."""

from collections.abc import Mapping
from math import cos, isfinite, pi

import torch
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.operations import RateSchedule
from bombus_trainer.settings import TrainerSettings


def learning_rate(step: int, settings: TrainerSettings) -> float:
    """Return the rate of optimizer step `step` (1 is the first): linear warm-up, then constant or decay to a floor.

    Warm-up step k of w has k / w of the rate. Decay begins after it, and the step after `total_steps` is the first at
    the floor, which is `min_lr_ratio` of the rate; so are all later ones.
    """
    config = settings.config
    schedule = RateSchedule(
        kind=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        min_ratio=config.min_lr_ratio,
    )
    return scheduled(step, config.lr, schedule)


def scheduled(step: int, peak: float, schedule: RateSchedule) -> float:
    """Return the rate of step `step` (1 is the first) by a schedule, as `learning_rate` says."""
    warmup, floor = schedule.warmup_steps, schedule.min_ratio
    if step <= warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    progress = min((step - warmup - 1) / (schedule.total_steps - warmup), 1.0)
    left = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return peak * (floor + (1.0 - floor) * left)


class NamedAdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101). Matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rate: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = dict(parameters)
        matrices = [parameter for parameter in self.parameters.values() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.parameters.values() if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=rate, betas=betas, eps=eps, fused=True
        )

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the state by `<parameter>.<moment>`. It is empty before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`. Raises `EngineFault` when it belongs to other parameters."""
        self._adam.state.clear()
        if not tensors:
            return
        for name, parameter in self.parameters.items():
            moments = {key: tensors.get(f"{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
            average = moments["exp_avg"]
            if any(value is None for value in moments.values()) or average is None:
                raise EngineFault(f"the checkpoint has no optimizer state for {name}")
            if average.shape != parameter.shape:
                raise EngineFault(f"the checkpoint's {name} has shape {tuple(average.shape)}")
            self._adam.state[parameter] = {
                key: value.to(parameter.device) for key, value in moments.items() if value is not None
            }


class Optimizer(NamedAdamW):
    """The optimizer of a job."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        config = settings.config
        super().__init__(parameters, config.lr, config.betas, settings.adam_epsilon, config.weight_decay)
        self._settings = settings

    def step(self, rate: float) -> float:
        """Clip, update at this learning rate, and free the gradients. Returns their norm before clipping.

        Nothing is updated when the norm is not finite.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self._settings.config.grad_clip))
        if isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self.zero_grad()
        return norm
