"""Decompress request bodies that a client compressed with zstd."""

import sys

from bombus.errors import Code, Refused
from bombus_gateway import limits

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A frame may ask for a window of 2 GiB. The windows of Tinker's client fit into the 8 MiB that RFC 8878 requires every
# decoder to support.
_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


def decompressed(encoding: str, body: bytes, bytes_max: int = limits.TRAINING_BODY_BYTES) -> bytes:
    """Return a decompressed body, decompressing no more than `bytes_max`.

    Raises `Refused`: UNSUPPORTED for an encoding other than zstd, MALFORMED unless the body is a single complete frame,
    and TOO_LARGE if the result would be larger than `bytes_max`.
    """
    named = encoding.strip().lower()
    if named in ("", "identity"):
        return body
    if named != "zstd":
        raise Refused(
            Code.UNSUPPORTED, f"The body has the Content-Encoding {encoding[:40]!r}; send zstd, gzip or none."
        )
    decoder = zstd.ZstdDecompressor(options=_OPTIONS)
    try:
        content = decoder.decompress(body, max_length=bytes_max + 1)
    except zstd.ZstdError as error:
        raise Refused(Code.MALFORMED, f"The body is not zstd: {error}.") from None
    if len(content) > bytes_max:
        why = f"The body has more than {bytes_max} bytes when decompressed; send less data in one request."
        raise Refused(Code.TOO_LARGE, why)
    if not decoder.eof or decoder.unused_data:
        raise Refused(Code.MALFORMED, "The body is not one whole zstd frame: it was cut off, or other data follows it.")
    return content
