"""A hive whose trainers are processes, which tests let die, freeze and hang where they say."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.bus import Bus
from bombus.bus.streams import stream_configs
from bombus.faults import Point
from bombus.hive.events import StepCompleted, WeightsReady
from bombus.hive.state import Phase
from bombus_trainer.publish.checkpoint import verify
from bombus_trainer.publish.step_checkpoint import read_step
from tests.conftest import SMALL_STREAMS
from tests.trainer.forked_trainers import Ended, Forge
from tests.trainer.trainer_hive import WAIT_S, Stage, served, staged


class Life:
    """A hive whose trainers are processes. Batches come automatically, and step k's is the same in every hive."""

    def __init__(self, stage: Stage, forge: Forge, url: str) -> None:
        self.stage = stage
        self._forge = forge
        self._url = url

    async def trainer(self, **environment: str) -> int:
        options = self.stage.options.model_dump_json()
        return await self._forge.start(self._url, self.stage.bus.subjects.hive, options, **environment)

    async def ended(self, pid: int, within_s: float = WAIT_S) -> Ended:
        async with asyncio.timeout(within_s):
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

    def log(self, pid: int) -> str:
        return self._forge.log(pid)

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
            found = read_step(Path(done.checkpoint), done.checkpoint_digest)
            verify(found, found.files)
            assert found.facts.step == done.step

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


async def undisturbed(
    url: str, name: str, folder: Path, forge: Forge, versions: int, lora_rank: int = 0, **options: object
) -> list[str]:
    """Return the digests of an undisturbed run, up to so many versions."""
    async with running(url, f"{name}-calm", folder / "calm", forge, lora_rank, **options) as life:
        await life.dies(Point.TRAINER_WEIGHTS_PRUNED, versions)
        return life.digests()
