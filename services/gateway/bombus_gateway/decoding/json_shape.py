"""How many lists, names and values JSON has, and how deep it is: counted in its bytes, before any of it is decoded."""

from bombus_gateway.limits import DEPTH

_CHUNK_BYTES = 1 << 18
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_REST = bytes(byte for byte in range(256) if byte not in b'[]{},:"')


def is_flat(text: bytes, depth: int = DEPTH) -> bool:
    """Return whether JSON has too few brackets to be deeper than `depth`, which is true of most bodies."""
    return text.count(b"[") + text.count(b"{") <= depth


def marks_of(text: bytes) -> bytes:
    """Return the brackets, commas and colons of JSON that are in none of its texts, with objects as lists."""
    kept: list[bytes] = []
    at, in_text = 0, False
    while at < len(text):
        chunk = text[at : at + _CHUNK_BYTES]
        slashes = len(chunk) - len(chunk.rstrip(b"\\"))
        chunk += text[at + len(chunk) : at + len(chunk) + slashes % 2]  # what is escaped belongs to its backslash
        at += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.translate(_TO_SQUARE, _REST).split(b'"')  # in turn outside of texts and in them
        kept.append(b"".join(pieces[in_text::2]))
        in_text ^= len(pieces) % 2 == 0
    return b"".join(kept)


def is_deeper(marks: bytes, depth: int) -> bool:
    """Return whether JSON with these marks has more than `depth` lists and objects within each other.

    Each pass takes away the innermost lists. What is not closed is left, and counts as if it were as deep as possible.
    """
    left = marks.translate(None, b",:")
    for _ in range(depth):
        within = left.replace(b"[]", b"")
        if len(within) == len(left):
            return left.count(b"[") > depth
        left = within
    return bool(left)
