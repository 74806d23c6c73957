"""A run that begins at a checkpoint of an earlier run: with its model, optimizer and version."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import StepFailed, WeightsReady
from bombus.hive.state import Phase
from bombus.weights.checkpoints import MANIFEST
from bombus.weights.models import resolve_model
from tests.small_disk import fill, small_disk
from tests.trainer.small_batches import tiny_model_folder
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, staged

LOADED = "or to never, which begins with the model as loaded"


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path) as stage:
        yield stage


async def play(stage: Stage, first: int, last: int) -> None:
    """Play the batches of some steps. The batch of a step is the same in every run."""
    for step in range(first, last + 1):
        await stage.until(Phase.ROLLING, version=step - 1)
        await stage.play_batch(shift=step)
    await stage.until(Phase.ROLLING, version=last)


async def stop(stage: Stage) -> None:
    answer = await stage.bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
    await stage.follower.wait_position(answer.position)


def published(stage: Stage, run: int) -> dict[int, str]:
    """Return the digest of each version of a run."""
    ready = [event for event in stage.events if isinstance(event, WeightsReady) and event.run == run]
    return {event.version: event.weights.sha256 for event in ready}


@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_r8_a_run_cut_in_two_makes_the_same_weights_as_a_whole_one(stage: Stage, lora_rank: int) -> None:
    stage.train()
    await stage.start(stage.job(lora_rank=lora_rank))
    await play(stage, 1, 4)
    await stop(stage)
    await stage.start(stage.job(lora_rank=lora_rank, resume="from 3"))
    await play(stage, 4, 4)
    whole, second = published(stage, run=1), published(stage, run=2)
    assert second == {version: whole[version] for version in (3, 4)}
    assert stage.engine.counters.trained == 5 * 4


async def test_a_run_begins_with_another_learning_rate_where_the_last_one_was_stopped(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(checkpoint_every=2))
    await play(stage, 1, 3)
    await stop(stage)
    await stage.start(stage.job(checkpoint_every=2, lr=0.0))
    await stage.until(Phase.ROLLING, version=2)
    assert published(stage, run=2)[2] == published(stage, run=1)[2], "step 3 left no checkpoint"
    await play(stage, 3, 3)
    assert published(stage, run=2)[3] == published(stage, run=1)[2], "nothing is learned at a rate of 0"


async def test_a_step_for_which_a_disk_has_no_room_is_made_once_there_is_some_and_suspends_nothing(
    bus: Bus, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "size=64m") as disk:
        async with staged(bus, tmp_path) as stage:
            stage.train(options=stage.options.model_copy(update={"folder": disk, "retry_s": 0.02, "retry_s_max": 0.1}))
            await stage.start(stage.job())
            await stage.until(Phase.ROLLING, version=0)
            fill(disk / "ballast")
            await stage.play_batch(shift=1)
            await stage.follower.wait_for(lambda _: sum(isinstance(e, StepFailed) for e in stage.events) > 3, WAIT_S)
            assert stage.engine.step_failures == 0
            assert not stage.engine.suspended
            (disk / "ballast").unlink()
            await stage.until(Phase.ROLLING, version=1)


async def test_a_run_that_begins_at_a_damaged_checkpoint_goes_on_from_the_one_before_with_the_same_bytes(
    stage: Stage,
) -> None:
    stage.train()
    await stage.start(stage.job(checkpoint_every=2))
    await play(stage, 1, 4)
    await stop(stage)
    older, newest = sorted(stage.options.folder.glob("checkpoints/*/main/run-1/step-*"))
    (newest / MANIFEST).write_bytes(b"damaged")
    await stage.start(stage.job(checkpoint_every=2))
    await play(stage, 5, 5)
    assert published(stage, run=2)[4] == published(stage, run=1)[4]
    done = stage.engine.step_done
    assert done is not None
    assert done.metrics["steps_made_again"] == 2
    await stop(stage)
    (older / MANIFEST).write_bytes(b"damaged")
    await stage.start(stage.job(checkpoint_every=2))
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert "not be loaded: the checkpoint" in stage.engine.suspended, "at once: it does not mend by itself"
    assert stage.engine.suspended.endswith(LOADED)


async def test_a_checkpoint_that_is_away_suspends_the_run_that_begins_at_it(stage: Stage) -> None:
    stage.train(options=stage.options.model_copy(update={"load_patience_s": 0.0}))
    await stage.start(stage.job())
    await play(stage, 1, 1)
    await stop(stage)
    (checkpoints := stage.options.folder / "checkpoints").rename(stage.folder / "unmounted")
    await stage.start(stage.job())
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert "cannot be read: No such file" in stage.engine.suspended
    assert "The run began at this checkpoint: bring it back, or stop the run and set trainer.resume to `from V" in (
        stage.engine.suspended
    )
    assert stage.engine.suspended.endswith(LOADED)
    (stage.folder / "unmounted").rename(checkpoints)
    await stage.bus.inbox.request(inbox.Resume(id=stage.id(), engine=ENGINE))
    await stage.until(Phase.ROLLING, version=1)
    assert published(stage, run=2)[1] == published(stage, run=1)[1]


async def test_a_run_whose_own_checkpoints_are_lost_does_not_say_that_it_began_at_them(stage: Stage) -> None:
    trainer = stage.train(options=stage.options.model_copy(update={"load_patience_s": 0.0}))
    await stage.start(stage.job())
    await play(stage, 1, 1)
    await stop(stage)
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=1)
    await play(stage, 2, 2)
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    (stage.options.folder / "checkpoints").rename(stage.folder / "unmounted")
    stage.train(options=stage.options.model_copy(update={"load_patience_s": 0.0}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert "and no other can be used: bring it back, or stop the run" in stage.engine.suspended
    assert "began at this checkpoint" not in stage.engine.suspended


async def test_a_checkpoint_of_other_weights_at_the_same_path_ends_the_run_and_says_how_to_begin_anew(
    stage: Stage,
) -> None:
    stage.train()
    await stage.start(stage.job())
    await play(stage, 1, 1)
    await stop(stage)
    tiny_model_folder(stage.folder / "model", hidden_size=16)
    await stage.restart()
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert "the checkpoint belongs to another model" in stage.engine.failure
    assert stage.engine.failure.endswith(LOADED)
    await stage.start(stage.job(resume="never"))
    await stage.until(Phase.ROLLING, version=0)


@pytest.mark.parametrize(("kept", "left"), [(1, [3, 4]), (3, [2, 3, 4])])
async def test_as_many_checkpoints_stay_on_disk_as_the_job_says_and_two_at_least(
    stage: Stage, kept: int, left: list[int]
) -> None:
    stage.train()
    await stage.start(stage.job(checkpoints_kept=kept))
    await play(stage, 1, 4)
    await stop(stage)
    found = stage.options.folder.glob("checkpoints/*/main/run-1/step-*")
    assert sorted(int(place.name.split("-")[1]) for place in found) == left
    await stage.start(stage.job(checkpoints_kept=kept, resume=f"from {left[0]}"))
    await stage.until(Phase.ROLLING, version=left[0])


@pytest.mark.parametrize("by_run", [False, True])
async def test_the_folder_of_a_lora_run_is_the_model_of_another(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, by_run: bool
) -> None:
    monkeypatch.setenv("BOMBUS_CACHE", str(stage.folder / "cache"))
    stage.train(options=stage.options.model_copy(update={"weights_lora": "adapter"}))
    await stage.start(stage.job(lora_rank=4))
    await play(stage, 1, 2)
    await stop(stage)
    newest = stage.engine.weights
    assert newest is not None
    version = Path(newest.weights.where)
    job = stage.job(lora_rank=2)
    named = job.model.model_copy(update={"path": str(version.parent if by_run else version)})
    await stage.start(job.model_copy(update={"model": named}))
    await stage.until(Phase.ROLLING, version=0)
    ready = stage.engine.weights
    assert ready is not None
    assert ready.weights.adapter_of is not None
    merged = load_file(resolve_model(str(version)) / "model.safetensors")
    served = load_file(Path(ready.weights.adapter_of.where) / "model.safetensors")
    assert all(torch.equal(value, merged[name]) for name, value in served.items())
    original = load_file(stage.folder / "model" / "model.safetensors")
    assert not all(torch.equal(value, original[name]) for name, value in served.items())
    await play(stage, 1, 1)
