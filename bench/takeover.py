"""How long no command is decided when a leader dies: from the signal until a standby answers a command.

python -m bench.takeover [--times 10]
"""

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bombus.bus import Bus, EmbeddedServer
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection

NAMES = ("a", "b", "c")


async def start(url: str, name: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "bombus", "coordinator", "--nats", url, "--hive", "bench", "--name", name]
    return await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)


async def leader(bus: Bus) -> str:
    """Return the leader that opened the newest epoch."""
    subject = bus.subjects.event(ev.HIVE, "epoch.opened")
    while (stored := await bus.last(bus.subjects.events_stream, subject)) is None:
        await asyncio.sleep(0.05)
    event = ev.decode_event(stored.data)
    assert isinstance(event, ev.EpochOpened)
    return event.leader


async def answered(bus: Bus, number: int) -> None:
    rules = Collection()
    await bus.inbox.request(
        inbox.Configure(
            id=f"configure-{number}", engine="main", config="{}", config_digest="d", collection=rules, model="tiny"
        ),
        timeout_s=60,
    )


async def measure(bus: Bus, url: str, children: dict[str, asyncio.subprocess.Process], how: int, times: int) -> None:
    seconds = []
    for number in range(times):
        await answered(bus, time.monotonic_ns())
        first = await leader(bus)
        began = time.perf_counter()
        children[first].send_signal(how)
        await answered(bus, time.monotonic_ns())
        seconds.append(time.perf_counter() - began)
        assert await leader(bus) != first
        if how == signal.SIGSTOP:
            children[first].send_signal(signal.SIGCONT)
        else:
            await children.pop(first).wait()
            name = f"{signal.Signals(how).name}-{number}".lower()  # a new name: under its old one it would lead at once
            children[name] = await start(url, name)
        await asyncio.sleep(1.5)  # until all of them stand by again
    print(
        f"{signal.Signals(how).name:8} median {statistics.median(seconds):.2f} s, least {min(seconds):.2f} s, "
        f"most {max(seconds):.2f} s, of {times}"
    )


async def main(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        await asyncio.to_thread(server.start)
        children = {name: await start(server.url, name) for name in NAMES}
        try:
            async with await Bus.connect(server.url, "bench") as bus:
                for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
                    await measure(bus, server.url, children, how, times)
        finally:
            for child in children.values():
                child.kill()
                await child.wait()
            await asyncio.to_thread(server.stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    asyncio.run(main(parser.parse_args().times))
