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


STOPS_SLOWLY = """
import asyncio, sys
from bombus.machine import process

process.THREADS_S = 0.1

async def main():
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("stopping", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("stopped", flush=True)

sys.exit(process.run_service(main()))
"""


@pytest.mark.parametrize(
    ("again", "last"), [(signal.SIGTERM, b"stopped\n"), (signal.SIGINT, b"")], ids=["SIGTERM", "Ctrl-C"]
)
async def test_a_second_sigterm_does_not_cut_an_orderly_stop_short_but_a_second_ctrl_c_does(
    again: signal.Signals, last: bytes
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOPS_SLOWLY, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"stopping\n"
            process.send_signal(again)
            if again == signal.SIGTERM:
                process.stdin.write(b"go on\n")
            assert await process.stdout.readline() == last
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
