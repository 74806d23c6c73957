"""Find the field names in training requests, which show the requests' dialect, and turn answers into HTTP responses."""

import msgspec
from fastapi import Response

from bombus_gateway.operations_wire.futures import FutureAnswer


def names_in(body: bytes) -> frozenset[str]:
    """Return the field names in a JSON object. Return no names for any other body; such a body is refused when it is
    decoded."""
    try:
        return frozenset(msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()


def answered(answer: FutureAnswer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.content_type)
