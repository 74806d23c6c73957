"""gzip for Atropos's clients: decompress bodies of one or more gzip members, and compress answers of 1,000 bytes or
more."""

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from bombus.errors import Code, Refused
from bombus_gateway import limits

# isal's zlib takes a third of the time that Python's zlib needs, and has the same API.
zlib: Any = importlib.import_module("isal.isal_zlib" if importlib.util.find_spec("isal") else "zlib")
COMPRESSED_FROM = 1000  # smallest answer that is compressed, in bytes
_LEVEL = 1  # the text is mostly digits, for which higher levels take several times as long
_GZIP = 16 + zlib.MAX_WBITS  # tells zlib that the format is gzip
_CHUNK_BYTES = 1 << 18
_VARY = {"vary": "Accept-Encoding"}
_padding = re.compile(rb"\0*")
_zero = re.compile(r"\s*;\s*q\s*=\s*0(\.0*)?\s*$")


def inflated(encoding: str, body: bytes, bytes_max: int = limits.TRAJECTORY_BODY_BYTES) -> bytes:
    """Return a decompressed body, decompressing no more than `bytes_max`.

    Raises `Refused`: UNSUPPORTED for an encoding other than gzip, MALFORMED if any part of the body is not gzip, and
    TOO_LARGE if the decompressed body has more than `bytes_max`.
    """
    named = encoding.strip().lower()
    if named in ("", "identity"):
        return body
    if named not in ("gzip", "x-gzip"):
        raise Refused(Code.UNSUPPORTED, f"The body has the Content-Encoding {encoding[:40]!r}; send gzip or none.")
    parts: list[bytes] = []
    at, room, members = 0, bytes_max, 0
    while at < len(body):
        members += 1
        if members > limits.GZIP_MEMBERS:
            why = f"The body has more than {limits.GZIP_MEMBERS} gzip members; compress it as one."
            raise Refused(Code.TOO_LARGE, why)
        content, at = _member(body, at, room)
        parts.append(content)
        room -= len(content)
    return b"".join(parts)


def sent(parts: Iterable[bytes], accepted: str) -> tuple[dict[str, str], Iterator[bytes]]:
    """Return the headers and the parts of an answer to a client that sent `accepted` as its `Accept-Encoding`."""
    coming = iter(parts)
    start = b""
    for part in coming:
        start += part
        if len(start) >= COMPRESSED_FROM:
            break
    whole = chain([start], coming)
    if len(start) < COMPRESSED_FROM or not takes_gzip(accepted):
        return _VARY, whole
    return _VARY | {"content-encoding": "gzip"}, deflated(whole)


def takes_gzip(accepted: str) -> bool:
    """Return whether an `Accept-Encoding` allows gzip, by name or by `*`, with a quality other than 0."""
    offers = {each.partition(";")[0].strip(): not _zero.search(each) for each in accepted.lower().split(",")}
    return offers.get("gzip", offers.get("*", False))


def deflated(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Compress a body part by part, yielding whatever output is ready after each part."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    for part in parts:
        yield packer.compress(part)
    yield packer.flush()


def _member(body: bytes, start: int, room: int) -> tuple[bytes, int]:
    """Return the content of the member that begins at `start`, and where the next member begins. Zeros between members
    are padding."""
    unpacker = zlib.decompressobj(_GZIP)
    content = bytearray()
    end = start
    while not unpacker.eof:
        if end == len(body):
            raise Refused(Code.MALFORMED, "The gzip body is incomplete: it was cut off, or other data follows it.")
        chunk = body[end : end + _CHUNK_BYTES]
        end += len(chunk)
        try:
            content += unpacker.decompress(chunk, room - len(content) + 1)
        except zlib.error as error:
            raise Refused(Code.MALFORMED, f"The body is not gzip: {error}.") from None
        if len(content) > room:
            why = "The body exceeds the limit when decompressed; send fewer groups in one request."
            raise Refused(Code.TOO_LARGE, why)
    end -= len(unpacker.unused_data)
    padding = _padding.match(body, end)
    return bytes(content), padding.end() if padding else end
