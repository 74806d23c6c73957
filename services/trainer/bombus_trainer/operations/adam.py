"""Checks the settings of an optimizer step that a client requests."""

import math

from bombus.errors import Code, Refused
from bombus.operations import AdamParams, RateSchedule

KINDS = ("constant", "linear", "cosine")  # kinds of learning-rate schedules
EPS_MIN = 1e-30  # a much smaller value is 0 in float32, so a gradient of 0 would give 0 / 0


def check_adam(adam: AdamParams) -> None:
    """Raise `Refused` if the parameters are not valid for an AdamW step."""
    wrong = ""
    if not math.isfinite(adam.learning_rate) or adam.learning_rate < 0.0:
        wrong = f"learning_rate is {adam.learning_rate}: it must be a number of at least 0"
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        if not 0.0 <= beta < 1.0:
            wrong = wrong or f"{name} is {beta}: it must be at least 0 and below 1"
    if not EPS_MIN <= adam.eps < math.inf:
        wrong = wrong or f"eps is {adam.eps}: it must be a number of at least {EPS_MIN}"
    for name, value in (("weight_decay", adam.weight_decay), ("grad_clip_norm", adam.grad_clip_norm)):
        if not math.isfinite(value) or value < 0.0:
            wrong = wrong or f"{name} is {value}: it must be a number of at least 0"
    if adam.schedule is not None:
        wrong = wrong or _why_no_schedule(adam.schedule)
    if wrong:
        raise Refused(Code.BAD_CONFIG, f"no step was taken: {wrong}")


def _why_no_schedule(schedule: RateSchedule) -> str:
    """Return why a schedule is invalid, or "" if it is valid."""
    if schedule.kind not in KINDS:
        return f"the schedule of the learning rate is {schedule.kind[:40]!r}: it must be one of {', '.join(KINDS)}"
    if schedule.warmup_steps < 0 or not 0.0 <= schedule.min_ratio <= 1.0:
        return (
            f"warmup_steps is {schedule.warmup_steps} and must be at least 0; min_lr_ratio is {schedule.min_ratio} and "
            "must be from 0 to 1"
        )
    if schedule.kind != KINDS[0] and schedule.total_steps <= schedule.warmup_steps:
        return f"total_steps is {schedule.total_steps}: it must be above warmup_steps, {schedule.warmup_steps}"
    return ""
