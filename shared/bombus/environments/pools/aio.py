"""`AsyncEnvPool`: several sessions at one server, in the caller's event loop. Either all of them open, or none."""

import asyncio
import logging
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self, TypeVar

from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    EnvironmentsBusy,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    Transcript,
)
from bombus.environments.openenv.messages import StepResult
from bombus.environments.pools.remote import RemoteEnvironment, reset_of
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.environments.variables import number_of
from bombus.errors import Code, Refused, in_one_line
from bombus.hive.episodes import reward_number
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained, infra_of
from bombus.sdk.types import Task
from bombus.task_groups import first_failure

log = logging.getLogger("bombus")

GROUP_VARIABLE = "NUM_GENERATIONS"
GROUP_SIZE = 8
POOL_MAX = 1024
CLOSE_S = 5.0
RECONNECT_S = 0.2
ATTEMPT_S = 0.5  # rough time to wait for all of a pool's slots before giving back those it has
ATTEMPT_S_MAX = 10.0
ACHIEVED_AT = 0.5

T = TypeVar("T")
GroupRollout = Callable[[Task, AgentEnvironment], Awaitable[T]]
Action = dict[str, Any]
StepOutcome = StepResult | InfraError | StepRefused


class ResultRecorder(Protocol):
    """Records the results of tasks, as a curriculum does."""

    def record_result(self, task: Task, achieved: bool, reward: float) -> object:
        """Record the result of a group of episodes for a task."""
        ...


