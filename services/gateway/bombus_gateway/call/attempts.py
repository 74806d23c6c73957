"""Whose answer a marked retry gets: that of an earlier attempt of its own, and never that of an equal request (R9).

Sub-agents send equal requests, so equal bytes do not say which of them comes again. What says it is the number that a
retry bears: attempt number k repeats one with a smaller number, and each attempt is repeated once.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from bombus.hive.bounded import trim
from bombus.hive.records import CallRef
from bombus_gateway.call.request import CallRequest

REQUESTS_MAX = 4096  # different ones whose attempts are remembered
ATTEMPTS_MAX = 32  # of equal requests, beside those that are under way


class RequestAttempt(msgspec.Struct, eq=False):
    """A request as it came, number `retry` of its client's. It is `sent` when its answer went out to the end."""

    retry: int
    ended: asyncio.Event
    call: str = ""
    ref: CallRef | None = None  # of its answer
    sent: bool = False

    @property
    def rank(self) -> int:
        """How likely a retry is to repeat this one: an answer that did not go out comes first, then a refusal.

        An answer that went out may still be lost on its way. A call that is under way has a client who waits for it.
        """
        if not self.ended.is_set():
            return 3
        if self.ref is None:
            return 1
        return 2 if self.sent else 0


class RequestAttempts:
    """The latest attempts of requests at this gateway."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, bytes], list[RequestAttempt]] = {}

    def begin(self, request: CallRequest) -> RequestAttempt:
        """Remember an attempt, which is under way until its `ended` is set."""
        return self._add(request, RequestAttempt(request.retry, asyncio.Event()))

    def repeated(self, request: CallRequest, is_continued: Callable[[CallRef], bool]) -> RequestAttempt | None:
        """Return the attempt that a retry repeats, which becomes this one; None where no such attempt is known.

        An answer that somebody has continued was received.
        """
        known = [each for each in self._of.get(request.key, ()) if each.retry < request.retry]
        earlier = [each for each in known if each.ref is None or not is_continued(each.ref)]
        latest = max((each.retry for each in earlier), default=0)
        found = min((each for each in reversed(earlier) if each.retry == latest), key=_rank, default=None)
        if found is not None:
            found.retry, found.sent = request.retry, False
        return found

    def repeated_stored(self, request: CallRequest, answers: Sequence[CallRef]) -> RequestAttempt | None:
        """Return an attempt with the latest of stored answers to the request that is not of an attempt known here."""
        known = {each.ref for each in self._of.get(request.key, ())}
        ref = next((ref for ref in reversed(answers) if ref not in known), None)
        if ref is None:
            return None
        attempt = self._add(request, RequestAttempt(request.retry, asyncio.Event(), ref.id, ref))
        attempt.ended.set()
        return attempt

    def forget(self, request: CallRequest, attempt: RequestAttempt) -> None:
        """Forget an attempt without an answer, which its retry takes the place of."""
        attempts = self._of.get(request.key, [])
        if attempt in attempts:
            attempts.remove(attempt)

    def _add(self, request: CallRequest, attempt: RequestAttempt) -> RequestAttempt:
        attempts = self._of.setdefault(request.key, [])
        attempts.append(attempt)
        if len(attempts) > ATTEMPTS_MAX:  # those under way are not forgotten: their clients may hang up and come again
            over = next((each for each in attempts if each.ended.is_set()), None)
            if over is not None:
                attempts.remove(over)
        trim(self._of, REQUESTS_MAX)
        return attempt


def _rank(attempt: RequestAttempt) -> int:
    return attempt.rank
