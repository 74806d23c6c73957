"""`python -m tests.fuzz --minutes 10 --seed 7`: send a hive everything that is wrong, then let it train a step."""

import argparse
import asyncio
import shutil
import sys

from tests.fuzz.run import Bad, fuzz
from tests.long_runs import begin


def cases_of(text: str) -> range:
    """Return the cases that `N` or `N-M` names."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def again(bad: Bad) -> str:
    """Return the command that repeats a finding, without its seed."""
    if bad.cases == "decoding":
        return "tests.fuzz.decoding --case N"
    return f"tests.fuzz --case {bad.cases}" if bad.cases[:1].isdigit() else "tests.fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="of all that is sent (default: the clock)")
    parser.add_argument("--case", type=cases_of, default=range(0), metavar="N[-M]", help="send only these cases, once")
    arguments = parser.parse_args()
    seed, folder, say = begin("fuzz", arguments.seed)
    try:
        outcome = asyncio.run(fuzz(folder, seed, arguments.minutes * 60, say, arguments.case))
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        return 130
    print(f"{outcome.cases} cases, {sum(outcome.statuses.values())} answers; {outcome.decoded}")
    print(f"memory in MiB: {outcome.rss}")
    if outcome.bad:
        for bad in outcome.bad:
            print(f"BAD {bad.what}")
            print(f"  again: python -m {again(bad)} --seed {seed}")
        print(f"{len(outcome.bad)} bad; everything is kept in {folder}")
        return 1
    print(f"nothing bad; honest clients trained a step in {outcome.step_s:.1f} s")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
