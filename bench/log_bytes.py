"""Bytes of the log for each model call, as the server counts them, at a given rate and length of episodes.

The coordinator decides on a real bus what gateways and clients send: claims, confirmations, calls, ends. Their ids are
as long as those of the SDK and the gateway.
"""

import argparse
import asyncio
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

from bench.coordinator import ENGINE, HIVE, boot
from bombus.bus import Bus, EmbeddedServer, Reader, StreamState
from bombus.bus.follow import Follower
from bombus.bus.headers import header_bytes
from bombus.config.streams import StreamLimits
from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import NotedCall
from bombus.hive.records import CallRef
from bombus_coordinator.shell import Coordinator

LIMITS = StreamLimits(
    inbox_bytes_max=256 << 20,
    events_bytes_max=256 << 20,
    calls_bytes_max=1 << 20,
    ops_bytes_max=1 << 20,
    trajectories_bytes_max=1 << 20,
    blobs_bytes_max=256 << 20,
)
CLIENT = str(uuid.uuid4())


async def episode(bus: Bus, number: int, calls: int, pause_s: float) -> None:
    """Play an episode that makes a call each `pause_s`."""
    claim = uuid.uuid4().hex
    asked = inbox.Claim(id=uuid.uuid4().hex, engine=ENGINE, claim=claim, client=CLIENT, wait_s=2.0, owner="team")
    granted = await bus.inbox.request(asked, 60)
    assert isinstance(granted, inbox.Granted)
    (name,) = granted.episodes
    for call in range(calls):
        await asyncio.sleep(pause_s)
        ref = CallRef(number * calls + call + 1, uuid.uuid4().hex, uuid.uuid4().bytes)
        noted = NotedCall(name, ref, 1_000 + 300 * call, 250, 7, 7, merged=call > 0)
        await bus.inbox.send(inbox.CallRecorded(id=f"recorded-{ref.id}", engine=ENGINE, run=1, call=noted))
        if not call:
            await bus.inbox.send(inbox.Touch(id=uuid.uuid4().hex, engine=ENGINE, episodes=(name,), confirmed=(claim,)))
    result = inbox.EpisodeResult(
        episode=name, task=f"train/{number // 8:06d}", reward=1.0, log_metrics={"turns": calls}
    )
    await bus.inbox.request(inbox.End(id=uuid.uuid4().hex, engine=ENGINE, client=CLIENT, results=(result,)), 60)


async def play(bus: Bus, seconds: float, rate: float, calls: int) -> None:
    """Start episodes evenly, so that all of them make `rate` calls a second."""
    pause_s = 0.5
    began = time.perf_counter()
    async with asyncio.TaskGroup() as playing:
        for number in range(round(seconds * rate / calls)):
            await asyncio.sleep(max(0.0, began + number * calls / rate - time.perf_counter()))
            playing.create_task(episode(bus, number, calls, pause_s))


async def events_of(bus: Bus) -> StreamState:
    """Return the size of the log. A server that is busy with the load may not answer at once."""
    while True:
        try:
            return await bus.state(bus.subjects.events_stream)
        except BusUnavailable:
            await asyncio.sleep(1.0)


async def report(bus: Bus, after: int, calls: int) -> None:
    stream = bus.subjects.events_stream
    state = await events_of(bus)
    kinds, bodies, headers = Counter[str](), Counter[str](), Counter[str]()
    async with Reader(bus, stream, after + 1) as reader:
        position = after
        while position < state.last_seq:
            for stored in await reader.read():
                kind = ".".join(stored.subject.split(".")[4:])
                kinds[kind] += 1
                bodies[kind] += len(stored.data)
                headers[kind] += header_bytes(stored.headers) + len(stored.subject)
                position = stored.seq
    for kind, count in kinds.most_common(4):
        body, around = bodies[kind] / count, headers[kind] / count
        print(f"  {kind:16} {count / calls:5.2f} a call: {body:4.0f} of body, {around:4.0f} around it")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        server.start()
        try:
            async with await Bus.connect(server.url, HIVE) as bus:
                await bus.ensure_streams(LIMITS)
                follower, coordinator = Follower(bus), Coordinator(bus)
                running = [asyncio.create_task(each) for each in (coordinator.lead(), follower.run())]
                await coordinator.leading.wait()
                await boot(bus, follower, ENGINE, 100_000)
                for calls in (1, 10):
                    before = await events_of(bus)
                    seconds = arguments.seconds
                    await play(bus, seconds, arguments.rate, calls)
                    after = await events_of(bus)
                    made = round(seconds * arguments.rate / calls) * calls
                    cost = (after.bytes - before.bytes) / made
                    hours = (1 << 30) / cost / 360_000
                    print(
                        f"{calls:3} calls an episode: {cost:5.0f} bytes a call; 1 GiB is {hours:.1f} h at 100 a second"
                    )
                    await report(bus, before.last_seq, made)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        finally:
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
