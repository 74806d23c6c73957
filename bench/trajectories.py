"""What a batch of rollout groups costs in a short and in a long queue, and what a queued group takes.

    python -m bench.trajectories

CPU time of `form` and of `take`, for batches of 256 sequences. Ratios are to the shortest queue.
"""

import argparse
import gc
import hashlib
import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from time import process_time

import msgspec

from bombus.hive.records import BodyRef
from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import (
    BATCH_SEQUENCES_MAX,
    Environment,
    QueuedGroup,
    TrajectoryQueue,
    join,
    push,
    register,
    take,
)
from bombus.hive.trajectories.queue_status import environment_status

BATCH = 256
QUEUED = (100, 10_000, 100_000)
TOKENS = 2_048  # of a sequence


def group(number: int, environment: int | None, sequences: int) -> QueuedGroup:
    body = BodyRef((number,), sequences * TOKENS * 8, hashlib.sha256(str(number).encode()).digest())
    return QueuedGroup(environment, sequences, sequences * TOKENS, TOKENS, body)


def queue_of(sizes: tuple[int, ...], minimum: float | None, queued: int) -> TrajectoryQueue:
    """Return a queue to which environments with groups of these sizes have pushed in turn."""
    queue = TrajectoryQueue()
    register(queue, BATCH)
    for id, size in enumerate(sizes):
        weight = 1.0 + id % 3
        named = Environment(id=id, name=f"env_{id}", max_tokens=TOKENS, weight=weight, group_size=size, minimum=minimum)
        join(queue, named, "env")
    push(queue, (group(number, number % len(sizes), sizes[number % len(sizes)]) for number in range(queued)))
    return queue


CASES: dict[str, Callable[[int], TrajectoryQueue]] = {
    "one environment, groups of 8": lambda queued: queue_of((8,), None, queued),
    "8 environments, groups of 8": lambda queued: queue_of((8,) * 8, None, queued),
    "4 environments, groups of 4, 8, 8, 16": lambda queued: queue_of((4, 8, 8, 16), None, queued),
    "the same, each with a minimum of 0.2": lambda queued: queue_of((4, 8, 8, 16), 0.2, queued),
    "8 environments, groups of 3 to 17, awkward": lambda queued: queue_of((3, 5, 7, 9, 11, 13, 15, 17), None, queued),
    "64 environments, groups of 2 to 65": lambda queued: queue_of(tuple(range(2, 66)), None, queued),
}


def costs(made: Callable[[int], TrajectoryQueue], queued: int) -> tuple[float, float]:
    """Return the median CPU time in microseconds of forming a batch and of taking it, in a queue of its own."""
    queue = made(queued)
    forming, taking = [], []
    for _ in range(1 if queued < 1_000 else 20):
        start = process_time()
        batch = form(queue)
        formed = process_time()
        assert batch is not None
        take(queue, batch)
        forming.append(formed - start)
        taking.append(process_time() - formed)
    return median(forming) * 1e6, median(taking) * 1e6


def min_of(measure: Callable[[], tuple[float, float]], times: int) -> tuple[float, float]:
    """Return the least of several runs: other work on the machine only makes one longer."""
    forming, taking = zip(*(measure() for _ in range(times)))
    return min(forming), min(taking)


def measure_batches(repeats: int) -> None:
    print(f"{'a batch, microseconds of CPU':<46}" + "".join(f"{queued:>18,}" for queued in QUEUED))
    for name, made in CASES.items():
        found = []
        for queued in QUEUED:
            found.append(min_of(partial(costs, made, queued), repeats))
        for part, what in enumerate(("form", "take")):
            line = "".join(f"{each[part]:>10.0f} {each[part] / found[0][part]:>6.2f}x" for each in found)
            print(f"{name + ', ' + what:<46}{line}")


def measure_worst() -> None:
    """Print what the largest batch costs where hardly any two groups are alike and every environment has a minimum."""
    queue, sizes = TrajectoryQueue(), Random(0)
    register(queue, BATCH_SEQUENCES_MAX)
    for id in range(16):
        named = Environment(id=id, name=f"env_{id}", max_tokens=TOKENS, weight=1.0, group_size=1, minimum=0.05)
        join(queue, named, "env")
    push(queue, (group(number, number % 16, sizes.randint(1, 64)) for number in range(QUEUED[-1])))
    start = process_time()
    batch = form(queue)
    assert batch is not None
    print(
        f"\na batch of {BATCH_SEQUENCES_MAX:,} sequences, {len(batch)} groups of 16 environments with minimums and 64 "
        f"sizes each: {process_time() - start:.2f} s"
    )


def measure_groups(queued: int) -> None:
    """Print what a queued group takes: time to push, memory, and bytes of a snapshot."""
    pushed = [group(number, number % 4, 8) for number in range(queued)]
    queue = queue_of((8,) * 4, None, 0)
    start = process_time()
    push(queue, pushed)
    spent = process_time() - start
    print(f"\npush: {spent / queued * 1e6:.2f} us a group")
    start = process_time()
    encoded = msgspec.msgpack.encode(queue)
    wrote = process_time() - start
    start = process_time()
    msgspec.msgpack.decode(encoded, type=TrajectoryQueue)
    read = process_time() - start
    print(
        f"a snapshot of {queued:,} groups: {len(encoded) / queued:.0f} B a group, {wrote:.2f} s to write, "
        f"{read:.2f} s to read"
    )
    del queue, pushed
    gc.collect()
    tracemalloc.start()
    queue = queue_of((8,) * 4, None, queued)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"memory: {size / queued:.0f} B a group, with where its body is; {size / queued / 8 / TOKENS:.3f} B a token of "
        f"groups of 8 x {TOKENS:,}"
    )
    start = process_time()
    for _ in range(100):
        environment_status(queue, queue.environments[0], 0)
    stood = (process_time() - start) / 100
    print(f"what one of 4 environments is told: {stood * 1e6:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    measure_batches(asked.repeats)
    measure_worst()
    measure_groups(QUEUED[-1])


if __name__ == "__main__":
    main()
