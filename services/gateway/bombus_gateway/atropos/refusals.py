"""Refusals as clients of Atropos may read them: what FastAPI answers for a body that does not fit its model."""

import re

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import BadParameter

UNPROCESSABLE = 422
_encode = msgspec.json.Encoder().encode
_steps = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class UnfitBody(BadParameter):
    """A body that is not what its route takes, with the place in it. `kind` is FastAPI's name of the fault."""

    def __init__(self, place: str, why: str, kind: str = "value_error") -> None:
        super().__init__(Code.MALFORMED, place, why)
        self.kind = kind


def write_refusal(refusal: Refused) -> tuple[int, bytes]:
    """Return the status and the body of a refusal: 422 with the place for a body that does not fit, as FastAPI has it.

    For any other refusal `detail` is its sentence, as FastAPI has it too.
    """
    why = limits.in_short(refusal.why)
    if not isinstance(refusal, BadParameter):
        return refusal.status, _encode({"detail": why})
    kind = refusal.kind if isinstance(refusal, UnfitBody) else "value_error"
    detail = {"type": kind, "loc": ["body", *place_in(refusal.param)], "msg": why}
    return UNPROCESSABLE, _encode({"detail": [detail]})


def write_batch_refusal(refusal: Refused) -> tuple[int, bytes]:
    """Return the status and the body of a refusal of a batch.

    Trainers read any JSON of `/batch` as a batch, or as an error if its `status` says so: this one says both.
    """
    why = limits.in_short(refusal.why)
    return refusal.status, _encode({"detail": why, "status": "error", "message": why, "batch": None})


def place_in(place: str) -> list[str | int]:
    """Return the steps to a place: `[2].tokens[0]` is 2, tokens, 0."""
    return [int(index) if index else limits.in_short(name) for index, name in _steps.findall(place)]
