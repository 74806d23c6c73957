"""How much memory the bodies of all requests together may take."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from bombus.errors import Code, Refused


class BodyMemory:
    """Counts the bytes of the bodies of the requests that are being read or answered."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0

    @contextmanager
    def counted(self, receive: Receive) -> Iterator[Receive]:
        """Give a `receive` that counts the body of one request until the block ends.

        Instead of a part of a body for which there is no memory left it raises `Refused` OVERLOADED.
        """
        held = 0

        async def counting() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if self._held + size > self._bytes_max:
                why = f"The requests in progress hold {self._bytes_max >> 20} MiB, the limit; try again in a moment."
                raise Refused(Code.OVERLOADED, why)
            held += size
            self._held += size
            return message

        try:
            yield counting
        finally:
            self._held -= held
