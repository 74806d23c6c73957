"""Caches the results of reading parts of bodies and texts, such as the tools, which every request in a job repeats."""

from collections.abc import Callable
from typing import Generic, TypeVar

from bombus_gateway.call.prefixes import memory_of_values

SIZE_MAX = 32 << 20  # size of a generation's parts, in bytes or characters; their results take several times more
PART_SIZE = 200  # overhead counted for each part

KeyT = TypeVar("KeyT", bound=bytes | str)
PartT = TypeVar("PartT")


class RememberedParts(Generic[KeyT, PartT]):
    """Reads parts of bodies or of texts, and caches the result for each part. Safe to use from several threads.

    Requests share the results, so the results must not be mutated. The cache has two generations: when the recent
    generation is full, it replaces the older one, which is dropped.
    """

    def __init__(self, read: Callable[[KeyT], PartT], size_max: int = SIZE_MAX) -> None:
        self._read = read
        self._limit = size_max
        self._recent: dict[KeyT, PartT] = {}
        self._older: dict[KeyT, PartT] = {}
        self._size = 0

    def __call__(self, part: KeyT) -> PartT:
        """Return the result of reading a part. Errors that `read` raises are not cached."""
        recent = self._recent
        if part in recent:
            return recent[part]
        found = self._older.get(part)
        if found is None:
            found = self._read(part)
        self.add(part, found)
        return found

    def knows(self, part: KeyT) -> bool:
        """Return whether the result for a part is cached."""
        return part in self._recent or part in self._older

    def add(self, part: KeyT, found: PartT) -> None:
        """Cache the result of reading a part, unless the part is too large."""
        size = len(part) + PART_SIZE
        size += memory_of_values(part) if isinstance(part, bytes) else 0
        if size > self._limit // 4:
            return
        if self._size + size > self._limit:
            self._older, self._recent, self._size = self._recent, {}, 0
        self._recent[part] = found
        self._size += size
