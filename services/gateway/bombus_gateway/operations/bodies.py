"""What shows in a training request whose it is, and answers as HTTP has them."""

import msgspec
from fastapi import Response

from bombus_gateway.operations_wire.futures import FutureAnswer


def names_in(body: bytes) -> frozenset[str]:
    """Return the names of the fields of a JSON object; none for anything else, which its reader refuses."""
    try:
        return frozenset(msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()


def answered(answer: FutureAnswer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.content_type)
