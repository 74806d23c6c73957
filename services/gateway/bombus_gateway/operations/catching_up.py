"""Wait for events that another gateway has just put on the log, before treating anything as unknown."""

from collections.abc import Callable
from typing import TypeVar

from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable, Code, Refused

CATCH_UP_S = 5.0
_UNKNOWN = (Code.UNKNOWN_MODEL, Code.UNKNOWN_SESSION, Code.SESSION_OVER)

_FoundT = TypeVar("_FoundT")


async def catch_up(follower: Follower) -> None:
    """Return once everything that is now on the log is folded here. Raises `BusUnavailable` if this takes too long;
    clients then ask again."""
    try:
        await follower.caught_up(CATCH_UP_S)
    except TimeoutError:
        why = "this gateway has not read all of the log yet and cannot answer this"
        raise BusUnavailable(f"{why}: ask again in a moment") from None


async def found(follower: Follower, find: Callable[[], _FoundT]) -> _FoundT:
    """Return the result of `find`. If `find` refuses because something is unknown or over, catch up with the log and
    call it again.

    Raises whatever `find` raises, and the same errors as `catch_up`.
    """
    try:
        return find()
    except Refused as refusal:
        if refusal.code not in _UNKNOWN:
            raise
    await catch_up(follower)
    return find()
