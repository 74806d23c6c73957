"""Requests to take an optimizer step, and to discard a gradient."""

import math

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import AbortEpoch, AdamParams, OptimStep, RateSchedule, Reduction
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.submission import Submission, addressed, attempted

LEARNING_RATE = 1e-4
XORL_CLIP = 5.0  # the default in xorl's AdamParams
_LARGE = 1e6


class _Adam(msgspec.Struct):
    learning_rate: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None


class _Family(msgspec.Struct):
    type: str = ""


class _Schedule(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0


class RateDefaults(msgspec.Struct, frozen=True):
    """The learning rate for steps for which the client gives none: the rate of the engine's job, if the job has a
    schedule."""

    rate: float = LEARNING_RATE
    schedule: RateSchedule | None = None


class _Step(msgspec.Struct):
    adam_params: _Adam | None = None
    optimizer_params: _Family | None = None
    learning_rate: float | None = None
    gradient_clip: float | None = None
    lr_schedule: _Schedule | None = None


NO_SCHEDULE = RateDefaults()
_steps = msgspec.json.Decoder(_Step)


def read_optim_step(dialect: TrainingDialect, body: bytes, job: RateDefaults = NO_SCHEDULE) -> Submission:
    """Read an `optim_step` request, with the client's own defaults and the reduction of its dialect.

    In xorl's dialect, a `learning_rate` or `gradient_clip` given beside `adam_params` takes precedence over the one
    inside it, and the defaults are those of xorl's client: 1e-4 and 5. A clip of 0 or less disables clipping. With an
    `lr_schedule`, the rate is the schedule's rate at the model's next step. Without one, a given rate is used
    unchanged, and a missing rate is taken from the engine's `job` if the job has a schedule.
    """
    model, seq = addressed(dialect, body)
    return Submission(model=model, seq=seq, operation=attempted(lambda: _step(dialect, body, job)))


def read_abort_epoch(body: bytes) -> Submission:
    model, seq = addressed(TrainingDialect.XORL, body)
    return Submission(model=model, seq=seq, operation=AbortEpoch())


def _step(dialect: TrainingDialect, body: bytes, job: RateDefaults) -> OptimStep:
    given = decode_body(_steps, body)
    if given.optimizer_params is not None:
        kind = given.optimizer_params.type[:40]
        raise Refused(Code.UNSUPPORTED, f"The optimizer {kind!r} is not offered: send adam_params.")
    adam = given.adam_params or _Adam()
    rate, clip, schedule = adam.learning_rate, adam.grad_clip_norm, None
    if dialect == TrainingDialect.XORL:
        rate = rate if given.learning_rate is None else given.learning_rate
        clip = clip if given.gradient_clip is None else given.gradient_clip
        clip = XORL_CLIP if clip is None else clip
        schedule = job.schedule if rate is None else None
        schedule = schedule if given.lr_schedule is None else _schedule(given.lr_schedule)
        rate = job.rate if rate is None else rate
    params = AdamParams(
        learning_rate=_within("learning_rate", LEARNING_RATE if rate is None else rate, _LARGE),
        beta1=_within("beta1", adam.beta1, 1.0),
        beta2=_within("beta2", adam.beta2, 1.0),
        eps=_within("eps", adam.eps, _LARGE),
        weight_decay=_within("weight_decay", adam.weight_decay, _LARGE),
        grad_clip_norm=max(clip or 0.0, 0.0),
        schedule=schedule,
    )
    reduction = Reduction.SUM if dialect == TrainingDialect.TINKER else Reduction.TOKEN_MEAN
    return OptimStep(adam=params, reduction=reduction)


def _schedule(given: _Schedule) -> RateSchedule:
    return RateSchedule(
        kind=given.type,
        warmup_steps=given.warmup_steps,
        total_steps=given.total_steps,
        min_ratio=_within("min_lr_ratio", given.min_lr_ratio, math.nextafter(1.0, 2.0)),
    )


def _within(name: str, value: float, below: float) -> float:
    if not math.isfinite(value) or not 0.0 <= value < below:
        raise Refused(Code.MALFORMED, f"{name} is {value}, but must be at least 0 and below {below:g}.")
    return value
