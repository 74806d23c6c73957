"""Ranks under torchrun on a real bus: rank 0 is the trainer, and when one ends, all end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from bombus.bus import Bus
from bombus.hive.state import Hive, Phase
from bombus_trainer.worker import main
from tests.effort import long_only
from tests.patience import PATIENCE_S
from tests.trainer.operations.serving.serving_hive import TrainingClient, create, serving, steps
from tests.trainer.trainer_hive import staged

WAIT_S = 120.0


@asynccontextmanager
async def ranks(url: str, hive: str, folder: Path, count: int) -> AsyncIterator[None]:
    worker = ["-m", "bombus_trainer.worker", "--nats", url, "--hive", hive, "--folder", str(folder), "--threads", "1"]
    torchrun = [sys.executable, "-m", "bombus_trainer.torchrun", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*torchrun, *worker, env=environment)
    family = psutil.Process(process.pid)
    try:
        yield
    finally:
        everybody = [family, *family.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()
        _, alive = psutil.wait_procs(everybody, timeout=10)
        assert not alive, "one SIGTERM ends all ranks"


@long_only
async def test_ranks_of_torch_make_the_steps_of_a_job_together(bus: Bus, nats_url: str, tmp_path: Path) -> None:
    async with (
        staged(bus, tmp_path) as stage,
        ranks(nats_url, bus.subjects.hive, tmp_path / "trainer", 2),
    ):
        await stage.start(stage.job())
        await stage.until(Phase.ROLLING, version=0)
        for version in (1, 2):
            await stage.play_batch()
            await stage.until(Phase.ROLLING, version=version)
        done = stage.engine.step_done
        assert done is not None
        assert done.metrics["ranks"] == 2.0


def is_settled(client: TrainingClient, model: str, key: str, _: Hive) -> bool:
    return not client.queued(model, key).waits


@long_only
async def test_ranks_of_torch_execute_training_operations_together(bus: Bus, nats_url: str, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as client, ranks(nats_url, bus.subjects.hive, tmp_path / "trainer", 2):
        for operation in (create(), *steps(0, 2)):
            key = await client.send("a", operation)
            await client.stage.follower.wait_for(partial(is_settled, client, "a", key), WAIT_S)
            assert not client.queued("a", key).error
        assert client.model("a").step == 2


def test_a_worker_without_torchrun_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_a_trainer_for_verl_without_its_environment_says_how_to_make_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bombus", "trainer", "--backend", "verl"],
        env={**os.environ, "BOMBUS_ENVIRONMENTS": str(tmp_path)}, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the environment 'verl' is not installed" in done.stderr
    assert "run `bombus install verl` first" in done.stderr
