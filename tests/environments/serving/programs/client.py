"""A client for tests: opens a pool, says `open`, and then steps whenever a line comes. It says how that went."""

import asyncio
import sys

from bombus.environments.openenv.messages import StepResult
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.sdk.types import Task


async def main(url: str, size: int) -> None:
    async with AsyncEnvPool(url, size, group_size=size) as pool:
        await pool.reset_group(Task(main_query="three"))
        print("open", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            outcomes = await pool.run_group_step([{"tool": "add"}] * size)
            told = [each.observation["text"] if isinstance(each, StepResult) else repr(each) for each in outcomes]
            print(" | ".join(told), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
