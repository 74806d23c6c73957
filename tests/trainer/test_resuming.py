"""A run that begins at a checkpoint of an earlier run: with its model, optimizer and version."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import WeightsReady
from bombus.hive.state import Phase
from bombus_trainer.publish.checkpoint import MANIFEST, CheckpointLost, read_facts
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, staged


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
    await stage.start(stage.job(checkpoint_every=2, resume="auto", lr=0.0))
    await stage.until(Phase.ROLLING, version=2)
    assert published(stage, run=2)[2] == published(stage, run=1)[2], "step 3 left no checkpoint"
    await play(stage, 3, 3)
    assert published(stage, run=2)[3] == published(stage, run=1)[2], "nothing is learned at a rate of 0"


async def test_a_checkpoint_that_is_away_suspends_the_run_that_begins_at_it(stage: Stage) -> None:
    stage.train(options=stage.options.model_copy(update={"load_patience_s": 0.0}))
    await stage.start(stage.job())
    await play(stage, 1, 1)
    await stop(stage)
    (checkpoints := stage.options.folder / "checkpoints").rename(stage.folder / "unmounted")
    await stage.start(stage.job(resume="auto"))
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert "cannot be read: No such file" in stage.engine.suspended
    (stage.folder / "unmounted").rename(checkpoints)
    await stage.bus.inbox.request(inbox.Resume(id=stage.id(), engine=ENGINE))
    await stage.until(Phase.ROLLING, version=1)
    assert published(stage, run=2)[1] == published(stage, run=1)[1]


@pytest.mark.parametrize("body", [b"", b"[" * 5000, b'{"format": 1, "facts": {"engine": "\xff"}}'])
def test_a_manifest_of_any_bytes_is_a_lost_checkpoint(tmp_path: Path, body: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(body)
    with pytest.raises(CheckpointLost, match="cannot be read"):
        read_facts(tmp_path, sha256(body).hexdigest())
