"""`python -m tests.power --cuts 200`: cut a hive's power at random, and check that nothing acknowledged is lost."""

import argparse
import asyncio
import sys

from tests.long_runs import begin, end
from tests.power.cuts import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--cuts", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="of what each cut leaves (default: the clock)")
    arguments = parser.parse_args()
    seed, folder, say = begin("power", arguments.seed)
    outcome = asyncio.run(run(folder, arguments.cuts, seed))
    say(
        f"{outcome.cuts} cuts; {outcome.acknowledged} claims, calls and ends acknowledged before the last; "
        f"{outcome.unanswered} commands unanswered at cuts; after {outcome.inbox_behind} the log was ahead of the inbox"
    )
    if not outcome.wrong:
        print("nothing lost, nothing doubled")
    return end(folder, outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
