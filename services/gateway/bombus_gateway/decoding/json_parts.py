"""Remembers how parts of bodies and of texts were read, such as the tools that all requests of a job have."""

from collections.abc import Callable
from typing import Generic, TypeVar

from bombus_gateway.call.prefixes import memory_of_values

SIZE_MAX = 32 << 20  # of the parts of one generation, in bytes or characters; what was read takes some times more
PART_SIZE = 200  # at least, for each part

KeyT = TypeVar("KeyT", bound=bytes | str)
PartT = TypeVar("PartT")


class RememberedParts(Generic[KeyT, PartT]):
    """Reads parts of bodies or of texts, and remembers what it read of each. Several threads may use it at once.

    Requests share what it returns, so nobody may change it. There are two generations: when the recent one is full, it
    becomes the older one, and what nobody asked for since is forgotten.
    """

    def __init__(self, read: Callable[[KeyT], PartT], size_max: int = SIZE_MAX) -> None:
        self._read = read
        self._limit = size_max
        self._recent: dict[KeyT, PartT] = {}
        self._older: dict[KeyT, PartT] = {}
        self._size = 0

    def __call__(self, part: KeyT) -> PartT:
        """Return what a part says. What `read` raises for it is raised each time."""
        recent = self._recent
        if part in recent:
            return recent[part]
        found = self._older.get(part)
        if found is None:
            found = self._read(part)
        self.add(part, found)
        return found

    def knows(self, part: KeyT) -> bool:
        """Return whether a part is remembered."""
        return part in self._recent or part in self._older

    def add(self, part: KeyT, found: PartT) -> None:
        """Remember what a part says, unless it is too large for that."""
        size = len(part) + PART_SIZE
        size += memory_of_values(part) if isinstance(part, bytes) else 0
        if size > self._limit // 4:
            return
        if self._size + size > self._limit:
            self._older, self._recent, self._size = self._recent, {}, 0
        self._recent[part] = found
        self._size += size
