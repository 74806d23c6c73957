"""Compressed bodies, and those that would grow without bound."""

import sys

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.operations_wire.compression import decompressed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = b"tokens " * 1000


@pytest.mark.parametrize("encoding", ["zstd", " ZSTD "])
def test_a_compressed_body_is_read(encoding: str) -> None:
    assert decompressed(encoding, zstd.compress(TEXT)) == TEXT


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_plain_body_stays_as_it_is(encoding: str) -> None:
    assert decompressed(encoding, TEXT) == TEXT


def test_a_body_of_exactly_the_limit_is_read() -> None:
    assert decompressed("zstd", zstd.compress(TEXT), len(TEXT)) == TEXT


def frame_of_zeros(mebibytes: int) -> bytes:
    """Return a frame by RFC 8878: a window of 8 MiB, and each block four bytes that stand for 128 KiB of zeros."""
    block = (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([13 << 3]) + block * (8 * mebibytes) + b"\x01\0\0"


def test_the_frame_of_the_next_test_is_one() -> None:
    assert decompressed("zstd", frame_of_zeros(1)) == bytes(1 << 20)


@pytest.mark.parametrize(
    ("encoding", "body", "code", "why"),
    [
        ("zstd", frame_of_zeros(4096), Code.TOO_LARGE, "more than 33554432 bytes when decompressed"),
        ("zstd", zstd.compress(TEXT)[:-3], Code.MALFORMED, "it was cut off, or other data follows it"),
        ("zstd", zstd.compress(TEXT) * 2, Code.MALFORMED, "it was cut off, or other data follows it"),
        ("zstd", b"", Code.MALFORMED, "it was cut"),
        ("zstd", b"{}{}{}{}", Code.MALFORMED, "The body is not zstd"),
        ("gzip", TEXT, Code.UNSUPPORTED, "the Content-Encoding 'gzip'; send zstd, gzip or none"),
        ("zstd, gzip", TEXT, Code.UNSUPPORTED, "send zstd, gzip or none"),
    ],
)
def test_what_is_not_one_whole_frame_of_a_size_is_refused(encoding: str, body: bytes, code: Code, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        decompressed(encoding, body)
    assert refused.value.code == code


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    large = zstd.compress(bytes(1 << 16), options={zstd.CompressionParameter.window_log: 27})
    assert decompressed("zstd", large) == bytes(1 << 16)  # its size is known, so that it needs no window
    streamed = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    body = streamed.compress(bytes(1 << 20)) + streamed.flush()
    with pytest.raises(Refused, match="is not zstd"):
        decompressed("zstd", body)
