"""Remembers how parts of bodies were read: each request of a conversation repeats the messages of the one before it."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from bombus.errors import Refused

BYTES_MAX = 32 << 20  # of the parts of one generation; what was read of them takes some times more
PART_BYTES = 200  # at least, for each part

KeyT = TypeVar("KeyT", bound=bytes | str)
PartT = TypeVar("PartT")


class RememberedParts(Generic[KeyT, PartT]):
    """Reads parts of bodies or of texts, and remembers what it read of each. Several threads may use it at once.

    Requests share what it returns, so nobody may change it. There are two generations: when the recent one is full, it
    becomes the older one, and what nobody asked for since is forgotten.
    """

    def __init__(self, read: Callable[[KeyT], PartT], bytes_max: int = BYTES_MAX) -> None:
        self._read = read
        self._bytes_max = bytes_max
        self._recent: dict[KeyT, PartT] = {}
        self._older: dict[KeyT, PartT] = {}
        self._bytes = 0

    def __call__(self, part: KeyT) -> PartT:
        """Return what a part says. What `read` raises for it is raised each time."""
        if part in self._recent:
            return self._recent[part]
        found = self._older.get(part)
        if found is None:
            found = self._read(part)
        self._keep(part, found)
        return found

    def _keep(self, part: KeyT, found: PartT) -> None:
        size = len(part) + PART_BYTES
        if size > self._bytes_max // 4:
            return
        if self._bytes + size > self._bytes_max:
            self._older, self._recent, self._bytes = self._recent, {}, 0
        self._recent[part] = found
        self._bytes += size


class RememberedItems(Generic[PartT]):
    """Reads the items of lists in bodies, and remembers them as `RememberedParts` does.

    `read` takes an item, its place in the words of msgspec (`messages[3]`), and in those of our own refusals
    (`messages.3`). What it returns must not depend on them, so places in it begin where the item does.
    """

    def __init__(self, read: Callable[[bytes, str, str], PartT]) -> None:
        self._read = read
        self._remembered = RememberedParts[bytes, PartT](lambda item: read(item, "", ""))

    def __call__(self, items: Iterable[msgspec.Raw], name: str) -> list[PartT]:
        """Return what the items of the list `name` say. Raises `Refused` with the place of the one that is wrong."""
        return [self._item(bytes(item), f"{name}[{at}]", f"{name}.{at}") for at, item in enumerate(items)]

    def _item(self, item: bytes, at: str, place: str) -> PartT:
        try:
            return self._remembered(item)
        except Refused:
            return self._read(item, at, place)  # raises it with its place
