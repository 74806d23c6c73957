"""How many gateways, hives and replicas a number of concurrent episodes needs, and what saturates first.

    python -m bench.scaling                                               # the tables of docs/scaling.md
    python -m bench.scaling --episodes 20000 --turns 10 --tool-s 2        # the same for a load of your own

Sizes are arithmetic on figures of bench/RESULTS.md. Latency is simulated event by event: agents that wait for their
tools, and processes of one thread that take CPU time for each message, and some more whenever they wake up, which all
that has arrived by then share (a read, an append, a write). The simulation is compared with what bench.load measured.
"""

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice
from typing import NamedTuple

BUSY = 0.6  # the part of a core up to which a process is planned: beyond it, waiting grows quickly
FOLLOWING = 0.1  # the part of a gateway's core that reading its hive's log may take
TOKENS_S = 2_000.0  # of a replica: an example; measure your own
CORE_HOUR, GPU_HOUR = 0.05, 2.5  # prices, as examples
STATE_BYTES = 500e6  # of a hive's state, which its coordinators and each of its gateways have in memory
CALL_BYTES = 620  # of that, for a call of an episode that is open
READ_BYTES_S = 125e6  # what gateways may read of a hive's log, all of them together: a link of 1 Gbit/s
BATCH = 64  # episodes of a step
SLICE_S = 0.003  # how long a process keeps a core while others wait for it


class Cost(NamedTuple):
    """Milliseconds of CPU: `each` for a message, and `alone` in addition for each time that its process wakes up."""

    each: float
    alone: float


# Milliseconds of CPU (bench/RESULTS.md). What a process takes to wake up is larger under a light load than in a
# benchmark that does nothing else: these are fitted to the first line of MEASURED, and the second is their test.
CALL = Cost(0.75, 0.9)  # a gateway, for a short call, in three parts: bench.gateway at 32
COMMAND_AT_GATEWAY = Cost(0.30, 0.4)  # a claim or an end over HTTP
COMMAND = Cost(0.060, 0.45)  # the coordinator, for a claim or an end: bench.coordinator
NOTE = Cost(0.013, 0.45)  # the coordinator, for a recorded call: bench.coordinator
MESSAGE = Cost(0.02, 0.2)  # the NATS server that leads a stream, for a message with its acknowledgement
STEP_MS = 2.4  # the trainer of the tiny model, for a call
AGENT = Cost(0.35, 0.15)  # bench.load's own work for each half of a call, on the same cores
FOLLOW_MS = 0.005  # a gateway, for each call of its hive that it reads in the log
LOG_BYTES, RECORD_BYTES = 211, 1_894  # of a call: bench.log_bytes, and bench.disk with answers of 103 tokens
TOKEN_BYTES = 12.0  # of a record, for each further token: its id, its logprob, its text


@dataclass(frozen=True)
class Load:
    """What agents do. A pause for tools is uniform from 0 to twice `tool_s`, and every turn is one call."""

    episodes: int
    turns: int = 30
    tool_s: float = 10.0
    answer_s: float = 10.0
    history: int = 16_000  # tokens of a request, on average
    answer: int = 500  # tokens

    @property
    def calls_s(self) -> float:
        return self.episodes / (self.tool_s + self.answer_s)

    @property
    def call(self) -> Cost:
        """What a gateway takes for a call: with tools and a history by bench.turns, without by bench.gateway."""
        return Cost(2.7 + 0.02 * self.history / 1000, CALL.alone) if self.history else CALL


