"""Small faults of a trainer stay small: it tries again, then the run waits for its operator with all that it has."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from bombus.bus import Bus
from bombus.config.job import RunConfig
from bombus.errors import BusUnavailable, EngineFault
from bombus.hive import inbox
from bombus.hive.events import EngineProgressed, EngineResumed, EngineSuspended, RollingStarted
from bombus.hive.state import Phase
from bombus_trainer.backend import Loader, TrainerBackend
from bombus_trainer.loading import load_backend
from bombus_trainer.recovery.faults import LoadPatience, backoff, may_pass
from bombus_trainer.service import Trainer
from tests.effort import long_only
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, staged

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB"


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path) as stage:
        yield stage


class FullGpu:
    """Loads a job's model, for as long as there is room on the GPU that it stands for."""

    def __init__(self, stage: Stage) -> None:
        self.failures = 0
        self.is_full = True
        self._options = stage.options

    def __call__(self, job: RunConfig) -> TrainerBackend:
        if self.is_full:
            self.failures += 1
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return load_backend(job, self._options)


def train(stage: Stage, load: Loader | None, patience_s: float) -> asyncio.Task[None]:
    options = stage.options.model_copy(update={"load_patience_s": patience_s})
    task = asyncio.create_task(Trainer(stage.bus, options, load=load).run())
    stage.trainers.append(task)
    return task


async def resume(stage: Stage) -> None:
    answer = await stage.bus.inbox.request(inbox.Resume(id=stage.id(), engine=ENGINE))
    await stage.follower.wait_position(answer.position)


async def until_suspended(stage: Stage) -> str:
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    return stage.engine.suspended


async def test_a_load_that_runs_out_of_memory_for_a_while_is_tried_again_and_the_run_says_why_it_waits(
    stage: Stage,
) -> None:
    gpu = FullGpu(stage)
    train(stage, gpu, patience_s=600.0)
    await stage.start(stage.job())
    await stage.follower.wait_for(lambda _: OUT_OF_MEMORY in stage.engine.stage, WAIT_S)
    gpu.is_full = False
    await stage.until(Phase.ROLLING, version=0)
    stages = [event.stage for event in stage.events if isinstance(event, EngineProgressed)]
    assert f"loading the model failed, trying again: OutOfMemoryError: {OUT_OF_MEMORY}" in stages
    assert stage.engine.suspensions == 0


async def test_a_load_that_goes_on_failing_suspends_the_run_which_boots_when_it_is_resumed(stage: Stage) -> None:
    gpu = FullGpu(stage)
    train(stage, gpu, patience_s=0.0)
    await stage.start(stage.job())
    reason = await until_suspended(stage)
    assert reason == f"the model could not be loaded 2 times: OutOfMemoryError: {OUT_OF_MEMORY}"
    assert (stage.engine.phase, stage.engine.failure, gpu.failures) == (Phase.BOOTING, "", 2)
    await resume(stage)
    await stage.follower.wait_for(lambda _: stage.engine.suspensions == 2, WAIT_S)
    assert gpu.failures == 4, "each resume has the whole patience"
    gpu.is_full = False
    await resume(stage)
    await stage.until(Phase.ROLLING, version=0)
    assert stage.engine.suspended == ""


@long_only
async def test_a_trainer_that_cannot_load_again_keeps_the_batch_of_its_run_until_the_cause_is_gone(
    stage: Stage,
) -> None:
    trainer = train(stage, None, patience_s=0.0)
    await stage.start(stage.job())
    for version in range(4):
        await stage.until(Phase.ROLLING, version)
        if version < 3:
            await stage.play_batch(shift=version)
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    (stage.options.folder / "checkpoints").rename(stage.folder / "unmounted")
    (model := stage.folder / "model").rename(stage.folder / "also unmounted")

    await stage.play_batch(shift=3)
    await stage.follower.wait_for(lambda _: stage.engine.batch is not None, WAIT_S)
    batch = stage.engine.batch
    train(stage, None, patience_s=0.0)
    assert "there is no model at" in await until_suspended(stage), "it was there before: the job is not at fault"
    assert (stage.engine.batch, stage.engine.version, stage.engine.step_failures) == (batch, 3, 0)

    (stage.folder / "also unmounted").rename(model)
    await resume(stage)
    await stage.follower.wait_for(lambda _: stage.engine.suspensions == 2, WAIT_S)
    assert "cannot be read: No such file" in stage.engine.suspended
    (stage.folder / "unmounted").rename(stage.options.folder / "checkpoints")
    await resume(stage)
    await stage.until(Phase.ROLLING, version=4)
    done = stage.engine.step_done
    assert done is not None
    assert "steps_made_again" not in done.metrics


