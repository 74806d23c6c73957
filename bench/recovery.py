"""How long a coordinator takes to recover: from the fold of a whole long log, and from a snapshot and the log after it.

python -m bench.recovery [--events 1000000]
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bombus.bus import EPOCH, INBOX, Bus, EmbeddedServer, PubAck, snapshots
from bombus.bus.snapshots import Snapshot
from bombus.hive import events as ev
from bombus.hive.events import Collection, Event, NotedCall, Outcome, Weights, decode_event, encode_event
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import CallRef
from bombus.hive.state import FOLD, Hive
from bombus.machine.process import loop_factory
from bombus.replay.audit.audit import Audit
from bombus_coordinator.recovery import Fold

ENGINE = "main"
BATCH = 64
TAIL = 20_000  # events after the snapshot: as many as there are between two
IN_FLIGHT = 2_000


def log(count: int) -> Iterator[Event]:
    """Yield this many events of one long run: claims, calls and ends one by one, a step after every 64 episodes."""
    rules = Collection(batch_size=8, num_repeat=8)
    yield ev.EpochOpened(epoch=1, leader="bench")
    yield ev.EngineConfigured(engine=ENGINE, config="{}", config_digest="d", collection=rules, model="tiny")
    yield ev.EngineStarted(engine=ENGINE, run=1, config_digest="d")
    yield ev.RollingStarted(engine=ENGINE, run=1, version=0)
    made, number, step = 4, 0, 0
    waiting: list[ev.BatchEpisode] = []
    while made < count:
        number += 1
        name = f"{ENGINE}-1-{number}"
        ref = CallRef(number, f"call-{number:012d}", b"d" * 16)
        outcome = Outcome(episode=name, task=f"t{(number - 1) % 8}", reward=0.5, digest=b"o" * 16, calls=(ref,))
        noted = NotedCall(name, ref, 200, 40, step, step)
        yield ev.EpisodeClaimed(
            engine=ENGINE, run=1, claim=f"c{number}", client="bench", episodes=(name,), version=step
        )
        yield ev.CallsNoted(engine=ENGINE, run=1, calls=(noted,))
        yield ev.EpisodeEnded(engine=ENGINE, run=1, client="bench", version=step, outcomes=(outcome,))
        made += 3
        waiting.append(ev.BatchEpisode(episode=name, reward=0.5, calls=(ref,)))
        if len(waiting) == BATCH:
            step += 1
            groups = tuple(ev.BatchGroup(task=f"t{k}", episodes=tuple(waiting[k::8])) for k in range(8))
            waiting = []
            yield ev.BatchReady(engine=ENGINE, run=1, step=step, groups=groups, config_digest="d")
            yield ev.StepCompleted(
                engine=ENGINE,
                run=1,
                step=step,
                trainer_epoch=1,
                checkpoint=f"/c/{step}",
                checkpoint_digest="d" * 64,
                metrics={"loss": 0.1},
            )
            yield ev.WeightsReady(engine=ENGINE, run=1, version=step, weights=Weights(where=f"/w/{step}"))
            made += 3


async def publish(bus: Bus, events: Iterator[Event]) -> int:
    acks: list[asyncio.Future[PubAck]] = []
    position = 0
    for position, event in enumerate(events, start=1):
        subject = bus.subjects.event(event.engine, ev.kind_of(event))
        headers = {EPOCH: "1", INBOX: str(position)}
        acks.append(await bus.publisher.submit(subject, encode_event(event), msg_id=f"e{position}", headers=headers))
        if len(acks) >= IN_FLIGHT:
            await asyncio.gather(*acks)
            acks = []
    await asyncio.gather(*acks)
    return position


def decoder_speed(count: int) -> tuple[float, float, float]:
    """Return the seconds to decode these events, to decode and fold them, and to audit them, which folds them too.

    No reader can be faster.
    """
    bodies = [encode_event(event) for event in log(count)]
    start = time.perf_counter()
    for body in bodies:
        decode_event(body)
    decoded = time.perf_counter() - start
    hive = Hive()
    start = time.perf_counter()
    for body in bodies:
        evolve(hive, decode_event(body))
    folded = time.perf_counter() - start
    audit = Audit()
    start = time.perf_counter()
    for number, body in enumerate(bodies, start=1):
        audit.read(decode_event(body), number)
    assert not audit.report().differences
    return decoded, folded, time.perf_counter() - start


async def recover(bus: Bus) -> tuple[float, float, Fold]:
    """Recover and return the seconds, the seconds of our own CPU (independent of other load), and the state."""
    start, cpu = time.perf_counter(), time.process_time()
    fold = await Fold.begin(bus)
    await fold.catch_up(bus)
    return time.perf_counter() - start, time.process_time() - cpu, fold


async def main(count: int) -> None:
    decoded, folded, audited = decoder_speed(min(count, 200_000))
    sample = min(count, 200_000)
    print(f"decoding alone        {sample / decoded:10,.0f} events/s")
    print(f"decoding and folding  {sample / folded:10,.0f} events/s")
    print(f"an audit              {sample / audited:10,.0f} events/s, {audited / folded:.2f} of the fold's time")
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        await asyncio.to_thread(server.start)
        try:
            async with await Bus.connect(server.url, "bench") as bus:
                await bus.ensure_streams()
                start = time.perf_counter()
                last = await publish(bus, log(count))
                print(f"(a log of {last:,} events, published in {time.perf_counter() - start:.0f} s)")
                seconds, cpu, fold = await recover(bus)
                assert fold.position == last
                print(
                    f"full fold             {last / seconds:10,.0f} events/s, {seconds:.2f} s; "
                    f"{cpu / last * 1e6:.1f} us of CPU an event"
                )
                at = max(last - TAIL, 1)
                await _snapshot(bus, at)
                seconds, cpu, again = await recover(bus)
                assert again.hive == fold.hive
                print(f"snapshot and {last - at:,} events: {seconds:.2f} s, {cpu:.2f} s of CPU")
        finally:
            await asyncio.to_thread(server.stop)


async def _snapshot(bus: Bus, position: int) -> None:
    hive = Hive()
    for number, event in enumerate(log(position), start=1):
        if number > position:
            break
        evolve(hive, event)
    snapshot = Snapshot(fold=FOLD, position=position, event_id=f"e{position}", answered=position, hive=hive)
    start = time.perf_counter()
    body = snapshots.encode(snapshot)
    encoded = time.perf_counter() - start
    await snapshots.store(bus, body, position)
    print(f"(a snapshot of {len(body) / 1e6:.1f} MB, encoded in {encoded * 1e3:.0f} ms)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as the services run
        runner.run(main(parser.parse_args().events))
