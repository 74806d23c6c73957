"""`EnvPool`: the same pool for programs without a loop. It owns a loop in a thread, where heartbeats go on."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
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
from bombus.environments.plain.world_thread import in_a_thread
from bombus.environments.pools.aio import (
    CLOSE_S,
    Action,
    AsyncEnvPool,
    GroupRollout,
    ResultRecorder,
    StepOutcome,
)
from bombus.environments.pools.session import SessionSettings
from bombus.sdk.errors import InfraError
from bombus.sdk.types import Task

STOP_S = 2.0

T = TypeVar("T")


class LoopThread:
    """A loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="bombus-environments", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. An interruption of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop, and whatever still waits in it."""
        if not self.loop.is_closed():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result(STOP_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=STOP_S)


class BlockingEnvironment:
    """An environment for a function that is no coroutine, and runs in a thread beside the loop.

    Its methods raise `EnvironmentLost` from `leave` on: a function that is not waited for any more may still run.
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
            raise EnvironmentLost("this rollout was cancelled, and its environment is another's now")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class AcrossLoops:
    """An environment that lives in one loop, for callers in others: `Rollout` under a `SwarmClient`, for example.

    A method begins when the one before it has ended there, which takes a moment after that was cancelled here.
    """

    def __init__(self, environment: AgentEnvironment, loop: asyncio.AbstractEventLoop) -> None:
        self._environment = environment
        self._loop = loop
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
        await self._there(self._environment.close())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._in_turn(work), self._loop))

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._turn:
                return await work
        finally:
            work.close()  # of one that was cancelled before its turn


class EnvPool:
    """`AsyncEnvPool` with methods that wait. Use it in `with`, or call `connect` and `close`.

    A rollout may be a coroutine function, which runs in the pool's own loop, or a function, which runs in a thread and
    is given a `BlockingEnvironment`.
    """

    def __init__(
        self,
        url: str,
        size: int | None = None,
        *,
        group_size: int | None = None,
        settings: SessionSettings | None = None,
        curriculum: ResultRecorder | None = None,
    ) -> None:
        self._pool = AsyncEnvPool(url, size, group_size=group_size, settings=settings, curriculum=curriculum)
        self._thread: LoopThread | None = None

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def group_size(self) -> int:
        return self._pool.group_size

    def connect(self) -> Self:
        """Open all sessions, or raise the first error and leave none open: it can be tried again."""
        thread = self._thread or LoopThread()
        try:
            thread.run(self._pool.connect())
        except BaseException:
            thread.stop()
            self._thread = None
            raise
        self._thread = thread
        return self

    def close(self, within_s: float = CLOSE_S) -> None:
        """Give all slots back, and cut what has not answered after `within_s` seconds. Closing again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._pool.close(within_s))
            finally:
                thread.stop()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run_group(
        self,
        task: Task,
        rollout: GroupRollout[T] | Callable[[Task, BlockingEnvironment], T],
        n: int | None = None,
        *,
        retries: int = 0,
    ) -> list[T | InfraError]:
        """Play a task `n` times at once: see `AsyncEnvPool.run_group`."""
        return self._run(self._pool.run_group(task, as_coroutine(rollout), n, retries=retries))

    def environment(self) -> AcrossLoops:
        """Return an environment that takes a session when it opens, and gives it back when it closes: for `Rollout`."""
        return AcrossLoops(self._pool.environment(), self._opened().loop)

    def reset_group(self, task: Task, n: int | None = None) -> list[StepResult]:
        """Make the first `n` worlds new for the same task."""
        return self._run(self._pool.reset_group(task, n))

    def run_group_step(self, actions: Sequence[Action | None]) -> list[StepOutcome | None]:
        """Take a step in each of the first worlds at the same time; None is for a world that does not act."""
        return self._run(self._pool.run_group_step(actions))

    def record_group_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Tell the curriculum once how a group went: its mean reward, and whether that is at least 0.5."""
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
    """Return a rollout that runs in a loop: a function gets a thread, so that heartbeats go on beside it."""
    if inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__):
        return rollout

    async def play(task: Task, environment: AgentEnvironment) -> Any:
        blocking = BlockingEnvironment(environment, asyncio.get_running_loop())
        try:
            return await in_a_thread(partial(rollout, task, blocking), "rollout")
        finally:
            blocking.leave()

    return play