class Process:
    """A process of one thread: it does what has arrived in order, and shares the cost of waking up among it."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.waiting: deque[tuple[Cost, Callable[[], None]]] = deque()
        self.left_s = 0.0
        self.doing: list[Callable[[], None]] = []
        self.spent_s = 0.0

    def do(self, cost: Cost, then: Callable[[], None]) -> None:
        self.waiting.append((cost, then))
        if not self.doing:
            self._begin()
            self.machine.ready(self)

    def _begin(self) -> None:
        taken = list(self.waiting)
        self.waiting.clear()
        self.doing = [then for _, then in taken]
        self.left_s = (max(cost.alone for cost, _ in taken) + sum(cost.each for cost, _ in taken)) / 1e3

    def ran(self, seconds: float) -> bool:
        """Note that it has run so long, and return whether it has more to do."""
        self.spent_s += seconds
        self.left_s -= seconds
        if self.left_s > 1e-12:
            return True
        done, self.doing = self.doing, []
        for then in done:
            then()
        if self.waiting and not self.doing:
            self._begin()
        return bool(self.doing)


class Machine:
    """Cores that processes share in turn. One that wakes up goes before those that have had a slice."""

    def __init__(self, clock: "Clock", cores: int) -> None:
        self._clock = clock
        self._free = cores
        self._ready: deque[Process] = deque()

    def ready(self, process: Process) -> None:
        self._ready.append(process)
        self._run()

    def _run(self) -> None:
        while self._free and self._ready:
            process = self._ready.popleft()
            self._free -= 1
            seconds = min(SLICE_S, process.left_s)
            self._clock.after(seconds, partial(self._ran, process, seconds))

    def _ran(self, process: Process, seconds: float) -> None:
        self._free += 1
        if process.ran(seconds):
            self._ready.append(process)
        self._run()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now_s + seconds, self._count, then))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, then = heapq.heappop(self._due)
            then()


Step = Callable[[Callable[[], None]], None]  # begins something, and calls what it is given at its end
Plan = Generator[Step, None, None]


class Hive:
    """A hive with so many gateways. Each process has a core, unless all share `cores` with the agents."""

    def __init__(self, load: Load, gateways: int, cores: int = 0) -> None:
        self.clock = clock = Clock()
        self._load, self._agents_work = load, AGENT if cores else Cost(0.0, 0.0)
        shared = Machine(clock, cores) if cores else None
        made = (Process(shared or Machine(clock, 1)) for _ in count())
        self.gateways = list(islice(made, gateways))
        self.coordinator, self.nats, self._agents = islice(made, 3)
        self._trainer = list(islice(made, max(1, cores)))  # the threads of torch
        self._gateway = cycle(self.gateways)
        self._random = random.Random(0)
        self._ended = 0
        self.calls_s: list[float] = []

    def run(self, seconds: float) -> None:
        """Let it play until it has settled, and then for so long. Only the latter counts."""
        for _ in range(self._load.episodes):
            self._go_on(self._agent())
        settled_s = 5 + 2 * self._load.tool_s + self._load.answer_s
        self.clock.run(settled_s)
        self.calls_s.clear()
        for process in (*self.gateways, self.coordinator, self.nats):
            process.spent_s = 0.0
        self.clock.run(settled_s + seconds)

    def _go_on(self, plan: Plan) -> None:
        begin = next(plan, None)
        if begin is not None:
            begin(lambda: self._go_on(plan))

    def _agent(self) -> Plan:
        turns = self._random.randrange(self._load.turns)  # not all are at their beginning
        while True:
            for _ in range(turns):
                yield from self._call()
            yield from self._command()
            self._ended += 1
            if self._ended % BATCH == 0:
                step = Cost(BATCH * self._load.turns * STEP_MS / len(self._trainer), 0.0)
                for thread in self._trainer:
                    thread.do(step, lambda: None)
            yield from self._command()
            turns = self._load.turns

    def _call(self) -> Plan:
        load, gateway = self._load, next(self._gateway)
        yield self._wait(self._random.uniform(0, 2 * load.tool_s))
        began = self.clock.now_s
        yield self._cpu(self._agents, self._agents_work)
        yield self._cpu(gateway, _part(load.call, 0.5))  # read and rendered
        yield self._wait(load.answer_s)
        yield self._cpu(gateway, _part(load.call, 0.3))  # parsed and recorded
        yield self._cpu(self.nats, MESSAGE)  # the record
        yield self._cpu(self.nats, MESSAGE)  # the note
        self.coordinator.do(NOTE, lambda: None)
        yield self._cpu(gateway, _part(load.call, 0.2))  # answered
        yield self._cpu(self._agents, self._agents_work)
        self.calls_s.append(self.clock.now_s - began)

    def _command(self) -> Plan:
        gateway = next(self._gateway)
        yield self._cpu(gateway, _part(COMMAND_AT_GATEWAY, 0.5))
        yield self._cpu(self.nats, MESSAGE)  # the command
        yield self._cpu(self.coordinator, COMMAND)
        yield self._cpu(self.nats, MESSAGE)  # its event
        yield self._cpu(gateway, _part(COMMAND_AT_GATEWAY, 0.5))

    def _wait(self, seconds: float) -> Step:
        return lambda resume: self.clock.after(seconds, resume)

    def _cpu(self, process: Process, cost: Cost) -> Step:
        return lambda resume: process.do(cost, resume)


def _part(cost: Cost, share: float) -> Cost:
    return Cost(cost.each * share, cost.alone / (3 if cost is not COMMAND_AT_GATEWAY else 2))


class Seen(NamedTuple):
    """What was measured or simulated. CPU is in milliseconds for a call with its share of claims and ends."""

    p50_ms: float
    p99_ms: float
    gateway: float
    coordinator: float
    nats: float


# bench.load --episodes 1000 --pause-s 3, and 4000 with 12: four calls of an answer of 50 ms, on two cores.
MEASURED = {
    Load(1_000, 4, 3.0, 0.05, 0): Seen(66, 190, 1.41, 0.42, 0.44),
    Load(4_000, 4, 12.0, 0.05, 0): Seen(86, 447, 1.49, 0.40, 0.36),
}


def simulated(load: Load, gateways: int = 1, cores: int = 0, seconds: float = 30.0) -> Seen:
    hive = Hive(load, gateways, cores)
    hive.run(seconds)
    ordered = sorted(1e3 * each for each in hive.calls_s)
    p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    spent = (sum(each.spent_s for each in hive.gateways), hive.coordinator.spent_s, hive.nats.spent_s)
    return Seen(p50, p99, *(1e3 * each / len(ordered) for each in spent))


class Size(NamedTuple):
    """What a load needs."""

    hives: int
    gateways: int  # of each hive, as the following
    coordinator: float  # cores
    nats: float
    state_mb: float  # memory for calls of open episodes, in each process that has the state
    read_mb_s: float  # of the log, by all gateways
    stored_gb_h: float  # of all hives, without copies
    replicas: int  # of all hives


def size(load: Load, tokens_s: float) -> Size:
    """Return what a load needs if a replica samples `tokens_s` tokens a second in all."""
    for hives in count(1):
        calls_s = load.calls_s / hives
        left = BUSY - calls_s * FOLLOW_MS / 1e3
        gateways = math.ceil(calls_s * (load.call.each + 2 * COMMAND_AT_GATEWAY.each / load.turns) / 1e3 / left)
        decided_s = calls_s * (NOTE.each + 2 * COMMAND.each / load.turns) / 1e3
        read = calls_s * LOG_BYTES * gateways
        state = load.episodes / hives * load.turns / 2 * CALL_BYTES
        if decided_s <= BUSY and BUSY - left <= FOLLOWING and state <= STATE_BYTES and read <= READ_BYTES_S:
            break
    messages = calls_s * (3 + 4 / load.turns)
    stored = load.calls_s * (LOG_BYTES + RECORD_BYTES + TOKEN_BYTES * max(0, load.answer - 103)) * 3600
    replicas = math.ceil(load.calls_s * load.answer / tokens_s)
    nats = messages * MESSAGE.each / 1e3
    return Size(hives, gateways, decided_s, nats, state / 1e6, read / 1e6, stored / 1e9, replicas)


def sizes(load: Load, tokens_s: float) -> Iterator[str]:
    yield "| episodes at once | calls/s | hives | gateways | coordinator, NATS | state | read | stored | GPUs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for episodes in sorted({10_000, 100_000, 1_000_000, load.episodes}):
        one = replace(load, episodes=episodes)
        need = size(one, tokens_s)
        yield (
            f"| {episodes:,} | {one.calls_s:,.0f} | {need.hives} | {need.gateways} | {need.coordinator:.2f}, "
            f"{need.nats:.2f} cores | {need.state_mb:.0f} MB | {need.read_mb_s:.1f} MB/s "
            f"| {need.stored_gb_h:,.0f} GB/h | {need.replicas:,} |"
        )


def costs(load: Load, tokens_s: float, core_h: float, gpu_h: float) -> Iterator[str]:
    """Yield the table of what a million calls cost at these prices of an hour of a core and of a replica's GPUs."""
    gateway = (load.call.each + 2 * COMMAND_AT_GATEWAY.each / load.turns) / BUSY
    rest = (NOTE.each + 2 * COMMAND.each / load.turns + (3 + 4 / load.turns) * MESSAGE.each * 3) / BUSY
    hours = load.answer * 1e6 / tokens_s / 3600
    yield "| for a million calls | hours | price |"
    yield "|---|---|---|"
    yield f"| gateways | {gateway / 3.6:.2f} of a core | {gateway / 3.6 * core_h:.2f} |"
    yield f"| coordinator and three NATS servers | {rest / 3.6:.2f} of a core | {rest / 3.6 * core_h:.2f} |"
    yield f"| replicas | {hours:.1f} of their GPUs | {hours * gpu_h:.2f} |"


