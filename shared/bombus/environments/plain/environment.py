"""`PlainEnvironment`: an instance of a plain class as an `AgentEnvironment`."""

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from bombus.environments.kinds import (
    EnvironmentLost,
    MessageDict,
    MethodFailed,
    Opening,
    ResetFailed,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    Transcript,
    task_of_its_own,
    went_on,
)
from bombus.environments.plain.description import MarkedMethod, PlainClass, WrongClass, describe
from bombus.environments.plain.instance_thread import InstanceThread
from bombus.environments.plain.marks import MethodKind
from bombus.environments.plain.tools import BadArguments, text_of
from bombus.errors import in_one_line, with_place, without_surrogates
from bombus.hive import episodes
from bombus.hive.failures import FailureKind
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained, contained_here
from bombus.sdk.types import Task

log = logging.getLogger("bombus")

CLOSE_S = 60.0  # time for a coroutine to close an environment whose methods have taken too long
REPR_CHARACTERS = 200  # length at which a method's return value is truncated in an error
TOOLS_NAMED = 20  # the most tools listed in the message about an unknown tool


class PlainInstance:
    """An instance of a plain class, and the rules for calling its methods.

    Coroutines run in the loop, other methods in a thread. One method runs at a time, unless the class has
    `tools_run_together = True`: then its tools may overlap. If a method in a thread does not end in time, the
    environment is lost, since nothing can stop the method.
    """

    def __init__(self, made: object, is_stopped: Callable[[], bool] | None = None) -> None:
        """Take an instance, a class, or a function that makes an instance. Raises `WrongClass` if the class cannot be
        used as an environment.

        `is_stopped`, if given, returns whether the task that calls a method was cancelled (see `contained_here`).
        """
        is_made = not (inspect.isclass(made) or inspect.isroutine(made) or isinstance(made, partial))
        self._instance: object | None = made if is_made else None
        self._make: Callable[[], object] | None = None if is_made else made  # type: ignore[assignment]
        self._description: PlainClass | None = None
        if is_made or inspect.isclass(made):
            self._description = describe(made if inspect.isclass(made) else type(made), is_made=is_made)
        self._is_stopped = is_stopped
        self._lost: EnvironmentLost | None = None  # why the environment was given up
        self._closed = False
        self._used = asyncio.Lock()
        self._idle: list[InstanceThread] = []
        self._stuck: list[InstanceThread] = []

    @property
    def description(self) -> PlainClass:
        """The description of the class. It is available once the instance has been made."""
        assert self._description is not None, "the instance must be created first"
        return self._description

    @property
    def has_play(self) -> bool:
        return self._description is not None and self._description.plays

    async def make(self) -> None:
        """Make the instance if it does not exist yet. Raises `ResetFailed` if making it fails, or `WrongClass` if the
        instance cannot be used as an environment."""
        made = await self.instance()
        self._description = self._description or describe(type(made), is_made=True)

    async def instance(self) -> object:
        """Return the instance, making it if it does not exist yet. Raises `ResetFailed` if making it fails, or
        `WrongClass` if the function returned a class or another episode's instance."""
        if self._instance is None:
            assert self._make is not None
            try:
                made = await contained_here(self._in_a_thread(partial(self._keep_made, self._make)))
                if inspect.isawaitable(made):
                    self._instance = None
                    self._instance = await contained_here(made)
            except InfraError:
                raise
            except Exception as error:  # any error in the class's own code means that there is no environment
                raise ResetFailed(f"the environment could not be made: {with_place(error)}") from error
            if inspect.isclass(made := self._instance):
                self._instance = None
                why = f"Its function returned the class itself: return an instance, `{made.__name__}()`."
                raise WrongClass(made.__name__, (why,))
            self._check_unshared()
        return self._instance

    def _check_unshared(self) -> None:
        """Raise `WrongClass` if a function returned an instance that another episode is already playing."""
        made = self._instance
        with _PLAYED_LOCK:
            other = _PLAYED.setdefault(id(made), self)
            if other is not self and other._instance is made and not other._closed:
                self._instance = None  # the other episode closes it
                why = "Its function returned the same instance for two episodes: make a new one at each call."
                raise WrongClass(type(made).__name__, (why,))
            _PLAYED[id(made)] = self

    async def give_away(self) -> object:
        """Return the instance, which the caller must then close, and end the instance's threads."""
        made, self._instance = self._instance, None
        await self.close()
        return made

    def _keep_made(self, make: Callable[[], object]) -> object:
        """Make the instance in its thread, and store it so that it is closed even if the caller stops waiting."""
        self._instance = make()
        return self._instance

    def check_alive(self) -> None:
        """Raise `EnvironmentLost` if the environment is lost or closed."""
        if self._lost is not None or self._closed:
            raise self._lost or EnvironmentLost("the environment has already been closed")

    async def call(self, name: str, arguments: Mapping[str, Any], *, together: bool = False) -> Any:
        """Call a method by its name, and return its result or raise its exception."""
        self.check_alive()
        method = getattr(self._instance, name)
        async with nullcontext() if together else self._used:
            self.check_alive()
            return await self._called(method, arguments, self._is_stopped)

    async def _called(
        self, method: Callable[..., Any], arguments: Mapping[str, Any], is_stopped: Callable[[], bool] | None = None
    ) -> Any:
        if inspect.iscoroutinefunction(method):
            return await contained_here(method(**arguments), is_stopped)
        found = await contained_here(self._in_a_thread(partial(method, **arguments)), is_stopped)
        return await contained_here(found, is_stopped) if inspect.isawaitable(found) else found

    def give_up(self, name: str) -> None:
        """Mark the environment as lost, because one of its coroutines kept running after it was cancelled."""
        self._lost = went_on(name)

    def can_cancel(self, name: str) -> bool:
        """Whether a call of this tool can be cancelled. Only coroutines can be; a thread cannot."""
        is_tool = name in self.description.tools  # the name comes from the model, and may be that of any attribute
        return is_tool and inspect.iscoroutinefunction(getattr(self._instance, name))

    async def asked(self, method: MarkedMethod, values: Mapping[str, object]) -> Any:
        """Call a decorated method with the arguments that it declares. Raises `MethodFailed` if it fails."""
        named = f"{self.description.name}.{method.name}"
        kind = _failure_of(method)
        try:
            if "state" in method.names:
                values = {**values, "state": self._state(method)}
            named_values: dict[str, Any] = {name: values[name] for name in method.names}
            return await self.call(method.name, named_values)
        except InfraError as error:
            error.attribute_to(kind)
            raise
        except Exception as error:  # any error in the class's own code: an episode that cannot be scored has no reward
            raise MethodFailed(f"{named} failed: {with_place(error)}", kind) from error

    async def tells(self, method: MarkedMethod, values: Mapping[str, object]) -> bool:
        """Call a decorated method that returns true or false. Raises `MethodFailed` for any other result, such as an
        array."""
        found = await self.asked(method, values)
        try:
            return bool(found)
        except Exception as error:  # raised by the returned value's own code
            raise MethodFailed(
                f"{self.description.name}.{method.name} returned {_shown(found)}, which is neither true nor false: "
                f"{in_one_line(error)}",
                _failure_of(method),
            ) from error

    def _state(self, method: MarkedMethod) -> object:
        if not hasattr(self._instance, "state"):
            raise MethodFailed(
                f"{self.description.name}.{method.name} takes `state`, but the environment has no attribute `state`: "
                "set it in `reset`",
                _failure_of(method),
            )
        return self._instance.state

    async def _in_a_thread(self, call: Callable[[], Any]) -> Any:
        async with self._thread(getattr(call, "func", call)) as thread:
            return await thread.run(call)

    @asynccontextmanager
    async def _thread(self, function: object) -> AsyncIterator[InstanceThread]:
        name = getattr(function, "__name__", "method")
        thread = self._idle.pop() if self._idle else InstanceThread(name)
        try:
            yield thread
        finally:
            if thread.is_stuck:
                is_tool = self._description is not None and name in self._description.tools
                self._lost = EnvironmentLost(
                    f"`{name}` did not end in time; a thread cannot be cancelled, so the environment was abandoned. "
                    "Make it `async def`, or give it its own time limit",
                    FailureKind.TOOL if is_tool else None,
                )
                log.warning("%s", self._lost)
                self._stuck.append(thread)
            else:
                self._idle.append(thread)

    async def close(self) -> None:
        """Call the class's `close`, and end the threads.

        If a method is still running after its time limit, `close` runs once that method ends: in the thread of the last
        such method, or in a task after a coroutine that kept running although it was cancelled.
        """
        if self._used.locked() and not self._stuck and _has_close(self._instance):
            await self._wait_until_unused()
        if self._closed:
            return
        try:
            if self._stuck:
                self._close_later()
            elif self._instance is not None and _has_close(self._instance):
                async with self._used:
                    await self._called(self._instance.close, {})  # type: ignore[attr-defined]
        except Exception as error:  # any error in the class's own code: the episode is over, and its reward is known
            log.warning("%s.close failed: %s", type(self._instance).__name__, with_place(error))
        finally:
            self._closed = True
            for thread in (*self._idle, *self._stuck):
                await thread.close()
            self._idle.clear()

    async def _wait_until_unused(self) -> None:
        """Wait for the running method. If this wait is cancelled, the environment is closed once that method ends."""
        try:
            async with self._used:
                pass
        except asyncio.CancelledError:
            closing = asyncio.create_task(self._close_when_unused())
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
            raise

    async def _close_when_unused(self) -> None:
        async with self._used:
            pass
        await self.close()

    def _close_later(self) -> None:
        loop = asyncio.get_running_loop()
        lock, left = threading.Lock(), len(self._stuck)

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            instance: Any = self._instance
            if not _has_close(instance):  # or there is no instance, because making it failed
                return
            try:
                if inspect.iscoroutinefunction(instance.close):
                    asyncio.run_coroutine_threadsafe(instance.close(), loop).result(CLOSE_S)
                else:
                    instance.close()
            except Exception as error:  # any error in the class's own code: its episode is over
                log.warning("%s.close failed: %s", type(instance).__name__, with_place(error))

        for thread in self._stuck:
            thread.leave(ended)


