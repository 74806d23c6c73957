"""How tests wait for what will surely come."""

import asyncio
import time
from collections.abc import Callable

# Ends the wait of a test that fails. The machines that run the tests may stand still for several seconds.
PATIENCE_S = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Wait until `holds` is true, while other tasks and processes run."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Wait until `holds` is true, in a thread without a loop. Raises `TimeoutError` after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"this did not become true in {limit_s:.0f} s")
        time.sleep(0.05)
