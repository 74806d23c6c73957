"""Bodies of training requests, which may be large and compressed, and answers as HTTP has them."""

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.training.compression import decompressed
from bombus_gateway.training.futures import FutureAnswer


async def read_body(request: Request) -> bytes:
    """Return a request's body, decompressed.

    Raises `Refused`: TOO_LARGE over `limits.TRAINING_BODY_BYTES`, MALFORMED, UNSUPPORTED.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limits.TRAINING_BODY_BYTES:
                most = limits.TRAINING_BODY_BYTES
                raise Refused(Code.TOO_LARGE, f"The body is over the limit of {most} bytes; send fewer data at once.")
    except ClientDisconnect:
        raise Refused(Code.MALFORMED, "The body was cut off.") from None
    return decompressed(request.headers.get("content-encoding", ""), bytes(body))


def names_in(body: bytes) -> frozenset[str]:
    """Return the names of the fields of a JSON object; none for anything else, which its reader refuses."""
    try:
        return frozenset(msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()


def answered(answer: FutureAnswer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.content_type)


def in_json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
