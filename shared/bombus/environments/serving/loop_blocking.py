"""Detects environment coroutines that block the event loop: while one does, no session on the server makes progress."""

import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

HELD_UP_S = 1.0


def watched(work: Awaitable[T], name: str, session: str) -> "Watched[T]":
    """Await work from a session's environment, and warn if it blocked the loop that all of the server's sessions
    share."""

    def note(longest_s: float) -> None:
        if longest_s >= HELD_UP_S:
            log.warning(
                "`%s` of session %s blocked all sessions of this server for %.1f s: let it await slow calls, or "
                "make it a plain `def`, which runs in a thread",
                name,
                session,
                longest_s,
            )

    return Watched(work, note)


class Watched(Generic[T]):
    """Awaits an environment's work, and calls `note` with the longest time, in seconds, for which a single step blocked
    the loop."""

    def __init__(self, work: Awaitable[T], note: Callable[[float], None]) -> None:
        self._work = work
        self._note = note

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        thrown: BaseException | None = None
        longest_s = 0.0
        try:
            while True:
                began_s = time.monotonic()
                try:
                    waited_for = next(steps) if thrown is None else steps.throw(thrown)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
                finally:
                    longest_s = max(longest_s, time.monotonic() - began_s)
                try:
                    yield waited_for
                    thrown = None
                except BaseException as error:  # for instance a cancellation, passed on to the environment's own code
                    thrown = error
        finally:
            self._note(longest_s)