async def test_steps_that_fail_suspend_the_run_and_are_made_when_it_is_resumed(stage: Stage) -> None:
    stage.options.folder.mkdir()
    (blocked := stage.options.folder / "checkpoints").write_text("a file where a folder should be")
    stage.train()
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    reason = await until_suspended(stage)
    assert "step 1 failed 3 times" in reason
    assert "NotADirectoryError" in reason
    blocked.unlink()
    await resume(stage)
    await stage.until(Phase.ROLLING, version=1)
    assert stage.engine.counters.trained == 4


async def test_a_new_trainer_of_a_suspended_run_waits_for_the_operator_too(stage: Stage) -> None:
    gpu = FullGpu(stage)
    first = train(stage, gpu, patience_s=0.0)
    await stage.start(stage.job())
    await until_suspended(stage)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stage.train("second")
    await stage.follower.wait_for(lambda _: stage.engine.trainer == "second", WAIT_S)
    await resume(stage)
    await stage.until(Phase.ROLLING, version=0)
    kinds = [type(event) for event in stage.events]
    assert kinds.index(EngineSuspended) < kinds.index(EngineResumed) < kinds.index(RollingStarted)
    assert gpu.failures == 2


@long_only
async def test_a_suspended_run_that_is_stopped_leaves_its_trainer_to_the_next_run(stage: Stage) -> None:
    gpu = FullGpu(stage)
    train(stage, gpu, patience_s=0.0)
    await stage.start(stage.job())
    await until_suspended(stage)
    await stage.bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
    gpu.is_full = False
    await stage.restart()
    await stage.until(Phase.ROLLING, version=0)
    assert stage.engine.run == 2


async def test_the_command_resume_says_what_goes_on_and_that_there_was_nothing_to_resume(
    stage: Stage, nats_url: str
) -> None:
    async def run() -> tuple[int | None, str]:
        hive = stage.bus.subjects.hive
        command = [sys.executable, "-m", "bombus", "resume", "--nats", nats_url, "--hive", hive]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    gpu = FullGpu(stage)
    train(stage, gpu, patience_s=0.0)
    await stage.start(stage.job())
    reason = await until_suspended(stage)
    gpu.is_full = False
    assert await run() == (0, f"run 1 of engine main resumes at step 0. It was suspended: {reason}\n")
    await stage.until(Phase.ROLLING, version=0)
    assert await run() == (0, "run 1 of engine main is not suspended: it is ENGINE.ROLLING\n")
    await stage.bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
    code, sentence = await run()
    assert code == 2
    assert sentence.startswith("bombus resume: Cannot resume the engine: the engine's status is ENGINE.OFFLINE.")


# ---- which faults may pass, and for how long they are borne -----------------------------------------------------


def caused_by(cause: BaseException) -> EngineFault:
    try:
        raise EngineFault("the model cannot be loaded") from cause
    except EngineFault as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(OUT_OF_MEMORY),
        MemoryError(),
        OSError(116, "Stale file handle"),
        PermissionError(13, "Permission denied"),
        BusUnavailable("the bus is away"),
        caused_by(torch.OutOfMemoryError(OUT_OF_MEMORY)),
        caused_by(OSError(5, "Input/output error")),
    ],
)
def test_a_full_device_and_a_file_system_that_is_away_are_faults_of_the_moment(error: Exception) -> None:
    assert may_pass(error, has_loaded=False)


@pytest.mark.parametrize(
    "error",
    [
        EngineFault("there is no model at /nowhere"),
        caused_by(FileNotFoundError(2, "No such file or directory")),
        caused_by(KeyError("mamba")),
        ValueError("this template cannot be read"),
    ],
)
def test_a_model_that_does_not_exist_is_a_fault_of_the_job_unless_it_was_loaded_before(error: Exception) -> None:
    assert not may_pass(error, has_loaded=False)
    assert may_pass(error, has_loaded=True)


def test_pauses_double_up_to_a_limit() -> None:
    assert [backoff(failures, 1.0, 30.0) for failures in (0, 1, 2, 3, 6, 10_000)] == [1.0, 1.0, 2.0, 4.0, 30.0, 30.0]


def test_patience_counts_from_the_first_failure_and_has_a_second_attempt() -> None:
    patience = LoadPatience(1.0, 30.0, limit_s=10.0)
    assert [patience.pause(now_s) for now_s in (100.0, 101.0, 109.9, 110.0)] == [1.0, 2.0, 4.0, None]
    assert patience.failures == 4
    without = LoadPatience(1.0, 30.0, limit_s=0.0)
    assert [without.pause(now_s) for now_s in (100.0, 100.0)] == [1.0, None]
