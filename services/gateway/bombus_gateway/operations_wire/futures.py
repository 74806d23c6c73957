"""The answers to `retrieve_future`: a result, "not yet", a failure, or "unknown"."""

from typing import Literal

import msgspec

from bombus.operations import Failed
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.dialects import JSON, TrainingDialect
from bombus_gateway.operations_wire.submission import checked_id

LARGE_BYTES = 1 << 20  # Tinker's client wants to make room before receiving a larger answer

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class FutureRequest(msgspec.Struct, frozen=True):
    """The result that a client asks for. If `may_be_size`, a large result may be answered with only its size."""

    id: str
    dialect: TrainingDialect
    may_be_size: bool


class FutureAnswer(msgspec.Struct, frozen=True):
    status: int
    content_type: str
    body: bytes


class _Retrieve(msgspec.Struct):
    request_id: str
    allow_metadata_only: bool | None = None


_retrieves = msgspec.json.Decoder(_Retrieve)


def read_retrieve(body: bytes) -> FutureRequest:
    """Read a `retrieve_future`. Raises `Refused` MALFORMED if the body is invalid."""
    given = decode_body(_retrieves, body)
    of_tinker = given.allow_metadata_only is not None
    dialect = TrainingDialect.TINKER if of_tinker else TrainingDialect.XORL
    return FutureRequest(checked_id(given.request_id, "request_id"), dialect, bool(given.allow_metadata_only))


def json_answer(content: object, status: int = 200) -> FutureAnswer:
    return FutureAnswer(status, JSON, msgspec.json.encode(content))


def accepted(request_id: str, model: str) -> FutureAnswer:
    """Return the answer to a request whose result is a future."""
    return json_answer({"request_id": request_id, "model_id": model})


def ready(answer: FutureAnswer, request: FutureRequest) -> FutureAnswer:
    """Return a result. If the result is large and the client wants to make room for it first, return its size
    instead."""
    if request.may_be_size and len(answer.body) > LARGE_BYTES:
        return json_answer({"status": "complete_metadata", "response_payload_size": len(answer.body)})
    return answer


def try_again(request: FutureRequest, reason: str, waiting: QueueState = "active") -> FutureAnswer:
    """Return the answer that says there is no result yet, with the reason as text.

    After a 408, Tinker's client asks again immediately, without telling its user, so hold the request for a while
    first. xorl's client waits a second after a 200, but not after a 408.
    """
    content = {"type": "try_again", "request_id": request.id, "queue_state": waiting, "queue_state_reason": reason}
    return json_answer(content, 408 if request.dialect == TrainingDialect.TINKER else 200)


def failed(failure: Failed) -> FutureAnswer:
    """Return the answer that says an operation failed. The status is 200, as for results, so that no client retries."""
    return json_answer({"error": failure.error, "category": failure.category.value})


def unknown(request_id: str) -> FutureAnswer:
    """Return the answer that says a future is unknown or has expired. After a 410, Tinker's client requests a sample
    again."""
    why = f"There is no result {request_id!r} here, or it has expired; send the operation again."
    return json_answer({"detail": why}, 410)
