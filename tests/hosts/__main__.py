"""`python -m tests.hosts`: break the network between the hosts of a hive, and then check every guarantee."""

import argparse
import asyncio
import itertools
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nats.errors import Error as NatsError

from bombus import AsyncEnvPool, SwarmError, Task
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BombusError
from tests.chaos.agents import Agents
from tests.chaos.audit import audit
from tests.chaos.report import Report, lines
from tests.hosts.hive import BUSES, ENGINE, FAKETIME, SERVICES, SpreadHive
from tests.hosts.network import Network
from tests.long_runs import begin, end

HOSTS = (*BUSES, *SERVICES)
CLOCKS = {"gateway": 60, "trainer": -60, "replica-2": 30}
READY_S = 120.0
QUIET_S = 240.0
STEPS_AFTER = 2


@dataclass(frozen=True)
class Fault:
    what: str
    seconds: float
    happens: Callable[[], AbstractContextManager[None]]


def faults(network: Network, hive: SpreadHive, pick: random.Random, share: float) -> Iterator[Fault]:
    """Yield the faults in random order: of `share` of all pairs of hosts, both ways and one way, and the others."""

    @contextmanager
    def cut(senders: tuple[str, ...], receivers: tuple[str, ...], both: bool = True) -> Iterator[None]:
        network.cut(senders, receivers)
        if both:
            network.cut(receivers, senders)
        yield
        network.heal()

    @contextmanager
    def slow() -> Iterator[None]:
        network.delay_s, network.loss = 0.1, 0.02  # 200 ms there and back
        yield
        network.heal()

    def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
        shuffled = pick.sample(network.hosts, len(network.hosts))
        return tuple(shuffled[:5]), tuple(shuffled[5:])

    found = [
        Fault(f"{a} and {b} apart", 5.0, partial(cut, (a,), (b,))) for a, b in itertools.combinations(network.hosts, 2)
    ]
    found += [
        Fault(f"nothing from {a} to {b}", 5.0, partial(cut, (a,), (b,), both=False))
        for a, b in itertools.permutations(network.hosts, 2)
    ]
    found = pick.sample(found, int(len(found) * share))
    for _ in range(6):
        some, others = halves()
        found.append(Fault(f"{', '.join(some)} apart from the others", 8.0, partial(cut, some, others)))
    for host in HOSTS:
        others = tuple(each for each in network.hosts if each != host)
        found += [Fault(f"{host} alone", 8.0, partial(cut, (host,), others))]
        found += [Fault(f"{host} frozen", 6.0, partial(hive.frozen, host))]
    found += [Fault("200 ms and 2 % loss", 20.0, slow)] * 2
    yield from pick.sample(found, len(found))


async def run(folder: Path, seed: int, share: float, say: Callable[[str], None]) -> tuple[Report, SpreadHive]:
    with Network(HOSTS, seed) as network:
        hive = SpreadHive(folder, network, CLOCKS if FAKETIME.exists() else {})
        hive.start()
        agents = Agents(hive.url, ENGINE, seed)
        try:
            async with asyncio.timeout(READY_S):
                bus = await _connected(hive.bus)
            say(f"a hive at {hive.url}, whose logs are in {folder}")
            async with bus:
                playing = asyncio.create_task(agents.run())
                try:
                    report = await _broken(bus, network, hive, agents, playing, seed, share, say)
                finally:
                    playing.cancel()
                    await asyncio.gather(playing, return_exceptions=True)
            return report, hive
        finally:
            await hive.stop()


async def _connected(url: str) -> Bus:
    while True:
        try:
            bus = await Bus.connect(url, "main", name="hosts")
            if await bus.last(bus.subjects.events_stream) is not None:
                return bus
            await bus.close()
        except (BombusError, NatsError, OSError, TimeoutError):
            pass  # the servers elect a leader, and the coordinator makes the streams
        await asyncio.sleep(1.0)


