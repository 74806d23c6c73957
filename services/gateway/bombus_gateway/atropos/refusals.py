"""Write refusals in the form that Atropos's clients expect, which is FastAPI's form for a body that does not match its
model."""

import re

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import BadParameter

UNPROCESSABLE = 422
_encode = msgspec.json.Encoder().encode
_steps = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class UnfitBody(BadParameter):
    """Raised for a body that does not match its route, with the place of the error. `kind` is FastAPI's name for the
    error."""

    def __init__(self, place: str, why: str, kind: str = "value_error") -> None:
        super().__init__(Code.MALFORMED, place, why)
        self.kind = kind


def write_refusal(refusal: Refused) -> tuple[int, bytes]:
    """Return the status and body of a refusal, in FastAPI's form.

    For an unfit body the status is 422, and `detail` includes the place of the error. For any other refusal, `detail`
    is its message.
    """
    why = limits.in_short(refusal.why)
    if not isinstance(refusal, BadParameter):
        return refusal.status, _encode({"detail": why})
    kind = refusal.kind if isinstance(refusal, UnfitBody) else "value_error"
    detail = {"type": kind, "loc": ["body", *place_in(refusal.param)], "msg": why}
    return UNPROCESSABLE, _encode({"detail": [detail]})


def write_batch_refusal(refusal: Refused) -> tuple[int, bytes]:
    """Return the status and body of a refusal from `/batch`.

    Some trainers read any JSON from `/batch` as a batch, and others check the JSON's `status` for an error, so the body
    has both a null `batch` and a `status`.
    """
    why = limits.in_short(refusal.why)
    return refusal.status, _encode({"detail": why, "status": "error", "message": why, "batch": None})


def place_in(place: str) -> list[str | int]:
    """Return the steps that lead to a place: for `[2].tokens[0]`, they are 2, tokens and 0."""
    return [int(index) if index else limits.in_short(name) for index, name in _steps.findall(place)]
