"""What rollout groups cost at the API of a whole hive, with the log, and in Atropos's own server.

    python -m bench.atropos_api [--atropos PYTHON] [--queued 100 10000 100000]

Ours is `bombus run-api`: a gateway, a coordinator and a nats-server, whose CPU seconds are all counted, and whose
answer comes once the groups are on disk. Atropos's server is one process, and keeps them in memory. First the CPU time
of a POST, then the memory that queued groups take, and then `GET /batch` from queues of several lengths: how long it
takes, and how long another client, a process of its own that asks for `/info` all the while, waits at most.
"""

import argparse
import gzip
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import httpx
import psutil

from bench.atropos_wire import ATROPOS, SEQUENCES, TRAINER, rollout_group
from bench.processes import cpu_s
from bombus.machine.process import free_port

BATCH = 256  # sequences
TAKEN_MAX = 50  # batches of each queue
LISTED = 1000  # groups of one request, of those that fill a long queue
SHORT = 16  # tokens of a sequence of these
ROUNDS = 3
OURS, THEIRS = "ours", "Atropos"

Cost = dict[str, float]  # of each process, by its name


class Server:
    """A running server, whose processes are `pids`."""

    def __init__(self, port: int, pids: dict[str, int]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pids = pids
        self.client = httpx.Client(base_url=self.url, timeout=1800)

    def ask(self, method: str, path: str, content: bytes = b"", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.client.request(
            method, path, content=content, headers={"content-type": "application/json"} | named
        )
        answer.raise_for_status()
        return answer

    def push(self, bodies: list[bytes], **headers: str) -> None:
        for body in bodies:
            self.ask("POST", "/scored_data", body, **headers)

    def register(self) -> None:
        """Begin a run with an empty queue, and ask for its first batch."""
        self.ask("GET", "/reset_data")
        self.ask("POST", "/register", json.dumps(TRAINER | {"batch_size": BATCH}).encode())
        self.ask("GET", "/batch")

    def cpu_ms(self, do: Callable[[], object]) -> Cost:
        """Return the CPU time that each process takes while something is done."""
        before = {name: cpu_s(pid) for name, pid in self.pids.items()}
        do()
        return {name: (cpu_s(pid) - before[name]) * 1000 for name, pid in self.pids.items()}

    def memory(self) -> Cost:
        """Return the bytes that each process keeps for itself: what it maps of files can be dropped at any time."""
        return {name: float(psutil.Process(pid).memory_full_info().uss) for name, pid in self.pids.items()}


@contextmanager
def ours(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "bombus", "run-api", "--port", str(port), "--data-dir", str(folder)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        assert any(line.startswith("ready ") for line in running.stdout), "the hive has not started"
        children = psutil.Process(running.pid).children()
        pids = {name: each.pid for each in children for name in ("gateway", "coordinator") if name in each.cmdline()}
        nats = next(each.pid for each in children if each.cmdline()[0].endswith("nats-server"))
        yield Server(port, pids | {"nats-server": nats})
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)


@contextmanager
def theirs(python: Path) -> Iterator[Server]:
    port = free_port()
    command = [str(python), "-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "error", "--port", str(port)]
    running = subprocess.Popen(command)
    try:
        until_it_listens = httpx.HTTPTransport(retries=7)  # with pauses that double, a minute in all
        with httpx.Client(transport=until_it_listens) as client:
            client.get(f"http://127.0.0.1:{port}/")
        yield Server(port, {"server": running.pid})
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def other_client(server: Server) -> Iterator[Callable[[], float]]:
    """Let a process of its own ask for `/info` all the while. Yields what gives the longest wait so far, in seconds."""
    command = [sys.executable, "-m", "bench.atropos_api", "--ask", server.url]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdin is not None
    assert asking.stdout is not None
    told, tell = asking.stdout, asking.stdin

    def longest() -> float:
        tell.write("\n")
        tell.flush()
        return float(told.readline())

    try:
        longest()  # it asks now
        yield longest
    finally:
        tell.close()
        asking.wait(1800)


def ask_all_the_while(url: str) -> None:
    """Ask for `/info` every 5 ms; print the longest wait since the last line, for each line of the standard input."""
    longest = 0.0
    began = 0.0

    def answer() -> None:
        nonlocal longest
        for _ in sys.stdin:
            print(max(longest, time.perf_counter() - began if began else 0.0), flush=True)
            longest = 0.0

    listener = threading.Thread(target=answer)
    with httpx.Client(base_url=url, timeout=1800) as client:
        client.get("/info")
        listener.start()
        while listener.is_alive():
            began = time.perf_counter()
            client.get("/info").raise_for_status()
            longest, began = max(longest, time.perf_counter() - began), 0.0
            time.sleep(0.005)


def bodies(tokens: int, count: int) -> list[bytes]:
    """Return groups that differ, since the same bytes within a minute are one push."""
    before, after = rollout_group(tokens).split(b'"scores": [')
    return [b'%s"scores": [%d.5, %s' % (before, number, after.partition(b", ")[2]) for number in range(count)]


def push_costs(server: Server, tokens: int) -> dict[str, Cost]:
    """Return the CPU ms of a POST, plain and compressed: medians of some rounds."""
    times = max(2**17 // tokens, 64)
    made = bodies(tokens, times * ROUNDS)
    packed = [gzip.compress(body) for body in made]
    found: dict[str, list[Cost]] = {}
    for start in range(0, len(made), times):
        for name, sent, headers in (("POST", made, {}), ("POST, gzip", packed, {"content_encoding": "gzip"})):
            server.register()
            cost = server.cpu_ms(partial(server.push, sent[start : start + times], **headers))
            found.setdefault(name, []).append({part: spent / times for part, spent in cost.items()})
    return {name: {part: median(each[part] for each in costs) for part in costs[0]} for name, costs in found.items()}


def memory_per_token(server: Server, tokens: int, groups: int) -> Cost:
    """Return the bytes of memory that each process takes for a queued token."""
    server.register()
    made = bodies(tokens, groups + 64)
    server.push(made[:64])
    before = server.memory()
    server.push(made[64:])
    after = server.memory()
    return {name: (after[name] - before[name]) / (groups * SEQUENCES * tokens) for name in after}


def fill(server: Server, queued: int) -> None:
    """Queue short groups, many in a request."""
    server.register()
    chance = random.Random(queued)
    row = [chance.randrange(128_000) for _ in range(SHORT)]
    logprobs = [-chance.random() for _ in range(SHORT)]
    for start in range(0, queued, LISTED):
        groups = [
            {
                "tokens": [row] * SEQUENCES,
                "masks": [row] * SEQUENCES,
                "inference_logprobs": [logprobs] * SEQUENCES,
                "scores": [number + 0.5] * SEQUENCES,
            }
            for number in range(start, min(start + LISTED, queued))
        ]
        server.ask("POST", "/scored_data_list", json.dumps(groups).encode())


def batch_times(server: Server, queued: int) -> Cost:
    """Return milliseconds: p50 and p99 of `GET /batch`, the first of them, and how long another client waits."""
    fill(server, queued)
    took: list[float] = []
    with other_client(server) as longest:
        for _ in range(min(TAKEN_MAX, queued * SEQUENCES // BATCH)):
            began = time.perf_counter()
            answer = server.ask("GET", "/batch", accept_encoding="identity")
            took.append((time.perf_counter() - began) * 1000)
            assert len(answer.json()["batch"]) == BATCH // SEQUENCES
        waited = longest() * 1000
    p99 = quantiles(took, n=100, method="inclusive")[98] if len(took) > 1 else took[0]
    return {"p50": median(took), "p99": p99, "first": took[0], "another client": waited}


def told(name: str, cost: Cost) -> str:
    parts = ", ".join(f"{part} {value:.2f}" for part, value in cost.items())
    return f"  {name:34} {sum(cost.values()):9.2f}   ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.atropos_api", description=__doc__)
    parser.add_argument("--atropos", type=Path, default=ATROPOS, metavar="PYTHON", help="one that has atroposlib")
    parser.add_argument("--queued", type=int, nargs="*", default=[100, 10_000, 100_000], metavar="GROUPS")
    parser.add_argument("--of-atropos", type=int, nargs="*", metavar="GROUPS", help="queues there (default: the same)")
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask is not None:
        ask_all_the_while(given.ask)
        return
    with tempfile.TemporaryDirectory() as folder:
        queues = {OURS: given.queued, THEIRS: given.queued if given.of_atropos is None else given.of_atropos}
        for side, server in ((OURS, ours(Path(folder))), (THEIRS, theirs(given.atropos))):
            if side == THEIRS and not given.atropos.exists():
                continue
            with server as running:
                print(f"\n{side}", flush=True)
                for tokens in (2048, 256):
                    for name, cost in push_costs(running, tokens).items():
                        print(told(f"{name}, {SEQUENCES} x {tokens}: ms of CPU", cost), flush=True)
                print(told("bytes for a queued token", memory_per_token(running, 2048, 500)), flush=True)
                for queued in queues[side]:
                    times = batch_times(running, queued)
                    parts = ", ".join(f"{part} {value:.1f}" for part, value in times.items())
                    print(f"  GET /batch of {queued} groups, ms: {parts}", flush=True)


if __name__ == "__main__":
    main()
