"""Large objects, in the layout of NATS' object store so that its tools can read them, by our publisher and reader."""

import asyncio
import base64
import json
import secrets
from hashlib import sha256

import msgspec

from bombus.bus.connection import Bus
from bombus.bus.headers import ROLLUP
from bombus.bus.reader import Reader
from bombus.bus.streams import blob_stream
from bombus.bus.wire import decode_info, decode_purge
from bombus.errors import LogCorrupted

CHUNK_BYTES = 1 << 20
STALL_S = 10.0


class BlobMissing(LogCorrupted):
    """No object has this name."""


class _Meta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    deleted: bool = False


async def put_blob(bus: Bus, name: str, data: bytes) -> None:
    """Chunks first, then the description that makes them an object; an older object's chunks are removed after."""
    bucket = bus.subjects.blobs_bucket
    nuid = secrets.token_hex(11)
    before = await _find(bus, name)
    view = memoryview(data)
    acks = [
        await bus.publisher.submit(
            f"$O.{bucket}.C.{nuid}",
            bytes(view[start : start + CHUNK_BYTES]),
            msg_id=f"{nuid}.{start}",
            timeout_s=60.0,
        )
        for start in range(0, len(data), CHUNK_BYTES)
    ]
    try:
        await asyncio.gather(*acks)
        meta = _Meta(
            name=name,
            bucket=bucket,
            nuid=nuid,
            size=len(data),
            chunks=len(acks),
            digest=f"SHA-256={base64.urlsafe_b64encode(sha256(data).digest()).decode()}",
        )
        await bus.publish(
            _meta_subject(bus, name), msgspec.json.encode(meta), msg_id=f"{nuid}.meta", headers={ROLLUP: "sub"}
        )
    except BaseException:
        for ack in acks:
            ack.cancel()
        await _remove_chunks(bus, nuid)
        raise
    if before is not None:
        await _remove_chunks(bus, before.nuid)


async def get_blob(bus: Bus, name: str) -> bytes:
    """The whole object. Raises `BlobMissing`, or `LogCorrupted` when its bytes are not what was stored."""
    meta = await _find(bus, name)
    while True:
        if meta is None or meta.deleted:
            raise BlobMissing(f"there is no object {name}")
        data = await _read_chunks(bus, meta)
        if data is not None:
            break
        now = await _find(bus, name)  # replaced while we read it, perhaps
        if now is not None and now.nuid == meta.nuid:
            raise LogCorrupted(f"object {name}: some of its {meta.size} bytes are not there")
        meta = now
    digest = meta.digest.partition("=")[2]
    if base64.urlsafe_b64decode(digest) != sha256(data).digest():
        raise LogCorrupted(f"object {name}: its bytes are not those that were stored")
    return data


async def delete_blob(bus: Bus, name: str) -> None:
    """Remove the object of this name, its description first; nothing happens when there is none."""
    meta = await _find(bus, name)
    if meta is not None:
        await _purge(bus, _meta_subject(bus, name))
        await _remove_chunks(bus, meta.nuid)


async def blob_names(bus: Bus, prefix: str) -> list[str]:
    """The names of all objects that begin with `prefix`."""
    stem = f"$O.{bus.subjects.blobs_bucket}.M."
    found = (base64.urlsafe_b64decode(each.removeprefix(stem)).decode() for each in await _subjects(bus, f"{stem}>"))
    return sorted(name for name in found if name.startswith(prefix))


async def _subjects(bus: Bus, pattern: str) -> list[str]:
    stream = blob_stream(bus.subjects)
    body = json.dumps({"subjects_filter": pattern}).encode()
    reply = await bus.requests.api(f"subjects of {stream}", f"STREAM.INFO.{stream}", decode_info, body)
    return list(reply.state.subjects)


async def _read_chunks(bus: Bus, meta: _Meta) -> bytes | None:
    """None when they stop coming before all are here."""
    chunks: list[bytes] = []
    size = 0
    subject = f"$O.{meta.bucket}.C.{meta.nuid}"
    async with Reader(bus, blob_stream(bus.subjects), filter_subject=subject) as reader:
        while size < meta.size:
            try:
                async with asyncio.timeout(STALL_S):
                    arrived = await reader.read()
            except TimeoutError:
                return None
            chunks += (stored.data for stored in arrived)
            size += sum(len(stored.data) for stored in arrived)
    return b"".join(chunks)


async def _find(bus: Bus, name: str) -> _Meta | None:
    stored = await bus.last(blob_stream(bus.subjects), _meta_subject(bus, name))
    if stored is None:
        return None
    try:
        return msgspec.json.decode(stored.data, type=_Meta)
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"object {name}: its description cannot be read: {error}") from error


async def _remove_chunks(bus: Bus, nuid: str) -> None:
    await _purge(bus, f"$O.{bus.subjects.blobs_bucket}.C.{nuid}")


async def _purge(bus: Bus, subject: str) -> None:
    body = json.dumps({"filter": subject}).encode()
    stream = blob_stream(bus.subjects)
    await bus.requests.api(f"purge of {stream}", f"STREAM.PURGE.{stream}", decode_purge, body)


def _meta_subject(bus: Bus, name: str) -> str:
    return f"$O.{bus.subjects.blobs_bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
