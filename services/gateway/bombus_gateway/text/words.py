"""Makes words that stand for texts of a conversation while it is rendered."""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from bombus_gateway.text.forms import WORD


def free_word(texts: Iterable[str]) -> str:
    """Return a word of small letters and digits that nobody can guess and that none of `texts` has.

    Templates keep it whatever they do to a text: they trim texts, change their case, or write them as JSON.
    """
    whole = "\0".join(texts).lower()
    while (word := f"{WORD}{secrets.token_hex(8)}z") in whole:
        pass
    return word


def strings(value: Any) -> Iterable[str]:
    """Yield all texts of a value of JSON, and the keys of its mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
