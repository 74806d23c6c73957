"""What it costs to load a log into the tables of `bombus sql`, beside a fold of the same events, in seconds of CPU.

python -m bench.tables [--events 1000000]
"""

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench.recovery import log
from bombus.bus import Stored
from bombus.hive.events import encode_event
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus.insight.database import LogDatabase
from bombus.insight.tables import OF_EVENTS
from bombus.replay.source import LogEnd, Source

ROUNDS = 3  # other programs on the machine only add to what is measured


class MemorySource(Source):
    """A log in memory, so that no reading is measured."""

    title = hive = "main"

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self._bodies = bodies

    async def base(self) -> tuple[Hive, int]:
        return Hive(), 0

    async def end(self) -> LogEnd:
        return LogEnd(len(self._bodies), 0)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        for seq, body in enumerate(self._bodies, 1):
            yield Stored(seq, "", body, {}, 0)

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return [None for _ in seqs]

    async def blob(self, name: str) -> bytes:
        raise KeyError(name)


async def fold(source: Source) -> None:
    hive = Hive()
    async for entry in source.events():
        evolve(hive, entry.event)


async def load(source: Source, wanted: Collection[str], path: Path | None = None) -> None:
    with LogDatabase(path) as database:
        await database.load(source, wanted)


async def load_into_file(source: Source) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await load(source, OF_EVENTS, Path(folder) / "log.duckdb")


def seconds_of(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Return the seconds of user CPU of all threads: other programs on the machine change them less than the time."""
    gc.collect()
    before = os.times().user
    asyncio.run(work())
    return os.times().user - before


def main(count: int) -> None:
    gc.set_threshold(50_000, 20, 20)  # as the command `bombus` does
    source = MemorySource([encode_event(event) for event in log(count)])
    works: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "fold": lambda: fold(source),
        "tables of the log": lambda: load(source, OF_EVENTS - {"metrics"}),
        "with the figures in metrics": lambda: load(source, OF_EVENTS),
        "the same, into a file": lambda: load_into_file(source),
        "episodes alone": lambda: load(source, {"episodes"}),
        "metrics alone": lambda: load(source, {"metrics"}),
    }
    rounds = [{name: seconds_of(work) for name, work in works.items()} for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in rounds) for name in works}
    print(f"the least of {ROUNDS} rounds, {count:,} events, seconds of user CPU:")
    for name, seconds in least.items():
        print(f"{name:<28} {seconds:6.2f}, {seconds / least['fold']:.2f} of the fold's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    main(parser.parse_args().events)
