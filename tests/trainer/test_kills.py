"""R11 on real trainer processes: killed at every fault point, or frozen there while another takes over.

Each step must still be completed once, and every policy version must have the bytes of an undisturbed run.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bombus.bus import Blobs
from bombus.faults import Point
from bombus.hive.events import StepCompleted, TrainerOpened, WeightsReady
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import DELTA_FORMAT, FULL_FILE, chain, file_sha256
from bombus_inference.fetching import Fetcher
from tests.effort import LONG, effort, long_only
from tests.trainer.forked_trainers import Forge
from tests.trainer.trainer_hive import WAIT_S
from tests.trainer.trainer_lives import running, undisturbed

# These are reached only with a successor, with an object store, with checkpoints that are some steps apart, and when a
# directory is replaced.
APART = (
    Point.TRAINER_SUPERSEDED,
    Point.TRAINER_WEIGHTS_STORED,
    Point.TRAINER_STEP_MADE_AGAIN,
    Point.TRAINER_DIRECTORY_ASIDE,
)
KILLED = [point for point in Point if point.startswith("trainer.") and point not in APART]
WEIGHTS = [point for point in Point if point.startswith("trainer.weights.")]
# Where a trainer is frozen while its successor makes the step: before, during and after each of its writes.
FROZEN = [
    Point.TRAINER_OPENED,
    Point.TRAINER_BIN_DONE,
    Point.TRAINER_CHECKPOINT_WRITTEN,
    Point.TRAINER_CHECKPOINT_RENAMED,
    Point.TRAINER_STEP_SEEN,
    Point.TRAINER_WEIGHTS_WRITTEN,
    Point.TRAINER_WEIGHTS_SEEN,
]


# In reverse order each process makes nearly a whole step.
LIVES = [*KILLED, *(reversed(KILLED) if LONG else ())]
BY_OBJECTS: dict[str, object] = {"weights_by": "objects", "weights_full_every": 4}
WAYS = {DELTA_FORMAT: 0, ADAPTER_FORMAT: 2}  # what is published, by the rank of LoRA


async def test_r11_killed_at_each_point_a_trainer_makes_each_step_once_and_with_the_same_bytes(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "killed", forge) as life:
        for point in LIVES:
            await life.dies(point)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED)  # a whole step, after which all leftovers were removed
        found = life.digests()
        opened = [event for event in life.stage.events if isinstance(event, TrainerOpened)]
        assert len(opened) == len(LIVES) - LIVES.count(KILLED[0]) + 1  # those died before, and one made the last step
        life.verify_files()
        life.verify_tidy()
    assert len(found) >= len(LIVES) // 3
    assert len(set(found)) == len(found), "each step has changed the weights"
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found))


@pytest.mark.parametrize("form", [DELTA_FORMAT, pytest.param(ADAPTER_FORMAT, marks=long_only)])
async def test_r15_killed_wherever_weights_are_put_out_a_trainer_leaves_no_version_that_cannot_be_put_together(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge, form: str
) -> None:
    """Through the object store, as deltas where possible: what a replica needs is there at every moment."""
    rank = WAYS[form]
    async with running(nats_url, hive, tmp_path / "killed", forge, rank, **BY_OBJECTS) as life:
        bus, stage = life.stage.bus, life.stage
        fetcher = Fetcher(bus, "main", tmp_path / "cache", adapters=True)
        for point in WEIGHTS * effort(1, 2):
            await life.dies(
                point, 3 if rank else 2
            )  # after version 0, before which the model below the adapters is published
            ready = stage.engine.weights
            assert ready is not None
            fetched = await fetcher.materialise(ready, lambda: 0)  # no trainer is left to give a full copy
            file = fetched.folder / FULL_FILE if fetched.adapter is None else fetched.adapter / ADAPTER_FILE
            assert file_sha256(file) == ready.weights.sha256
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, 2)
        found = life.digests()
        fetcher.close()
        made = [event for event in stage.events if isinstance(event, WeightsReady)]
        links = [link.where for ready in made[-2:] for link in chain(ready.weights, life.mirror)]
        stored = {name.rpartition("/")[0] for name in await Blobs(bus).names("weights/")}
        assert stored == {where.removeprefix("object:") for where in links}
        assert any(event.weights.format == form for event in made)
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found), rank, **BY_OBJECTS)


async def test_r11_a_trainer_that_was_frozen_while_another_took_over_changes_nothing(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "frozen", forge) as life:
        for point in FROZEN if LONG else FROZEN[1:6:2]:
            zombie = await life.freezes(point)
            successor = await life.trainer()
            # So many steps that everything the zombie has read is gone.
            await life.version(life.stage.engine.version + 3)
            os.kill(zombie, signal.SIGCONT)
            assert (await life.ended(zombie)).by(signal.SIGKILL, Point.TRAINER_SUPERSEDED), point
            life.verify_files()
            await life.version(life.stage.engine.version + 1)
            await forge.kill(successor)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, 2)
        found = life.digests()
        life.verify_tidy()
        assert life.stage.engine.failure == ""
        assert life.stage.engine.step_failures == 0
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found))


async def test_r11_steps_since_the_newest_checkpoint_are_made_again_with_the_same_bytes(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    """Each life makes about one step, so most of them begin between two checkpoints."""
    points = (
        Point.TRAINER_STEP_SEEN,  # its weights are not on the log yet
        Point.TRAINER_WEIGHTS_SEEN,
        Point.TRAINER_UPDATE_DONE,
        Point.TRAINER_STEP_MADE_AGAIN,
        Point.TRAINER_STEP_SAID,
        Point.TRAINER_WEIGHTS_WRITTEN,
    )
    async with running(nats_url, hive, tmp_path / "killed", forge, checkpoint_every=3) as life:
        await life.dies(Point.TRAINER_STEP_SEEN)
        await life.dies(Point.TRAINER_STEP_MADE_AGAIN)
        for _ in range(effort(1, 2)):
            for point in points[:3] + points[4:]:
                await life.dies(point, 2 if point in WEIGHTS else 1)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, 4)
        found = life.digests()
        steps = [event for event in life.stage.events if isinstance(event, StepCompleted)]
        assert [bool(step.checkpoint) for step in steps] == [step.step % 3 == 0 for step in steps]
        again = [step.metrics for step in steps if "steps_made_again" in step.metrics]
        assert {metrics["steps_made_again"] for metrics in again} == {1.0, 2.0}
        assert {metrics.get("made_again_differs", 0.0) for metrics in again} == {0.0}
        names = sorted(place.name for place in life.stage.options.folder.glob("checkpoints/*/main/run-1/*"))
        newest = len(steps) // 3 * 3
        assert [name.partition("-epoch")[0] for name in names] == [f"step-{newest - 3:08d}", f"step-{newest:08d}"]
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found))


async def test_r11_a_superseded_trainer_takes_over_again_when_its_successor_is_gone(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "back", forge) as life:
        await life.trainer()
        await life.version(1)
        await life.dies(Point.TRAINER_BATCH_READ)
        done = life.stage.engine.version
        await life.version(done + 2)
        assert life.stage.engine.trainer_epoch == 3
        life.digests()


async def test_a_superseded_trainer_stands_aside_for_as_long_as_its_successor_answers(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    # A successor that computes answers late on a busy machine.
    async with running(nats_url, hive, tmp_path / "aside", forge, presence_s=3.0) as life:
        first = await life.trainer()
        await life.version(1)
        await life.trainer()
        await life.stage.follower.wait_for(lambda _: life.stage.engine.trainer_epoch == 2, WAIT_S)
        asked = asyncio.Event()

        async def note(_: object) -> None:
            asked.set()

        for _ in range(2):
            asked.clear()
            subject = life.stage.bus.subjects.trainer("main", 2)
            watching = await life.stage.bus.client.subscribe(subject, cb=note)
            async with asyncio.timeout(WAIT_S):
                await asked.wait()
            await watching.unsubscribe()
        assert life.stage.engine.trainer_epoch == 2
        assert "taking over" not in forge.log(first)
