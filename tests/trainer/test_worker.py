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
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.hive.state import Hive, Phase
from bombus_trainer.loading import load_base
from bombus_trainer.options import TrainerOptions
from bombus_trainer.tenants.settings import TenantSettings
from bombus_trainer.worker import main
from tests.effort import long_only
from tests.patience import PATIENCE_S
from tests.trainer.serving.serving_hive import TrainingClient, create, serving
from tests.trainer.trainer_hive import Stage, staged

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


def failed(stage: Stage, run: int, _: Hive) -> bool:
    return stage.engine.run == run and bool(stage.engine.failure)


@long_only
async def test_rank_0_is_the_trainer_and_every_rank_gets_its_jobs(bus: Bus, nats_url: str, tmp_path: Path) -> None:
    async with (
        staged(bus, tmp_path) as stage,
        ranks(nats_url, bus.subjects.hive, tmp_path / "trainer", 2),
    ):
        for run in (1, 2):  # they go on after a job that none of them can do
            await stage.start(stage.job())
            await stage.follower.wait_for(partial(failed, stage, run), WAIT_S)
            assert stage.engine.phase == Phase.OFFLINE
            assert stage.engine.failure == (
                "trainer.backend is torch, which trains in one process, and this trainer has 2: set trainer.backend to "
                "verl, or start the trainer with `bombus trainer`"
            )


def is_settled(client: TrainingClient, model: str, key: str, _: Hive) -> bool:
    return not client.queued(model, key).waits


@long_only
async def test_training_operations_are_refused_by_a_trainer_of_several_ranks_which_goes_on(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path) as client, ranks(nats_url, bus.subjects.hive, tmp_path / "trainer", 2):
        for run, model in ((1, "a"), (2, "b")):
            key = await client.send(model, create())
            await client.stage.follower.wait_for(partial(is_settled, client, model, key), WAIT_S)
            why = "this engine's trainer has 2 processes, and training operations are executed by torch in one"
            assert why in client.queued(model, key).error
            assert client.stage.engine.run == run
            assert client.stage.engine.phase == Phase.OFFLINE


def test_training_operations_of_a_job_for_verl_are_refused(tmp_path: Path) -> None:
    job = RunConfig.model_validate({"trainer": {"backend": "verl"}})
    with pytest.raises(EngineFault, match="training operations are executed by torch alone: set it to torch"):
        load_base(job, TrainerOptions(), TenantSettings(checkpoints=tmp_path, covers=tmp_path, scratch=tmp_path))


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
