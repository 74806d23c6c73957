"""`python -m tests.histories --histories 10000 --seed 0` plays random histories; `--history N` plays one of them."""

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bombus.bus import Bus, EmbeddedServer
from bombus.commands.audit import audited, lines_of
from bombus.config.streams import StreamLimits
from bombus.machine.process import loop_factory
from bombus.replay.source import BusSource
from tests.histories.hive import arena_of
from tests.histories.run import Outcome, play, play_all, shortened

PROGRESS_S = 5.0
SHOWN_MAX = 10
MB = 1 << 20
STREAMS = StreamLimits(
    inbox_bytes_max=64 * MB,
    events_bytes_max=1024 * MB,
    calls_bytes_max=8192 * MB,
    ops_bytes_max=MB,
    trajectories_bytes_max=MB,
    blobs_bytes_max=256 * MB,
)


async def run(url: str, arguments: argparse.Namespace) -> int:
    async with await Bus.connect(url, "histories") as bus:
        await bus.ensure_streams(STREAMS)
        async with arena_of(bus) as arena:
            if arguments.history is not None:
                outcome = await play(arena, arguments.seed, arguments.history, arguments.moves)
                print(outcome)
                return bool(outcome.wrong)
            numbers = range(arguments.first, arguments.first + arguments.histories)
            counts: Counter[str] = Counter()
            bad: list[Outcome] = []
            began = reported = time.monotonic()
            async for outcome in play_all(arena, arguments.seed, numbers):
                counts += outcome.counts
                if outcome.wrong:
                    bad.append(outcome)
                    print(f"history {outcome.number} is bad: {outcome.wrong[0]}", flush=True)
                if time.monotonic() - reported > PROGRESS_S:
                    reported = time.monotonic()
                    print(f"{reported - began:6.0f} s  {_told(counts)}, {len(bad)} bad", flush=True)
            took = time.monotonic() - began
            for outcome in bad[:SHOWN_MAX]:
                print(await shortened(arena, outcome), flush=True)
            print(f"seed {arguments.seed}: {_told(counts)} in {took:.0f} s, {len(bad)} bad")
            report = await audited(BusSource(bus, "the log"))
            print("\n".join(lines_of(report, "the log")))
            return bool(bad) or report.differences_count > 0


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000, help="how many to play")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--history", type=int, help="play this one alone")
    parser.add_argument("--moves", type=int, help="only so many of its moves")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="bombus-histories-"))
    server = EmbeddedServer(folder, store_bytes_max=100 << 40)
    server.start()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run(server.url, arguments))
    finally:
        server.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
