"""Running many episodes: retries of those that fail, and what their agents return."""

import asyncio
import logging
import random
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import ValidationError

from bombus.errors import BombusError, Code, with_place
from bombus.hive.bounded import trim
from bombus.hive.episodes import REWARD_MAX
from bombus.sdk.errors import BadRequest, BadReward, EpisodesFailed, InfraError, NoTaskId, Unauthorized
from bombus.sdk.types import Credentials, Task, WorkflowOutput
from bombus.task_groups import take_back_cancellations

log = logging.getLogger("bombus")

ATTEMPTS_MAX = 3
RETRY_FIRST_S = 2.0
WORKERS_MAX = 64
UNASKED = "it raised a CancelledError, but nobody had cancelled it"
CANCELLED_S = 5.0  # for somebody's coroutine to end once it was cancelled
DISTINCT_ERRORS_MAX = 1000  # that are counted
KEEP_FINISHED_S = 30.0  # between two signs of life of episodes that wait for the rest of their group

T = TypeVar("T")
AgentResult = WorkflowOutput | float  # the outcome, or just the reward
Agent = Callable[[Task, Credentials], AgentResult | Awaitable[AgentResult]]
AsyncAgent = Callable[[Task, Credentials], Awaitable[AgentResult]]


def output_of(result: AgentResult) -> WorkflowOutput:
    """Return the outcome that an agent has returned, or that has the reward which it has. Raises `BadReward`."""
    if isinstance(result, WorkflowOutput):
        return result
    try:
        return WorkflowOutput(reward=result)
    except ValidationError as error:
        why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadReward(f"the agent returned no outcome: {why}", Code.BAD_REWARD) from error


def checked_output(result: AgentResult) -> WorkflowOutput:
    """Return the outcome that an agent has returned. Raises `BadReward` for one that the hive would refuse."""
    output = output_of(result)
    match output.reward:
        case list() as rewards:
            numbers = rewards
        case dict() as rewards:
            numbers = list(rewards.values())
        case None:
            raise BadReward("the agent returned an outcome without a reward", Code.BAD_REWARD)
        case number:
            numbers = [number]
    for number in numbers:
        if not abs(number) <= REWARD_MAX:  # which NaN is not either
            raise BadReward(
                f"the agent returned the reward {number:g}, but one is at most {REWARD_MAX:.0e} in size",
                Code.BAD_REWARD,
            )
    return output


async def contained(
    work: Awaitable[T], left: Callable[[], object] = lambda: None, given_up: asyncio.Future[T] | None = None
) -> T:
    """Return what somebody's coroutine returns, as `contained_here` does, from a task of its own.

    There a group of tasks that fails can leave a cancellation with no task but that one, so that a `CancelledError` of
    its own is told from one that was asked for even after such a group.

    One that was cancelled may still return something, but no error of it hides that it was cancelled. One that goes on
    for `CANCELLED_S` after it was cancelled is not waited for any more: `left` is called then. Nor is one that still
    runs when `given_up` is done, whose result is returned in its place.
    """
    this, before = _cancellations()
    task = asyncio.create_task(contained_here(work))
    try:
        if given_up is not None:
            await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _leave(task)
                return given_up.result()
        return await asyncio.shield(task)
    except asyncio.CancelledError as error:
        if this.cancelling() == before:
            raise RuntimeError(UNASKED) from error
        if task.done():  # without having heard of it, so that it would be lost
            _leave(task)
            raise
        if await _has_ended(task):
            failure = None if task.cancelled() else task.exception()
            if isinstance(failure, Exception):  # such as of a tool that calls whatever it catches its own error
                raise error from failure
            return await task
        name = getattr(work, "__qualname__", type(work).__name__)
        log.warning("%s was cancelled %g s ago and is still running; not waiting for it", name, CANCELLED_S)
        _leave(task)
        left()
        raise


