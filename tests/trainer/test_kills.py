"""R11 on real trainer processes: killed at every fault point, or frozen there while another takes over.

Each step must still be completed once, and every policy version must have the bytes of an undisturbed run.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bombus.bus import Blobs, Bus
from bombus.bus.streams import stream_configs
from bombus.faults import Point
from bombus.hive.events import StepCompleted, TrainerOpened, WeightsReady
from bombus.hive.state import Phase
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import DELTA_FORMAT, FULL_FILE, chain, file_sha256
from bombus_inference.fetching import Fetcher
from bombus_trainer.publish import checkpoint
from tests.conftest import SMALL_STREAMS
from tests.trainer.forked_trainers import Ended, Forge
from tests.trainer.trainer_hive import WAIT_S, Stage, served, staged

# These are reached only with a successor, with an object store, and with checkpoints that are some steps apart.
APART = (Point.TRAINER_SUPERSEDED, Point.TRAINER_WEIGHTS_STORED, Point.TRAINER_STEP_MADE_AGAIN)
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


BY_OBJECTS: dict[str, object] = {"weights_by": "objects", "weights_full_every": 4}
WAYS = {DELTA_FORMAT: 0, ADAPTER_FORMAT: 2}  # what is published, by the rank of LoRA


class Life:
    """A hive whose trainers are processes. Batches come automatically, and step k's is the same in every hive."""

    def __init__(self, stage: Stage, forge: Forge, url: str) -> None:
        self.stage = stage
        self._forge = forge
        self._url = url

    async def trainer(self, **environment: str) -> int:
        options = self.stage.options.model_dump_json()
        return await self._forge.start(self._url, self.stage.bus.subjects.hive, options, **environment)

    async def ended(self, pid: int) -> Ended:
        async with asyncio.timeout(WAIT_S):
            return await self._forge.wait(pid)

    async def dies(self, point: Point, time: int = 1) -> None:
        """Let a trainer work until it is killed at `point`."""
        pid = await self.trainer(BOMBUS_KILL_AT=f"{point}:{time}")
        ended = await self.ended(pid)
        assert ended.by(signal.SIGKILL, point), (point, ended, self._forge.log(pid))

    async def freezes(self, point: Point) -> int:
        """Let a trainer work until it is frozen at `point`. Once resumed, it dies when it notices its successor."""
        pid = await self.trainer(BOMBUS_STOP_AT=point, BOMBUS_KILL_AT=Point.TRAINER_SUPERSEDED)
        ended = await self.ended(pid)
        assert ended.by(signal.SIGSTOP, point), (point, ended, self._forge.log(pid))
        return pid

    async def version(self, version: int) -> None:
        await self.stage.until(Phase.ROLLING, version)

    def digests(self) -> list[str]:
        """Return the sha256 of each policy version's weights, and check that versions count from 0 and steps from 1."""
        events = self.stage.events
        ready = [event for event in events if isinstance(event, WeightsReady)]
        steps = [event.step for event in events if isinstance(event, StepCompleted)]
        assert [event.version for event in ready] == list(range(len(ready)))
        assert steps == list(range(1, len(steps) + 1))
        return [event.weights.sha256 for event in ready]

    def mirror(self, where: str) -> Path:
        """Return the trainer's own copy of a version in the object store."""
        (place,) = self.stage.options.folder.glob(f"weights/*/main/run-1/{Path(where).name}")
        return place

    def verify_files(self) -> None:
        """Check that the newest checkpoint and weights on the log exist, with the digests on the log."""
        engine = self.stage.engine
        assert engine.weights is not None
        served(engine.weights.weights)
        if engine.step_done is not None:
            done = engine.step_done
            assert checkpoint.load(Path(done.checkpoint), done.checkpoint_digest).facts.step == done.step

    def verify_tidy(self) -> None:
        """Check that two checkpoints and two versions are kept, and nothing is left of killed trainers."""
        newest = self.stage.engine.version
        for what, stem in (("checkpoints", "step"), ("weights", "version")):
            names = sorted(place.name for place in self.stage.options.folder.glob(f"{what}/*/main/run-1/*"))
            kept = [f"{stem}-{newest - 1:08d}", f"{stem}-{newest:08d}"]
            assert [name.partition("-epoch")[0] for name in names] == kept


