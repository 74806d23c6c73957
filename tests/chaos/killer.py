"""Kill and stop the processes of a hive at random."""

import asyncio
import random
import signal
from collections import Counter

import psutil

WEIGHTS = {"coordinator": 5, "gateway": 5, "inference": 4, "nats-server": 3, "trainer": 2}
STOPS = 0.3  # the share of stops; the others are kills
PAUSE_S = (0.3, 3.0)
STOPPED_S = (0.3, 4.0)


class Killer:
    """Kills and stops children of the process `supervisor`."""

    def __init__(self, supervisor: int, seed: int) -> None:
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self._supervisor = psutil.Process(supervisor)
        self._random = random.Random(seed)
        self._stopped: set[asyncio.Task[None]] = set()

    async def run(self, kills: int) -> None:
        """Run until there were `kills` kills, at least one of each service, and all processes run again."""
        try:
            while self.kills.total() < kills or set(self.kills) != set(WEIGHTS):
                await asyncio.sleep(self._random.uniform(*PAUSE_S))
                self._strike()
        finally:
            await asyncio.gather(*self._stopped)

    def _strike(self) -> None:
        missing = [kind for kind in WEIGHTS if kind not in self.kills]
        kind = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if missing and self._random.random() < 0.5:
            kind = self._random.choice(missing)
        victims = [child for child in self._supervisor.children() if kind_of(child) == kind]
        running = [victim for victim in victims if victim.status() != psutil.STATUS_STOPPED]
        if not running:
            return  # dead and not restarted yet, or stopped
        victim = self._random.choice(running)
        if self._random.random() < STOPS:
            self.stops[kind] += 1
            resumed = asyncio.create_task(self._stop(victim, self._random.uniform(*STOPPED_S)))
            self._stopped.add(resumed)
            resumed.add_done_callback(self._stopped.discard)
        else:
            self.kills[kind] += 1
            victim.kill()

    async def _stop(self, victim: psutil.Process, seconds: float) -> None:
        try:
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            victim.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            pass  # killed while it was stopped


def kind_of(process: psutil.Process) -> str:
    """Return the service that a child of `bombus up` runs, "" for none."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    if words and words[0].endswith("nats-server"):
        return "nats-server"
    return words[3] if words[1:3] == ["-m", "bombus"] and len(words) > 3 else ""