_PLAYED: WeakValueDictionary[int, PlainInstance] = WeakValueDictionary()  # keyed by the id of the instance
_PLAYED_LOCK = threading.Lock()
_CLOSING: set[asyncio.Task[None]] = set()  # tasks that each close an environment once its coroutine ends


class PlainEnvironment:
    """A plain class as an environment. It is created from the class, an instance, or a function that makes an
    instance."""

    def __init__(self, made: object, is_stopped: Callable[[], bool] | None = None) -> None:
        """`is_stopped` is passed by a server, and returns whether the server has cancelled the task that makes a call.

        Tool calls then run in that task instead of a separate one, and the server does not wait for a call that keeps
        running after it was cancelled.
        """
        self.plain = PlainInstance(made, is_stopped)
        self._is_served = is_stopped is not None
        self.task = Task()  # the open episode's own copy: changes by the class affect no other episode

    @property
    def tools_run_together(self) -> bool:
        """Whether the tool calls in one answer may run at the same time."""
        return self.plain.description.tools_run_together

    async def open(self, task: Task) -> Opening:
        await self.plain.make()
        self.task = task = task_of_its_own(task)
        description = self.plain.description
        try:
            first = await self.plain.call("reset", {"task": task})
        except InfraError:
            raise
        except Exception as error:  # any error in the class's code: an environment that was not reset is never played
            raise ResetFailed(f"{description.name}.reset failed: {with_place(error)}") from error
        messages = _messages_of(first, description.name)
        try:
            msgspec.json.encode(messages)
        except (TypeError, ValueError, RecursionError) as error:
            raise ResetFailed(
                f"{description.name}.reset returned messages that cannot be sent as JSON: {in_one_line(error)}"
            ) from error
        return Opening(messages=messages, tools=[tool.schema for tool in description.tools.values()])

    async def call(self, call: ToolCall) -> ToolOutcome:
        self.plain.check_alive()
        description = self.plain.description
        tool = description.tools.get(call.name)
        if tool is None:
            return ToolOutcome(text=_no_tool(call.name, list(description.tools)), failed=True)
        try:
            arguments = tool.read(call.arguments)
        except BadArguments as error:
            return ToolOutcome(text=f"the arguments are wrong: {error}", failed=True)
        try:
            work = self.plain.call(tool.name, arguments, together=description.tools_run_together)
            if not self._is_served:
                work = contained(work, partial(self.plain.give_up, tool.name))
            result = await work
            return ToolOutcome(text=text_of(result))
        except InfraError as error:
            error.attribute_to(FailureKind.TOOL)
            raise
        except Exception as error:  # any error in the tool's own code is shown to the model, which continues
            return ToolOutcome(text=in_one_line(error), failed=True)

    async def is_over(self, transcript: Transcript) -> bool:
        self.plain.check_alive()
        values = {"task": self.task, "transcript": transcript}
        for method in self.plain.description.stops:
            if await self.plain.tells(method, values):
                return True
        return False

    async def score(self, transcript: Transcript) -> RolloutScores:
        values = {"task": self.task, "transcript": transcript}
        description = self.plain.description
        rewards = {one.name: await self._number(one, values) for one in description.rewards}
        metrics = await metrics_of(description.metrics, lambda one: self._number(one, values))
        achieved = description.success
        return RolloutScores(
            reward=sum(one.mark.weight * rewards[one.name] for one in description.rewards),
            rewards=rewards,
            metrics=metrics,
            is_success=await self.plain.tells(achieved, values) if achieved is not None else None,
        )

    async def _number(self, method: MarkedMethod, values: Mapping[str, object]) -> float:
        found = await self.plain.asked(method, values)
        return number_of(found, f"{self.plain.description.name}.{method.name}")

    async def close(self) -> None:
        await self.plain.close()


