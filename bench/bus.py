"""The cost of bombus' publisher and reader compared with nats-py's own: client CPU per message, and rates.

It starts a nats-server of its own in a temporary folder. Ratios carry over to other machines, rates do not.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nats.js.api import ConsumerConfig, DeliverPolicy

from bombus.bus import Bus, EmbeddedServer, Reader
from bombus.config.streams import StreamLimits

Run = Callable[[Bus, int, int], Awaitable[None]]


async def publish_ours(bus: Bus, count: int, size: int) -> None:
    subject, body, name = bus.subjects.call("e", "x"), bytes(size), os.urandom(4).hex()
    futures = [await bus.publisher.submit(subject, body, msg_id=f"{name}{n}", timeout_s=60) for n in range(count)]
    await asyncio.gather(*futures)


async def publish_ours_by_task(bus: Bus, count: int, size: int) -> None:
    """Publish from 64 tasks that each wait for their own acknowledgement, as requests in a gateway do."""
    subject, body, name = bus.subjects.call("e", "x"), bytes(size), os.urandom(4).hex()

    async def work(first: int) -> None:
        for n in range(first, count, 64):
            await bus.publisher.publish(subject, body, msg_id=f"{name}{n}", timeout_s=60)

    await asyncio.gather(*(work(first) for first in range(64)))


async def publish_async(bus: Bus, count: int, size: int) -> None:
    js = bus.client.jetstream(publish_async_max_pending=4096)
    subject, body, name = bus.subjects.call("e", "x"), bytes(size), os.urandom(4).hex()
    for n in range(count):
        await js.publish_async(subject, body, headers={"Nats-Msg-Id": f"{name}{n}"})
    await js.publish_async_completed()


async def publish_by_task(bus: Bus, count: int, size: int) -> None:
    js = bus.client.jetstream()
    subject, body, name = bus.subjects.call("e", "x"), bytes(size), os.urandom(4).hex()

    async def work(first: int) -> None:
        for n in range(first, count, 64):
            await js.publish(subject, body, headers={"Nats-Msg-Id": f"{name}{n}"}, timeout=60)

    await asyncio.gather(*(work(first) for first in range(64)))


async def read_ours(bus: Bus, count: int, size: int) -> None:
    left = count
    async with Reader(bus, bus.subjects.calls_stream) as reader:
        while left > 0:
            left -= len(await reader.read())


async def read_fetch(bus: Bus, count: int, size: int) -> None:
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy="none")
    pull = await bus.client.jetstream().pull_subscribe(
        bus.subjects.all_calls, stream=bus.subjects.calls_stream, config=config
    )
    left = count
    while left > 0:
        left -= len(await pull.fetch(min(1000, left), timeout=10))
    await pull.unsubscribe()


async def read_ordered(bus: Bus, count: int, size: int) -> None:
    ordered: Any = await bus.client.jetstream().subscribe(
        bus.subjects.all_calls, stream=bus.subjects.calls_stream, ordered_consumer=True
    )
    for _ in range(count):
        await ordered.next_msg(timeout=10)
    await ordered.unsubscribe()


PUBLISHING: dict[str, Run] = {
    "bombus, pipelined": publish_ours,
    "nats-py publish_async": publish_async,
    "bombus, 64 tasks": publish_ours_by_task,
    "nats-py publish, 64 tasks": publish_by_task,
}
READING: dict[str, Run] = {
    "bombus Reader": read_ours,
    "nats-py fetch(1000)": read_fetch,
    "nats-py ordered": read_ordered,
}


async def measure(runs: dict[str, Run], bus: Bus, count: int, size: int, repeats: int) -> dict[str, float]:
    """Return the best rate and the least CPU of several rounds, taken in turn so that a busy moment affects all."""
    rates = dict.fromkeys(runs, 0.0)
    costs = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            await run(bus, count, size)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rates[name] = max(rates[name], count / wall)
            costs[name] = min(costs[name], cpu / count * 1e6)
    reference = next(iter(runs))
    for name in runs:
        print(
            f"{name:28} {rates[name]:9,.0f}/s {costs[name]:6.1f} us CPU"
            f"   rate x{rates[name] / rates[reference]:.2f}, CPU x{costs[name] / costs[reference]:.2f} of ours"
        )
    return costs


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="messages in each run (default 10000)")
    parser.add_argument("--size", type=int, default=300, help="bytes of a message (default 300)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the best counts (default 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), store_bytes_max=1 << 40)
        server.start()
        try:
            async with await Bus.connect(server.url, "bench") as bus:
                await bus.ensure_streams(StreamLimits(calls_bytes_max=8 << 30))
                print(f"publishing {options.count} messages of {options.size} B")
                await measure(PUBLISHING, bus, options.count, options.size, options.repeats)
                print(f"reading the first {options.count} of them")
                await measure(READING, bus, options.count, options.size, options.repeats)
        finally:
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
