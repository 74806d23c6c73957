"""What a call at the end of a long conversation takes on disk, beside NeMo Gym's store of what was sampled.

python -m pip install --target FOLDER --no-deps --ignore-requires-python nemo-gym==0.7.0 orjson
python -m bench.disk --nemo-gym FOLDER

The conversation is that of `bench.turns`, in chat completions. What the log takes for its calls and their events is the
server's own count. NeMo Gym's `TokenCaptureStore` is given the same prompts, completions and log-probabilities.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.turns import PAIRS, TOOLS, Chat, running_bench
from bombus.bus import Bus, Reader
from bombus.hive.records import CallRecord, decode_record, unpack_logprobs, unpack_tokens


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


def captured(folder: Path, records: dict[int, CallRecord], measured: list[CallRecord], deltas: bool) -> float:
    """Return the bytes a call that NeMo Gym's store takes, with whole prompts or with what is new in them."""
    from nemo_gym.token_id_capture.records import TokenEntry
    from nemo_gym.token_id_capture.store import TokenCaptureStore

    store = TokenCaptureStore(folder)
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
        store.append(TokenEntry(**entry))
    return sum(file.stat().st_size for file in folder.iterdir()) / len(measured)


async def run(turns: int, nemo_gym: str) -> None:
    async with running_bench() as bench:
        played = await bench.played(Chat(), PAIRS, TOOLS)
        before = await bytes_of(bench.bus)
        for _ in range(turns):
            await bench.turn(played)
        after = await bytes_of(bench.bus)
        records = await records_of(bench.bus)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = [records[seq] for seq in sorted(records)][-turns:]
        new = sum(len(each.prompt_tail) // 4 + each.completion_tokens() for each in measured) / turns
        ours = {name: (after[name] - before[name]) / turns for name in after}
        print(f"{played.tokens:,} tokens at the end, {turns} calls of {new:.0f} new tokens")
        of_each = ", ".join(f"{name} {size:,.0f}" for name, size in ours.items())
        print(f"the log: {sum(ours.values()):,.0f} bytes a call, {of_each}")
        if nemo_gym:
            sys.path.insert(0, nemo_gym)
            for what, deltas in (("as it is set", False), ("with delta_records", True)):
                size = captured(folder / what, records, measured, deltas)
                print(f"NeMo Gym's TokenCaptureStore {what}: {size:9,.0f} bytes a call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--nemo-gym", default="", metavar="FOLDER", help="where its package was installed")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(run(arguments.turns, arguments.nemo_gym))


if __name__ == "__main__":
    main()
