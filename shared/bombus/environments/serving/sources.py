"""Where the worlds of a server come from: a class, and the backends that its instances stand on."""

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from bombus.environments.backends.pool import BackendPool
from bombus.environments.kinds import AgentEnvironment
from bombus.errors import Code, Refused, in_one_line

METHODS = ("open", "call", "is_over", "score", "close")


class ClassSource:
    """Makes an instance of a class for each session.

    A class whose `__init__` has a parameter `backend` is given one of the pool, which is the session's until its end.
    """

    def __init__(self, make: Callable[..., AgentEnvironment], backends: BackendPool | None = None) -> None:
        self._make = make
        self._takes_backend = "backend" in inspect.signature(make).parameters
        self._backends = backends if self._takes_backend else None
        self.exhausted = self._backends.exhausted if self._backends is not None else "Environment pool exhausted"

    async def make(self, session: str) -> AgentEnvironment:
        """Return a new world for a session. Raises `InfraError`, and what the class raises."""
        if self._backends is None:
            # A class may take its time: the other sessions go on meanwhile.
            return await asyncio.to_thread(self._make, **({"backend": None} if self._takes_backend else {}))
        backend = await self._backends.take(session)
        return await asyncio.to_thread(self._make, backend=backend)

    async def renew(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.renew(session)

    async def clean(self, session: str) -> None:
        if self._backends is not None:
            await self._backends.give_back(session)

    def schema(self) -> dict[str, object]:
        """Return what actions, observations and states look like. The tools of a world are known after its reset."""
        text = {"type": "string"}
        tool = {"tool": text, "arguments": {"type": "object"}}
        return {
            "action": {
                "oneOf": [
                    {"type": "object", "properties": tool, "required": ["tool"], "additionalProperties": False},
                    {"type": "object", "properties": {"message": text}, "required": ["message"]},
                ]
            },
            "observation": {
                "type": "object",
                "properties": {
                    "messages": {"type": "array", "items": {"type": "object"}},
                    "tools": {"type": "array", "items": {"type": "object"}},
                    "text": text,
                    "failed": {"type": "boolean"},
                },
            },
            "state": {
                "type": "object",
                "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
            },
        }


def load_class(path: str) -> Any:
    """Return what `module:Class` names; modules in the current folder are found. Raises `Refused`."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise Refused(Code.BAD_CONFIG, f"{path!r} does not name a class: write module:Class, as worlds:Counter is")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # the module is its author's: whatever it raises is told to whoever named it
        raise Refused(Code.BAD_CONFIG, f"{module_name} cannot be imported: {in_one_line(error)}") from error
    if not callable(found):
        raise Refused(Code.BAD_CONFIG, f"{module_name} has no class {name!r}")
    return found


def is_environment(made: Any) -> bool:
    """Return whether a class is an `AgentEnvironment` as it stands."""
    return all(inspect.iscoroutinefunction(getattr(made, name, None)) for name in METHODS)
