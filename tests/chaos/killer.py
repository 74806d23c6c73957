"""Kill and stop the processes of a hive at random."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter

import psutil

from tests.chaos.hive import RunningHive

SHARES = {"coordinator": 5, "gateway": 5, "inference": 4, "nats-server": 3, "trainer": 3}
STOPS = 0.3  # the share of stops; the others are kills
TOGETHER = (1, 1, 1, 2, 3)  # how many processes are killed at once, each as often
PAUSE_S = (0.3, 6.0)  # two cores are half busy with starting again what was killed
STOPPED_S = (0.3, 4.0)


class Killer:
    """Kills and stops the processes that a hive's supervisor has started."""

    def __init__(self, hive: RunningHive, seed: int) -> None:
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self._hive = hive
        self._random = random.Random(seed)
        self._stopped: set[asyncio.Task[None]] = set()
        self._seconds = 0.0

    async def run(self, kills: int) -> None:
        """Run until there were `kills` kills, at least one of each service. All processes run again afterwards."""
        try:
            while self.kills.total() < kills or set(self.kills) != set(SHARES):
                began = time.monotonic()
                await asyncio.sleep(self._random.uniform(*PAUSE_S))
                self._strike()
                self._seconds += time.monotonic() - began
        finally:
            await asyncio.gather(*self._stopped)

    def seconds_left(self, kills: int) -> float:
        """Return how long it takes to come to `kills`, at the pace so far."""
        done = self.kills.total()
        return self._seconds / done * max(0, kills - done) if done else 0.0

    def _strike(self) -> None:
        if self._hive.releases is not None:
            self._hive.releases.choose()
        if self._random.random() < STOPS:
            for kind, victim in self._victims(1):
                self.stops[kind] += 1
                resumed = asyncio.create_task(self._stop(victim, self._random.uniform(*STOPPED_S)))
                self._stopped.add(resumed)
                resumed.add_done_callback(self._stopped.discard)
        else:
            for kind, victim in self._victims(self._random.choice(TOGETHER)):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                    victim.kill()
                    self.kills[kind] += 1

    def _victims(self, count: int) -> list[tuple[str, psutil.Process]]:
        """Choose up to `count` processes, each with its kind. Those that are dead or stopped are left alone."""
        running: dict[str, list[psutil.Process]] = {}
        for child in self._hive.children():
            if (kind := kind_of(child)) in SHARES and _is_running(child):
                running.setdefault(kind, []).append(child)
        chosen: list[tuple[str, psutil.Process]] = []
        while running and len(chosen) < count:
            kind = self._choose(list(running))
            victims = running[kind]
            chosen.append((kind, victims.pop(self._random.randrange(len(victims)))))
            if not victims:
                del running[kind]
        return chosen

    def _choose(self, kinds: list[str]) -> str:
        missing = [kind for kind in kinds if kind not in self.kills]
        if missing and self._random.random() < 0.5:
            return self._random.choice(missing)
        return self._random.choices(kinds, [SHARES[kind] for kind in kinds])[0]

    async def _stop(self, victim: psutil.Process, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed while it was stopped
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            victim.send_signal(signal.SIGCONT)


def kind_of(process: psutil.Process) -> str:
    """Return the service that a child of `bombus up` runs, "" for none."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    if words and words[0].endswith("nats-server"):
        return "nats-server"
    return words[3] if words[1:3] == ["-m", "bombus"] and len(words) > 3 else ""


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process is neither dead nor stopped."""
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
