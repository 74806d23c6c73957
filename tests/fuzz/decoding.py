"""`python -m tests.fuzz.decoding --seed 0 --seconds 10`: changed bytes for every decoder, in this process alone.

Each case follows from the seed and its number.
"""

import argparse
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.decoders import Decoder, all_decoders
from tests.fuzz.values import damaged, mutated

CPU_S_MAX = 3.0
HANG_S = 60  # of one case: then this process is ended
MEMORY_KIB_MAX = 768 << 10  # that one case may add
ADDRESS_BYTES_MAX = 24 << 30  # torch reserves much, so this is only against what would end the machine
DAMAGED = 0.35


@dataclass(frozen=True)
class BadDecoding:
    """A case in which a decoder did something other than to return or to raise what it declares."""

    case: int
    decoder: str
    what: str
    body: bytes

    def __str__(self) -> str:
        return f"case {self.case}: {self.decoder}: {self.what}; {len(self.body)} bytes: {self.body[:300]!r}"


def body_of(seed: int, number: int, decoders: tuple[Decoder, ...]) -> tuple[Decoder, bytes]:
    """Return the decoder of a case and the bytes for it."""
    pick = random.Random(f"decoding/{seed}/{number}")
    decoder = decoders[number % len(decoders)]
    tree = mutated(pick.choice(decoder.valid), pick, decoder.valid)
    body = decoder.write(tree)
    return decoder, damaged(body, pick) if pick.random() < DAMAGED else body


def problem(decoder: Decoder, body: bytes, folder: Path) -> str:
    """Decode, and return what is wrong with how that went, "" for nothing."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        decoder.read(body, folder)
    except decoder.declared:
        pass
    except Exception as error:  # whatever a decoder raises without saying so is what is looked for here
        return f"raised {type(error).__name__}: {str(error)[:300]}"
    took_s = time.thread_time() - began
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if took_s > CPU_S_MAX:
        return f"took {took_s:.1f} s of CPU"
    return f"took {added >> 10} MiB of memory" if added > MEMORY_KIB_MAX else ""


def run(seed: int, numbers: Iterator[int], until: float, bad_max: int = 20) -> Iterator[int | BadDecoding]:
    """Yield each case that ended as it should by its number, and each other. Stop at the monotonic time `until`."""
    decoders = all_decoders()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="bombus-fuzz-") as folder:
        for number in numbers:
            if time.monotonic() > until or bad >= bad_max:
                return
            decoder, body = body_of(seed, number, decoders)
            what = problem(decoder, body, Path(folder))
            bad += bool(what)
            yield BadDecoding(number, decoder.name, what, body) if what else number


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.decoding", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--case", type=int, default=None, help="run this case alone")
    arguments = parser.parse_args()
    logging.disable()
    os.nice(5)  # the hive beside it has to be in time
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    gc.freeze()
    numbers = iter(range(sys.maxsize)) if arguments.case is None else iter([arguments.case])
    now = -1

    def hangs(_: int, frame: FrameType | None) -> None:
        print(f"BAD case {now + 1}: still decoding after {HANG_S} s", flush=True)
        traceback.print_stack(frame)
        sys.exit(1)

    signal.signal(signal.SIGALRM, hangs)
    bad = 0
    for outcome in run(arguments.seed, numbers, time.monotonic() + arguments.seconds):
        signal.alarm(HANG_S)
        if isinstance(outcome, BadDecoding):
            bad += 1
            now = outcome.case
            print(f"BAD {outcome}", flush=True)
        else:
            now = outcome
    print(
        f"decoded {now + 1} cases of {len(all_decoders())} decoders with seed {arguments.seed}, {bad} bad", flush=True
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
