"""Runs many episodes: retries failed ones, and checks the results of their agents."""

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
UNASKED = "it raised a CancelledError, but it had not been cancelled"
CANCELLED_S = 5.0  # time for a foreign coroutine to end after it was cancelled
DISTINCT_ERRORS_MAX = 1000  # number of distinct errors that are counted
KEEP_FINISHED_S = 30.0  # time between two touches of episodes that wait for the rest of their group

T = TypeVar("T")
AgentResult = WorkflowOutput | float  # the outcome, or just the reward
Agent = Callable[[Task, Credentials], AgentResult | Awaitable[AgentResult]]
AsyncAgent = Callable[[Task, Credentials], Awaitable[AgentResult]]


def output_of(result: AgentResult) -> WorkflowOutput:
    """Return an agent's result as an outcome. Raises `BadReward` if the result is neither an outcome nor a number."""
    if isinstance(result, WorkflowOutput):
        return result
    try:
        return WorkflowOutput(reward=result)
    except ValidationError as error:
        why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadReward(f"the agent returned neither an outcome nor a reward: {why}", Code.BAD_REWARD) from error


def checked_output(result: AgentResult) -> WorkflowOutput:
    """Return an agent's result as an outcome.

    Raises `BadReward` if the hive would refuse the outcome, and `InfraError` if it is a failure that has no reward.
    """
    output = output_of(result)
    if output.failure is not None and not output.failure.is_trained:
        raise InfraError(f"the agent returned an outcome with the failure {output.failure}", output.failure)
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
        if not abs(number) <= REWARD_MAX:  # also rejects NaN
            raise BadReward(
                f"the agent returned the reward {number:g}, but its absolute value must be at most {REWARD_MAX:.0e}",
                Code.BAD_REWARD,
            )
    return output


async def contained(
    work: Awaitable[T], left: Callable[[], object] = lambda: None, given_up: asyncio.Future[T] | None = None
) -> T:
    """Return the result of a foreign coroutine, as `contained_here` does, but run it in a separate task.

    A task group that fails in the coroutine can then leave a stray cancellation only in that task. A `CancelledError`
    raised by the coroutine itself can therefore always be distinguished from a requested cancellation.

    A cancelled coroutine may still return a result, but an error that it raises does not hide the cancellation. If it
    keeps running for `CANCELLED_S` after it was cancelled, this stops waiting for it and calls `left`. If `given_up` is
    done while the coroutine is still running, this stops waiting too, and returns the result of `given_up`.
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
        if task.done():  # it ended without seeing the cancellation, which must not be lost
            _leave(task)
            raise
        if await _has_ended(task):
            failure = None if task.cancelled() else task.exception()
            if isinstance(failure, Exception):  # such as from a tool that wraps any error it catches in its own
                raise error from failure
            return await task
        name = getattr(work, "__qualname__", type(work).__name__)
        log.warning("%s was cancelled %g s ago and is still running; not waiting for it", name, CANCELLED_S)
        _leave(task)
        left()
        raise


def _leave(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from warning that the task's exception was never retrieved."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _has_ended(task: asyncio.Task[Any]) -> bool:
    """Cancel a task, and return whether it ends in time. Keep waiting even if the caller is cancelled again."""
    deadline = asyncio.get_running_loop().time() + CANCELLED_S
    while not task.done() and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=left_s)
    return task.done()


async def contained_here(work: Awaitable[T], is_stopped: Callable[[], bool] | None = None) -> T:
    """Return the result of a foreign coroutine, letting through only errors that the caller can handle.

    An error that is not an `Exception`, such as `SystemExit`, becomes a `RuntimeError`. So does a `CancelledError`, for
    example from a task that the coroutine cancelled and awaited, unless this task was cancelled. A Ctrl-C is raised
    unchanged.

    If given, `is_stopped` says whether this task was cancelled. By default, the task's own cancellation count
    determines that, although a failed task group may have left a stray cancellation in it.
    """
    this, before = _cancellations()
    try:
        found = await work
        if this.cancelling() > before:
            await asyncio.sleep(0)  # a pending cancellation is raised here rather than in the caller's next await
    except asyncio.CancelledError as error:
        if is_stopped() if is_stopped is not None else this.cancelling() > before:
            raise
        take_back_cancellations(this, before)
        raise RuntimeError(UNASKED) from error
    except BaseException as error:
        take_back_cancellations(this, before)
        if isinstance(error, Exception | KeyboardInterrupt | GeneratorExit):
            raise
        raise RuntimeError(f"it raised {error!r}") from error  # must end neither its group nor the program
    take_back_cancellations(this, before)
    return found


def _cancellations() -> tuple[asyncio.Task[Any], int]:
    """Return the current task, and how often it has been cancelled so far."""
    this = asyncio.current_task()
    assert this is not None
    return this, this.cancelling()


def infra_of(error: Exception) -> Exception:
    """Return the first error in a group that contains only infrastructure failures. Return any other error
    unchanged."""
    first: BaseException = error
    if isinstance(error, ExceptionGroup) and error.split(InfraError)[1] is None:
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    return first if isinstance(first, InfraError) else error


def is_mistake(error: Exception) -> bool:
    """Return whether the error is a mistake in the program, so that another attempt would fail in the same way."""
    wrong = isinstance(error, LookupError | TypeError | AttributeError | NameError | ImportError | NotImplementedError)
    return wrong or isinstance(error, NoTaskId | BadRequest | Unauthorized)


class ErrorReports:
    """Logs errors raised by the caller's code: the first of each kind with its traceback, later ones with a count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def report(self, error: Exception, what: str) -> None:
        """Log that something failed. `what` says what failed, and what happens next."""
        cause = error.__cause__ if isinstance(error, BombusError) else error  # our own errors say what to do
        with self._lock:
            self._counts[key := _place_of(error)] += 1
            trim(self._counts, DISTINCT_ERRORS_MAX)
            count = self._counts[key]
        is_shown = count == 1 and isinstance(cause, Exception) and (cause is error or is_mistake(cause))
        often = f" ({count} of this kind so far)" if count > 1 else ""
        log.warning("%s: %s%s", what, with_place(error), often, exc_info=cause if is_shown else None)


def _place_of(error: Exception) -> str:
    """Return a key that identifies an error by its type and the line where it was raised, regardless of its text."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(error)


reports = ErrorReports()  # shared by all groups and clients of this program, as they fail in the same code


def retry_delays(auto_retry: bool) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: a limited number of increasing pauses, with some random
    jitter."""
    for attempt in range(ATTEMPTS_MAX - 1 if auto_retry else 0):
        yield RETRY_FIRST_S * 2**attempt * (1 + random.random() / 2)


def retry_note(delay: float | None) -> str:
    return " for good" if delay is None else f", retrying in {delay:.0f} s"


def workers_for(count: int, max_workers: int | None) -> int:
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is {max_workers}: it must be at least 1")
    return max(1, min(count, max_workers or WORKERS_MAX))


def all_or_raise(results: list[T | None], failures: dict[int, Exception]) -> list[T | None]:
    if failures:
        raise EpisodesFailed(results, failures)
    return results
