"""Makes unique words that take the place of a conversation's texts while it is rendered."""

import secrets
from collections.abc import Iterable
from typing import Any

from bombus_gateway.text.forms import WORD


def free_word(texts: Iterable[str]) -> str:
    """Return an unguessable word of lower-case letters and digits that occurs in none of `texts`.

    The word survives what templates do to text: trimming, changing case, or writing it as JSON.
    """
    whole = "\0".join(texts).lower()
    while (word := f"{WORD}{secrets.token_hex(8)}z") in whole:
        pass
    return word


def strings(value: Any) -> list[str]:
    """Return all texts of a JSON value, and the keys of its objects."""
    found: list[str] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            found.append(str(key))
            if isinstance(item, str):  # most items are strings
                found.append(item)
            else:
                _collect(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
