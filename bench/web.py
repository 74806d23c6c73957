"""What the page in the browser costs: a log of many events, read, shown and scrubbed over HTTP, and memory and CPU.

python -m bench.web [--events 1000000] [--positions 60]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from random import Random

import httpx
import psutil
from tests.insight.long_log import story_events, write_archive

from bombus.commands.web import SEEN_AT

POLL_S = 0.5
READING = "Reading the log"


def timed(client: httpx.Client, path: str) -> tuple[float, httpx.Response]:
    """Return how many milliseconds an answer took, and the answer."""
    began = time.perf_counter()
    answer = client.get(path)
    return (time.perf_counter() - began) * 1e3, answer.raise_for_status()


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
            for path in ("/run/main-1", "/run/main-1", "/run/main-1/points.json"):
                took_ms, answer = timed(client, path)
                print(f"{path}: {took_ms:.0f} ms, {len(answer.content):,} bytes")
            chance, began = Random(2), cpu_s()
            took = [timed(client, f"/?at={chance.randint(1, events)}")[0] for _ in range(positions)]
            print(
                f"{positions} random positions: median {statistics.median(took):.0f} ms, at most {max(took):.0f} ms, "
                f"{(cpu_s() - began) * 1e3 / positions:.0f} ms of CPU each, {memory()}"
            )
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--positions", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "long.bombuslog"
        write_archive(archive, list(islice(story_events(10**6), given.events)))
        measure(archive, given.events, given.positions)


if __name__ == "__main__":
    main()
