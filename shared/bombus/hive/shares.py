"""Fair sharing of limited resources between keys, so that no key can crowd out the others.

A holder is identified by the name of its key: "" for all keys without a name, and `ADMIN` for the hive's admin key. Any
other names are chosen by clients, so a client could use them to get as many shares as it likes.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

ADMIN = "/admin"  # cannot be the name of a key
IMPORTED = "/imported"  # also not the name of a key: it holds an imported log's calls, whose messages name no holder
SHARED = 0.75  # fraction of a stream that is shared freely; the rest admits new holders and lets open work finish

UNNAMED, NOBODY = "/client", "/nobody"  # a sender whose key has no name, and one without a key

K = TypeVar("K")
V = TypeVar("V")


def share_name(owner: str, admin: bool) -> str:
    """Return the holder to which a key named `owner` belongs. `admin` says whether it is the hive's admin key."""
    return ADMIN if admin else owner


def sender_name(share: str, has_key: bool, address: str = "") -> str:
    """Return how the log names the sender of a command: by the name of its key, never the key, and its address."""
    name = share or (UNNAMED if has_key else NOBODY)
    return f"{name}@{address}" if address else name


def has_share(held: Mapping[str, int], holder: str, limit: int, more: int = 1) -> bool:
    """Return whether a holder may take `more` of a resource, given a `limit` on what all holders together may have.

    Any holder may take what is free. Once nothing is free, each holder may still have its share: the limit divided by
    the number of holders that have any of the resource. So no holder is locked out, but the total may exceed the limit
    for a while.
    """
    if sum(held.values()) + more <= limit:
        return True
    holders = {name for name, amount in held.items() if amount} | {holder}
    return held.get(holder, 0) + more <= max(limit // len(holders), 1)


def has_share_of_stream(held: Mapping[str, int], holder: str, size: int, more: int = 1) -> bool:
    """Return whether a holder may keep `more` bytes of a stream of `size` bytes. Part of the stream stays free."""
    return has_share(held, holder, int(SHARED * size), more)


def trim_fairly(kept: dict[K, V], limit: int, holder_of: Callable[[V], str]) -> None:
    """Drop entries beyond `limit`, many at a time: the oldest entries of the holders that have the most."""
    for key in surplus(kept, limit, holder_of):
        del kept[key]


def surplus(kept: Mapping[K, V], limit: int, holder_of: Callable[[V], str]) -> list[K]:
    """Return the keys of the entries to drop: the oldest entries of the holders that have the most, as in
    `trim_fairly`.

    Nothing is dropped until `limit` is exceeded by more than an eighth.
    """
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
    """Return the cap that, applied to each of these ascending amounts, keeps their sum within the limit."""
    left = limit
    for index, amount in enumerate(amounts):
        others = len(amounts) - index
        if amount * others > left:
            return left // others
        left -= amount
    return left
