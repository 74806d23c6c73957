"""A service as a process: it ends at a signal, whatever other code in it does."""

import asyncio
import signal
import sys

import pytest

from tests.patience import PATIENCE_S

# Serves with somebody's coroutine beside it, and has shorter limits.
SERVICE = """
import asyncio, sys, time
from bombus import task_groups
from bombus.machine import process

task_groups.LEFT_S = process.THREADS_S = 0.1

async def swallows():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def hangs_in_a_thread():
    await asyncio.to_thread(time.sleep, 3600)

async def main():
    beside = asyncio.create_task(eval(sys.argv[1]))
    await asyncio.sleep(0)
    print("ready", flush=True)
    await asyncio.Event().wait()

sys.exit(process.run_service(main()))
"""


@pytest.mark.parametrize("beside", ["swallows()", "hangs_in_a_thread()"])
async def test_a_service_ends_at_a_signal_whatever_other_code_makes_of_its_cancellation(beside: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, beside, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
