"""Bodies of protobuf put together by hand, so that tests do not read what our own encoder wrote."""

import struct

MODEL = "S:train:0"


def part(number: int, payload: bytes) -> bytes:
    """Return a field that has a length: its tag, the length, and that many bytes. Short ones alone."""
    assert len(payload) < 1 << 14
    low, high = len(payload) & 0x7F, len(payload) >> 7
    return bytes([number << 3 | 2, low | 0x80, high] if high else [number << 3 | 2, low]) + payload


def number(field: int, value: int) -> bytes:
    """Return a field that is a number under 128."""
    assert 0 <= value < 128
    return bytes([field << 3, value])


def int32s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def int64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def float32s(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def dense(data: bytes, dtype: int, *shape: int) -> bytes:
    return part(1, data) + number(3, dtype) + (part(4, bytes(shape)) if shape else b"")


def sparse(values: bytes, starts: bytes, columns: bytes, dtype: int, *shape: int) -> bytes:
    csr = part(1, values) + part(2, starts) + part(3, columns)
    return part(2, csr) + number(3, dtype) + part(4, bytes(shape))


def chunk(*tokens: int) -> bytes:
    """Return a chunk of text, as a field of a datum."""
    return part(1, part(1, part(1, int32s(*tokens))))


def datum(*chunks: bytes, **inputs: bytes) -> bytes:
    pairs = (part(2, part(1, name.encode()) + part(2, tensor)) for name, tensor in inputs.items())
    return b"".join(chunks) + b"".join(pairs)


def request(*data: bytes, loss: str = "cross_entropy", more: bytes = b"", model: str = MODEL, seq: int = 1) -> bytes:
    head = part(1, model.encode()) + (number(2, seq) if seq else b"")
    return head + b"".join(part(3, each) for each in data) + part(4, loss.encode()) + more


TARGETS = dense(int64s(6, 7), INT64, 2)
DATUM = datum(chunk(5, 6), target_tokens=TARGETS)
