"""Dictionaries that keep only their newest entries."""

from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def trim(kept: dict[K, V], limit: int) -> None:
    """Drop the oldest entries beyond `limit`, an eighth of them at a time.

    Dropping them one by one would be slow: a dict whose front is emptied again and again is searched through the
    deleted entries.
    """
    if len(kept) > limit + limit // 8:
        for key in list(islice(kept, len(kept) - limit)):
            del kept[key]
