"""What a call at the end of a conversation takes on disk and of CPU, beside NeMo Gym's store of what was sampled.

python -m pip install --target FOLDER --no-deps --ignore-requires-python nemo-gym==0.7.0 orjson
python -m bench.disk --nemo-gym FOLDER

The conversations are those of `bench.turns`, in chat completions, in a hive with `--durability power`. What the log
takes for calls and their events is the server's own count. NeMo Gym's `TokenCaptureStore` is given the same prompts,
completions and log-probabilities; it syncs each call by itself.

CPU is user and system time. Of whole calls it is that of our services, which also read the request, render and tokenize
it, and answer it. "Recorded alone" is what is like the store's `put`: this process encodes the same records, stores
them, and reports them to the coordinator, and each of both waits for a sync. Neither side's includes the making of what
is stored.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.processes import cpu_ns, process_of
from bench.turns import Chat, running_bench
from bombus.bus import Bus, Reader
from bombus.bus.server import find_server
from bombus.hive.events import NotedCall
from bombus.hive.inbox import CallRecorded
from bombus.hive.records import (
    CallRecord,
    CallRef,
    decode_record,
    digest,
    encode_record,
    unpack_logprobs,
    unpack_tokens,
)

SIZES = ((7, 1), (200, 60))  # calls with their results, and tools: some 2,000 and 30,000 tokens
AT_ONCE = 32


async def bytes_of(bus: Bus) -> dict[str, int]:
    """Return what the two streams of a call take, by the server's count."""
    streams = {"calls": bus.subjects.calls_stream, "events": bus.subjects.events_stream}
    return {name: (await bus.state(stream)).bytes for name, stream in streams.items()}


async def records_of(bus: Bus) -> dict[int, CallRecord]:
    """Return all calls, by their places in the stream."""
    stream = bus.subjects.calls_stream
    last, found = (await bus.state(stream)).last_seq, dict[int, CallRecord]()
    async with Reader(bus, stream) as reader:
        while last not in found:
            found |= {stored.seq: decode_record(stored.data) for stored in await reader.read()}
    return found


def prompt_of(record: CallRecord, records: dict[int, CallRecord]) -> list[int]:
    """Return the whole prompt of a call."""
    if record.parent is None:
        return unpack_tokens(record.prompt_tail)
    before = records[record.parent.seq]
    completion = unpack_tokens(before.choices[record.parent_choice].tokens)
    return [*prompt_of(before, records), *completion, *unpack_tokens(record.prompt_tail)]


async def captured(
    folder: Path, records: dict[int, CallRecord], measured: list[CallRecord], deltas: bool
) -> tuple[float, list[float]]:
    """Return the bytes a call that NeMo Gym's store takes, with whole prompts or with what is new in them, and the CPU
    seconds: one call at a time, and in as many rollouts at once as ours."""
    from nemo_gym.token_id_capture.records import TokenEntry
    from nemo_gym.token_id_capture.store import TokenCaptureStore

    entries = []
    for record in measured:
        (choice,) = record.choices
        entry: dict[str, Any] = {
            "rollout_id": record.episode,
            "model_call_id": record.id,
            "prompt_token_ids": prompt_of(record, records),
            "generation_token_ids": unpack_tokens(choice.tokens),
            "generation_log_probs": unpack_logprobs(choice.logprobs),
            "output_items": [choice.message],
        }
        if deltas:
            assert record.parent is not None
            parent = {"parent_call_id": record.parent.id, "parent_resolution": "resolved", "prompt_is_delta": True}
            entry |= {**parent, "prompt_token_ids": unpack_tokens(record.prompt_tail)}
        entries.append(TokenEntry(**entry))

    async def put(store: Any, rollout: int) -> None:
        for each in entries:
            await store.put(each.model_copy(update={"rollout_id": f"{each.rollout_id}-{rollout}"}))

    spent: list[float] = []
    for at_once in (1, AT_ONCE):
        store = TokenCaptureStore(folder / str(at_once))
        before = time.process_time()
        await asyncio.gather(*(put(store, rollout) for rollout in range(at_once)))
        spent.append((time.process_time() - before) / len(entries) / at_once)
    return sum(file.stat().st_size for file in (folder / "1").iterdir()) / len(entries), spent


