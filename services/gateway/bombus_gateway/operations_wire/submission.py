"""The operation that a request submits to a model. An invalid body becomes a failed operation."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from bombus.errors import Code, Refused
from bombus.operations import Category, Failed, Operation
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.dialects import TrainingDialect

# The number that a client gives a request, a model or a session. Clones of a Tinker sampler begin numbering at 10^9
# times a number of up to 10^9.
SeqId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
DEFAULT_MODEL = "default"  # xorl's name for a model that its client does not name

_MadeT = TypeVar("_MadeT")
NOT_GIVEN = msgspec.Raw(b"null")  # the default for JSON fields that are decoded later


def is_given(value: msgspec.Raw) -> bool:
    return bytes(value) != bytes(NOT_GIVEN)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """An operation for a model, with the number that the client gave it, or 0 if it has no number.

    A request whose model and number can be read is always answered with a future, so an invalid request has a `Failed`
    operation. `counts` says whether the operation adds to the gradient. `metadata` is kept with the model or
    checkpoint. A checkpoint for a sampler may come with the id of the sampling session that it begins. An `inflight`
    checkpoint moves the model's existing inflight samplers to the new weights.
    """

    model: str
    seq: int
    operation: Operation | Failed
    counts: bool = False
    metadata: dict[str, str] = {}
    sampling_session: str = ""
    inflight: bool = False


class ModelAddress(msgspec.Struct):
    """The model that a body is for. xorl's clients may send `session_id` instead of `model_id`, or neither."""

    model_id: str | None = None
    session_id: str | None = None

    @property
    def model(self) -> str:
        return self.model_id or self.session_id or DEFAULT_MODEL


class _Address(ModelAddress):
    seq_id: SeqId | None = None


_addresses = msgspec.json.Decoder(_Address)


def addressed(dialect: TrainingDialect, body: bytes) -> tuple[str, int]:
    """Return the model that a JSON body is for, and the number of the request. Raises `Refused` MALFORMED if they
    cannot be read.

    In Tinker's dialect, both are required.
    """
    given = decode_body(_addresses, body)
    if dialect == TrainingDialect.XORL:
        return checked_id(given.model, "model_id"), given.seq_id or 0
    if given.seq_id is None or given.seq_id < 1:
        raise Refused(Code.MALFORMED, f"seq_id is {given.seq_id}, but request numbers begin at 1.")
    return checked_id(given.model_id or "", "model_id"), given.seq_id


def attempted(make: Callable[[], _MadeT]) -> _MadeT | Failed:
    """Return what `make` returns, or `Failed` if it raises `Refused`."""
    try:
        return make()
    except Refused as refusal:
        return Failed(error=limits.in_short(refusal.why), category=Category.USER)


def submitted(model: str, seq: int, make: Callable[[], Submission]) -> Submission:
    """Return what `make` returns, or a submission with a `Failed` operation if it raises `Refused`."""
    made = attempted(make)
    return Submission(model=model, seq=seq, operation=made) if isinstance(made, Failed) else made


def checked_id(given: str, field: str) -> str:
    """Return the id of a model, a session or a request. Raises `Refused` if the id is empty or too long."""
    if not 0 < len(given) <= limits.TRAINING_ID_CHARACTERS:
        why = f"{field} must have 1 to {limits.TRAINING_ID_CHARACTERS} characters, but has {len(given)}."
        raise Refused(Code.MALFORMED, why)
    return given
