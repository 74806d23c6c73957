"""Reads all request bodies and limits their size. Large bodies are decoded in threads, so that other requests continue.

Every API reads its bodies here, after it has checked the key. Each API's `BodyLimits` state what its routes accept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.access import HeaderMap
from bombus_gateway.atropos.compression import inflated
from bombus_gateway.call.workers import CLIENTS, INLINE_BYTES_MAX, READ_BYTES_MAX, Workers
from bombus_gateway.decoding.json_shape import is_deeper, is_flat, marks_of
from bombus_gateway.operations_wire.compression import decompressed
from bombus_gateway.operations_wire.dialects import is_protobuf

_T = TypeVar("_T")


@dataclass(frozen=True)
class BodyLimits:
    """What the bodies sent to a route may contain. A limit of 0 means that only `bytes_max` applies.

    With a `depth` of 0, the body's decoder checks the nesting. `names` limits the number of names in all objects
    together, and `lists` limits the number of lists and objects. A body that `may_be_binary` is read as JSON unless its
    content type is protobuf. A body of up to `inline_bytes` is decoded on the event loop, and a larger one in a thread.
    """

    bytes_max: int
    depth: int = limits.DEPTH
    lists: int = 0
    names: int = 0
    values: int = 0
    fewer: str = "send less at once"
    may_be_binary: bool = False
    inline_bytes: int = INLINE_BYTES_MAX

    def check_size(self, size: int) -> None:
        if size > self.bytes_max:
            raise Refused(Code.TOO_LARGE, f"The body is over the limit of {self.bytes_max} bytes; {self.fewer}.")

    def checked(self, body: bytes) -> bytes:
        """Return the JSON `body` if it is within the limits. Raises `Refused` TOO_LARGE if it is not, or MALFORMED if
        it is nested too deeply.

        Nothing is decoded. Each list, name or value takes at least two bytes, so nothing is counted in a body that is
        too small to exceed the limits.
        """
        counted = {"lists and objects": self.lists, "names": self.names, "values": self.values}
        if (not self.depth or is_flat(body)) and not any(0 < most < len(body) // 2 for most in counted.values()):
            return body
        marks = marks_of(body)
        found = (marks.count(b"["), marks.count(b":"), marks.count(b","))
        for (what, most), count in zip(counted.items(), found, strict=True):
            if 0 < most < count:
                raise Refused(Code.TOO_LARGE, f"The body has more than {most} {what}; {self.fewer}.")
        if self.depth and is_deeper(marks, self.depth):
            raise Refused(Code.MALFORMED, f"The body is nested deeper than {self.depth}.")
        return body


SMALL = BodyLimits(limits.SMALL_BODY_BYTES, inline_bytes=limits.SMALL_BODY_BYTES)
SIGN = BodyLimits(limits.SIGN_BODY_BYTES)
SWARM = BodyLimits(limits.SWARM_BODY_BYTES, depth=limits.SWARM_DEPTH)
TRAINING = BodyLimits(
    limits.TRAINING_BODY_BYTES,
    lists=limits.TRAINING_FIELDS,
    names=limits.TRAINING_FIELDS,
    values=limits.TRAINING_NUMBERS,
    fewer="send less data in one request",
    may_be_binary=True,
)
TRAJECTORIES = BodyLimits(
    limits.TRAJECTORY_BODY_BYTES,
    lists=limits.TRAJECTORY_LISTS,
    values=limits.TRAJECTORY_NUMBERS,
    fewer="send fewer groups in one request",
    inline_bytes=READ_BYTES_MAX,
)


class BodyGate:
    """Reads the bodies of one gateway's requests. `calls` are the limits for model calls, and `samples` are those for
    samples."""

    def __init__(self, workers: Workers, call_bytes_max: int) -> None:
        self.calls = BodyLimits(call_bytes_max, depth=0, fewer="send less text", inline_bytes=READ_BYTES_MAX)
        self.samples = replace(TRAINING, bytes_max=call_bytes_max, may_be_binary=False)
        self._workers = workers

    async def small(self, request: Request) -> bytes:
        """Return the body of a client's request to a route that accepts no data. Raises `Refused` if the body cannot be
        accepted."""
        return await self.read(request, SMALL, bytes)

    async def read(self, request: Request, bounds: BodyLimits, decode: Callable[[bytes], _T]) -> _T:
        """Return the decoded body of a client's request. Raises `Refused`, and whatever `decode` raises."""
        return await self.decoded(dict(request.scope["headers"]), request.receive, bounds, decode, CLIENTS)

    async def decoded(
        self, headers: HeaderMap, receive: Receive, bounds: BodyLimits, decode: Callable[[bytes], _T], turn: str
    ) -> _T:
        """Return the decoded body if it is within its bounds. A large body is decoded in a thread, when its `turn`
        comes."""
        body = await self.unpacked(headers, receive, bounds, turn)
        is_json = not (bounds.may_be_binary and is_protobuf(headers.get(b"content-type", b"").decode("latin-1")))

        def work() -> _T:
            return decode(bounds.checked(body) if is_json else body)

        return await self._workers.run(turn, len(body), work, bounds.inline_bytes)

    async def unpacked(self, headers: HeaderMap, receive: Receive, bounds: BodyLimits, turn: str) -> bytes:
        """Return the decompressed bytes of a body, checking only their number. Raises `Refused` if the body is too
        large."""
        body = await received(headers, receive, bounds)
        encoding = headers.get(b"content-encoding", b"").decode("latin-1")
        return body if encoding in ("", "identity") else await self._unpacked(encoding, body, bounds, turn)

    async def _unpacked(self, encoding: str, body: bytes, bounds: BodyLimits, turn: str) -> bytes:
        """Decompress a body, in a thread unless it is small both before and after decompression."""
        if len(body) <= bounds.inline_bytes:
            try:
                return _unpacked(encoding, body, bounds.inline_bytes)
            except Refused as refusal:
                if refusal.code != Code.TOO_LARGE or bounds.inline_bytes >= bounds.bytes_max:
                    raise
        unpack = partial(_unpacked, encoding, body, bounds.bytes_max)
        return await self._workers.run(turn, len(body), unpack, inline_bytes=-1)


def _unpacked(encoding: str, body: bytes, bytes_max: int) -> bytes:
    """Decompress a body. Raises `Refused` TOO_LARGE as soon as it exceeds `bytes_max`."""
    unpack = inflated if "gzip" in encoding.lower() else decompressed
    return unpack(encoding, body, bytes_max)


async def received(headers: HeaderMap, receive: Receive, bounds: BodyLimits) -> bytes:
    """Return the bytes of a body as received. Raises `Refused` TOO_LARGE if the body exceeds the limit, or MALFORMED if
    it is cut off."""
    parts: list[bytes] = []
    size, more = 0, True
    bounds.check_size(int(headers.get(b"content-length", b"0")))  # the server has checked that this is a number
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(Code.MALFORMED, "The body was cut off.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        bounds.check_size(size)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)
