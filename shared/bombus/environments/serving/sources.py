"""The source of a server's environments: a class, and the backends that its instances run on."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bombus.environments.backends.kinds import RealBackend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.kinds import AgentEnvironment, ToolSchema, is_environment
from bombus.environments.plain.description import WrongClass, describe
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.instance_thread import in_a_thread
from bombus.errors import Code, Refused, in_one_line

log = logging.getLogger(__name__)


class ClassSource:
    """Makes an instance of a class for each session. The class is either a plain class or an `AgentEnvironment`.

    If the class's `__init__` has a parameter `backend`, that parameter gets either `REAL` or a backend from the pool.
    The backend belongs to the session until the session ends.
    """

    def __init__(self, kind: Callable[..., Any], backends: BackendPool | RealBackend | None = None) -> None:
        """Raise `Refused` for a class that is not an environment, or that cannot be played through a server."""
        self._kind = kind
        takes = inspect.signature(kind).parameters.get("backend")
        if takes is not None and takes.default is inspect.Parameter.empty and backends is None:
            why = f"{getattr(kind, '__name__', kind)} needs a backend: choose one with --backend"
            raise Refused(Code.BAD_CONFIG, why)
        self._real = backends if takes is not None and isinstance(backends, RealBackend) else None
        self._backends = backends if takes is not None and isinstance(backends, BackendPool) else None
        self._abandoned: set[asyncio.Task[None]] = set()  # tasks that are still making environments no longer awaited
        self._is_plain = not is_environment(kind)
        self._tools = _tools_of(kind, takes is not None) if self._is_plain else ()
        self.exhausted = self._backends.exhausted if self._backends is not None else "Environment pool exhausted"

    async def make(self, session: str, is_stopped: Callable[[], bool]) -> AgentEnvironment:
        """Return a new environment for a session. Raises `InfraError`, and any error that the class raises.

        If this is cancelled while the class makes an instance, the instance is closed as soon as it exists.
        """
        given: dict[str, object] = {}
        if self._backends is not None:
            given["backend"] = await self._backends.take(session)
        elif self._real is not None:
            given["backend"] = self._real
        making = asyncio.create_task(self._made(partial(self._kind, **given), is_stopped))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            abandoned = asyncio.create_task(_close_once_made(making))
            self._abandoned.add(abandoned)
            abandoned.add_done_callback(self._abandoned.discard)
            raise

    async def _made(self, make: Callable[[], Any], is_stopped: Callable[[], bool]) -> AgentEnvironment:
        """Make an instance in a thread, because that may take a while and other sessions must keep running."""
        if not self._is_plain:
            found: AgentEnvironment = await in_a_thread(make, "make")
            return found
        environment = PlainEnvironment(make, is_stopped)
        await environment.plain.make()
        return environment

    async def renew(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.renew(session)

    async def check(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.check(session)

    async def clean(self, session: str, in_use: bool) -> None:
        if self._backends is not None:
            await self._backends.give_back(session, in_use=in_use)

    def tools(self) -> Sequence[ToolSchema]:
        """Return the tools that are known before a reset. Only a plain class has such tools."""
        return self._tools

    def metadata(self) -> dict[str, str]:
        name = getattr(self._kind, "__name__", type(self._kind).__name__)
        return {"name": name, "description": inspect.getdoc(self._kind) or f"The environment {name}."}

    def schema(self) -> dict[str, object]:
        """Return the schemas of actions, observations and states.

        Unless the class is a plain one, its tools are known only after a reset.
        """
        text: dict[str, object] = {"type": "string"}
        free: dict[str, object] = {"type": "object"}
        calls = [
            _action({"tool": {"const": tool.name}, "arguments": tool.parameters}, "tool") for tool in self._tools
        ] or [_action({"tool": text, "arguments": free}, "tool")]
        seen = {name: {"type": "array", "items": free} for name in ("messages", "tools")}
        return {
            "action": {"oneOf": [*calls, _action({"message": text}, "message")]},
            "observation": {"type": "object", "properties": {**seen, "text": text, "failed": {"type": "boolean"}}},
            "state": {
                "type": "object",
                "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
            },
        }


async def _close_once_made(making: asyncio.Task[AgentEnvironment]) -> None:
    """Close an environment whose session ended before it was made."""
    try:
        await (await making).close()
    except Exception as error:  # raised by the class's own code, after its session has ended
        log.warning("an environment could not be created or closed after its session had ended: %s", in_one_line(error))


def _action(properties: dict[str, object], required: str) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}


def _tools_of(kind: Callable[..., Any], takes_backend: bool) -> tuple[ToolSchema, ...]:
    """Return the tools of a plain class. Raises `Refused`."""
    if not inspect.isclass(kind):
        raise Refused(Code.BAD_CONFIG, f"{kind!r} is not a class: name a class, so that each session gets an instance")
    try:
        description = describe(kind, is_made=takes_backend)
    except WrongClass as error:
        raise Refused(Code.BAD_CONFIG, str(error)) from error
    if description.plays:
        why = "it has `play`, and calls models itself: play it with `Rollout`, without a server"
        raise Refused(Code.BAD_CONFIG, f"{description.name} cannot be served: {why}")
    return tuple(tool.schema for tool in description.tools.values())
