"""A hive that trains, with every tracker, while its processes and the one that writes to trackers are killed."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from bombus import Job, SwarmClient, Task, WorkflowOutput
from bombus.cli import main
from bombus.insight.metrics import step_metrics
from bombus.insight.runs import read_runs
from bombus.replay.diagnosis.steps import StepFigures
from bombus.replay.opening import add_source_arguments, open_source
from tests.tinker.whole_hive import running
from tests.trackers.readers import READERS
from tests.trackers.test_kills import as_float32

STEPS = 12
DONE_S = 120.0
KILLED = ("coordinator", "trainer", "inference", "gateway")


def agent(task: Task, credentials: "object") -> WorkflowOutput:
    url, key = credentials.base_url, credentials.api_key  # type: ignore[attr-defined]
    body = {"model": "any", "messages": [{"role": "user", "content": task.main_query}], "max_tokens": 4}
    answer = httpx.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    said = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
    return WorkflowOutput(reward=float(said.count(task.task_id)), log_metrics={"length": float(len(said))})


def follow(nats: Path, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "bombus", "track", "--follow", "--folder", str(folder)]
    environment = {**os.environ, "BOMBUS_NATS": nats.read_text().strip()}
    with (folder.parent / "track.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stderr=log)


@pytest.mark.timeout(900)
def test_trackers_agree_with_the_log_of_a_hive_whose_processes_were_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, data, folder = Random(3), tmp_path / "data", tmp_path / "trackers"
    job: dict[str, dict[str, Any]] = {
        "rollout": {"max_model_len": 256},
        "trainer": {"resume": "never"},
        "experiment": {"project_name": "hive", "experiment_name": "killed"},
        "logging": {"trackers": [*READERS, "jsonl"], "samples_every": 2},
    }
    with ExitStack() as ends, running(tmp_path) as hive:
        tracking = follow(data / "nats-url", folder)
        ends.callback(lambda: tracking.kill())
        with SwarmClient(hive.url) as client:
            client.auto_sync_train_config_and_start_engine(
                Job(model="tiny", batch_size=2, num_repeat=4, lr=1e-3, bombus=job)
            )
            tasks = [Task(task_id=name, main_query=f"{name}=") for name in "ab"]
            for step in range(1, STEPS + 1):
                while client.get_global_step() < step:
                    client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 4))
                if step % 3 == 0:
                    hive.kill(random.choice(KILLED))
                if step % 2 == 0:
                    tracking.kill()
                    tracking.wait()
                    tracking = follow(data / "nats-url", folder)
            client.stop_engine()
        (run_folder,) = (path.parent for path in folder.glob("*/run.json"))
        asyncio.run(all_complete(psutil.Process(tracking.pid), run_folder))
        tracking.terminate()
        assert tracking.wait(60) == 0
    series = asyncio.run(read(data))
    wanted = {row.step: step_metrics(row) for row in series}
    assert len(wanted) >= STEPS
    for tracker, reader in READERS.items():
        found = reader(run_folder)
        assert sorted(step for step, _ in found) == sorted(wanted), tracker
        for step, figures in found:
            exact = wanted[step].items()
            assert figures == {name: as_float32(y) if tracker == "tensorboard" else y for name, y in exact}, tracker
    lines = [json.loads(line) for line in (run_folder / "steps.jsonl").read_text().splitlines()]
    samples = {line["step"]: line["samples"] for line in lines if "samples" in line}
    assert samples
    assert {step % 2 for step in samples} == {0}
    assert "user: a=" in {sample["prompt"] for several in samples.values() for sample in several}
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    for tracker in READERS:
        before = READERS[tracker](run_folder)
        words = ["track", "main-1", "--data", str(data), "--to", tracker, "--folder", str(folder)]
        assert main(words) == 0
        assert "main-1: 0 steps were written" in capsys.readouterr().out
        assert READERS[tracker](run_folder) == before


async def all_complete(tracking: psutil.Process, folder: Path) -> None:
    async with asyncio.timeout(DONE_S):
        while not all((folder / tracker / "complete").is_file() for tracker in READERS):
            assert tracking.is_running(), "the process that writes to trackers has ended"
            await asyncio.sleep(0.1)


async def read(data: Path) -> list[StepFigures]:
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    async with open_source(parser.parse_args(["--data", str(data)])) as source:
        return (await read_runs(source)).newest("main-1", source.title).steps
