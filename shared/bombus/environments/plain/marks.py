"""The decorators for methods of a plain class: `reward`, `metric`, `success` and `stop`."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar, overload

import msgspec

_ATTRIBUTE = "__bombus_mark__"

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class MethodKind(StrEnum):
    """The purpose of a decorated method."""

    REWARD = "reward"
    METRIC = "metric"
    SUCCESS = "success"
    STOP = "stop"


class MethodMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a decorator has recorded about its method. A reward lies between `low` and `high`, and is multiplied by
    `weight`.

    `role` names the agents in `play` whose calls get the reward. If `role` is empty, all calls do.
    """

    kind: MethodKind
    weight: float = 1.0
    role: str = ""
    low: float = 0.0
    high: float = 1.0


@overload
def reward(method: MethodT, /) -> MethodT: ...
@overload
def reward(
    weight: float = 1.0, /, *, role: str = "", low: float = 0.0, high: float = 1.0
) -> Callable[[MethodT], MethodT]: ...
@overload
def reward(
    *, weight: float = 1.0, role: str = "", low: float = 0.0, high: float = 1.0
) -> Callable[[MethodT], MethodT]: ...
def reward(
    given: MethodT | float | None = None, /, *, weight: float = 1.0, role: str = "", low: float = 0.0, high: float = 1.0
) -> MethodT | Callable[[MethodT], MethodT]:
    """Decorate a method that returns one part of the reward: the episode's reward is the weighted sum of all parts.

    `@reward(0.5)` means `@reward(weight=0.5)`.
    """
    if isinstance(given, int | float):
        weight, given = given, None
    return _mark(given, MethodMark(kind=MethodKind.REWARD, weight=weight, role=role, low=low, high=high))


@overload
def metric(method: MethodT, /) -> MethodT: ...
@overload
def metric() -> Callable[[MethodT], MethodT]: ...
def metric(method: MethodT | None = None, /) -> MethodT | Callable[[MethodT], MethodT]:
    """Decorate a method whose result, a number, is reported with the episode but is not part of its reward."""
    return _mark(method, MethodMark(kind=MethodKind.METRIC))


@overload
def success(method: MethodT, /) -> MethodT: ...
@overload
def success() -> Callable[[MethodT], MethodT]: ...
def success(method: MethodT | None = None, /) -> MethodT | Callable[[MethodT], MethodT]:
    """Decorate the method that says whether the task was achieved."""
    return _mark(method, MethodMark(kind=MethodKind.SUCCESS))


@overload
def stop(method: MethodT, /) -> MethodT: ...
@overload
def stop() -> Callable[[MethodT], MethodT]: ...
def stop(method: MethodT | None = None, /) -> MethodT | Callable[[MethodT], MethodT]:
    """Decorate a method that is called after each turn and says whether the episode is over."""
    return _mark(method, MethodMark(kind=MethodKind.STOP))


def mark_of(method: object) -> MethodMark | None:
    """Return the mark that a decorator in this module has put on a method, or None."""
    found = getattr(method, _ATTRIBUTE, None)
    return found if isinstance(found, MethodMark) else None


def _mark(method: MethodT | None, mark: MethodMark) -> MethodT | Callable[[MethodT], MethodT]:
    return _marked(method, mark) if method is not None else lambda each: _marked(each, mark)


def _marked(method: MethodT, mark: MethodMark) -> MethodT:
    if (other := mark_of(method)) is not None and other.kind != mark.kind:
        raise TypeError(
            f"@{mark.kind} decorates a method that already has @{other.kind}, but a method can have only one of them: "
            "write a second method, which may call the first"
        )
    try:
        setattr(method, _ATTRIBUTE, mark)
    except AttributeError as error:
        raise TypeError(f"@{mark.kind} decorates a {type(method).__name__}: it must decorate a plain method") from error
    return method
