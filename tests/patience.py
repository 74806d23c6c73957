"""How tests wait for what will surely come."""

import asyncio
from collections.abc import Callable

# Ends the wait of a test that fails. The machines that run the tests may stand still for several seconds.
PATIENCE_S = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Wait until `holds` is true, while other tasks and processes run."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)
