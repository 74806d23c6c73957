"""Measures the structure and depth of JSON from its bytes, before any of it is decoded."""

from bombus_gateway.limits import DEPTH

_CHUNK_BYTES = 1 << 18
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_REST = bytes(byte for byte in range(256) if byte not in b'[]{},:"')


def is_flat(text: bytes, depth: int = DEPTH) -> bool:
    """Return whether JSON has too few brackets to be nested deeper than `depth`. This is true for most bodies."""
    return text.count(b"[") + text.count(b"{") <= depth


def marks_of(text: bytes) -> bytes:
    """Return the brackets, commas and colons of JSON outside its strings. Braces are returned as square brackets."""
    kept: list[bytes] = []
    at, in_text = 0, False
    while at < len(text):
        chunk = text[at : at + _CHUNK_BYTES]
        slashes = len(chunk) - len(chunk.rstrip(b"\\"))
        chunk += text[at + len(chunk) : at + len(chunk) + slashes % 2]  # keeps an escaped byte with its backslash
        at += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.translate(_TO_SQUARE, _REST).split(b'"')  # alternately outside and inside strings
        kept.append(b"".join(pieces[in_text::2]))
        in_text ^= len(pieces) % 2 == 0
    return b"".join(kept)


def is_deeper(marks: bytes, depth: int) -> bool:
    """Return whether JSON with these marks (`marks_of`) has lists and objects nested deeper than `depth`.

    Each pass removes the innermost lists. Unclosed brackets remain, and count as one level each.
    """
    left = marks.translate(None, b",:")
    for _ in range(depth):
        within = left.replace(b"[]", b"")
        if len(within) == len(left):
            return left.count(b"[") > depth
        left = within
    return bool(left)
