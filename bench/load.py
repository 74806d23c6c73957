"""A hive under the load of thousands of agents: latency, errors, CPU for each call, memory and its slope, backlog.

    python -m bench.load --episodes 1000 --minutes 1
    python -m bench.load --episodes 4000 --pause-s 12 --minutes 60
    python -m bench.load --rate 50 --minutes 5              # open loop: so many episodes begin each second

One `bombus up` with the tiny model's text and its real trainer, and a scripted replica that answers each call with 64
tokens after 50 ms. An agent claims an episode, makes its calls with a pause before each, as for a tool, and reports a
reward. In the closed loop it then begins the next episode; in the open loop episodes begin at the given rate, whatever
becomes of the others. What an agent's own program costs is not counted.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.gateway import ANSWER, TOKENS, chat
from bench.processes import cpu_ns, process_of
from bench.scripted import scripted_replica
from bench.web import looking
from bombus import AsyncSwarmClient, Job, SwarmError, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.demo import hive
from bombus.hive.events import AnyEvent, BatchReady, EpisodeEnded
from bombus.machine.process import loop_factory

SERVICES = ("gateway", "coordinator", "trainer", "nats-server", "web")
SAMPLE_S = 5.0
SETTLE_S = 5.0  # before the first figure counts
IDLE_S = 600.0
REPEAT = 4
KEPT_S = 4.0  # a client does not use a connection again that was idle for longer
LENGTHS = {
    "max_prompt_length": 256, "max_response_length": 128, "max_response_length_in_one_turn": TOKENS,
    "max_model_len": 512, "max_env_worker": 100_000,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    episodes: int
    rate: float
    calls: int
    pause_s: float
    seconds: float
    engine_s: float
    gateways: int
    page: str


@dataclass
class Seen:
    """What agents have seen: seconds by what they waited for, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[str] = field(default_factory=Counter)
    open: int = 0
    open_most: int = 0

    @asynccontextmanager
    async def timed(self, what: str) -> AsyncIterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what].append(time.perf_counter() - began)


class Agents:
    """Plays episodes against a hive."""

    def __init__(self, client: AsyncSwarmClient, port: int, load: Load) -> None:
        self.seen = Seen()
        self._client = client
        self._port = port
        self._load = load
        self._random = random.Random(0)
        self._ended = count()

    async def run(self) -> None:
        """Play until cancelled."""
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            if not load.rate:
                for _ in range(load.episodes):
                    tasks.create_task(self._play_on())
                return
            while True:
                await asyncio.sleep(self._random.expovariate(load.rate))
                tasks.create_task(self._play())

    async def _play_on(self) -> None:
        await asyncio.sleep(self._random.uniform(0, self._load.pause_s))  # agents do not begin all at once
        while True:
            await self._play()

    async def _play(self) -> None:
        seen, client = self.seen, self._client
        try:
            async with seen.timed("claim"):
                uuid, credentials = await client.begin_episode(IDLE_S, max_wait_s=IDLE_S)
            seen.open += 1
            seen.open_most = max(seen.open, seen.open_most)
            try:
                await self._converse(credentials.api_key)
                task = Task(task_id=f"t{next(self._ended) // REPEAT}")
                output = WorkflowOutput(reward=self._random.random())
                async with seen.timed("end"):
                    await client.end_episode(task, uuid, output)
            finally:
                seen.open -= 1
        except (SwarmError, OSError, asyncio.IncompleteReadError) as error:
            seen.errors[f"{type(error).__name__}: {error}"[:90]] += 1
            await asyncio.sleep(1.0)

    async def _converse(self, key: str) -> None:
        connection = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            for _ in range(self._load.calls):
                pause_s = self._random.uniform(0, 2 * self._load.pause_s)
                await asyncio.sleep(pause_s)
                if pause_s > KEPT_S:
                    connection[1].close()
                    connection = await asyncio.open_connection("127.0.0.1", self._port)
                async with self.seen.timed("call"):
                    await _called(*connection, chat(key, stream=False))
        finally:
            connection[1].close()


async def _called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a request. Raises `OSError` if the answer is not 200."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(int(length.split(b":")[1]))
    if b" 200 " not in head[:20]:
        raise OSError(f"{head[9:12].decode()} {json.loads(body).get('error', {}).get('message', '')}")


