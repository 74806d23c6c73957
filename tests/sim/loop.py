"""Virtual time: coroutines that sleep and wait, in processes that may be killed or stopped. A seed gives one order."""

import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Callback = Callable[..., object]
Work = Coroutine[Any, Any, Any]


class Loop:
    """Runs callbacks in order of their time, then of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._ready: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._later: list[tuple[float, int, Callback, tuple[Any, ...]]] = []
        self._number = 0

    def soon(self, callback: Callback, *args: Any) -> None:
        self._ready.append((callback, args))

    def after(self, seconds: float, callback: Callback, *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._later, (self.now_s + seconds, self._number, callback, args))

    def run(self, until_s: float, goal: Callable[[], bool] | None = None) -> bool:
        """Run until `goal` holds and return True, or until `until_s` and return False."""
        ready, later = self._ready, self._later
        while True:
            while ready:
                callback, args = ready.popleft()
                self.steps += 1
                callback(*args)
            if goal is not None and goal():
                return True
            if not later or later[0][0] > until_s:
                self.now_s = until_s
                return False
            self.now_s, _, callback, args = heapq.heappop(later)
            self.steps += 1
            callback(*args)


class Future(Generic[T]):
    """A value or an error to come. A second one is dropped, as an answer that comes too late is."""

    __slots__ = ("_callbacks", "_error", "_loop", "_value", "done")

    def __init__(self, loop: Loop) -> None:
        self.done = False
        self._loop = loop
        self._value: T
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []

    def set(self, value: T) -> None:
        if not self.done:
            self._value = value
            self._finish()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self._error = error
            self._finish()

    def fail_after(self, seconds: float, error: BaseException) -> None:
        self._loop.after(seconds, self.fail, error)

    def when_done(self, callback: Callback) -> None:
        if self.done:
            self._loop.soon(callback)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator["Future[T]", None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value

    def _finish(self) -> None:
        self.done = True
        for callback in self._callbacks:
            self._loop.soon(callback)


class Task:
    """A coroutine of a process. `over` has its result; an error that is not taken from there ends the simulation."""

    def __init__(self, process: "Process", work: Work, over: Future[Any] | None) -> None:
        self._process = process
        self._work = work
        self._over = over
        self.closed = False
        process.loop.soon(self._step)

    def close(self) -> None:
        self.closed = True
        self._work.close()

    def _step(self) -> None:
        if self.closed:
            return
        if self._process.stopped:
            self._process.held.append(self._step)
            return
        try:
            self._work.send(None).when_done(self._step)
        except StopIteration as stop:
            self._end()
            if self._over is not None:
                self._over.set(stop.value)
        except Exception as error:
            self._end()
            if self._over is None:
                raise
            self._over.fail(error)

    def _end(self) -> None:
        self.closed = True
        self._process.tasks.pop(self, None)


class Process:
    """A process that can be killed, losing its memory, and stopped, resuming later with its old state."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = False
        self.stopped = False
        self.lives = 0
        self.tasks: dict[Task, None] = {}
        self.held: list[Callback] = []

    async def main(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        if not self.alive:
            self.alive = True
            self.lives += 1
            self.spawn(self.main())

    def kill(self) -> None:
        tasks, self.tasks = self.tasks, {}
        for task in tasks:
            task.close()
        self.held.clear()
        self.alive = self.stopped = False

    def stop(self) -> None:
        self.stopped = self.alive

    def resume(self) -> None:
        self.stopped = False
        held, self.held = self.held, []
        for callback in held:
            self.loop.soon(callback)

    def spawn(self, work: Work, over: Future[Any] | None = None) -> Task:
        task = Task(self, work, over)
        self.tasks[task] = None
        return task

    async def sleep(self, seconds: float) -> None:
        over: Future[None] = Future(self.loop)
        self.loop.after(seconds, over.set, None)
        await over

    async def together(self, *works: Work) -> None:
        """Run these until one returns or fails, which ends all of them."""
        over: Future[None] = Future(self.loop)
        tasks = [self.spawn(work, over) for work in works]
        try:
            await over
        finally:
            for task in tasks:
                self.tasks.pop(task, None)
                task.close()
