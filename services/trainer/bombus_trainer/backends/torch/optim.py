"""The optimizer: AdamW over named parameters, and the learning rate of each step."""

from collections.abc import Mapping
from math import cos, pi

import torch
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.operations import AdamParams, RateSchedule
from bombus_trainer.settings import TrainerSettings

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(step: int, settings: TrainerSettings) -> float:
    """Return the rate of optimizer step `step` (counted from 1): linear warm-up, then constant or decay to a floor.

    Warm-up step k of w uses k / w of the rate. Decay begins after warm-up. From step `total_steps` + 1 on, the rate
    stays at the floor, which is `min_lr_ratio` of the full rate.
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
    """Return the rate of step `step` (counted from 1) under a schedule, as described in `learning_rate`."""
    warmup, floor = schedule.warmup_steps, schedule.min_ratio
    if step <= warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    progress = min((step - warmup - 1) / (schedule.total_steps - warmup), 1.0)
    left = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return peak * (floor + (1.0 - floor) * left)


class AdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101). Matrices decay; vectors (norms, biases) do not.

    Its parameters are named, its settings are passed to each step, and its state is created in the first step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        matrices = [parameter for parameter in self.parameters.values() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.parameters.values() if parameter.ndim < 2]
        self._adam = torch.optim.AdamW([{"params": group} for group in (matrices, vectors) if group], fused=True)

    @property
    def full_bytes(self) -> int:
        """The number of bytes that the state takes once it exists."""
        return sum(2 * parameter.nbytes + 4 for parameter in self.parameters.values())

    @property
    def held_bytes(self) -> int:
        """The number of bytes that the state takes now."""
        return sum(value.nbytes for value in self.state().values())

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def step(self, adam: AdamParams) -> None:
        """Update the parameters that have gradients. The caller clips and clears the gradients."""
        self.make_state()
        for group in self._adam.param_groups:
            group["lr"], group["betas"], group["eps"] = adam.learning_rate, (adam.beta1, adam.beta2), adam.eps
            group["weight_decay"] = adam.weight_decay if group["params"][0].ndim >= 2 else 0.0
        self._adam.step()

    def make_state(self) -> None:
        """Create the state of parameters that have gradients, unless it exists.

        If there is not enough memory for the state, a step then fails before it changes anything. Parts of a model that
        text never passes through, such as a vision tower, have no gradients and take no memory.
        """
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter not in self._adam.state:
                self._adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    def state(self) -> dict[str, Tensor]:
        """Return the state, keyed by `<parameter>.<moment>`. It is empty before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value
        return tensors

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `EngineFault` unless the state fits these parameters, with all moments of a parameter or none."""
        stepped = {name: parameter for name, parameter in self.parameters.items() if f"{name}.step" in state}
        for name, parameter in stepped.items():
            for moment in MOMENTS:
                value, shape = state.get(f"{name}.{moment}"), torch.Size(()) if moment == "step" else parameter.shape
                if value is None:
                    raise EngineFault(f"the checkpoint has no optimizer state for {name}")
                if value.shape != shape:
                    raise EngineFault(f"the checkpoint's optimizer state for {name} has shape {tuple(value.shape)}")
        if len(state) != len(MOMENTS) * len(stepped):
            raise EngineFault("the checkpoint has optimizer state for other parameters too")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned. Raises `EngineFault` if it belongs to other parameters."""
        self.check(state)
        self._adam.state.clear()
        for name, parameter in self.parameters.items():
            if f"{name}.step" in state:
                moments = {moment: state[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS}
                self._adam.state[parameter] = moments

    def drop(self) -> None:
        """Delete the state."""
        self.restore({})