class Hive:
    """Measures the processes of a hive that this process has started, and its log."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._processes: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in psutil.Process(os.getpid()).children(recursive=True):
            words = process.cmdline()
            for name in SERVICES:
                if name in words or words[0].endswith(name):
                    self._processes[name].append(process)
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)  # MB of the largest process, by second
        self.backlog = 0  # messages of the inbox that were not decided, at most
        self.sealed: list[float] = []  # seconds from the newest end before a batch to the batch
        self.steps = 0
        self.events = 0
        self._ended = 0
        self.follower = Follower(bus, self._on_event)

    def _on_event(self, _: int, event: AnyEvent) -> None:
        if isinstance(event, EpisodeEnded):
            self._ended = self.follower.stored_ns
        elif isinstance(event, BatchReady):
            self.sealed.append((self.follower.stored_ns - self._ended) / 1e9)

    def cpu_ms(self) -> dict[str, float]:
        return {name: sum(cpu_ns(each.pid) for each in found) / 1e6 for name, found in self._processes.items()}

    async def watch(self) -> None:
        """Note memory and backlog until cancelled."""
        while True:
            for name, found in self._processes.items():
                self.memory[name].append((time.monotonic(), max(each.memory_info().rss for each in found) / 1e6))
            newest = await self._bus.last(self._bus.subjects.events_stream)
            inbox = await self._bus.state(self._bus.subjects.inbox_stream)
            if newest is not None:
                self.backlog = max(self.backlog, inbox.last_seq - newest.answers.seq)
            await asyncio.sleep(SAMPLE_S)


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the second half of (second, value), for an hour."""
    half = points[len(points) // 2 :]
    mean_x, mean_y = (sum(each) / len(half) for each in zip(*half, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in half) / spread if spread else 0.0


def tell(agents: Agents, hive: Hive, spent_ms: dict[str, float], calls: int, seconds: float) -> None:
    seen = agents.seen
    print(f"{seen.open_most:,} episodes at once, {len(hive.sealed)} batches, {hive.steps} steps in {seconds:.0f} s")
    for what, found in sorted(seen.seconds.items()):
        if not found:  # none has come to its end
            continue
        ordered = sorted(found)
        p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        print(f"{what:6} {len(ordered) / seconds:7.1f} a second   p50 {p50:7.1f} ms   p99 {p99:8.1f} ms")
    print(f"errors {seen.errors.total()}")
    for error, times in seen.errors.most_common(5):
        print(f"  {times} x {error}")
    cpu = ", ".join(f"{name} {ms / calls:.2f}" for name, ms in spent_ms.items())
    print(f"CPU of a call with its share of claims, ends and steps: {sum(spent_ms.values()) / calls:.2f} ms ({cpu})")
    if page := spent_ms.get("web", 0.0):
        print(f"the page takes {page / (sum(spent_ms.values()) - page):.1%} of what the others do")
    print(f"{hive.events / seconds:,.0f} events a second")
    for name, points in hive.memory.items():
        print(f"memory {name:12} {points[-1][1]:6.0f} MB, {slope_per_hour(points):+7.1f} MB an hour in the second half")
    print(f"inbox: at most {hive.backlog} messages not decided")
    if hive.sealed:
        ordered = sorted(1e3 * each for each in hive.sealed)
        print(f"from the last reward to the batch: p50 {ordered[len(ordered) // 2]:.1f} ms, most {ordered[-1]:.1f} ms")


async def run(load: Load) -> None:
    with tempfile.TemporaryDirectory() as folder:
        running = hive.running(Path(folder), 1, more=("--gateways", str(load.gateways)))
        async with running as url, AsyncSwarmClient(url, verbose=False) as client:
            settings = {"rollout": LENGTHS, "collection": {"max_staleness": 32}, "trainer": {"checkpoint_every": 20}}
            await client.auto_sync_train_config_and_start_engine(
                Job(model="tiny", batch_size=64, num_repeat=REPEAT, bombus=settings)
            )
            nats = (Path(folder) / "hive/nats-url").read_text().strip()
            async with (
                await Bus.connect(nats, "main") as bus,
                scripted_replica(bus, "main", [ANSWER], delay_s=load.engine_s),
                watched(load.page),
            ):
                await measure(load, client, bus)


@asynccontextmanager
async def watched(path: str) -> AsyncIterator[None]:
    """Have a page of the hive open for the block, unless the path is ""."""
    if not path:
        yield
        return
    web = psutil.Process(process_of(os.getpid(), "web"))
    port = next(each.laddr.port for each in web.net_connections() if each.status == "LISTEN")
    async with looking(f"http://127.0.0.1:{port}", path):
        yield


async def measure(load: Load, client: AsyncSwarmClient, bus: Bus) -> None:
    agents, measured = Agents(client, urlsplit(client.server_url).port or 0, load), Hive(bus)
    following = asyncio.create_task(measured.follower.run())
    playing = asyncio.create_task(agents.run())
    await asyncio.sleep(SETTLE_S + 2 * load.pause_s)
    agents.seen.seconds.clear()
    agents.seen.errors.clear()
    measured.sealed.clear()
    first = measured.follower.position
    steps, before, began = measured.follower.hive.engine("main").step, measured.cpu_ms(), time.monotonic()
    watching = asyncio.create_task(measured.watch())
    await asyncio.wait({playing}, timeout=load.seconds)
    seconds, after = time.monotonic() - began, measured.cpu_ms()
    measured.events = measured.follower.position - first
    measured.steps = measured.follower.hive.engine("main").step - steps
    calls = len(agents.seen.seconds["call"])
    for task in (watching, playing, following):
        task.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await asyncio.gather(watching, playing, following, return_exceptions=True)
    tell(agents, measured, {name: after[name] - before[name] for name in after}, max(1, calls), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000, metavar="N", help="at once (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, metavar="N", help="episodes a second, in an open loop")
    parser.add_argument("--calls", type=int, default=4, metavar="N", help="of an episode (default %(default)s)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="before a call, on average (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--engine-ms", type=float, default=50.0, help="for an answer (default %(default)s)")
    parser.add_argument("--page", default="", metavar="PATH", help="have this page of the hive open, such as /")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="default %(default)s")
    given = parser.parse_args()
    load = Load(
        episodes=given.episodes,
        rate=given.rate,
        calls=given.calls,
        pause_s=given.pause_s,
        seconds=60 * given.minutes,
        engine_s=given.engine_ms / 1e3,
        gateways=given.gateways,
        page=given.page,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run(load))


if __name__ == "__main__":
    main()