async def _guess(url: str, played: Counter[str]) -> None:
    """Play an environment of the server at `url` again and again, until cancelled. Counts what became of each game."""
    while True:
        try:
            async with asyncio.timeout(60.0), AsyncEnvPool(url, size=1, group_size=1) as pool:
                await pool.reset_group(Task(task_id="seven", metadata={"seed": 7}))
                for number in range(10):
                    await pool.run_group_step([{"tool": "guess", "arguments": {"number": number}}])
                    await asyncio.sleep(0.2)
            played["to the end"] += 1
        except (BombusError, SwarmError, OSError, TimeoutError) as error:
            played[type(error).__name__] += 1
            await asyncio.sleep(1.0)


async def _confirm(hive: SpreadHive, report: Report) -> None:
    """Have the commands say the same: the log is whole, accounts for each token, and gives the last step's bytes."""
    found = report.engines[ENGINE.name]
    again = ("replay", "train", "--step", str(found.steps), "--engine", ENGINE.name)
    codes = []
    for command in (("log", "check"), ("audit",), again):
        code, output = await hive.bombus(*command)
        codes.append(code)
        if code:
            report.wrong_in_hive.append(f"bombus {' '.join(command)}: {output}")
    report.verified, found.trained_again = not codes[0], not codes[2]


async def _broken(
    bus: Bus,
    network: Network,
    hive: SpreadHive,
    agents: Agents,
    playing: "asyncio.Task[None]",
    seed: int,
    share: float,
    say: Callable[[str], None],
) -> Report:
    follower = Follower(bus)
    following = asyncio.create_task(follower.run())
    played: Counter[str] = Counter()
    guessing = asyncio.create_task(_guess(hive.environments, played))

    async def steps(more: int, within_s: float) -> int:
        engine = follower.hive.engine(ENGINE.name)
        wanted = engine.step + more
        waiting = asyncio.create_task(follower.wait_for(lambda hive: hive.engine(ENGINE.name).step >= wanted, within_s))
        await asyncio.wait({waiting, playing}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            await playing
            raise AssertionError("the agents stopped by themselves")
        await waiting
        return follower.hive.engine(ENGINE.name).step

    try:
        await steps(1, QUIET_S)
        planned = list(faults(network, hive, random.Random(seed), share))
        for number, fault in enumerate(planned, 1):
            with fault.happens():
                await asyncio.sleep(fault.seconds)
            await asyncio.sleep(2.0)
            step = follower.hive.engine(ENGINE.name).step
            say(f"{number} of {len(planned)}: {fault.what}; step {step}, {agents.ledger.acknowledged_calls} calls")
            if playing.done():
                await playing
        games = played["to the end"]
        made = await steps(STEPS_AFTER, QUIET_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while played["to the end"] < games + 2:
                    await asyncio.sleep(0.5)
        assert played["to the end"] >= games + 2, f"no game comes to its end any more: {dict(played)}"
        say(f"games at the environment server: {dict(played)}")
        agents.stop()
        await asyncio.wait_for(playing, QUIET_S)
        say(f"the network is whole again, step {made} is done, the agents have ended")
        await follower.wait_for(lambda hive: hive.engine(ENGINE.name).batch is None, QUIET_S)
        report = await audit(bus, {ENGINE.name: agents.ledger})
        await _confirm(hive, report)
        return report
    finally:
        following.cancel()
        guessing.cancel()
        await asyncio.gather(following, guessing, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the order of the faults (default: the clock)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the faults of two hosts that are tried (default: %(default)s)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no host and no process is left
    seed, folder, say = begin("hosts", arguments.seed)
    report, hive = asyncio.run(run(folder, seed, arguments.share, say))
    print(f"processes that ended and were started again: {hive.restarts}")
    print("\n".join(lines(report)))
    return end(folder, report.wrong)


if __name__ == "__main__":
    sys.exit(main())