def validation() -> Iterator[str]:
    yield "| episodes | | p50, p99 | CPU for a call: gateway, coordinator, NATS |"
    yield "|---|---|---|---|"
    for load, measured in MEASURED.items():
        for name, seen in (("measured", measured), ("simulated", simulated(load, cores=2))):
            yield (
                f"| {load.episodes:,} | {name} | {seen.p50_ms:.0f}, {seen.p99_ms:.0f} ms "
                f"| {seen.gateway:.2f}, {seen.coordinator:.2f}, {seen.nats:.2f} ms |"
            )


def saturation(load: Load) -> Iterator[str]:
    """Yield the table of one hive with four gateways under more and more of a load."""
    yield "| episodes at once | calls/s | a gateway, the coordinator, NATS: cores | added to an answer: p50, p99 |"
    yield "|---|---|---|---|"
    for episodes in (4_000, 8_000, 12_000, 16_000, 20_000):
        one = replace(load, episodes=episodes)
        seen = simulated(one, gateways=4)
        busy = ", ".join(f"{one.calls_s * ms / 1e3:.2f}" for ms in (seen.gateway / 4, seen.coordinator, seen.nats))
        added = [ms - 1e3 * load.answer_s for ms in (seen.p50_ms, seen.p99_ms)]
        yield f"| {episodes:,} | {one.calls_s:,.0f} | {busy} | {added[0]:,.0f}, {added[1]:,.0f} ms |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Load(100_000)
    parser.add_argument("--episodes", type=int, default=usual.episodes, metavar="N", help="at once, as one more row")
    parser.add_argument("--turns", type=int, default=usual.turns, metavar="N", help="of an episode (%(default)s)")
    parser.add_argument("--tool-s", type=float, default=usual.tool_s, metavar="S", help="between calls (%(default)s)")
    parser.add_argument("--answer-s", type=float, default=usual.answer_s, metavar="S", help="for one (%(default)s)")
    parser.add_argument("--history", type=int, default=usual.history, metavar="N", help="tokens of a request; 0: short")
    parser.add_argument("--answer", type=int, default=usual.answer, metavar="N", help="its tokens (%(default)s)")
    parser.add_argument("--tokens-s", type=float, default=TOKENS_S, metavar="N", help="of a replica (%(default)s)")
    parser.add_argument("--core-hour", type=float, default=CORE_HOUR, metavar="PRICE", help="of a core (%(default)s)")
    parser.add_argument("--gpu-hour", type=float, default=GPU_HOUR, metavar="PRICE", help="of a replica (%(default)s)")
    given = parser.parse_args()
    load = Load(given.episodes, given.turns, given.tool_s, given.answer_s, given.history, given.answer)
    tables = (
        sizes(load, given.tokens_s),
        saturation(load),
        costs(load, given.tokens_s, given.core_hour, given.gpu_hour),
        validation(),
    )
    for table in tables:
        print(*table, "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
