"""Both pools behind one face, so that one suite holds for either."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.pools.blocking import EnvPool


class InThread:
    """An `EnvPool`, whose methods are called in a thread, as the program without a loop would."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pool, name)

        async def called(*arguments: Any, **named: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **named)

        return called if callable(method) and name != "record_group_result" else method


MakePool = Callable[..., Any]
POOLS: dict[str, MakePool] = {
    "async": AsyncEnvPool,
    "blocking": lambda *given, **named: InThread(EnvPool(*given, **named)),
}


@contextlib.asynccontextmanager
async def opened(make: MakePool, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
    pool = make(*arguments, **named)
    await pool.connect()
    try:
        yield pool
    finally:
        await pool.close()
