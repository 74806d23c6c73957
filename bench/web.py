"""What the page in the browser costs: a log of many events, read, shown and scrubbed over HTTP, and memory and CPU.

python -m bench.web [--events 1000000] [--positions 60]
python -m bench.web --beside-hive 30 --events 60000 [--rate 10000]

The second one plays the tiny task in a real hive for half a minute, with a page open, and compares the CPU of the page
with that of all other processes of the hive, for each event. Then the page follows a bus of its own, to which
events of a made-up run are written at a constant rate.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random

import httpx
import psutil
from tests.insight.long_log import story_events, write_archive

from bench.episodes import RATE, REPEAT, TASKS
from bench.processes import cpu_ns, process_of
from bombus import AsyncSwarmClient
from bombus.bus import Bus, EmbeddedServer
from bombus.commands.demo import tiny_job
from bombus.commands.web import SEEN_AT
from bombus.config.streams import StreamLimits
from bombus.demo import hive
from bombus.demo.games import Letters
from bombus.demo.player import Player
from bombus.demo.training import Training, TrainingPlan, Watcher
from bombus.hive.events import Event, encode_event, kind_of
from bombus.replay.opening import arguments_for, open_source

POLL_S = 0.5
PORTION = 500  # events that are written at once
READING = "Reading the log"


def timed(client: httpx.Client, path: str) -> tuple[float, httpx.Response]:
    """Return how many milliseconds an answer took, and the answer."""
    began = time.perf_counter()
    answer = client.get(path)
    return (time.perf_counter() - began) * 1e3, answer.raise_for_status()


def story(events: int) -> list[Event]:
    return list(islice(story_events(10**6), events))


def measure(archive: Path, events: int, positions: int) -> None:
    command = [sys.executable, "-m", "bombus", "web", "--log", str(archive), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix(SEEN_AT).strip()
        server = psutil.Process(process.pid)

        def cpu_s() -> float:
            return sum(server.cpu_times()[:2])

        def memory() -> str:
            return f"{server.memory_info().rss / 2**20:.0f} MB"

        with httpx.Client(base_url=address, timeout=300) as client:
            print(f"idle: {memory()}, {cpu_s():.1f} s of CPU")
            first_ms, answer = timed(client, "/")
            worst_ms, began = first_ms, cpu_s()
            while READING in answer.text:
                time.sleep(POLL_S)
                took_ms, answer = timed(client, "/")
                worst_ms = max(worst_ms, took_ms)
            print(f"first answer: {first_ms:.0f} ms; the slowest while the log was read: {worst_ms:.0f} ms")
            print(f"{events:,} events read: {cpu_s() - began:.1f} s of CPU, {memory()}")
            for path in ("/run/main-1", "/run/main-1", "/runs/points.json?run=main-1"):
                took_ms, answer = timed(client, path)
                print(f"{path}: {took_ms:.0f} ms, {len(answer.content):,} bytes")
            chance, began = Random(2), cpu_s()
            took = [timed(client, f"/?at={chance.randint(1, events)}")[0] for _ in range(positions)]
            print(
                f"{positions} random positions: median {statistics.median(took):.0f} ms, at most {max(took):.0f} ms, "
                f"{(cpu_s() - began) * 1e3 / positions:.0f} ms of CPU each, {memory()}"
            )
        process.terminate()


# ---- beside a running hive ------------------------------------------------------------------------------------------


@asynccontextmanager
async def looking(address: str, path: str) -> AsyncIterator[None]:
    """Do what an open page does: listen to changes, and load the page again after each."""

    async def look() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            await client.get(path)
            async with client.stream("GET", "/events") as told:
                async for line in told.aiter_lines():
                    if line.startswith("data: "):
                        await client.get(path)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def family_ns(pid: int) -> dict[int, int]:
    """Return the CPU time of a process and of all its descendants, in nanoseconds."""
    return {
        each: cpu_ns(each) for each in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    }


async def beside_hive(seconds: float, path: str) -> None:
    """Print the CPU of a hive and of its page for each event."""
    plan = TrainingPlan(batch_size=TASKS, num_repeat=REPEAT, train_s=seconds, measure=False)
    with tempfile.TemporaryDirectory() as folder:
        async with hive.running(Path(folder), threads=1) as url, AsyncSwarmClient(url) as client:
            page = process_of(os.getpid(), "web")
            port = next(each.laddr.port for each in psutil.Process(page).net_connections() if each.status == "LISTEN")
            up = psutil.Process(page).ppid()
            await client.auto_sync_train_config_and_start_engine(tiny_job(plan, RATE))
            player = Player(client, Letters())
            data = arguments_for(str(Path(folder) / "hive"))
            async with looking(f"http://127.0.0.1:{port}", path), open_source(data) as source:
                await asyncio.sleep(1)
                first, began, ran = (await source.end()).seq, time.monotonic(), family_ns(up)
                await Training(player, plan, Watcher(), time.monotonic()).run()
                after, took_s = family_ns(up), time.monotonic() - began
            await player.close()
            async with open_source(data) as source:
                events = (await source.end()).seq - first
    used = {pid: (each - ran.get(pid, 0)) / 1e3 / events for pid, each in after.items()}
    whole = sum(used.values()) - used[page]
    print(f"a hive that plays the tiny task, {events / took_s:,.0f} events/s, {path} open, {events:,} events")
    print(
        f"CPU for each: other processes {whole:.0f} us; the page {used[page]:.1f} us, {used[page] / whole:.1%} of that"
    )


async def at_rate(events: int, rate: int, path: str) -> None:
    """Print the CPU of a page that follows a bus to which so many events are written, `rate` of them a second."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder) / "nats")
        await asyncio.to_thread(server.start)
        async with await Bus.connect(server.url, "main", name="bench") as bus:
            await bus.ensure_streams(StreamLimits())
            command = [sys.executable, "-m", "bombus", "web", "--nats", server.url, "--port", "0"]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().removeprefix(SEEN_AT).strip()
            made = [(bus.subjects.event(each.engine, kind_of(each)), encode_event(each)) for each in story(events)]
            async with looking(address, path):
                await asyncio.sleep(2)
                began, ran = time.monotonic(), cpu_ns(process.pid)
                for first in range(0, events, PORTION):
                    part = list(enumerate(made[first : first + PORTION], first))
                    await asyncio.gather(
                        *(bus.publisher.publish(to, body, msg_id=str(number)) for number, (to, body) in part)
                    )
                    await asyncio.sleep(max(0.0, began + (first + PORTION) / rate - time.monotonic()))
                took_s = time.monotonic() - began
                await asyncio.sleep(2)
                used = cpu_ns(process.pid) - ran
            process.terminate()
            await process.wait()
        server.stop()
    print(
        f"{events:,} events at {events / took_s:,.0f} events/s, {path} open: {used / 1e3 / events:.1f} us of CPU for "
        f"each, {used / 1e9 / took_s:.0%} of a core"
    )


async def measure_following(seconds: float, events: int, rate: int) -> None:
    await beside_hive(seconds, "/")
    for path in ("/static/page.css", "/", "/run/main-1"):  # a style is not made again: what remains is the following
        await at_rate(events, rate, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--positions", type=int, default=60)
    parser.add_argument("--beside-hive", type=float, metavar="SECONDS")
    parser.add_argument("--rate", type=int, default=10_000)
    given = parser.parse_args()
    if given.beside_hive:
        asyncio.run(measure_following(given.beside_hive, given.events, given.rate))
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "long.bombuslog"
        write_archive(archive, story(given.events))
        measure(archive, given.events, given.positions)


if __name__ == "__main__":
    main()
