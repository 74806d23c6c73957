"""Runs of many steps as events, for the tests of trackers, and a hive's log that holds them."""

import asyncio
import itertools
from collections.abc import Iterator
from random import Random

from bombus.bus import Bus
from bombus.config.documents import parse_job
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, EpisodeType, encode_event, kind_of
from bombus.hive.state import Hive
from bombus.insight.metrics import step_metrics
from bombus.insight.trackers.rows import Row, TrackedRows
from tests.replay.diagnosis.test_steps import outcome

SECOND = 1_000_000_000
BEGAN = 1_790_000_000 * SECOND
HOSTILE = "../../<img src=x onerror=alert(1)>\x1b[31m"  # in names of projects, runs, tasks and figures
EVALUATED_EVERY = 5


def run_of(
    steps: int, trackers: list[str], *, name: str = "small", run: int = 1, ends: bool = True, seed: int = 7
) -> Iterator[AnyEvent]:
    """Yield the events of a run: each fifth version is evaluated, and the last one after the last step."""
    random = Random(seed)
    job = parse_job(
        {"bombus": {"experiment": {"project_name": name, "experiment_name": name}, "logging": {"trackers": trackers}}}
    )
    now = itertools.count(BEGAN, SECOND)
    configure = job.to_command("c", "main")
    yield ev.EngineConfigured(
        engine="main",
        at_ns=next(now),
        config=configure.config,
        config_digest=configure.config_digest,
        collection=configure.collection,
        model=configure.model,
    )
    yield ev.EngineStarted(engine="main", at_ns=next(now), run=run, config_digest=configure.config_digest)
    yield ev.RollingStarted(engine="main", at_ns=next(now), run=run, version=0)
    for step in range(1, steps + 1):
        members = [f"{run}-{step}-{number}" for number in range(4)]
        rewards = {member: random.random() for member in members}
        played = tuple(
            outcome(member, name, reward, step, log_metrics={"form": random.random(), name: float(step)})
            for member, reward in rewards.items()
        )
        yield ev.EpisodeEnded(engine="main", at_ns=next(now), run=run, client="x", outcomes=played)
        sealed = tuple(ev.BatchEpisode(episode=member, reward=reward) for member, reward in rewards.items())
        group = ev.BatchGroup(task=name, episodes=sealed)
        yield ev.BatchReady(engine="main", at_ns=next(now), run=run, step=step, groups=(group,), config_digest="")
        yield ev.StepCompleted(
            engine="main",
            at_ns=next(now),
            run=run,
            step=step,
            trainer_epoch=1,
            checkpoint="",
            checkpoint_digest="",
            metrics={"loss": random.gauss(0, 1), "entropy": random.random(), name: 1.0},
        )
        if step % EVALUATED_EVERY == 0:
            held_out = (outcome(f"held-{step}", name, random.random()),)
            at_ns = next(now)
            yield ev.EpisodeEnded(
                engine="main", at_ns=at_ns, run=run, client="x", outcomes=held_out, type=EpisodeType.EVAL, version=step
            )
    if ends:
        yield ev.EngineStopped(engine="main", at_ns=next(now), run=run)


def rows_of(events: list[AnyEvent]) -> list[Row]:
    """Return the rows of all runs in some events."""
    rows = TrackedRows(Hive())
    noted = [each for seq, event in enumerate(events, 1) for each in rows.note(seq, event)]
    return [each.row for each in noted if each.row is not None]


def expected(events: list[AnyEvent]) -> dict[int, dict[str, float]]:
    """Return the figures of each step of a log with one run, without evaluations: `step_metrics` alone."""
    rows = TrackedRows(Hive(), every=True)
    for seq, event in enumerate(events, 1):
        rows.note(seq, event)
    (series,) = rows.runs.series.values()
    return {row.step: step_metrics(row) for row in series.steps}


async def publish(bus: Bus, events: list[AnyEvent], start: int) -> None:
    """Add events to the log of a hive, as its coordinator would; `start` is the number of the first."""
    for number, event in enumerate(events, start):
        subject = bus.subjects.event(event.engine, kind_of(event))
        await bus.publisher.publish(subject, encode_event(event), msg_id=f"e{number}")


async def publish_slowly(bus: Bus, events: list[AnyEvent], pause_s: float) -> None:
    for number, event in enumerate(events, 1):
        await publish(bus, [event], number)
        await asyncio.sleep(pause_s)
