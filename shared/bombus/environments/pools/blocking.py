"""`EnvPool`: a pool like `AsyncEnvPool`, for programs without an event loop. The pool's own loop runs in a thread, and
also sends heartbeats."""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, Self, TypeVar

from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    Transcript,
)
from bombus.environments.openenv.messages import StepResult
from bombus.environments.plain.instance_thread import in_a_thread
from bombus.environments.pools.aio import (
    CLOSE_S,
    Action,
    AsyncEnvPool,
    GroupRollout,
    ResultRecorder,
    StepOutcome,
)
from bombus.environments.pools.session import SessionSettings
from bombus.errors import Code, Refused
from bombus.sdk.errors import InfraError
from bombus.sdk.threads import WAKE_S
from bombus.sdk.types import Task

log = logging.getLogger("bombus")

STOP_S = 1.0

T = TypeVar("T")


class LoopThread:
    """An event loop in its own thread, for callers that have none."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run_loop, name="bombus-environments", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether the loop is running. After a fork, it does not run in the child process."""
        return self._thread.is_alive() and not self._is_stopped

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine in the loop. Raises `EnvironmentLost` if the loop is not running."""
        if not self.is_running:
            work.close()
            why = "it was closed, or this process was forked from the one that opened it"
            raise EnvironmentLost(f"the pool of environments is not open here: {why}")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """Run a coroutine in the loop and return its result. Interrupting the caller cancels the coroutine.

        Raises `Refused` when called in the loop's own thread, `EnvironmentLost` if the loop is stopped before the
        coroutine is done, and `TimeoutError` after `limit_s`.
        """
        try:
            self.check_caller()
        except Refused:
            work.close()
            raise
        future = self.submit(work)
        try:
            until = math.inf if limit_s is None else time.monotonic() + limit_s
            while not future.done() and (left := until - time.monotonic()) > 0:
                wait([future], min(left, WAKE_S))
            return future.result(0)
        except CancelledError as error:
            raise EnvironmentLost("the pool of environments was closed during the call") from error
        except BaseException:
            future.cancel()
            raise

    def check_caller(self) -> None:
        """Raise `Refused` if called in the loop's own thread, which would then wait for itself."""
        if threading.current_thread() is self._thread:
            why = "this pool cannot be used in its own coroutines, because they would deadlock"
            raise Refused(Code.WRONG_PHASE, f"{why}: use the environment that they are given, or an AsyncEnvPool")

    def stop(self) -> None:
        """End the loop, and cancel everything that is still waiting in it. Do not wait for a coroutine that blocks the
        loop."""
        if self.is_running:
            self._is_stopped = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(2 * STOP_S)

    def _run_loop(self) -> None:
        while not self._is_stopped:
            # If, for instance, a rollout calls `sys.exit`, the rollout's caller gets that error, and other rollouts
            # continue.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.loop.run_forever()
        try:
            self.loop.run_until_complete(_cancel_others())
        finally:
            self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=STOP_S)


class BlockingEnvironment:
    """An environment for a plain function, which runs in a thread alongside the event loop.

    After `leave`, its methods raise `EnvironmentLost`: the function may still be running although nobody waits for it.
    """

    def __init__(self, environment: AgentEnvironment, loop: asyncio.AbstractEventLoop) -> None:
        self._environment = environment
        self._loop = loop
        self._is_left = False

    def open(self, task: Task) -> Opening:
        return self._wait(self._environment.open(task))

    def call(self, call: ToolCall) -> ToolOutcome:
        return self._wait(self._environment.call(call))

    def is_over(self, transcript: Transcript) -> bool:
        return self._wait(self._environment.is_over(transcript))

    def score(self, transcript: Transcript) -> RolloutScores:
        return self._wait(self._environment.score(transcript))

    def leave(self) -> None:
        self._is_left = True

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_left:
            work.close()
            raise EnvironmentLost("this rollout was cancelled, and another one has its environment now")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class AcrossLoops:
    """An environment that runs in one loop, for callers in other loops, such as `Rollout` under a `SwarmClient`.

    A method starts once the previous method has ended in that loop, which may be a moment after the previous method's
    caller was cancelled.
    """

    def __init__(self, environment: AgentEnvironment, thread: LoopThread) -> None:
        self._environment = environment
        self._thread = thread
        self._turn = asyncio.Lock()

    async def open(self, task: Task) -> Opening:
        return await self._there(self._environment.open(task))

    async def call(self, call: ToolCall) -> ToolOutcome:
        return await self._there(self._environment.call(call))

    async def is_over(self, transcript: Transcript) -> bool:
        return await self._there(self._environment.is_over(transcript))

    async def score(self, transcript: Transcript) -> RolloutScores:
        return await self._there(self._environment.score(transcript))

    async def close(self) -> None:
        """Give the session back. Does nothing if the pool has been closed."""
        if self._thread.is_running:
            await self._there(self._environment.close())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = self._thread.submit(self._in_turn(work))
        except EnvironmentLost:
            work.close()
            raise
        return await asyncio.wrap_future(future)

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._turn:
                return await work
        finally:
            work.close()  # in case it was cancelled before its turn


