"""A step of AdamW against one worked out by hand, with every parameter of it."""

import msgspec
import pytest
import torch
from torch import nn

from bombus.errors import EngineFault, Refused
from bombus.operations import AdamParams, RateSchedule
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.operations.adam import check_adam


def optimizer(*values: float) -> tuple[nn.Parameter, AdamW]:
    parameter = nn.Parameter(torch.tensor([list(values)]))
    return parameter, AdamW({"w": parameter})


def test_two_steps_with_parameters_of_their_own_are_those_worked_out_by_hand() -> None:
    parameter, adam = optimizer(1.0, -2.0)
    parameter.grad = torch.tensor([[0.5, -0.25]])
    adam.step(AdamParams(learning_rate=0.1, beta1=0.5, beta2=0.75, eps=1e-12, weight_decay=0.2))
    # The decay first: w (1 - 0.1 * 0.2). At the first step both corrected moments are g and g^2, so the step is 0.1.
    assert parameter.tolist()[0] == pytest.approx([0.98 - 0.1, -1.96 + 0.1])
    parameter.grad = torch.tensor([[1.0, 0.0]])
    adam.step(AdamParams(learning_rate=0.01, beta1=0.5, beta2=0.5, eps=0.5, weight_decay=0.0))
    # The first moments are 0.25 and -0.125 (half of g); now 0.125 + 0.5 and -0.0625. Corrected by 1 - 0.5^2 = 0.75.
    # The second are 0.0625 and 0.015625 (a quarter of g^2); now 0.03125 + 0.5 and 0.0078125. Corrected by 0.75.
    first = 0.88 - 0.01 * (0.625 / 0.75) / ((0.53125 / 0.75) ** 0.5 + 0.5)
    second = -1.86 - 0.01 * (-0.0625 / 0.75) / ((0.0078125 / 0.75) ** 0.5 + 0.5)
    assert parameter.tolist()[0] == pytest.approx([first, second], rel=1e-6)


def test_vectors_do_not_decay() -> None:
    vector = nn.Parameter(torch.tensor([4.0]))
    adam = AdamW({"norm": vector})
    vector.grad = torch.zeros(1)
    adam.step(AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert vector.tolist() == [4.0]


def test_the_bytes_of_its_state_are_known_before_it_is_there() -> None:
    parameter, adam = optimizer(1.0, 2.0, 3.0)
    assert (adam.held_bytes, adam.full_bytes) == (0, 2 * 12 + 4)
    parameter.grad = torch.ones(1, 3)
    adam.step(AdamParams(learning_rate=0.1))
    assert adam.held_bytes == adam.full_bytes
    adam.drop()
    assert adam.held_bytes == 0


def test_a_parameter_without_a_gradient_has_no_state_until_it_has_one() -> None:
    text, vision = (nn.Parameter(torch.ones(1, 2)) for _ in range(2))
    adam = AdamW({"text": text, "vision": vision})
    text.grad = torch.ones(1, 2)
    adam.step(AdamParams(learning_rate=0.1))
    assert set(adam.state()) == {"text.step", "text.exp_avg", "text.exp_avg_sq"}
    again = AdamW({"text": text, "vision": vision})
    again.restore(adam.state())
    vision.grad = torch.ones(1, 2)
    again.step(AdamParams(learning_rate=0.1))
    assert {name: int(value) for name, value in again.state().items() if name.endswith("step")} == {
        "text.step": 2,
        "vision.step": 1,
    }


def test_a_state_of_other_parameters_is_refused() -> None:
    parameter, adam = optimizer(1.0, 2.0)
    parameter.grad = torch.ones(1, 2)
    adam.step(AdamParams(learning_rate=0.1))
    adam.check({})
    adam.check(adam.state())
    own = adam.state()
    for wrong, why in (
        ({**own, "w.exp_avg": torch.zeros(1, 3)}, r"optimizer state for w has shape \(1, 3\)"),
        ({"w.step": torch.tensor(1.0)}, "no optimizer state for w"),
        ({**own, "v.step": torch.tensor(1.0)}, "optimizer state for other parameters too"),
    ):
        with pytest.raises(EngineFault, match=why):
            adam.restore(wrong)
        assert adam.state().keys() == own.keys(), "nothing has changed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("eps", float("nan")),
        ("weight_decay", -0.1),
        ("grad_clip_norm", float("inf")),
    ],
)
def test_parameters_that_are_no_step_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(Refused, match=f"no step was taken: {name} is {value}: it must be"):
        check_adam(msgspec.structs.replace(AdamParams(learning_rate=1e-3), **{name: value}))


def test_an_eps_above_one_is_a_step() -> None:
    check_adam(AdamParams(learning_rate=1e-3, eps=3.0))


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (RateSchedule(kind="wsd"), "'wsd': it must be one of constant, linear, cosine"),
        (RateSchedule(kind="linear", warmup_steps=4, total_steps=4), "total_steps is 4: it must be above"),
        (RateSchedule(warmup_steps=-1), "warmup_steps is -1"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: RateSchedule, why: str) -> None:
    with pytest.raises(Refused, match=why):
        check_adam(AdamParams(learning_rate=1e-3, schedule=schedule))