def _leave(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from complaining about an exception that is never retrieved."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _has_ended(task: asyncio.Task[Any]) -> bool:
    """Cancel a task, and return whether it ends in its time, also where this is cancelled again meanwhile."""
    deadline = asyncio.get_running_loop().time() + CANCELLED_S
    while not task.done() and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=left_s)
    return task.done()


async def contained_here(work: Awaitable[T], is_stopped: Callable[[], bool] | None = None) -> T:
    """Return what somebody's coroutine returns. Whatever it raises that is no `Exception`, such as a `SystemExit`, is a
    `RuntimeError`, and a `CancelledError` too, such as of a task that it has cancelled and awaited, unless this task
    was cancelled. A Ctrl-C is raised as it is.

    `is_stopped` says whether it was, where whoever cancels this task notes that. Without it the task's own count is
    asked, in which a group of tasks that failed can have left a cancellation.
    """
    this, before = _cancellations()
    try:
        found = await work
        if this.cancelling() > before:
            await asyncio.sleep(0)  # a cancellation that is still to come meets this, and not what follows
    except asyncio.CancelledError as error:
        if is_stopped() if is_stopped is not None else this.cancelling() > before:
            raise
        take_back_cancellations(this, before)
        raise RuntimeError(UNASKED) from error
    except BaseException as error:
        take_back_cancellations(this, before)
        if isinstance(error, Exception | KeyboardInterrupt | GeneratorExit):
            raise
        raise RuntimeError(f"it raised {error!r}") from error  # it may end neither its group nor the program
    take_back_cancellations(this, before)
    return found


def _cancellations() -> tuple[asyncio.Task[Any], int]:
    """Return the task that runs, and how often it was cancelled until now."""
    this = asyncio.current_task()
    assert this is not None
    return this, this.cancelling()


def infra_of(error: Exception) -> Exception:
    """Return the first of a group of errors where infrastructure is to blame for all of them, and else the error."""
    first: BaseException = error
    if isinstance(error, ExceptionGroup) and error.split(InfraError)[1] is None:
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    return first if isinstance(first, InfraError) else error


def is_mistake(error: Exception) -> bool:
    """Return whether the program itself is wrong, so that another attempt would fail as this one did."""
    wrong = isinstance(error, LookupError | TypeError | AttributeError | NameError | ImportError | NotImplementedError)
    return wrong or isinstance(error, NoTaskId | BadRequest | Unauthorized)


class ErrorReports:
    """Shows each distinct error of the caller's code once with its traceback, and counts it from then on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def report(self, error: Exception, what: str) -> None:
        """Log that something failed: `what` says what did, and what becomes of it."""
        cause = error.__cause__ if isinstance(error, BombusError) else error  # ours say what to do
        with self._lock:
            self._counts[key := _place_of(error)] += 1
            trim(self._counts, DISTINCT_ERRORS_MAX)
            count = self._counts[key]
        is_shown = count == 1 and isinstance(cause, Exception) and (cause is error or is_mistake(cause))
        often = f" ({count} of this kind so far)" if count > 1 else ""
        log.warning("%s: %s%s", what, with_place(error), often, exc_info=cause if is_shown else None)


def _place_of(error: Exception) -> str:
    """Return what distinguishes an error from others: its kind, and the line where it was raised, whatever its text
    says."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(error)


reports = ErrorReports()  # of this program, whose groups and clients fail in the same code


def retry_delays(auto_retry: bool) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: growing, a little random, and only so many."""
    for attempt in range(ATTEMPTS_MAX - 1 if auto_retry else 0):
        yield RETRY_FIRST_S * 2**attempt * (1 + random.random() / 2)


def retry_note(delay: float | None) -> str:
    return " for good" if delay is None else f", again in {delay:.0f} s"


def workers_for(count: int, max_workers: int | None) -> int:
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is {max_workers}: it must be at least 1")
    return max(1, min(count, max_workers or WORKERS_MAX))


def all_or_raise(results: list[T | None], failures: dict[int, Exception]) -> list[T | None]:
    if failures:
        raise EpisodesFailed(results, failures)
    return results
