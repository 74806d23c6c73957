"""A server by OpenEnv's own code: `openenv_server.py PORT CAP TIMEOUT_S KIND`.

KIND is `counter`, an environment that counts what it is told, `mcp`, one with tools of MCP, `both`, one with such tools
whose actions do not call them, or `union`, one that tells its tools and calls them by two kinds of actions, without
MCP.
"""

import itertools
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from pydantic import TypeAdapter

_made = itertools.count(1)


class Add(Action):
    amount: int = 1
    nap_s: float = 0


class Count(Observation):
    environment: int = 0
    count: int = 0
    was_reset: bool = False
    was_closed: bool = False


class CounterEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.count, self.was_reset, self.was_closed = next(_made), 0, False, False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Count:
        if seed == 13:
            raise ValueError("there is no such environment")
        self.count, self.was_reset = seed or 0, True
        return self._seen(None)

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Count:
        time.sleep(action.nap_s)
        self.count += action.amount
        return self._seen(float(action.amount))

    def _seen(self, reward: float | None) -> Count:
        return Count(
            environment=self.number,
            count=self.count,
            was_reset=self.was_reset,
            was_closed=self.was_closed,
            reward=reward,
            done=self.count >= 3,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.count)

    def close(self) -> None:
        self.was_closed = True


class ToolEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def greet(name: str) -> str:
            """Greets somebody by name."""
            return f"hello {name}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(done=False)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("there are only tools")

    @property
    def state(self) -> State:
        return State()


class LookingEnvironment(ToolEnvironment):
    """Has tools, and actions of its own."""

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Count(count=1, reward=1.0, done=True)


Either = TypeAdapter(ListToolsAction | CallToolAction)


class EitherAction(Action):
    """One of two kinds of actions, as in the environment of OpenEnv's that plays the Agent World Model."""

    @classmethod
    def model_validate(cls, found: Any, **kwargs: Any) -> Any:
        return Either.validate_python(found)

    @classmethod
    def model_json_schema(cls, **kwargs: Any) -> dict[str, Any]:
        return Either.json_schema(**kwargs)


class UnionEnvironment(CounterEnvironment):
    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[Tool(name="add", description="Adds.", input_schema={"type": "object"})])
        return super().step(Add(**action.arguments))


def main(port: int, cap: int, timeout_s: float, kind: str) -> None:
    limits = ConcurrencyConfig(max_concurrent_envs=cap, session_timeout=timeout_s or None)
    environment, action, observation = {
        "mcp": (ToolEnvironment, CallToolAction, CallToolObservation),
        "both": (LookingEnvironment, Add, Count),
        "union": (UnionEnvironment, EitherAction, Count),
    }.get(kind, (CounterEnvironment, Add, Count))
    app = create_app(environment, action, observation, kind, concurrency_config=limits)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