class EnvPool:
    """`AsyncEnvPool` with blocking methods. Use it with `with`, or call `connect` and `close`.

    A rollout may be a coroutine function, which runs in the pool's loop, or a plain function, which runs in a thread
    and is given a `BlockingEnvironment`.
    """

    def __init__(  # noqa: PLR0913 - the options of a pool
        self,
        url: str,
        size: int | None = None,
        *,
        group_size: int | None = None,
        settings: SessionSettings | None = None,
        curriculum: ResultRecorder | None = None,
        rollout: Callable[..., Any] | None = None,
        task: Task | None = None,
    ) -> None:
        self._make = partial(
            AsyncEnvPool,
            url,
            size,
            group_size=group_size,
            settings=settings,
            curriculum=curriculum,
            rollout=as_coroutine(rollout) if rollout is not None else None,
            task=task,
        )
        self._pool = self._make()
        self._thread: LoopThread | None = None
        self._changing = threading.Lock()  # guards the two attributes above

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def group_size(self) -> int:
        return self._pool.group_size

    def connect(self) -> Self:
        """Open all sessions. If any fails, raise the first error and leave none open; this can then be called again."""
        with self._changing:
            if self._thread is None or not self._thread.is_running:
                self._pool, self._thread = self._make(), LoopThread()  # a pool's futures belong to one loop
            pool, thread = self._pool, self._thread
        try:
            thread.run(pool.connect())
        except BaseException:
            with self._changing:
                self._thread = None if self._thread is thread else self._thread
            thread.stop()
            raise
        return self

    def close(self, within_s: float = CLOSE_S) -> None:
        """Give all slots back, and cut off sessions that have not answered after `within_s` seconds. Closing again does
        nothing.

        If one of the caller's coroutines blocks the loop, the slots cannot be given back, and their leases lapse.
        """
        if self._thread is not None:
            self._thread.check_caller()
        with self._changing:
            pool, thread, self._thread = self._pool, self._thread, None
        if thread is None or not thread.is_running:
            return
        try:
            thread.run(pool.close(within_s), within_s + STOP_S)
        except TimeoutError:
            log.warning("a coroutine blocks the pool's loop, so its slots were not released; their leases will lapse")
        finally:
            thread.stop()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_group(
        self,
        task: Task | GroupRollout[T] | Callable[[Task, BlockingEnvironment], T],
        rollout: GroupRollout[T] | Callable[[Task, BlockingEnvironment], T] | None = None,
        n: int | None = None,
        *,
        retries: int = 0,
    ) -> list[T | InfraError]:
        """Play a task `n` times concurrently: see `AsyncEnvPool.run_group`."""
        given = task if isinstance(task, Task) else as_coroutine(task)
        by = as_coroutine(rollout) if rollout is not None else None
        return self._run(self._pool.run_group(given, by, n, retries=retries))

    def environment(self) -> AcrossLoops:
        """Return an environment for `Rollout` that takes a session when it opens, and gives it back when it closes."""
        return AcrossLoops(self._pool.environment(), self._opened())

    def reset_group(self, task: Task, n: int | None = None) -> list[StepResult]:
        """Reset the first `n` environments for the same task."""
        return self._run(self._pool.reset_group(task, n))

    def run_group_step(self, actions: Sequence[Action | None]) -> list[StepOutcome | None]:
        """Take a step in each of the first `len(actions)` environments at the same time, skipping those whose action is
        None."""
        return self._run(self._pool.run_group_step(actions))

    def record_group_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Record a group's result in the curriculum: its mean reward, and whether that is at least 0.5."""
        self._pool.record_group_result(task, rewards)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            thread = self._opened()
        except EnvironmentLost:
            work.close()
            raise
        return thread.run(work)

    def _opened(self) -> LoopThread:
        if self._thread is None:
            raise EnvironmentLost("the pool of environments is not open: use it inside `with`")
        return self._thread


def as_coroutine(rollout: Callable[..., Any]) -> GroupRollout[Any]:
    """Return a rollout as a coroutine function. A plain function runs in a thread, so that heartbeats continue
    meanwhile."""
    if inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__):
        return rollout

    async def play(task: Task, environment: AgentEnvironment) -> Any:
        blocking = BlockingEnvironment(environment, asyncio.get_running_loop())
        try:
            return await in_a_thread(partial(rollout, task, blocking), "rollout")
        finally:
            blocking.leave()

    return play