class Cpu:
    """The CPU seconds of a hive's processes and of this one since it was made."""

    def __init__(self) -> None:
        names = {"gateway": "gateway", "nats-server": str(find_server()), "syncer": "up", "coordinator": "coordinator"}
        self._pids = {name: process_of(os.getpid(), argument) for name, argument in names.items()}
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {name: cpu_ns(pid) / 1e9 for name, pid in self._pids.items()} | {"client": time.process_time()}

    def spent(self) -> dict[str, float]:
        return {name: after - self._before[name] for name, after in self._now().items()}


async def recorded(bus: Bus, measured: list[CallRecord], at_once: int) -> dict[str, float]:
    """Store and report calls again under other ids, so many at a time, and return the CPU seconds a call."""
    copies = [msgspec.structs.replace(each, id=f"{each.id}.{at_once}.{n}") for n in range(AT_ONCE) for each in measured]
    waiting: Iterator[CallRecord] = iter(copies)

    async def record() -> None:
        for each in waiting:
            body = encode_record(each)
            ack = await bus.publisher.publish(bus.subjects.call(each.engine, ""), body, msg_id=each.id)
            noted = NotedCall(each.episode, CallRef(ack.seq, each.id, digest(body)), 1, 1, 0, 0)
            await bus.inbox.send(CallRecorded(id=each.id, engine=each.engine, run=each.run, call=noted))

    cpu = Cpu()
    await asyncio.gather(*(record() for _ in range(at_once)))
    return {name: spent / len(copies) for name, spent in cpu.spent().items()}


def say(what: str, size: str, *seconds: float) -> None:
    """Print a line with bytes a call, and with calls for each second of CPU."""
    rates = "".join(f" {1 / each:8,.0f}" for each in seconds)
    print(f"{what:58} {size:>9}{rates}")


async def measure(turns: int, pairs: int, tools: int, nemo_gym: str) -> None:
    async with running_bench(durability="power") as bench:
        played = await bench.played(Chat(), pairs, tools)
        first, before, cpu = played.tokens, await bytes_of(bench.bus), Cpu()
        for _ in range(turns):
            await bench.turn(played)
        whole = {name: spent / turns for name, spent in cpu.spent().items()}
        after = await bytes_of(bench.bus)
        records = await records_of(bench.bus)
        measured = [records[seq] for seq in sorted(records)][-turns:]
        alone = {count: await recorded(bench.bus, measured, count) for count in (1, AT_ONCE)}
    new = sum(len(each.prompt_tail) // 4 + each.completion_tokens() for each in measured) / turns
    ours = {name: (after[name] - before[name]) / turns for name in after}
    print(f"\n{turns} calls of {new:.0f} new tokens, after {first:,} to {played.tokens:,}")
    print(f"{'':58} bytes, and calls for each second of CPU")
    size = f"{sum(ours.values()):,.0f}"
    say("whole calls: gateway; with nats-server, syncer", size, *_sums(whole, "gateway"))
    for count, spent in alone.items():
        say(f"recorded alone, {count} at once: client; with nats-server, syncer", size, *_sums(spent, "client"))
    print("of these bytes " + ", ".join(f"{name} {each:,.0f}" for name, each in ours.items()), end="; ")
    print("CPU of a whole call: " + ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in whole.items()))
    if not nemo_gym:
        return
    sys.path.insert(0, nemo_gym)
    with tempfile.TemporaryDirectory() as name:
        for what, deltas in (("as it is set", False), ("with delta_records", True)):
            bytes_each, spent_s = await captured(Path(name) / what, records, measured, deltas)
            say(f"NeMo Gym's store {what}, 1 at once; {AT_ONCE} at once", f"{bytes_each:,.0f}", *spent_s)


def _sums(spent: dict[str, float], first: str) -> tuple[float, float]:
    """Return the CPU of one process, and of it with the server and the syncer."""
    return spent[first], spent[first] + spent["nats-server"] + spent["syncer"]


async def run(turns: int, nemo_gym: str) -> None:
    for pairs, tools in SIZES:
        await measure(turns, pairs, tools, nemo_gym)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--nemo-gym", default="", metavar="FOLDER", help="where its package was installed")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(run(arguments.turns, arguments.nemo_gym))


if __name__ == "__main__":
    main()
