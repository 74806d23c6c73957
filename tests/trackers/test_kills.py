"""A run of many steps is followed while the process that writes to the trackers is killed again and again, and
sometimes the bus. Then each tracker's own reader finds each step once, with the values of `step_metrics`."""

import asyncio
import json
import os
import struct
import sys
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest
from mlflow import MlflowClient

from bombus.bus import Bus, EmbeddedServer
from bombus.hive.events import AnyEvent
from bombus.insight.trackers.adapters import open_mlflow
from bombus.insight.trackers.rows import Row, TrackedRun
from tests.conftest import SMALL_STREAMS, kill
from tests.insight.tracked import HOSTILE, expected, publish, rows_of, run_of
from tests.trackers.readers import READERS, Read

KILLS = int(os.environ.get("BOMBUS_TRACKER_KILLS", "20"))
STEPS = 400
ALONE_S = (1.0, 6.0)  # how long every second process lives; the others until all trackers were written to
PAUSE_S = 0.02
BUS_KILLED_EVERY = 5
DONE_S = 180.0


def checked(read: Read, events: list[AnyEvent], single: bool = False) -> None:
    """Compare what a tracker has with the rows of a log: no step is missing, none is there twice, all values agree."""
    counts = Counter(step for step, _ in read)
    wanted = {row.step: row.metrics for row in rows_of(events)}
    assert set(counts) == set(wanted), f"missing: {set(wanted) - set(counts)}, more: {set(counts) - set(wanted)}"
    assert max(counts.values()) == 1, f"twice: {[step for step, count in counts.items() if count > 1]}"
    for step, figures in read:
        for name, value in wanted[step].items():
            if name.startswith(("reward/", "train/", "policy/", "held_out/", "length/", "episodes/", "time/")):
                assert figures[name] == (as_float32(value) if single else value), (step, name)
        assert len(figures) == len(wanted[step])
    figures_of_steps = expected(events)
    assert set(figures_of_steps) <= set(counts)


def as_float32(value: float) -> float:
    (found,) = struct.unpack("f", struct.pack("f", value))
    return float(found)


class Tracking:
    """The process that writes to the trackers, which is killed again and again."""

    def __init__(self, url: str, hive: str, folder: Path) -> None:
        self._command = (sys.executable, "-m", "bombus", "track", "--follow", "--hive", hive, "--folder", str(folder))
        self._environment = {**os.environ, "BOMBUS_NATS": url}
        self._log = (folder.parent / "track.log").open("ab")

    async def start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*self._command, env=self._environment, stderr=self._log)


async def published(server: EmbeddedServer, hive: str, events: list[AnyEvent], rounds: "asyncio.Queue[int]") -> None:
    """Write a run's events, up to the number that each round allows, on a server that is killed too."""
    number = 0
    async with await Bus.connect(server.url, hive, name="author") as bus:
        while number < len(events):
            until = await rounds.get()
            for event in events[number:until]:
                number += 1
                await publish(bus, [event], number)
                await asyncio.sleep(PAUSE_S)


def complete(folder: Path, trackers: list[str]) -> bool:
    last = str(STEPS + 1)
    return all(any(path.read_text() == last for path in folder.glob(f"*/{name}/complete")) for name in trackers)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trackers", [list(READERS)], ids="+".join)
async def test_each_step_is_there_once_after_twenty_kills(tmp_path: Path, trackers: list[str]) -> None:
    folder, random, hive = tmp_path / "trackers", Random(35), "demo"
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    async with await Bus.connect(server.url, hive) as bus:
        await bus.ensure_streams(SMALL_STREAMS)
    events: list[AnyEvent] = list(run_of(STEPS, [*trackers, "jsonl"], name=HOSTILE))
    rounds: asyncio.Queue[int] = asyncio.Queue()
    publishing = asyncio.create_task(published(server, hive, events, rounds))
    process = Tracking(server.url, hive, folder)
    grown, before = Counter[str](), dict.fromkeys(trackers, 0)  # by tracker: kills before which it was written to
    for number in range(1, KILLS + 1):
        rounds.put_nowait(number * len(events) // (KILLS + 1))
        running = await process.start()
        if number % 2:  # time is what is tested: it dies at any moment, also before a tracker has begun
            await asyncio.sleep(random.uniform(*ALONE_S))
        else:
            async with asyncio.timeout(DONE_S):
                while any(sizes_of(folder, [name])[name] == before[name] for name in trackers):
                    await asyncio.sleep(0.05)
            await asyncio.sleep(random.uniform(0.0, 1.0))
        running.kill()
        await running.wait()
        if number % BUS_KILLED_EVERY == 0:
            kill(server)
            await asyncio.to_thread(server.start)
        sizes = sizes_of(folder, trackers)
        grown.update(name for name in trackers if sizes[name] != before[name])
        before = sizes
    print(dict(grown))
    rounds.put_nowait(len(events))
    running = await process.start()
    await publishing
    try:
        async with asyncio.timeout(DONE_S):
            while not complete(folder, trackers):
                assert running.returncode is None, (tmp_path / "track.log").read_text()
                await asyncio.sleep(0.1)
        running.terminate()
        assert await running.wait() == 0
    finally:
        if running.returncode is None:
            running.kill()
        server.stop()
    (run_folder,) = folder.glob("*/run.json")
    for tracker in trackers:
        checked(READERS[tracker](run_folder.parent), events, single=tracker == "tensorboard")
    lines = (run_folder.parent / "steps.jsonl").read_text().splitlines()
    written = {line.pop("step"): line for line in map(json.loads, lines) if line.pop("at_ns")}
    assert len(lines) == len(written)
    assert written == {row.step: row.metrics for row in rows_of(events)}
    outside = {path.name for path in tmp_path.iterdir()} - {"trackers", "nats", "track.log"}
    assert min(grown[name] for name in trackers) >= KILLS // 2, f"each was written to before most kills: {grown}"
    assert not outside, "nothing is written elsewhere, whatever runs are called"


def test_a_run_of_mlflow_whose_process_was_killed_before_it_had_the_configuration_gets_it(tmp_path: Path) -> None:
    run = TrackedRun(id="id", hive="h", engine="main", run=1, project="p", name="n", digest="d", config={})
    folder = tmp_path / run.folder / "mlflow"
    folder.mkdir(parents=True)
    with open_mlflow(run, folder) as (last, write):
        write(Row(step=3, at_ns=1, metrics={"reward/mean": 0.5}))
    with open_mlflow(msgspec.structs.replace(run, config={"trainer.lr": 0.1}), folder) as (last, _):
        assert last == 3
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("p")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params == {"trainer.lr": "0.1"}
    assert found.info.status == "FINISHED"


def sizes_of(folder: Path, trackers: list[str]) -> dict[str, int]:
    """Return how many bytes each tracker's files have, and how many there are, as one number."""
    found = dict.fromkeys(trackers, 0)
    for path in folder.rglob("*"):
        for name in trackers:
            if name in str(path.relative_to(folder)) and "draft" not in path.name:
                try:
                    found[name] += 1 + path.stat().st_size
                except FileNotFoundError:  # it was removed meanwhile
                    continue
    return found
