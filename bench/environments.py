"""What a pool of environments costs: whether steps overlap, and how long it takes to get an environment.

One `bombus env serve` in a process of its own, over real sockets; the pool is in this process. The rounds with 1, 8 and
64 sessions take turns, so that a machine whose speed changes does not favour one of them.
"""

import argparse
import asyncio
import statistics
import sys
import time

from bombus import AsyncEnvPool, Task, reward
from bombus.environments.pools.session import EnvSession, SessionSettings

SESSIONS = (1, 8, 64)
NAP_S = 0.05


class Napping:
    """An environment whose tools take a given time, or none."""

    def reset(self, task: Task) -> str:
        return "Sleep."

    async def nap(self) -> str:
        """Take 50 ms."""
        await asyncio.sleep(NAP_S)
        return "rested"

    async def blink(self) -> str:
        """Take no time."""
        return "blinked"

    @reward()
    def always(self) -> float:
        return 1.0


async def rate(pool: AsyncEnvPool, count: int, tool: str, seconds: float, over_s: float = 0.0) -> float:
    """Return the steps that `count` sessions take in a second, each of them one after the other.

    They begin together, and then stay in step, as each step takes the same time: the server gets all its work at once.
    Otherwise they begin one after the other within `over_s`, and steps count from then on.
    """
    began = time.perf_counter() + over_s
    until = began + seconds
    taken = 0

    async def run(session: EnvSession, pause_s: float) -> None:
        nonlocal taken
        await asyncio.sleep(pause_s)
        while time.perf_counter() < until:
            await session.rpc("tools/call", {"name": tool, "arguments": {}})
            taken += time.perf_counter() >= began

    await asyncio.gather(*(run(pool.session(number), over_s * number / count) for number in range(count)))
    return taken / (time.perf_counter() - began)


async def acquires(pool: AsyncEnvPool, workers: int, each: int) -> list[float]:
    """Return how long it took to take an environment of the pool, in ms, by workers that all have one."""
    waits: list[float] = []

    async def work() -> None:
        for _ in range(each):
            began = time.perf_counter()
            taken = await pool.take()
            waits.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(0)
            pool.give_back(taken)

    await asyncio.gather(*(work() for _ in range(workers)))
    return waits


async def opens(url: str, count: int) -> list[float]:
    """Return how long each of many sessions took to open, one after the other, in ms."""
    waits = []
    for _ in range(count):
        began = time.perf_counter()
        session = await EnvSession.open(url, SessionSettings(wait_s=60))
        waits.append(1e3 * (time.perf_counter() - began))
        await session.close()
    return waits


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def measure(url: str, rounds: int, seconds: float) -> None:
    took = await opens(url, 100)
    print(f"a session is opened in {statistics.median(took):.1f} ms (p50), {p99(took):.1f} ms (p99)")
    together = [(tool, count, 0.0) for tool in ("nap", "blink") for count in SESSIONS]
    found: dict[tuple[str, int, float], list[float]] = {case: [] for case in (*together, ("nap", SESSIONS[-1], NAP_S))}
    async with AsyncEnvPool(url, SESSIONS[-1], group_size=8, settings=SessionSettings(wait_s=60)) as pool:
        for _ in range(2):
            await pool.reset_group(Task(), SESSIONS[-1])
        waits = [wait for _ in range(rounds) for wait in await acquires(pool, SESSIONS[-1], 50)]
        print(f"an environment of the pool is taken in {p99(waits):.3f} ms (p99) by {SESSIONS[-1]} workers at once")
        for _ in range(rounds):
            for (tool, count, over_s), rates in found.items():
                rates.append(await rate(pool, count, tool, seconds, over_s))
    for (tool, count, over_s), rates in found.items():
        ratios = [one / alone for one, alone in zip(rates, found[tool, 1, 0.0], strict=True)]
        begun = ", begun one after the other" if over_s else ""
        print(
            f"{tool:<6} {count:>3} sessions: {statistics.median(rates):>8,.1f} steps/s, "
            f"{statistics.median(ratios):.2f} times one session's ({min(ratios):.2f} to {max(ratios):.2f}){begun}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.environments", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "bombus", "env", "serve", "bench.environments:Napping"]
    server = await asyncio.create_subprocess_exec(
        *command, "--slots", str(SESSIONS[-1]), "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        url = (await server.stdout.readline()).decode().split()[1]
        await measure(url, arguments.rounds, arguments.seconds)
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main())