@asynccontextmanager
async def running(
    url: str, name: str, folder: Path, forge: Forge, lora_rank: int = 0, **options: object
) -> AsyncIterator[Life]:
    """`options` are the trainer's, except for the job's `checkpoint_every`."""
    checkpoint_every = options.pop("checkpoint_every", 1)
    async with await Bus.connect(url, name, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        async with staged(bus, folder) as stage:
            # Several updates in a step, and several micro-batches in an update.
            rate = 1e-4 if options else 1e-2
            job = stage.job(
                mini_batch_num=2,
                max_tokens_per_bin=32,
                lr=rate,
                lora_rank=lora_rank,
                checkpoint_every=checkpoint_every,
            )
            dtype = "bfloat16" if options else "float32"
            stage.options = stage.options.model_copy(update=options)
            await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"dtype": dtype})}))
            feeding = asyncio.create_task(stage.feed())
            yield Life(stage, forge, url)
            feeding.cancel()
        for config in stream_configs(bus.subjects, SMALL_STREAMS):
            await bus.requests.request(f"$JS.API.STREAM.DELETE.{config['name']}")


@pytest.fixture(scope="module")
def forges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    forge = Forge(tmp_path_factory.mktemp("trainers"))
    yield forge
    forge.close()


@pytest.fixture
def forge(forges: Forge) -> Iterator[Forge]:
    yield forges
    forges.kill_all()


async def undisturbed(
    url: str, name: str, folder: Path, forge: Forge, versions: int, lora_rank: int = 0, **options: object
) -> list[str]:
    """Return the digests of an undisturbed run, up to so many versions."""
    async with running(url, f"{name}-calm", folder / "calm", forge, lora_rank, **options) as life:
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, versions)
        return life.digests()


async def test_r11_killed_at_each_point_a_trainer_makes_each_step_once_and_with_the_same_bytes(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge
) -> None:
    async with running(nats_url, hive, tmp_path / "killed", forge) as life:
        for point in (*KILLED, *reversed(KILLED)):  # in reverse order each process makes nearly a whole step
            await life.dies(point)
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED)  # a whole step, after which all leftovers were removed
        found = life.digests()
        opened = [event for event in life.stage.events if isinstance(event, TrainerOpened)]
        assert len(opened) == 2 * len(KILLED) - 2 + 1  # two died before they opened, one more made the last step
        life.verify_files()
        life.verify_tidy()
    assert len(found) > 10
    assert len(set(found)) == len(found), "each step has changed the weights"
    assert found == await undisturbed(nats_url, hive, tmp_path, forge, len(found))


@pytest.mark.parametrize("form", WAYS)
async def test_r15_killed_wherever_weights_are_put_out_a_trainer_leaves_no_version_that_cannot_be_put_together(
    nats_url: str, hive: str, tmp_path: Path, forge: Forge, form: str
) -> None:
    """Through the object store, as deltas where possible: what a replica needs is there at every moment."""
    rank = WAYS[form]
    async with running(nats_url, hive, tmp_path / "killed", forge, rank, **BY_OBJECTS) as life:
        bus, stage = life.stage.bus, life.stage
        fetcher = Fetcher(bus, "main", tmp_path / "cache", adapters=True)
        for point in (*WEIGHTS, *WEIGHTS):
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
        for point in FROZEN:
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
        for _ in range(2):
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
    async with running(nats_url, hive, tmp_path / "aside", forge) as life:
        first = await life.trainer()
        await life.version(1)
        await life.trainer()
        await life.stage.follower.wait_for(lambda _: life.stage.engine.trainer_epoch == 2, WAIT_S)
        asked = asyncio.Event()

        async def note(_: object) -> None:
            asked.set()

        for _ in range(3):
            asked.clear()
            subject = life.stage.bus.subjects.trainer("main", 2)
            watching = await life.stage.bus.client.subscribe(subject, cb=note)
            async with asyncio.timeout(WAIT_S):
                await asked.wait()
            await watching.unsubscribe()
        assert life.stage.engine.trainer_epoch == 2
        assert "taking over" not in forge.log(first)
