"""Bytes that others wrote, decoded: whatever is wrong with them is one error."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

_BytesT = TypeVar("_BytesT")
_ValueT = TypeVar("_ValueT")


def decoded(decode: Callable[[_BytesT], _ValueT], body: _BytesT) -> _ValueT:
    """Return what msgspec's `decode` makes of `body`. Raises `msgspec.MsgspecError` when these bytes are not that.

    msgspec itself raises other errors for text that is not UTF-8, and for values too deep within each other.
    """
    try:
        return decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
