"""One chaos run: a hive, its load, the killer, the audit."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from bombus.bus import Bus
from bombus.demo.hive import free_port
from bombus.sdk.aio import AsyncSwarmClient
from tests.chaos.agents import Agents
from tests.chaos.audit import Report, audit
from tests.chaos.killer import Killer

READY_S = 120.0
QUIET_S = 120.0  # allowed for a step once the killing has ended
PROCESSES = ("--gateways", "2", "--coordinators", "2", "--replicas", "2")

Say = Callable[[str], None]


@dataclass
class Outcome:
    """The outcome of a run. `report.wrong` lists what went wrong."""

    report: Report
    killer: Killer
    agents: Agents
    seconds: float


async def run(folder: Path, kills: int, seed: int, say: Say, max_staleness: int = 0) -> Outcome:
    """Run once. Raises `AssertionError` when the hive does not start, or makes no progress after the kills."""
    began = time.monotonic()
    log = folder / "up.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bombus", "up", "--port", str(free_port()), "--data-dir", str(folder / "data"),
            "--threads", "1", *PROCESSES,
            stdout=subprocess.PIPE, stderr=out, start_new_session=True,
            env={**os.environ, "BOMBUS_CACHE": str(folder / "cache")},
        )  # fmt: skip
    try:
        url = await _ready(process, log)
        say(f"a hive of {' '.join(PROCESSES)} at {url}")
        agents, killer = Agents(url, seed, max_staleness), Killer(process.pid, seed)
        playing = asyncio.create_task(agents.run())
        telling = asyncio.create_task(_report_progress(killer, agents, say))
        try:
            await _while(playing, killer.run(kills))
            say("the killing has ended; waiting for two more steps")
            await _while(playing, _makes_progress(url))
            agents.stop()
            await asyncio.wait_for(playing, QUIET_S)
        finally:
            telling.cancel()
            playing.cancel()
            await asyncio.gather(telling, playing, return_exceptions=True)
        async with await Bus.connect((folder / "data/nats-url").read_text().strip(), "main", name="audit") as bus:
            report = await audit(bus, agents.ledger)
        if report.steps:
            await _train_again(folder / "data", report)
    finally:
        process.terminate()
        await process.wait()
    return Outcome(report, killer, agents, time.monotonic() - began)


async def _train_again(data: Path, report: Report) -> None:
    """Train the last step again from the log and the checkpoint before it, and compare with the served weights."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bombus", "replay", "train", "--step", str(report.steps), "--data", str(data),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    report.trained_again = process.returncode == 0
    if not report.trained_again:
        report.wrong.append(f"step {report.steps}, trained again from the log: {output.decode()}")


async def _ready(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while line := await process.stdout.readline():
                if line.startswith(b"ready "):
                    return line.split()[1].decode()
    raise AssertionError(f"the hive did not come up:\n{log.read_text()[-4000:]}")


async def _while(playing: "asyncio.Task[None]", work: Coroutine[None, None, None]) -> None:
    """Do `work` while the agents play. An unexpected failure of an agent fails the run."""
    doing = asyncio.create_task(work)
    await asyncio.wait({playing, doing}, return_when=asyncio.FIRST_COMPLETED)
    if not doing.done():
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
        await playing
        raise AssertionError("the agents stopped by themselves")
    await doing


async def _makes_progress(url: str) -> None:
    async with asyncio.timeout(QUIET_S), AsyncSwarmClient(url, verbose=False) as client:
        before = await client.get_global_step()
        while await client.get_global_step() < before + 2:
            phase, _ = await client.get_engine_status()
            assert phase != "ENGINE.OFFLINE", "the engine gave up"
            await asyncio.sleep(0.2)


async def _report_progress(killer: Killer, agents: Agents, say: Say) -> None:
    while True:
        await asyncio.sleep(10)
        ledger = agents.ledger
        say(
            f"{killer.kills.total()} kills, {killer.stops.total()} stops; {ledger.acknowledged_calls} calls and "
            f"{len(ledger.ends)} ends acknowledged"
        )


def summary(outcome: Outcome) -> str:
    """Summarise the run in a few lines."""
    report, killer = outcome.report, outcome.killer
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(killer.kills.items()))
    stops = ", ".join(f"{kind} {count}" for kind, count in sorted(killer.stops.items()))
    troubles = sum(outcome.agents.ledger.troubles.values())
    return "\n".join(
        [
            f"kills                   {killer.kills.total():6}   ({kills})",
            f"stops                   {killer.stops.total():6}   ({stops})",
            f"leaders                 {report.epochs:6}",
            f"calls acknowledged      {report.calls_acknowledged:6}",
            f"calls found             {report.calls_found:6}",
            f"episodes ended          {report.episodes_ended:6}   (acknowledged)",
            f"episodes trained once   {report.episodes_trained_once:6}   (in {report.steps} steps)",
            f"  waiting, dropped      {report.episodes_waiting:6}, {report.episodes_dropped}",
            f"  evaluation            {report.episodes_evaluated:6}",
            f"last step made again    {'same bytes' if report.trained_again else 'OTHER BYTES'}",
            f"lost                    {report.lost:6}",
            f"doubled                 {report.doubled:6}",
            f"otherwise wrong         {len(report.wrong) - report.lost - report.doubled:6}",
            f"errors seen by agents   {troubles:6}   (of calls and claims that were not acknowledged)",
            f"seconds                 {outcome.seconds:6.0f}",
        ]
    )
