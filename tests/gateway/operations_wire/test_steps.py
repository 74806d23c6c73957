"""Steps of the optimizer: each client's defaults, and what comes before what."""

import msgspec
import pytest

from bombus.errors import Refused
from bombus.operations import AbortEpoch, AdamParams, Category, Failed, OptimStep, RateSchedule, Reduction
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.steps import RateDefaults, read_abort_epoch, read_optim_step

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL


def step(dialect: TrainingDialect, **fields: object) -> OptimStep | Failed:
    body = msgspec.json.encode({"model_id": "S:train:0", "seq_id": 2, "type": "optim_step", **fields})
    submission = read_optim_step(dialect, body)
    assert (submission.model, submission.seq) == ("S:train:0", 2)
    assert isinstance(submission.operation, OptimStep | Failed)
    return submission.operation


def test_a_step_of_tinker_takes_the_plain_sum() -> None:
    given = {
        "learning_rate": 3e-4,
        "beta1": 0.8,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_clip_norm": 1.0,
    }
    adam = AdamParams(learning_rate=3e-4, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    assert step(TINKER, adam_params=given) == OptimStep(adam=adam, reduction=Reduction.SUM)


@pytest.mark.parametrize(
    ("dialect", "fields", "rate", "clip"),
    [
        (TINKER, {}, 1e-4, 0.0),
        (TINKER, {"adam_params": {"learning_rate": 2e-4}}, 2e-4, 0.0),
        (TINKER, {"adam_params": {"grad_clip_norm": -1.0}}, 1e-4, 0.0),
        (XORL, {}, 1e-4, 5.0),
        (XORL, {"adam_params": {}}, 1e-4, 5.0),
        (XORL, {"adam_params": {"learning_rate": 2e-4, "grad_clip_norm": 1.0}}, 2e-4, 1.0),
        (XORL, {"adam_params": {"grad_clip_norm": 0.0}}, 1e-4, 0.0),
        (XORL, {"learning_rate": 3e-4, "gradient_clip": 2.0}, 3e-4, 2.0),
        (
            XORL,
            {
                "adam_params": {"learning_rate": 2e-4, "grad_clip_norm": 1.0},
                "learning_rate": 3e-4,
                "gradient_clip": 0.0,
            },
            3e-4,
            0.0,
        ),
        (XORL, {"adam_params": {"learning_rate": 2e-4}, "learning_rate": None, "gradient_clip": None}, 2e-4, 5.0),
    ],
)
def test_what_is_beside_adam_params_comes_first_and_the_clients_defaults_last(
    dialect: TrainingDialect, fields: dict[str, object], rate: float, clip: float
) -> None:
    found = step(dialect, **fields)
    assert isinstance(found, OptimStep)
    assert (found.adam.learning_rate, found.adam.grad_clip_norm) == (rate, clip)
    assert found.reduction == (Reduction.SUM if dialect == TINKER else Reduction.TOKEN_MEAN)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "The optimizer 'dimuon' is not offered"),
        ({"adam_params": {"learning_rate": -1}}, "learning_rate is -1.0, but must be at least 0 and below 1e"),
        ({"adam_params": {"beta1": 1.0}}, "beta1 is 1.0, but must be at least 0 and below 1."),
        ({"adam_params": {"beta2": -0.1}}, "beta2 is -0.1"),
        ({"adam_params": {"eps": -1e-9}}, "eps is -1e-09"),
        ({"adam_params": {"weight_decay": 1e9}}, "weight_decay is 1000000000.0"),
        ({"adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate: Expected `float"),
    ],
)
def test_a_wrong_step_fails_in_words(fields: dict[str, object], why: str) -> None:
    failure = step(TINKER, **fields)
    assert isinstance(failure, Failed)
    assert failure.category == Category.USER
    assert why in failure.error


def test_xorl_may_leave_out_the_number_and_call_the_model_a_session() -> None:
    assert read_optim_step(XORL, b"{}").model == "default"
    submission = read_optim_step(XORL, b'{"session_id": "mine"}')
    assert (submission.model, submission.seq) == ("mine", 0)


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"model_id": "S:train:0"}', b'{"model_id": "", "seq_id": 1}'])
def test_tinker_may_not(body: bytes) -> None:
    with pytest.raises(Refused):
        read_optim_step(TINKER, body)


def test_a_gradient_is_forgotten() -> None:
    submission = read_abort_epoch(b'{"model_id": "default", "seq_id": 4}')
    assert (submission.model, submission.seq, submission.operation) == ("default", 4, AbortEpoch())


def test_a_schedule_is_the_clients_or_else_the_jobs_and_a_rate_that_is_given_is_the_steps() -> None:
    cosine = {"type": "cosine", "warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1}
    own = RateSchedule(kind="cosine", warmup_steps=2, total_steps=10, min_ratio=0.1)
    jobs = RateDefaults(3e-4, RateSchedule(kind="linear", total_steps=4))
    for fields, rate, schedule in (
        ({}, 3e-4, jobs.schedule),
        ({"learning_rate": 2e-4}, 2e-4, None),
        ({"learning_rate": 2e-4, "lr_schedule": cosine}, 2e-4, own),
        ({"lr_schedule": cosine}, 3e-4, own),
    ):
        body = msgspec.json.encode({"model_id": "mine", "seq_id": 1, **fields})
        found = read_optim_step(XORL, body, jobs).operation
        assert isinstance(found, OptimStep)
        assert (found.adam.learning_rate, found.adam.schedule) == (rate, schedule)
    wrong = step(XORL, lr_schedule={"type": "linear", "gamma": 1})
    assert isinstance(wrong, Failed)
    assert "gamma" in wrong.error
