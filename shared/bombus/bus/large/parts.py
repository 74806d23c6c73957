"""Store a body in parts of a stream, and read it back by its reference.

Parts of several writers interleave, so a reference lists the sequence of each of its own.
"""

import asyncio
import secrets

from bombus.bus.connection import Bus
from bombus.bus.wire import PubAck
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive.records import BODY_BYTES_MAX, BodyRef, digest

PART_BYTES_MAX = 1_000_000
ATTEMPTS_MAX = 3


class Parts:
    """The bodies in one stream of a hive: those of its operations, unless another one is named."""

    def __init__(self, bus: Bus, stream: str = "") -> None:
        self._bus = bus
        self._stream = stream or bus.subjects.ops_stream

    async def store(self, subject: str, body: bytes, timeout_s: float = 30.0, known: bytes = b"") -> BodyRef:
        """Store a body, and return its reference once all of it is durable. Its digest may be `known`.

        Each call stores it anew, because the copy of an earlier call may be purged already: what makes an operation one
        is its key. Raises `Refused` for a body over the limit, `BusUnavailable` when not all of it is acknowledged
        within `timeout_s` or the stream is full; the parts that were stored are purged in time.
        """
        if len(body) > BODY_BYTES_MAX:
            raise Refused(
                Code.TOO_LARGE,
                f"a body of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}: send less data at once; the "
                "gradients of training operations add up",
            )
        for _ in range(ATTEMPTS_MAX):
            acks = await self._publish(subject, body, timeout_s)
            seqs = tuple(ack.seq for ack in acks)
            ref = BodyRef(seqs=seqs, size=len(body), digest=known or await _digest(body))
            if not any(ack.duplicate for ack in acks) or await self._is_there(ref):
                return ref
        raise BusUnavailable(f"{subject}: the server did not say where it stored a body in {ATTEMPTS_MAX} attempts")

    async def fetch(self, ref: BodyRef) -> bytes:
        """Return a body. Raises `LogCorrupted` when a part is gone, or is not one of those that were stored."""
        stored = await self._bus.get_many(self._stream, ref.seqs)
        body = b"".join(each.data for each in stored)
        if len(body) != ref.size or await _digest(body) != ref.digest:
            raise LogCorrupted(f"the body at {ref.first} of {self._stream} is not the one that was referenced")
        return body

    async def _publish(self, subject: str, body: bytes, timeout_s: float) -> list[PubAck]:
        size = min(PART_BYTES_MAX, self._bus.publisher.message_bytes_max)
        token = secrets.token_hex(8)
        acks: list[asyncio.Future[PubAck]] = []
        try:
            for number, start in enumerate(range(0, max(len(body), 1), size)):
                part = body[start : start + size]
                msg_id = f"{token}.{number}"
                acks.append(await self._bus.publisher.submit(subject, part, msg_id=msg_id, timeout_s=timeout_s))
            return await asyncio.gather(*acks)
        except BaseException:
            for ack in acks:
                ack.cancel()
            await asyncio.gather(*acks, return_exceptions=True)
            raise

    async def _is_there(self, ref: BodyRef) -> bool:
        """Return whether these are the parts: with several replicas a repeat may be answered with another sequence."""
        try:
            await self.fetch(ref)
        except LogCorrupted:
            return False
        return True


async def _digest(body: bytes) -> bytes:
    """Return the digest of a body: of a large one while others go on, since hashing keeps no lock of Python."""
    return digest(body) if len(body) <= PART_BYTES_MAX else await asyncio.to_thread(digest, body)
