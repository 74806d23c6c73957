"""Helpers that limit the size of dictionaries and of single writes."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def trim(kept: dict[K, V], limit: int) -> None:
    """Drop the oldest entries beyond `limit`, an eighth of them at a time.

    Dropping them one by one would be slow: to find a dict's first entry, Python has to step over all deleted entries
    before it.
    """
    if len(kept) > limit + limit // 8:
        for key in list(islice(kept, len(kept) - limit)):
            del kept[key]


def portions(items: Sequence[V], size: int) -> Iterator[tuple[V, ...]]:
    """Cut a sequence into tuples of `size` items. The last one may be shorter."""
    return (tuple(items[start : start + size]) for start in range(0, len(items), size))
