"""`python -m tests.chaos --kills 200`: kill a hive's processes at random, then check every guarantee."""

import argparse
import asyncio
import sys
from pathlib import Path

from tests.chaos.run import run, summary
from tests.long_runs import begin, end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the choice of victims and times (default: the clock)"
    )
    parser.add_argument(
        "--broken-replica", action="store_true", help="one replica more, which never loads: its server is not there"
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="TREE",
        help="another release: each process runs either, as in an upgrade and a roll-back",
    )
    arguments = parser.parse_args()
    seed, folder, say = begin("chaos", arguments.seed)
    outcome = asyncio.run(run(folder, arguments.kills, seed, say, arguments.broken_replica, arguments.other))
    print(summary(outcome))
    for engine, agents in outcome.agents.items():
        for trouble, count in agents.ledger.troubles.most_common(5):
            print(f"  seen by agents of {engine} {count:5} times: {trouble}")
    return end(folder, outcome.report.wrong)


if __name__ == "__main__":
    sys.exit(main())
