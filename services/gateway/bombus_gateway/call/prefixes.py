"""Caches the parsed beginnings of an episode's latest bodies, since each body repeats the conversation so far."""

import re
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from bombus.hive.records import hasher

BODIES_KEPT = 4  # per episode, so that this many agents can take turns
MEMORY_BYTES_MAX = 8 << 20  # maximum for one kept body, including the values read from it
VALUE_BYTES = 64  # memory for each list, object or other value that was read, besides its text
SPARED_PER_READ = 16  # bytes of a known prefix that can be skipped in the time that reading one byte takes
_GOES_ON = re.compile(rb"[ \t\n\r]*+[,\]]")


def memory_of_values(json: bytes, start: int = 0, end: int | None = None) -> int:
    """Estimate the memory that the values in JSON take in addition to its text. Even a list of three bytes becomes an
    object."""
    return VALUE_BYTES * sum(json.count(mark, start, end) for mark in (b"[", b"{", b","))


class BodyPrefix(NamedTuple):
    """The parsed beginning of a body, up to the end of an item in the list that contains its conversation.

    The list begins at `start`, after the bracket. Its first `items` items end at `end`, and `read` is the parsed value
    of these items. A prefix without items fits every body.
    """

    start: int = 0
    end: int = 0
    items: int = 0
    read: Any = None

    def work_bytes(self, body: bytes) -> int:
        """Return the work of reading this body, whose prefix is already parsed, as the number of unparsed bytes that
        would take as long to read."""
        spared = self.end - self.start
        return len(body) - spared + spared // SPARED_PER_READ


NOTHING_READ = BodyPrefix()


class AnotherList(Exception):
    """Raised if a whole body has to be read, because it is invalid after the prefix or the prefix belongs to another
    list."""


class EarlierBody(NamedTuple):
    """A body that was sent to a route, with its parsed beginning `prefix`.

    `hashed` is the hash state after the route and the bytes of the prefix; `taken_bytes` is roughly the memory taken by
    the values read.
    """

    route: bytes
    body: bytes
    prefix: BodyPrefix
    hashed: blake2b
    taken_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory taken by the body and the values read from it."""
        return len(self.body) + self.taken_bytes

    def is_continued_by(self, route: bytes, body: bytes) -> bool:
        """Return whether a body sent to `route` begins with this body's prefix."""
        end = self.prefix.end
        begins_so = self.route == route and body.startswith(memoryview(self.body)[:end])
        return begins_so and _GOES_ON.match(body, end) is not None

    def continued(self, body: bytes, prefix: BodyPrefix) -> tuple[bytes, Self]:
        """Return the digest of a body that continues this one, and the entry to keep, which is `self` if nothing was
        added."""
        start, end = self.prefix.end, prefix.end
        hashed, view = self.hashed.copy(), memoryview(body)
        if prefix is self.prefix:
            hashed.update(view[end:])
            return hashed.digest(), self
        hashed.update(view[start:end])
        whole = hashed.copy()
        whole.update(view[end:])
        taken = self.taken_bytes + end - start + memory_of_values(body, start, end)
        return whole.digest(), self._replace(body=body, prefix=prefix, hashed=hashed, taken_bytes=taken)


@cache
def nothing_of(route: bytes) -> EarlierBody:
    """Return the entry with an empty prefix, which every body sent to the route continues."""
    return EarlierBody(route, b"", NOTHING_READ, hasher(route + b"\0"))


class EarlierBodies:
    """The latest bodies that were read for one episode. Safe to use from several threads."""

    def __init__(self) -> None:
        self._bodies: list[EarlierBody] = []  # never mutated, only replaced

    @property
    def memory_bytes(self) -> int:
        return sum(each.memory_bytes for each in self._bodies)

    def continued_by(self, route: bytes, body: bytes) -> EarlierBody:
        """Return the kept body with the longest prefix that this body continues, or `nothing_of(route)`."""
        found = [each for each in self._bodies if each.is_continued_by(route, body)]
        return max(found, key=lambda each: each.prefix.end, default=nothing_of(route))

    def keep(self, new: EarlierBody, before: EarlierBody) -> None:
        """Keep a body in place of the body `before` that it continues, unless nothing was read or the new body is too
        large."""
        if new.prefix.items and new.memory_bytes <= MEMORY_BYTES_MAX:
            read = new.hashed.digest()  # another request may have kept an equal body in the meantime
            others = [each for each in self._bodies if each is not before and each.hashed.digest() != read]
            self._bodies = [*others, new][-BODIES_KEPT:]
