"""Makes words that stand for texts of a conversation while it is rendered."""

import secrets
from collections.abc import Iterable

from bombus_gateway.text.forms import WORD


def free_word(texts: Iterable[str]) -> str:
    """Return a word of small letters and digits that nobody can guess and that none of `texts` has.

    Templates keep it whatever they do to a text: they trim texts, change their case, or write them as JSON.
    """
    whole = "\0".join(texts).lower()
    while (word := f"{WORD}{secrets.token_hex(8)}z") in whole:
        pass
    return word
