"""What is limited for all is shared by keys: none can take what the others need.

Whose something is counts by the name of a key, "" for all keys without one, and `ADMIN` for the hive's own. A client
chooses every other name itself, and could have as many shares as it likes.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

ADMIN = "/admin"  # no key has such a name
IMPORTED = "/imported"  # nor this one: calls of an imported log, of which no message says whose they are
SHARED = 0.75  # of a stream that keys fill: what is left lets others in, and work in progress end

K = TypeVar("K")
V = TypeVar("V")


def share_name(owner: str, admin: bool) -> str:
    """Return for whose share something counts, by the name of its key; `admin` says that it was the hive's own."""
    return ADMIN if admin else owner


def has_share(held: Mapping[str, int], holder: str, limit: int, more: int = 1) -> bool:
    """Return whether a holder may have so much `more` of what all of them together have `limit` of.

    What is free is anybody's. Once all of it is taken, each holder still gets its share: the limit divided by the
    number of those who have some. So nobody is locked out, and for a while there is more than the limit.
    """
    if sum(held.values()) + more <= limit:
        return True
    holders = {name for name, amount in held.items() if amount} | {holder}
    return held.get(holder, 0) + more <= max(limit // len(holders), 1)


def has_share_of_stream(held: Mapping[str, int], holder: str, size: int, more: int = 1) -> bool:
    """Return whether a holder may keep so many bytes `more` of a stream of this `size`. A part of it stays free."""
    return has_share(held, holder, int(SHARED * size), more)


def trim_fairly(kept: dict[K, V], limit: int, holder_of: Callable[[V], str]) -> None:
    """Drop the oldest entries beyond `limit` of those who have most, many at a time."""
    for key in surplus(kept, limit, holder_of):
        del kept[key]


def surplus(kept: Mapping[K, V], limit: int, holder_of: Callable[[V], str]) -> list[K]:
    """Return the keys of what is to be dropped, the oldest of those who have most: none until it is an eighth."""
    if len(kept) <= limit + limit // 8:
        return []
    held = Counter(map(holder_of, kept.values()))
    level = _level(sorted(held.values()), limit)
    found: list[K] = []
    for holder, count in held.items():
        if count > level:
            of_holder = (key for key, value in kept.items() if holder_of(value) == holder)
            found += islice(of_holder, count - level)
    return found


def _level(amounts: list[int], limit: int) -> int:
    """Return how much each may keep of ascending amounts for their sum to be at most the limit."""
    left = limit
    for index, amount in enumerate(amounts):
        others = len(amounts) - index
        if amount * others > left:
            return left // others
        left -= amount
    return left
