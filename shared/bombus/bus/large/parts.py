"""Stores a body in parts in a stream, and reads it back by its reference.

Parts from several writers interleave, so a reference lists the sequences of all its parts.
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
    """The bodies in one stream of a hive, by default the stream of its operations."""

    def __init__(self, bus: Bus, stream: str = "") -> None:
        self._bus = bus
        self._stream = stream or bus.subjects.ops_stream

    async def store(self, subject: str, body: bytes, timeout_s: float = 30.0, known: bytes = b"") -> BodyRef:
        """Store a body, and return its reference once all of it is durable. `known` is its digest, if already computed.

        Each call stores a new copy, because the copy that an earlier call stored may have been purged by now.
        Duplicates are harmless, since an operation is identified by its key. Raises `Refused` for a body over the
        limit. Raises `BusUnavailable` if not all of the body is acknowledged within `timeout_s`, or if the stream is
        full; the parts that were stored are purged later.
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
        """Return a body. Raises `LogCorrupted` if a part is gone or differs from what was stored."""
        stored = await self._bus.get_many(self._stream, ref.seqs)
        body = b"".join(each.data for each in stored)
        if len(body) != ref.size or await _digest(body) != ref.digest:
            raise LogCorrupted(f"the body at {ref.first} of {self._stream} does not match its reference")
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
        """Return whether the body is stored where `ref` says. With several replicas, a resent part may be acknowledged
        with another sequence."""
        try:
            await self.fetch(ref)
        except LogCorrupted:
            return False
        return True


async def _digest(body: bytes) -> bytes:
    """Return the digest of a body. A large one is hashed in a thread, since hashing releases the GIL."""
    return digest(body) if len(body) <= PART_BYTES_MAX else await asyncio.to_thread(digest, body)
