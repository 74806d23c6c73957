"""Commands per second through the coordinator: inbox, decision, event, answer, on a real log.

Two processes, as in production: the coordinator in its own, the clients in this one. Then come calls that gateways
note, and last claims with others before them in the queue, for room that is not there: each command asks for the next
claim.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from bench.processes import cpu_s
from bombus.bus import Bus, EmbeddedServer
from bombus.bus.follow import Follower
from bombus.hive import inbox
from bombus.hive.events import Collection, NotedCall, Weights
from bombus.hive.records import CallRef
from bombus.hive.state import Phase

HIVE, ENGINE, FULL = "bench", "main", "full"
OPEN, WORKERS = 1_000, 32  # episodes that the full engine may have open, and those of them that change hands
QUEUES = (0, 2_000, 8_000)  # claims that wait
WAIT_S = 60.0


async def boot(bus: Bus, follower: Follower, engine: str, open_max: int) -> None:
    """Let an engine roll that may have so many open episodes."""
    # No batch is ever complete: the pool is cleared before.
    rules = Collection(batch_size=1_000, num_repeat=32, max_open_claims=open_max, max_pool_episodes=30_000)
    await bus.inbox.request(
        inbox.Configure(id=f"c{engine}", engine=engine, config="{}", config_digest="d", collection=rules, model="m"), 60
    )
    await bus.inbox.request(inbox.Start(id=f"s{engine}", engine=engine))
    await bus.inbox.send(inbox.ReplicaAlive(id=f"a{engine}", engine=engine, replica="r", url="http://r"))
    opened = await bus.inbox.request(inbox.TrainerOpens(id=f"o{engine}", engine=engine, run=1, trainer="t"))
    assert isinstance(opened, inbox.Done)
    saved = inbox.WeightsSaved(
        id=f"w{engine}", engine=engine, run=1, step=0, trainer_epoch=opened.epoch, weights=Weights(where="/w")
    )
    await bus.inbox.send(saved)
    await bus.inbox.send(inbox.WeightsLoadedFact(id=f"l{engine}", engine=engine, run=1, version=0, replica="r"))
    await follower.wait_for(lambda hive: hive.engine(engine).phase == Phase.ROLLING, 30)


async def episode(bus: Bus, name: str) -> None:
    """Send two commands: a claim and an end."""
    granted = await bus.inbox.request(inbox.Claim(id=f"k{name}", engine=ENGINE, claim=f"k{name}", client="c"), 60)
    assert isinstance(granted, inbox.Granted)
    result = inbox.EpisodeResult(episode=granted.episodes[0], task=name, reward=1.0)
    await bus.inbox.request(inbox.End(id=f"e{name}", engine=ENGINE, client="c", results=(result,)), 60)


async def measure(bus: Bus, waiting: int, seconds: float, pid: int, label: str) -> float:
    count = 0
    until = time.perf_counter() + seconds
    latencies: list[float] = []

    async def client(number: int) -> None:
        nonlocal count
        index = 0
        while time.perf_counter() < until:
            began = time.perf_counter()
            await episode(bus, f"{waiting}-{number}-{index}")
            latencies.append((time.perf_counter() - began) / 2)
            index += 1
            count += 2

    began, before = time.perf_counter(), cpu_s(pid)
    await asyncio.gather(*(client(number) for number in range(waiting)))
    rate = count / (time.perf_counter() - began)
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] * 1e3 for share in (0.5, 0.99))
    spent = (cpu_s(pid) - before) / count * 1e6
    print(f"{label:>12} {rate:9.0f}/s  p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  coordinator CPU {spent:5.0f} us a command")
    return rate


async def measure_calls(bus: Bus, seconds: float, pid: int) -> None:
    """Note calls of open episodes, in bunches of a thousand."""
    episodes = []
    for number in range(WORKERS):
        granted = await bus.inbox.request(inbox.Claim(id=f"n{number}", engine=ENGINE, claim=f"n{number}", client="c"))
        assert isinstance(granted, inbox.Granted)
        episodes.append(granted.episodes[0])
    count, began, before = 0, time.perf_counter(), cpu_s(pid)
    while time.perf_counter() - began < seconds:
        async with asyncio.TaskGroup() as sending:
            for episode in episodes * 32:
                count += 1
                ref = CallRef(count, f"call-{count}", count.to_bytes(16))
                noted = NotedCall(episode, ref, 1_000, 250, 7, 7, merged=True)
                message = inbox.CallRecorded(id=f"r{count}", engine=ENGINE, run=1, call=noted)
                sending.create_task(bus.inbox.send(message))
    # Its answer says that all before it is decided.
    result = inbox.EpisodeResult(episode=episodes[0], task="noted", reward=1.0)
    await bus.inbox.request(inbox.End(id="noted", engine=ENGINE, client="c", results=(result,)), WAIT_S)
    rate = count / (time.perf_counter() - began)
    print(f" calls noted {rate:9.0f}/s  coordinator CPU {(cpu_s(pid) - before) / count * 1e6:5.0f} us a call")


async def claimed(bus: Bus, claim: str, client: str, count: int = 1) -> str:
    """Claim episodes in the full engine, and return the first of them once there is room."""
    message = inbox.Claim(
        id=claim, engine=FULL, claim=claim, client=client, count=count, wait_s=WAIT_S, discard_timeout_s=3600.0
    )
    granted = await bus.inbox.request(message, WAIT_S)
    assert isinstance(granted, inbox.Granted)
    await bus.inbox.send(inbox.Touch(id=f"t{claim}", engine=FULL, confirmed=(claim,)))
    return granted.episodes[0]


async def queue(bus: Bus, first: int, end: int) -> None:
    """Let more claims of another client wait."""
    for name in (f"q{index}" for index in range(first, end)):
        await bus.inbox.send(inbox.Claim(id=name, engine=FULL, claim=name, client="greedy", wait_s=WAIT_S))


async def measure_beside(bus: Bus, held: list[str], waiting: int, seconds: float, pid: int) -> float:
    """Measure workers that claim and end in an engine that is full, while so many claims of another client wait.

    A worker claims its next episode before it ends the one in `held`. That claim is the first of those that wait,
    because the other client has more open episodes.
    """
    count = 0

    async def worker(number: int) -> None:
        nonlocal count
        index = 0
        while time.perf_counter() < until:
            index += 1
            name = f"w{waiting}-{number}-{index}"
            following = asyncio.create_task(claimed(bus, name, "workers"))
            await asyncio.sleep(0)  # so that the claim leaves first
            result = inbox.EpisodeResult(episode=held[number], task=name, reward=1.0)
            await bus.inbox.request(inbox.End(id=f"e{name}", engine=FULL, client="workers", results=(result,)), WAIT_S)
            held[number] = await following
            count += 3  # claim, end, and the touch that confirms the claim

    began, before = time.perf_counter(), cpu_s(pid)
    until = began + seconds
    await asyncio.gather(*(worker(number) for number in range(WORKERS)))
    rate = count / (time.perf_counter() - began)
    spent = (cpu_s(pid) - before) / count * 1e6
    print(f"{waiting:>5} claims wait {rate:9.0f}/s  coordinator CPU {spent:5.0f} us a command")
    return rate


async def run(seconds: float, power: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), power=power)
        server.start()
        command = [sys.executable, "-m", "bombus", "coordinator", "--nats", server.url, "--hive", HIVE]
        coordinator = subprocess.Popen([*command, "--log-level", "warning"])
        try:
            async with await Bus.connect(server.url, HIVE, name="bench") as bus:
                await bus.ensure_streams()
                follower = Follower(bus)
                following = asyncio.create_task(follower.run())
                await boot(bus, follower, ENGINE, 100_000)
                rates = [await measure(bus, n, seconds, coordinator.pid, f"{n} waiting") for n in (1, 32, 256)]
                print("ratios to one at a time: " + ", ".join(f"{rate / rates[0]:.1f}" for rate in rates))
                await measure_calls(bus, seconds, coordinator.pid)
                await boot(bus, follower, FULL, OPEN)
                held = [await claimed(bus, f"w{number}", "workers") for number in range(WORKERS)]
                await claimed(bus, "greedy", "greedy", OPEN - WORKERS)
                rates = []
                for waited, waiting in zip((0, *QUEUES), QUEUES):
                    await queue(bus, waited, waiting)
                    rates.append(await measure_beside(bus, held, waiting, seconds, coordinator.pid))
                print("ratios to an empty queue: " + ", ".join(f"{rate / rates[0]:.2f}" for rate in rates))
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        finally:
            coordinator.terminate()
            coordinator.wait()
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of waiting clients")
    parser.add_argument("--durability", choices=("process", "power"), default="process", help="as of `bombus up`")
    arguments = parser.parse_args()
    uvloop.run(run(arguments.seconds, arguments.durability == "power"))


if __name__ == "__main__":
    main()