class AsyncEnvPool:
    """A pool of `size` sessions at a server. `async with` opens all of them, or raises and leaves none open.

    When a session dies, its episode ends with `InfraError`. A new session replaces it the next time that the pool is
    used. `group_size` is how many sessions play one task together, by default `$NUM_GENERATIONS` or 8.
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
        """Store the defaults for `run_group`. If `run_group` is called with only a rollout or only a task, it takes the
        other from these defaults."""
        if group_size is None:
            group_size = number_of(os.environ, GROUP_VARIABLE, GROUP_SIZE, 1, POOL_MAX)
        self.group_size = group_size
        self.size = self.group_size if size is None else size
        if not 1 <= self.group_size <= self.size <= POOL_MAX:
            raise Refused(
                Code.BAD_CONFIG,
                f"a pool of {self.size} environments cannot play groups of {self.group_size}: give a size from "
                f"{max(1, self.group_size)} to {POOL_MAX}, or a smaller group_size",
            )
        self.url = url
        self.settings = settings or SessionSettings()
        self._curriculum = curriculum
        self._rollout, self._task = rollout, task
        self._sessions: list[EnvSession | None] = []
        self._idle: asyncio.Queue[int | None] = asyncio.Queue()  # numbers of sessions; None once the pool is closed
        self._taken: set[TakenSession] = set()
        self._connecting = asyncio.Lock()
        self._opening: asyncio.Task[list[EnvSession]] | None = None
        self._using = asyncio.Lock()  # held while a group is stepped together, because that needs the whole pool

    # ---- opening and closing ----------------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Open all sessions. If any fails, close the others and raise the first error; `connect` may then be called
        again.

        While a pool waits for slots (`wait_s`), it now and then releases the slots that it has, so that two pools
        connecting at the same time do not block each other.
        """
        async with self._connecting:
            if not self._sessions:
                self._sessions = list(await self._opened_unless_closed())
                self._idle, self._taken = asyncio.Queue(), set()
                for number in range(self.size):
                    self._idle.put_nowait(number)
        return self

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Give all slots back, and cut off sessions that have not answered after `within_s` seconds. Closing again does
        nothing."""
        if self._opening is not None:
            self._opening.cancel()
        sessions = [session for session in self._sessions if session is not None]
        self._sessions = []
        self._taken = set()  # sessions that are given back from now on are ignored
        self._idle.put_nowait(None)
        await close_all(sessions, within_s)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _opened_unless_closed(self) -> list[EnvSession]:
        opening = self._opening = asyncio.create_task(self._open_patiently())
        this = asyncio.current_task()
        try:
            return await opening
        except asyncio.CancelledError as error:
            if this is not None and this.cancelling():
                raise
            raise EnvironmentLost(f"the pool of environments at {self.url} was closed while it connected") from error
        finally:
            self._opening = None

    async def _open_patiently(self) -> list[EnvSession]:
        """Open all sessions within `wait_s`, in all-or-none attempts. Raises the error of the last attempt."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settings.wait_s
        attempt_s = ATTEMPT_S
        while True:
            left_s = until - loop.time()
            patience_s = max(0.0, min(left_s, random.uniform(0.5, 1.5) * attempt_s))
            try:
                return await self._open(self.size, self.settings.model_copy(update={"wait_s": patience_s}))
            except EnvironmentsBusy as error:
                if left_s <= patience_s:
                    raise EnvironmentsBusy(self._needs(error)) from error
                log.info("not all %d slots of this pool are free yet: %s", self.size, in_one_line(error))
            await asyncio.sleep(min(left_s, random.uniform(0, attempt_s)))
            attempt_s = min(2 * attempt_s, ATTEMPT_S_MAX)

    def _needs(self, error: EnvironmentsBusy) -> str:
        waited_s = self.settings.wait_s
        waited = f" within {waited_s:g} s" if waited_s else "; SessionSettings(wait_s=...) waits for them"
        return f"a pool of {self.size} needs {self.size} free slots at once, but did not get them{waited} ({error})"

    async def _open(self, count: int, settings: SessionSettings) -> list[EnvSession]:
        """Open sessions, either all or none. Raises the first error."""
        first: list[Exception] = []

        async def open_one() -> EnvSession:
            try:
                return await EnvSession.open(self.url, settings)
            except Exception as error:
                first.append(error)
                raise

        tasks = [asyncio.create_task(open_one()) for _ in range(count)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if not first:
                return [task.result() for task in tasks]
        except BaseException:  # cancelled: leave nothing open
            await _undo(tasks)
            raise
        await _undo(tasks)
        raise first[0]

    # ---- one environment at a time --------------------------------------------------------------------------------

    def environment(self) -> "PooledEnvironment":
        """Return an environment that takes a session of the pool when it opens, and gives it back when it closes."""
        return PooledEnvironment(self)

    async def take(self, wait_s: float | None = None) -> "TakenSession":
        """Take a session for exclusive use until `give_back`. Raises `EnvironmentsBusy` or `EnvironmentLost`.

        A session that has died is replaced with a new one. If the server is unreachable, this waits as long as a
        session may take to connect.
        """
        self._check_open()
        idle = self._idle
        number = await self._next_idle(idle, self.settings.take_s if wait_s is None else wait_s)
        try:
            await self._revive(number)
            taken = TakenSession(number, self.session(number))
        except BaseException:
            idle.put_nowait(number)
            raise
        self._taken.add(taken)
        return taken

    def give_back(self, taken: "TakenSession") -> None:
        """Give back a session returned by `take`. Giving it back again does nothing."""
        if taken in self._taken:
            self._taken.remove(taken)
            self._idle.put_nowait(taken.number)

    async def _next_idle(self, idle: "asyncio.Queue[int | None]", limit_s: float) -> int:
        """Return the number of an idle session. The caller's own task awaits the queue, so that a cancellation loses no
        session."""
        try:
            async with asyncio.timeout(limit_s):
                number = await idle.get()
        except TimeoutError as error:
            self._check_open()
            why = f"all {self.size} environments of the pool are in use, and none became free in {limit_s:g} s"
            raise EnvironmentsBusy(why) from error
        if number is None:
            idle.put_nowait(None)  # for the other waiting callers
            raise EnvironmentLost(f"the pool of environments at {self.url} is no longer open")
        return number

    def session(self, number: int) -> EnvSession:
        """Return a session by its number. Raises `EnvironmentLost` once the pool is closed."""
        found = self._sessions[number] if number < len(self._sessions) else None
        if found is None:
            raise EnvironmentLost(f"the pool of environments at {self.url} is closed, or this session failed to open")
        return found

    async def _revive(self, number: int) -> None:
        """Open a new session in place of a dead one."""
        limit_s = max(self.settings.wait_s, self.settings.connect_s)
        sessions = self._sessions
        if number >= len(sessions):
            raise EnvironmentLost(f"the pool of environments at {self.url} is closed")
        old = sessions[number]
        if old is not None and not old.is_dead:
            return
        sessions[number] = None
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while True:
            try:
                opened = await EnvSession.open(self.url, self.settings)
            except (EnvironmentLost, EnvironmentsBusy) as error:
                if loop.time() + RECONNECT_S > until:
                    raise
                log.info("a lost environment could not be replaced yet: %s", in_one_line(error))
                await asyncio.sleep(RECONNECT_S)
            else:
                if sessions is self._sessions:
                    sessions[number] = opened
                    return
                await opened.close()
                raise EnvironmentLost("the pool was closed while a session was opened")

    # ---- groups ---------------------------------------------------------------------------------------------------

    async def run_group(
        self,
        task: Task | GroupRollout[T],
        rollout: GroupRollout[T] | None = None,
        n: int | None = None,
        *,
        retries: int = 0,
    ) -> list[T | InfraError]:
        """Play a task `n` times concurrently, each in its own session, and return the results in order.

        If the pool was created with a rollout or a task, only the other one has to be passed here.

        A rollout whose environment was lost is replayed in another session, with up to `retries` replays for the whole
        group. After that, its `InfraError` takes the place of a result. Any other error in a rollout cancels the others
        and is raised here. An error that would end the program, such as `SystemExit`, is raised as `RuntimeError`.
        """
        played, by = self._task_and_rollout(task, rollout)
        count = self._group_of(n)
        left = retries

        async def play() -> T | InfraError:
            nonlocal left
            while True:
                environment = self.environment()
                try:
                    return await contained(by(played.model_copy(deep=True), environment))
                except Exception as raised:
                    error = infra_of(raised)
                    if not isinstance(error, InfraError):
                        raise
                    log.warning(
                        "an episode of task %r has no reward, because its environment failed: %s",
                        played.task_id,
                        in_one_line(error),
                    )
                    if left < 1:
                        return error
                    left -= 1
                finally:
                    await environment.close()

        async with first_failure() as tasks:
            playing = [tasks.create_task(play()) for _ in range(count)]
        return [each.result() for each in playing]

    def _task_and_rollout(
        self, task: Task | GroupRollout[T], rollout: GroupRollout[T] | None
    ) -> tuple[Task, GroupRollout[T]]:
        """Return the task and rollout to play, from the arguments or the pool's defaults. Raises `Refused` if either is
        missing."""
        given = task if isinstance(task, Task) else self._task
        by = rollout or (self._rollout if isinstance(task, Task) else task)
        if given is None or by is None:
            what = "rollout" if by is None else "task"
            raise Refused(
                Code.BAD_CONFIG,
                f"run_group has no {what}: give it as run_group(task, rollout), or make the pool with {what}=...",
            )
        return given, by

    async def reset_group(self, task: Task, n: int | None = None) -> list[StepResult]:
        """Reset the first `n` environments for the same task. If any fails, raise the first error; none of them may be
        used after that."""
        count = self._group_of(n)
        self._check_open()
        data = task.model_dump(mode="json")

        async def reset(number: int) -> StepResult:
            await self._revive(number)
            session = self.session(number)
            return await session.reset({"task": data} if session.is_ours else reset_of(task))

        async with self._all_idle():
            done = await asyncio.gather(*(reset(number) for number in range(count)), return_exceptions=True)
        return [_raised(each) for each in done]

    async def run_group_step(self, actions: Sequence[Action | None]) -> list[StepOutcome | None]:
        """Take a step in each of the first `len(actions)` environments at the same time, skipping those whose action is
        None.

        Each environment's answer or error takes its own place in the list, and does not affect the others.
        """
        self._group_of(len(actions))

        async def step(number: int, action: Action | None) -> StepOutcome | None:
            if action is None:
                return None
            try:
                return await self.session(number).step(action)
            except (InfraError, StepRefused) as error:
                return error

        async with self._all_idle():
            return list(await asyncio.gather(*(step(number, action) for number, action in enumerate(actions))))

    def record_group_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Record a group's result in the curriculum: its mean reward, and whether that is at least 0.5."""
        try:
            numbers = [reward_number(reward) for reward in rewards]
        except ValueError as error:
            raise Refused(Code.BAD_REWARD, f"the rewards of a group cannot be used: {error}") from error
        if not numbers or not all(map(math.isfinite, numbers)):
            raise Refused(Code.BAD_REWARD, f"the rewards of a group must be finite numbers, not {numbers}")
        if self._curriculum is None:
            raise Refused(Code.BAD_CONFIG, "this pool has no curriculum: give it one when you make the pool")
        mean = sum(numbers) / len(numbers)
        self._curriculum.record_result(task, mean >= ACHIEVED_AT, mean)

    def _group_of(self, n: int | None) -> int:
        count = self.group_size if n is None else n
        if not 1 <= count <= self.size:
            raise Refused(Code.BAD_CONFIG, f"a group of {count} does not fit into a pool of {self.size} environments")
        return count

    @asynccontextmanager
    async def _all_idle(self) -> AsyncIterator[None]:
        """Reserve all environments for a group that is stepped together. Rollouts wait until the block ends. Raises
        `Refused` if any are in use."""
        async with self._using:
            idle = self._idle
            if (used := self.size - idle.qsize()) > 0:
                why = "are being used by rollouts: wait for them, or make another pool"
                raise Refused(Code.WRONG_PHASE, f"{used} environments of this pool {why}")
            numbers = [idle.get_nowait() for _ in range(self.size)]
            try:
                yield
            finally:
                for number in numbers:
                    idle.put_nowait(number)

    def _check_open(self) -> None:
        if not self._sessions:
            raise EnvironmentLost(f"the pool of environments at {self.url} is not open: use it inside `async with`")


class TakenSession:
    """A session of a pool, in exclusive use until it is given back."""

    def __init__(self, number: int, session: EnvSession) -> None:
        self.number = number
        self.session = session


class PooledEnvironment:
    """An `AgentEnvironment` that holds a session of a pool from `open` to `close`."""

    def __init__(self, pool: AsyncEnvPool) -> None:
        self._pool = pool
        self._taken: TakenSession | None = None
        self._remote: RemoteEnvironment | None = None

    async def open(self, task: Task) -> Opening:
        """Take a session and reset its environment. Raises `EnvironmentsBusy`, `ResetFailed` or `EnvironmentLost`."""
        if self._remote is None:
            self._taken = await self._pool.take()
            self._remote = RemoteEnvironment(self._taken.session)
        return await self._remote.open(task)

    async def call(self, call: ToolCall) -> ToolOutcome:
        return await self._opened().call(call)

    async def is_over(self, transcript: Transcript) -> bool:
        return await self._opened().is_over(transcript)

    async def score(self, transcript: Transcript) -> RolloutScores:
        return await self._opened().score(transcript)

    async def close(self) -> None:
        """Give the session back to the pool, which keeps its slot. Closing again does nothing."""
        taken, self._taken, self._remote = self._taken, None, None
        if taken is not None:
            self._pool.give_back(taken)

    def _opened(self) -> RemoteEnvironment:
        if self._remote is None:
            raise EnvironmentLost("this environment is not open")
        return self._remote


async def close_all(sessions: Sequence[EnvSession], within_s: float) -> None:
    """Close sessions, and cut off those that have not answered in time."""
    if not sessions:
        return
    closing = {asyncio.ensure_future(session.close()): session for session in sessions}
    try:
        await asyncio.wait(closing, timeout=within_s)
    finally:
        for task, session in closing.items():
            if not task.done():
                session.cut()
                task.cancel()
    await asyncio.gather(*closing, return_exceptions=True)


async def _undo(tasks: Sequence["asyncio.Task[EnvSession]"]) -> None:
    """Close the sessions that were opened, and stop opening more. If this is cancelled too, cut the sessions off."""
    try:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await close_all([session for session in done if isinstance(session, EnvSession)], CLOSE_S)
    except BaseException:
        for task in tasks:
            task.add_done_callback(_cut_opened)
        raise


def _cut_opened(task: "asyncio.Task[EnvSession]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cut()


def _raised(result: StepResult | BaseException) -> StepResult:
    if isinstance(result, BaseException):
        raise result
    return result