def _failure_of(method: MarkedMethod) -> FailureKind:
    return FailureKind.ENVIRONMENT if method.mark.kind == MethodKind.STOP else FailureKind.GRADER


def _has_close(instance: object) -> bool:
    return inspect.isfunction(inspect.getattr_static(type(instance), "close", None))


async def metrics_of(
    methods: Sequence[MarkedMethod], ask: Callable[[MarkedMethod], Awaitable[float]]
) -> dict[str, float]:
    """Return the values of metrics. A metric that fails is left out with a warning, since nothing depends on it."""
    found: dict[str, float] = {}
    for method in methods:
        try:
            found[method.name] = await ask(method)
        except MethodFailed as error:
            log.warning("a metric was left out: %s", error)
    return found


def number_of(value: object, where: str) -> float:
    """Return a method's result as a number. Raises `MethodFailed` if it is not a finite number."""
    try:
        found = episodes.reward_number(value)
    except ValueError as error:
        raise MethodFailed(f"{where} did not return a number: {error}") from error
    if not math.isfinite(found):
        raise MethodFailed(f"{where} returned {found}, which is not a finite number")
    return found


def _shown(value: object) -> str:
    try:
        return repr(value)[:REPR_CHARACTERS]
    except Exception:  # any error in the class's own code: the type's name will do instead
        return f"a value of type {type(value).__name__}"


def _messages_of(first: object, name: str) -> list[MessageDict]:
    if isinstance(first, str):
        return [{"role": "user", "content": without_surrogates(first)}]
    if isinstance(first, Sequence) and first and all(isinstance(each, Mapping) and "role" in each for each in first):
        return [_readable(each) for each in first]
    raise ResetFailed(
        f"{name}.reset returned {type(first).__name__}: it must return the first message as text, or a list of "
        "messages that have a role"
    )


def _readable(message: Mapping[str, Any]) -> MessageDict:
    return {key: without_surrogates(value) if isinstance(value, str) else value for key, value in message.items()}


def _no_tool(name: str, tools: list[str]) -> str:
    if not tools:
        return f"there is no tool {name!r}: this environment has no tools"
    more = f", and {len(tools) - TOOLS_NAMED} more" if len(tools) > TOOLS_NAMED else ""
    return f"there is no tool {name!r}: the tools are {', '.join(tools[:TOOLS_NAMED])}{more}"
