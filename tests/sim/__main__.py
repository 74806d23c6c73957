"""`python -m tests.sim --seeds 1000` tries seeds; `--seed K --verbose` replays one and prints its events."""

import argparse
import sys
import time
from collections import Counter

from tests.sim.faults import Fault
from tests.sim.variants import Variant
from tests.sim.world import simulate, tally

PROGRESS_S = 5.0


def rates_of(text: str) -> dict[Fault, float]:
    pairs = (each.split("=") for each in text.split(","))
    return {Fault[name]: float(rate) for name, rate in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to try")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one alone")
    parser.add_argument("--variant", choices=[variant.name for variant in Variant], help="build this mistake in")
    parser.add_argument("--faults", type=rates_of, help="the faults and their rates, such as KILL=0.1,SLOW=0.02")
    parser.add_argument("--verbose", action="store_true", help="print every event and fault")
    arguments = parser.parse_args()
    variant = Variant[arguments.variant] if arguments.variant else None
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    seen: Counter[str] = Counter()
    failed: list[int] = []
    began = reported = time.monotonic()
    for done, seed in enumerate(seeds, start=1):
        try:
            seen += tally(simulate(seed, variant, print if arguments.verbose else None, arguments.faults))
        except AssertionError as error:
            failed.append(seed)
            print(error, flush=True)
            if len(seeds) == 1:
                raise
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            print(f"{done} of {len(seeds)} seeds, {len(failed)} failed, {reported - began:.0f} s", flush=True)
    for what, count in sorted(seen.items()):
        print(f"{count:10} {what}")
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.1f} s, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
