"""Matches a numbered retry to the earlier attempt that it repeats (R9).

Sub-agents send identical requests, so the bytes alone do not show which request is being retried. The retry's number
helps: attempt number k repeats an attempt with a smaller number, and each attempt is repeated only once. If several
attempts still match, `RequestAttempt.rank` determines which of them is chosen, and the retry may get the answer to
another agent's identical request.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from bombus.hive.bounded import trim
from bombus.hive.records import CallRef
from bombus_gateway.call.request import CallRequest

REQUESTS_MAX = 4096  # distinct requests whose attempts are remembered
ATTEMPTS_MAX = 32  # per request; attempts in progress are kept even beyond that


class RequestAttempt(msgspec.Struct, eq=False):
    """One attempt at a request. `retry` is the number that the client gave it, and `sent` is true once the attempt's
    whole answer has been sent."""

    retry: int
    ended: asyncio.Future[None]
    call: str = ""
    ref: CallRef | None = None  # the record of its answer
    sent: bool = False

    @property
    def rank(self) -> int:
        """The attempt's place in the order in which attempts are matched to a retry, lowest first.

        An unsent answer comes first, then a refusal, then a sent answer, which may have been lost in transit. A call in
        progress comes last, as its client is still waiting.
        """
        if not self.ended.done():
            return 3
        if self.ref is None:
            return 1
        return 2 if self.sent else 0


class RequestAttempts:
    """The latest attempts of requests at this gateway."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, bytes], list[RequestAttempt]] = {}

    def begin(self, request: CallRequest) -> RequestAttempt:
        """Remember an attempt. The attempt is in progress until its `ended` is done."""
        return self._add(request, RequestAttempt(request.retry, _future()))

    def repeated(self, request: CallRequest, is_continued: Callable[[CallRef], bool]) -> RequestAttempt | None:
        """Return the attempt that a retry repeats, renumbered as this retry, or None if no such attempt is known.

        An attempt is never returned if its answer has been continued, since the client must have received that answer.
        """
        known = [each for each in self._of.get(request.key, ()) if each.retry < request.retry]
        earlier = [each for each in known if each.ref is None or not is_continued(each.ref)]
        latest = max((each.retry for each in earlier), default=0)
        found = min((each for each in reversed(earlier) if each.retry == latest), key=_rank, default=None)
        if found is not None:
            found.retry, found.sent = request.retry, False
        return found

    def repeated_stored(self, request: CallRequest, answers: Sequence[CallRef]) -> RequestAttempt | None:
        """Return a new attempt with the latest stored answer that belongs to no known attempt, or None if there is
        none."""
        known = {each.ref for each in self._of.get(request.key, ())}
        ref = next((ref for ref in reversed(answers) if ref not in known), None)
        if ref is None:
            return None
        attempt = self._add(request, RequestAttempt(request.retry, _future(), ref.id, ref))
        attempt.ended.set_result(None)
        return attempt

    def forget(self, request: CallRequest, attempt: RequestAttempt) -> None:
        """Forget an attempt that is replaced by its retry."""
        attempts = self._of.get(request.key, [])
        if attempt in attempts:
            attempts.remove(attempt)

    def _add(self, request: CallRequest, attempt: RequestAttempt) -> RequestAttempt:
        attempts = self._of.setdefault(request.key, [])
        attempts.append(attempt)
        if len(attempts) > ATTEMPTS_MAX:  # attempts in progress stay: their clients may hang up and retry
            over = next((each for each in attempts if each.ended.done()), None)
            if over is not None:
                attempts.remove(over)
        trim(self._of, REQUESTS_MAX)
        return attempt


def _rank(attempt: RequestAttempt) -> int:
    return attempt.rank


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
