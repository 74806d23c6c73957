"""Runs many episodes, or groups of episodes, at the same time, in threads or on an event loop."""

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

from bombus import telemetry
from bombus.sdk import running
from bombus.sdk.core import Exchange, check_task
from bombus.sdk.groups import Claiming, ClaimT, GivenT, GroupRun, OutcomeT
from bombus.sdk.multi_model import HiveCore
from bombus.sdk.progress import ProgressBar
from bombus.sdk.types import Task

T = TypeVar("T")


class Runtime(Exchange, Protocol):
    """How a client runs agents, in addition to how it waits (`Exchange`)."""

    async def result_of(self, agent: Callable[[], T | Awaitable[T]]) -> T:
        """Return an agent's result.

        An error that is not an `Exception`, such as `SystemExit`, is raised as a `RuntimeError`.
        """
        ...

    async def each(
        self, indices: Sequence[int], attempt: Callable[[int], Coroutine[Any, Any, None]], workers: int
    ) -> None:
        """Call `attempt` for each index, up to `workers` of them at the same time."""
        ...

    def beating(
        self, touch: Callable[[], Coroutine[Any, Any, object]], every_s: float
    ) -> AbstractAsyncContextManager[None]:
        """Call `touch` every `every_s` seconds while the block runs."""
        ...


class Playing:
    """Calls agents for tasks, many at the same time. `lost` counts the groups' lost episodes by error type."""

    def __init__(self, core: HiveCore, runtime: Runtime) -> None:
        self.lost: Counter[str] = Counter()
        self._core = core
        self._runtime = runtime
        self._lock = threading.Lock()

    async def run_tasks(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], T | Awaitable[T]],
        max_workers: int | None,
        auto_retry: bool,
    ) -> list[T | None]:
        """See `run_episodes_until_all_complete`."""
        results: list[T | None] = [None] * len(tasks)
        failures: dict[int, Exception] = {}

        async def attempt(index: int) -> None:
            delays = running.retry_delays(auto_retry)
            while True:
                try:
                    results[index] = await self._runtime.result_of(lambda: func(tasks[index]))
                    break
                except Exception as error:  # an error in the caller's code must not stop the other tasks
                    self._runtime.check()
                    delay = None if running.is_mistake(error) else next(delays, None)
                    running.reports.report(error, f"task {tasks[index].task_id} failed{running.retry_note(delay)}")
                    if delay is None:
                        failures[index] = error
                        break
                await self._runtime.sleep(delay)
            progress.step(failed=index in failures)

        with ProgressBar(len(tasks), "episodes", shown=None if self._core.verbose else False) as progress:
            await self._runtime.each(range(len(tasks)), attempt, running.workers_for(len(tasks), max_workers))
        return running.all_or_raise(results, failures)

    async def run_group(  # noqa: PLR0913 - what a group is
        self,
        kind: type[GroupRun[ClaimT, GivenT, OutcomeT]],
        task: Task,
        func: Callable[[Task, ClaimT], GivenT | Awaitable[GivenT]],
        n: int,
        claim: Claiming[ClaimT],
        replace_infra: int,
        max_workers: int | None = None,
    ) -> list[OutcomeT | None]:
        """Play a group of episodes to the end. If that fails, no episode stays open. See `run_group`."""
        check_task(task)
        with telemetry.span("sdk.group", None, {"bombus.episodes": n}):
            group = kind(self._core, task, claim, await claim(n), replace_infra)
            return await self._run_claimed(group, func, max_workers)

    async def _run_claimed(
        self,
        group: GroupRun[ClaimT, GivenT, OutcomeT],
        func: Callable[[Task, ClaimT], GivenT | Awaitable[GivenT]],
        max_workers: int | None,
    ) -> list[OutcomeT | None]:
        trace = telemetry.current()  # which threads do not know by themselves

        async def attempt(index: int) -> None:
            try:
                claimed = group.begin(index)
                with telemetry.span("invoke_agent", trace, telemetry.gen_ai("invoke_agent", claimed.episode)):
                    given = await self._runtime.result_of(partial(func, group.task, claimed))
                    group.succeeded(index, given)
            except Exception as error:  # an error in the caller's code: the rest of the group continues
                self._runtime.check()
                group.failed(index, error)

        async def fill(index: int) -> None:
            if index not in group.failures:
                await attempt(index)
            while index in group.failures and await group.replace(index):
                await attempt(index)

        left: Sequence[int] = range(len(group))
        try:
            async with self._runtime.beating(group.keep, group.keep_every_s):
                while left:
                    await self._runtime.each(left, fill, running.workers_for(len(left), max_workers or len(left)))
                    left = await group.end()
        except BaseException:
            self._runtime.check()  # if this thread was interrupted, the interrupter gives the episodes up
            await self._core.claimed.give_up(group.episodes, self._runtime.send)
            raise
        group.tell()
        with self._lock:
            self.lost += group.lost
        return group.outcome()
