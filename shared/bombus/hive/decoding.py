"""Decoding of bytes from other processes, with one exception type for all malformed input."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

_BytesT = TypeVar("_BytesT")
_ValueT = TypeVar("_ValueT")


def decoded(decode: Callable[[_BytesT], _ValueT], body: _BytesT) -> _ValueT:
    """Call msgspec's `decode` on `body`. Raises `msgspec.MsgspecError` if the bytes do not encode a valid value.

    msgspec itself raises other errors for text that is not UTF-8, and for values that are nested too deeply.
    """
    try:
        return decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
