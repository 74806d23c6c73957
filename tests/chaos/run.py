"""One chaos run: a hive of two engines, their load, the killer, a restart of everything, the audit."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive.state import EngineState, Hive, Phase
from bombus.sdk.aio import AsyncSwarmClient
from tests.chaos.agents import Agents, MultiModelAgents
from tests.chaos.audit import audit
from tests.chaos.engines import ENGINES, LEFT
from tests.chaos.hive import RunningHive
from tests.chaos.killer import Killer
from tests.chaos.releases import Releases
from tests.chaos.report import Report, lines

QUIET_S = 240.0  # allowed for some steps once the killing has ended
STEPS_AFTER = 2
TOLD_EVERY_S = 10.0
AGREED = re.compile(r"the snapshot at event ([\d,]+) is the fold of the events before it")

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass
class Outcome:
    """The outcome of a run. `report.wrong` lists what went wrong."""

    report: Report
    killer: Killer
    agents: Mapping[str, Agents]  # by engine
    multi: MultiModelAgents
    restarted: int  # processes that were killed at once in the middle
    seconds: float
    started: Mapping[str, Counter[str]]  # by release, the processes of each service, if there are two releases


async def run(
    folder: Path, kills: int, seed: int, say: Say, broken_replica: bool = False, other: Path | None = None
) -> Outcome:
    """Run once, if `other` is the tree of another release, with processes of both.

    Raises `AssertionError` when the hive does not start, or what stopped an agent.
    """
    began = time.monotonic()
    releases = None if other is None else Releases(folder, other, seed)
    hive = RunningHive(folder, broken_replica, releases)
    killer = Killer(hive, seed)
    agents = {engine.name: Agents(hive.url, engine, seed) for engine in ENGINES}
    multi = MultiModelAgents(hive.url, {name: each.ledger for name, each in agents.items()}, seed)
    try:
        await hive.start()
        say(f"a hive at {hive.url}, whose log is {hive.log}")
        async with _playing(agents, multi) as playing, _telling(killer, kills, agents, say):
            await _while(playing, killer.run(kills // 2))
            await _while(playing, _more_steps(hive.url, 1))  # so that there is something to lose
            restarted = await _while(playing, _restart(hive))
            say(f"{restarted} processes were killed at once and are up again")
            await _while(playing, killer.run(kills))
            say("the killing has ended; waiting for more steps")
            if releases is not None:
                releases.choose("this")
            made = await _while(playing, _more_steps(hive.url, STEPS_AFTER))
            multi.stop()
            for each in agents.values():
                each.stop()
            await asyncio.wait_for(playing, QUIET_S)
        report = await _audit(hive, agents)
        if broken_replica and not report.engines[LEFT.name].replicas_quarantined:
            report.engines[LEFT.name].wrong.append("the replica that never loads was not quarantined")
        for engine, steps in made.items():
            report.engines[engine].steps_after = steps
            if steps < STEPS_AFTER:
                report.engines[engine].wrong.append(f"{steps} steps were made within {QUIET_S:.0f} s of the killing")
        await asyncio.gather(*(_train_again(hive, engine, report) for engine in agents))
        await hive.stop()
        await _verify(hive, report)
    finally:
        await hive.stop()
    started = {} if releases is None else releases.started()
    return Outcome(report, killer, agents, multi, restarted, time.monotonic() - began, started)


# ---- while agents play --------------------------------------------------------------------------------------------


@asynccontextmanager
async def _playing(agents: Mapping[str, Agents], multi: MultiModelAgents) -> AsyncIterator["asyncio.Task[None]"]:
    """Let all agents play, in a task that ends once they were stopped, or when one of them fails."""

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(multi.run())
            for each in agents.values():
                tasks.create_task(each.run())

    playing = asyncio.create_task(play())
    try:
        yield playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def _while(playing: "asyncio.Task[None]", work: Coroutine[None, None, T]) -> T:
    """Do `work` while the agents play, and return its result. An unexpected failure of an agent fails the run."""
    doing = asyncio.create_task(work)
    try:
        await asyncio.wait({playing, doing}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            await playing
            raise AssertionError("the agents stopped by themselves")
        return await doing
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _restart(hive: RunningHive) -> int:
    """Kill every process of the hive at once, and start the hive again on the same folder."""
    killed = await hive.kill()
    await hive.start()
    return killed


async def _more_steps(url: str, wanted: int) -> dict[str, int]:
    """Wait for so many more steps of each engine, and return how many each has made: fewer where it gets stuck."""
    names = [engine.name for engine in ENGINES]
    made = await asyncio.gather(*(_steps_of(url, name, wanted) for name in names))
    return dict(zip(names, made, strict=True))


async def _steps_of(url: str, engine: str, wanted: int) -> int:
    made = 0
    async with AsyncSwarmClient(url, verbose=False, engine=engine) as client:
        before = await client.get_global_step()
        try:
            async with asyncio.timeout(QUIET_S):
                while made < wanted:
                    await asyncio.sleep(0.2)
                    made = await client.get_global_step() - before
        except TimeoutError:
            pass  # the audit tells what has become of the engine
    return made


@asynccontextmanager
async def _telling(killer: Killer, kills: int, agents: Mapping[str, Agents], say: Say) -> AsyncIterator[None]:
    """Say every few seconds how far the run is, and how long it still takes."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            done = ", ".join(
                f"{name}: {each.ledger.acknowledged_calls} calls and {len(each.ledger.ends)} ends"
                for name, each in agents.items()
            )
            left = killer.seconds_left(kills) / 60
            say(f"{killer.kills.total()} of {kills} kills, {killer.stops.total()} stops; {done}; {left:.0f} min left")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


