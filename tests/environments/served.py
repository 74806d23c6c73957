"""Environment servers for tests: in this process, and as a process that can be killed and stopped."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from bombus.environments.serving.server import EnvironmentServer, environment_server
from bombus.environments.serving.settings import ServerSettings
from bombus.environments.serving.sources import ClassSource
from bombus.host.host_names import OwnHostNames
from bombus.host.process import listen
from tests.environments.worlds import Counter


@contextlib.asynccontextmanager
async def served(
    make: Callable[..., Any] = Counter, pages: dict[str, tuple[str, bytes]] | None = None, **settings: Any
) -> AsyncIterator[tuple[EnvironmentServer, str]]:
    """Serve a class in this process. Yields the server and its URL."""
    bound = listen("127.0.0.1", 0)
    names = OwnHostNames("127.0.0.1")
    server = EnvironmentServer(ServerSettings(**settings), ClassSource(make), names, pages)
    async with environment_server(server, bound):
        yield server, f"http://127.0.0.1:{bound.getsockname()[1]}"
