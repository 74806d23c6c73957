"""What a request asks of one model, and how a body that is wrong becomes an operation that has failed."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import Category, Failed, Operation
from bombus_gateway import limits

_OperationT = TypeVar("_OperationT")


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """An operation for a model, with the number that the client gave it; 0 for one that has none.

    A request whose model and number can be read is always answered with a future, so one that cannot be done is
    `Failed` already. `metadata` is JSON that the client wants to have kept with a model or a checkpoint.
    """

    model: str
    seq: int
    operation: Operation | Failed
    metadata: bytes = b""


def attempted(make: Callable[[], _OperationT]) -> _OperationT | Failed:
    """Return what `make` returns, or that it has failed where it refuses."""
    try:
        return make()
    except Refused as refusal:
        return Failed(error=limits.in_short(refusal.why), category=Category.USER)


def checked_id(given: str, field: str) -> str:
    """Return the id of a model, a session or a request. Raises `Refused` for one that is empty or too long."""
    if not 0 < len(given) <= limits.TRAINING_ID_CHARACTERS:
        why = f"{field} is a text of 1 to {limits.TRAINING_ID_CHARACTERS} characters; this one has {len(given)}."
        raise Refused(Code.MALFORMED, why)
    return given