# ---- afterwards ---------------------------------------------------------------------------------------------------


async def _audit(hive: RunningHive, agents: Mapping[str, Agents]) -> Report:
    async with await Bus.connect(hive.bus, "main", name="audit") as bus:
        unsettled = await _unsettled(bus)
        report = await audit(bus, {name: each.ledger for name, each in agents.items()})
    for engine in unsettled:
        report.engines[engine].wrong.append(f"it did not come to rest within {QUIET_S:.0f} s after its agents")
    return report


async def _unsettled(bus: Bus) -> list[str]:
    """Wait until each engine has trained what it has, and return those that do not get there."""

    def unsettled(hive: Hive) -> list[str]:
        return [engine.name for engine in ENGINES if not _is_settled(hive.engine(engine.name))]

    follower = Follower(bus)
    following = asyncio.create_task(follower.run())
    try:
        await follower.caught_up()
        await follower.wait_for(lambda hive: not unsettled(hive), QUIET_S)
    except TimeoutError:
        pass
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return unsettled(follower.hive)


def _is_settled(engine: EngineState) -> bool:
    resting = engine.phase == Phase.ROLLING and not engine.suspended
    return resting and engine.batch is None and engine.version == engine.step


async def _train_again(hive: RunningHive, engine: str, report: Report) -> None:
    """Train the last step again from the log and the checkpoint before it, and compare with the served weights."""
    found = report.engines[engine]
    if not found.steps:
        found.wrong.append("no step was made")
        return
    code, output = await hive.bombus("replay", "train", "--step", str(found.steps), "--engine", engine)
    found.trained_again = code == 0
    if not found.trained_again:
        found.wrong.append(f"step {found.steps}, trained again from the log: {output}")


async def _verify(hive: RunningHive, report: Report) -> None:
    """Check the log of a hive that was stopped in order, and that the state of its last leader is what it folds to."""
    code, output = await hive.bombus("log", "check")
    agreed = [int(found.replace(",", "")) for found in AGREED.findall(output)]
    report.verified = code == 0 and max(agreed, default=0) >= report.events
    if not report.verified:
        report.wrong_in_hive.append(f"bombus log check, after {report.events} events were checked: {output}")
    code, output = await hive.bombus("audit")
    if code:
        report.wrong_in_hive.append(f"bombus audit: {output}")


def summary(outcome: Outcome) -> str:
    """Summarise the run in a few lines."""
    killer = outcome.killer
    kills, stops = _counted(killer.kills), _counted(killer.stops)
    return "\n".join(
        [
            f"kills                   {killer.kills.total():12}   ({kills})",
            f"  at once, in the middle{outcome.restarted:12}   (everything)",
            f"stops                   {killer.stops.total():12}   ({stops})",
            *(
                f"started, {name} release {services.total():14}   ({_counted(services)})"
                for name, services in outcome.started.items()
            ),
            *lines(outcome.report),
            f"multi-model episodes ended    {outcome.multi.ended:12}   (none in parts, by `bombus log check`)",
            f"seconds                 {outcome.seconds:12.0f}",
        ]
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
