"""Large objects, in the layout of NATS' object store so that its tools can read them."""

import asyncio
import base64
import json
import logging
import secrets
from hashlib import sha256

import msgspec

from bombus.bus.connection import Bus
from bombus.bus.headers import ROLLUP
from bombus.bus.reader import Reader
from bombus.bus.requests import ApiCall
from bombus.bus.streams import blob_stream
from bombus.bus.wire import decode_info, decode_purge
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # smaller if the server's message limit is lower
STALL_S = 10.0


class BlobMissing(LogCorrupted):
    """Raised if no object has this name."""


class _Meta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    deleted: bool = False


_meta = msgspec.json.Decoder(_Meta)


def _digest(data: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(sha256(data).digest()).decode()}"


def _name_in(token: str) -> str | None:
    """Decode an object's name from the last part of its subject. Return None if another program wrote the message."""
    try:
        return base64.urlsafe_b64decode(token).decode()
    except ValueError:
        return None


class Blobs:
    """The large objects of one hive, such as snapshots, tokenizers and weights."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.blobs_bucket
        self._stream = blob_stream(bus.subjects)

    async def put(self, name: str, data: bytes) -> None:
        """Store an object, replacing any older one of the same name.

        The chunks are stored first, then the description that makes them an object. The chunks of the older object are
        removed last.
        """
        nuid = secrets.token_hex(11)
        before = await self._replaced(name)
        view = memoryview(data)
        chunk_bytes = min(CHUNK_BYTES, self._bus.publisher.message_bytes_max)
        acks = [
            await self._bus.publisher.submit(
                self._chunks_subject(nuid),
                bytes(view[start : start + chunk_bytes]),
                msg_id=f"{nuid}.{start}",
                timeout_s=60.0,
            )
            for start in range(0, len(data), chunk_bytes)
        ]
        try:
            await asyncio.gather(*acks)
            meta = _Meta(
                name=name,
                bucket=self._bucket,
                nuid=nuid,
                size=len(data),
                chunks=len(acks),
                digest=_digest(data),
            )
            await self._bus.publisher.publish(
                self._meta_subject(name), msgspec.json.encode(meta), msg_id=f"{nuid}.meta", headers={ROLLUP: "sub"}
            )
        except BaseException:
            for ack in acks:
                ack.cancel()
            await self._purge(self._chunks_subject(nuid))
            raise
        if before is not None:
            await self._purge(self._chunks_subject(before.nuid))

    async def get(self, name: str) -> bytes:
        """Return an object, checked against its digest.

        Raises `BlobMissing` if it does not exist, or `LogCorrupted` if its bytes differ from those that were stored.
        """
        meta = await self._find(name)
        while True:
            if meta is None or meta.deleted:
                raise BlobMissing(f"there is no object {name}")
            data = await self._read_chunks(meta)
            if data is not None:
                break
            now = await self._find(name)  # it may have been replaced while we read it
            if now is not None and now.nuid == meta.nuid:
                raise LogCorrupted(f"object {name}: some of its {meta.size} bytes are missing")
            meta = now
        if meta.digest != _digest(data):
            raise LogCorrupted(f"object {name}: its bytes differ from those that were stored")
        return data

    async def delete(self, name: str) -> None:
        """Remove an object, its description first. Do nothing if it does not exist."""
        meta = await self._replaced(name)
        await self._purge(self._meta_subject(name))
        if meta is not None:
            await self._purge(self._chunks_subject(meta.nuid))

    async def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`, sorted."""
        stem = f"$O.{self._bucket}.M."
        subjects = await self._subjects(f"{stem}>")
        found = (_name_in(each.removeprefix(stem)) for each in subjects)
        return sorted(name for name in found if name is not None and name.startswith(prefix))

    async def _subjects(self, pattern: str) -> list[str]:
        body = json.dumps({"subjects_filter": pattern}).encode()
        what = f"subjects of {self._stream}"
        reply = await self._bus.requests.api(ApiCall(what, f"STREAM.INFO.{self._stream}", decode_info, body))
        return list(reply.state.subjects)

    async def _read_chunks(self, meta: _Meta) -> bytes | None:
        """Return the object's bytes, or None if its chunks stop arriving before the object is complete."""
        chunks: list[bytes] = []
        size = 0
        async with Reader(self._bus, self._stream, filter_subject=self._chunks_subject(meta.nuid)) as reader:
            while size < meta.size:
                try:
                    async with asyncio.timeout(STALL_S):
                        arrived = await reader.read()
                except TimeoutError:
                    return None
                chunks += (stored.data for stored in arrived)
                size += sum(len(stored.data) for stored in arrived)
        return b"".join(chunks)

    async def _find(self, name: str) -> _Meta | None:
        stored = await self._bus.last(self._stream, self._meta_subject(name))
        if stored is None:
            return None
        try:
            return decoded(_meta.decode, stored.data)
        except msgspec.MsgspecError as error:
            raise LogCorrupted(f"object {name}: its description cannot be read: {error}") from error

    async def _replaced(self, name: str) -> _Meta | None:
        """Return the description of the object that is being replaced; None if there is none or it cannot be read."""
        try:
            return await self._find(name)
        except LogCorrupted as error:
            logger.warning("its chunks stay: %s", error)
            return None

    async def _purge(self, subject: str) -> None:
        body = json.dumps({"filter": subject}).encode()
        what = f"purge of {self._stream}"
        await self._bus.requests.api(ApiCall(what, f"STREAM.PURGE.{self._stream}", decode_purge, body))

    def _chunks_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
