"""Where the worlds of a server come from: a class, and the backends that its instances stand on."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bombus.environments.backends.pool import BackendPool
from bombus.environments.kinds import AgentEnvironment, ToolSchema
from bombus.environments.plain.description import WrongClass, describe
from bombus.environments.plain.environment import PlainEnvironment
from bombus.errors import Code, Refused

METHODS = ("open", "call", "is_over", "score", "close")


class ClassSource:
    """Makes an instance of a class for each session: a plain class, or one that is an `AgentEnvironment` as it stands.

    A class whose `__init__` has a parameter `backend` is given one of the pool, which is the session's until its end.
    """

    def __init__(self, kind: Callable[..., Any], backends: BackendPool | None = None) -> None:
        """Raises `Refused` for a class that is not an environment, or cannot be played through a server."""
        self._kind = kind
        self._takes_backend = "backend" in inspect.signature(kind).parameters
        self._backends = backends if self._takes_backend else None
        self._is_plain = not is_environment(kind)
        self._tools = _tools_of(kind, self._takes_backend) if self._is_plain else ()
        self.exhausted = self._backends.exhausted if self._backends is not None else "Environment pool exhausted"

    async def make(self, session: str) -> AgentEnvironment:
        """Return a new world for a session. Raises `InfraError`, and what the class raises."""
        given: dict[str, object] = {}
        if self._takes_backend:
            given["backend"] = await self._backends.take(session) if self._backends is not None else None
        made = partial(self._kind, **given)
        if not self._is_plain:
            found: AgentEnvironment = await asyncio.to_thread(made)  # it may take its time: other sessions go on
            return found
        world = PlainEnvironment(made)
        await world.world.make()
        return world

    async def renew(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.renew(session)

    async def check(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.check(session)

    async def clean(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.give_back(session)

    def tools(self) -> Sequence[ToolSchema]:
        """Return the tools that are known before a reset: those of a plain class."""
        return self._tools

    def schema(self) -> dict[str, object]:
        """Return what actions, observations and states look like.

        The tools of a class that is no plain one are known only after a reset.
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


def _action(properties: dict[str, object], required: str) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}


def _tools_of(kind: Callable[..., Any], takes_backend: bool) -> tuple[ToolSchema, ...]:
    """Return the tools of a plain class. Raises `Refused`."""
    if not inspect.isclass(kind):
        raise Refused(Code.BAD_CONFIG, f"{kind!r} is not a class: name a class, of which each session gets an instance")
    try:
        description = describe(kind, is_made=takes_backend)
    except WrongClass as error:
        raise Refused(Code.BAD_CONFIG, str(error)) from error
    if description.plays:
        why = "it has `play`, and asks models itself: play it with `Rollout` where the models are, without a server"
        raise Refused(Code.BAD_CONFIG, f"{description.name} cannot be served: {why}")
    return tuple(tool.schema for tool in description.tools.values())


def is_environment(made: Any) -> bool:
    """Return whether a class is an `AgentEnvironment` as it stands."""
    return all(inspect.iscoroutinefunction(getattr(made, name, None)) for name in METHODS)
