"""The norm of a gradient and its bound, and which weights a model takes."""

from pathlib import Path

import pytest
import torch

from bombus.errors import EngineFault
from bombus.operations import AdamParams, AdapterSpec, RateSchedule, Reduction
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.operations.client_model import GradientEpoch, TrainedClientModel
from tests.trainer.small_batches import tiny_settings


@pytest.fixture(scope="module")
def shared(base: Path) -> Base:
    return Base(base, tiny_settings(), all_weights=False)


def client_model(shared: Base, rank: int = 1) -> TrainedClientModel:
    return TrainedClientModel(shared, AdapterSpec(rank=rank, alpha=2.0, targets=("q_proj",)))


def with_gradient(made: TrainedClientModel, value: float, tokens: int) -> TrainedClientModel:
    for parameter in made.parameters.values():
        parameter.grad = torch.full_like(parameter, value)
    made.epoch = GradientEpoch(1, tokens)
    return made


def test_a_gradient_is_divided_before_its_norm_is_bounded(shared: Base) -> None:
    # 128 numbers of 6, divided by 3 tokens: the norm is 2 sqrt(128). Plain SGD shows what was left of it
    for bound, left in ((0.0, 2.0), (100.0, 2.0), (128**0.5, 1.0)):
        made = with_gradient(client_model(shared), 6.0, tokens=3)
        grads = [parameter.grad for parameter in made.parameters.values() if parameter.grad is not None]
        step = made.take_step(AdamParams(learning_rate=0.0, grad_clip_norm=bound), Reduction.TOKEN_MEAN)
        assert (step.divisor, step.grad_norm) == pytest.approx((3.0, 2 * 128**0.5))
        assert all(grad.flatten().tolist() == pytest.approx([left] * grad.numel()) for grad in grads)


def test_a_step_clears_the_gradient(shared: Base) -> None:
    made = with_gradient(client_model(shared), 1.0, tokens=5)
    made.take_step(AdamParams(learning_rate=0.1), Reduction.TOKEN_MEAN)
    assert (made.step, made.epoch) == (1, GradientEpoch())
    assert all(parameter.grad is None for parameter in made.parameters.values())


def test_a_schedule_goes_on_with_the_steps_of_the_model(shared: Base) -> None:
    made = client_model(shared)
    schedule = RateSchedule(kind="linear", warmup_steps=2, total_steps=6, min_ratio=0.5)
    rates = []
    for _ in range(8):
        step = with_gradient(made, 1.0, tokens=1).take_step(
            AdamParams(learning_rate=0.4, schedule=schedule), Reduction.SUM
        )
        rates.append(step.metrics["learning_rate"])
    # Warm-up of 1/2 and 2/2; then from 0.4 to its half at the step after the sixth, in four equal parts
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2])


def test_weights_of_another_shape_are_refused_before_any_changes(shared: Base) -> None:
    made, other = client_model(shared), client_model(shared, rank=2)
    before = {name: value.clone() for name, value in made.weights().items()}
    for wrong, why in ((other.weights(), r"has shape \[2, 32\], not \[1, 32\]"), ({}, "is in only one of the two")):
        with pytest.raises(EngineFault, match=why):
            made.restore(wrong)
    assert all(torch.equal(before[name], value) for name, value in made.weights().items())


def named_while_on(shared: Base, made: TrainedClientModel) -> list[str]:
    with shared.switched_on(made.adapters):
        return [name for name, _ in shared.network.named_modules()]


def test_the_base_has_its_own_layers_when_no_adapter_is_switched_on(shared: Base) -> None:
    names = [name for name, _ in shared.network.named_modules()]
    made = client_model(shared)
    assert any(name.endswith("q_proj.base") for name in named_while_on(shared, made))
    with pytest.raises(ZeroDivisionError), shared.switched_on(made.adapters):
        made.step //= 0
    assert [name for name, _ in shared.network.named_modules()] == names
    assert not any(parameter.requires_grad for parameter in shared.network.parameters())
