"""Replicas that do not see the trainer's folder, as real processes: one of several, and the only one.

The folder is named relative to the working directory of each process, as a mount point is relative to its machine: what
the log says is the same for all, and a process elsewhere sees nothing there until its mount is made.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import BatchReady, EngineFailed, EngineSuspended
from bombus.hive.pacing import fitting
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.text import render_status
from bombus_inference import service
from bombus_inference.settings import ComputeSettings, InferenceSettings
from tests.effort import long_only
from tests.inference.test_service import ask
from tests.trainer.trainer_hive import ENGINE, Stage, staged

MOUNT = "shared"
NINTH = "r9"
PROCESS_S = 120.0  # until a process has imported everything, on a busy machine
NO_WEIGHTS = f"no weights at /proc/self/cwd/{MOUNT}/"


class Hive:
    """A hive whose trainer and first replica run here, where the mount is, and whose ninth replica runs elsewhere."""

    def __init__(self, stage: Stage, nats_url: str, folder: Path) -> None:
        self.stage = stage
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        self._mounted = folder / MOUNT
        self._nats_url = nats_url
        options = stage.options.model_copy(update={"folder": Path("/proc/self/cwd") / MOUNT})
        stage.train(options=options)

    @property
    def _hive(self) -> str:
        return self.stage.bus.subjects.hive

    def mount(self) -> None:
        (self.elsewhere / MOUNT).symlink_to(self._mounted)

    async def until(self, holds: Callable[[EngineState], bool]) -> None:
        await self.stage.follower.wait_for(lambda _: holds(self.stage.engine), PROCESS_S)

    async def until_quarantined(self, version: int) -> None:
        """Wait until the ninth replica is quarantined for want of this version."""

        def is_quarantined(engine: EngineState) -> bool:
            found = engine.replicas[NINTH].quarantined
            return found is not None and found.version == version

        await self.until(is_quarantined)

    def command(self, name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "bombus", name, "--hive", self._hive, "--nats", self._nats_url, *arguments]

    @contextmanager
    def ninth(self) -> Iterator[None]:
        """Run the ninth replica in a process of its own, whose machine lacks the mount."""
        command = self.command("inference", "--replica", NINTH, "--load-retry", "0.2", "--threads", "1")
        with subprocess.Popen(command, cwd=self.elsewhere) as process:
            try:
                yield
            finally:
                process.terminate()

    @asynccontextmanager
    async def first(self) -> AsyncIterator[None]:
        """Run a replica here."""
        compute = ComputeSettings(dtype="float32", kv_cache_bytes=4 << 20, max_model_len=256)
        settings = InferenceSettings(hive=self._hive, bus_url=self._nats_url, replica="r2", compute=compute)
        running = asyncio.create_task(service.run(settings))
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@long_only
async def test_a_run_goes_on_without_the_replica_that_lacks_the_mount_which_serves_once_it_is_back(
    bus: Bus, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with staged(bus, tmp_path) as stage:
        hive = Hive(stage, nats_url, tmp_path)
        with hive.ninth():
            async with hive.first():
                await hive.until(lambda engine: {"r1", "r2", NINTH} <= set(engine.replicas))
                await stage.start(stage.job())
                await hive.until_quarantined(version=0)
                for version in (1, 2):
                    await stage.until(Phase.ROLLING, version - 1)
                    await stage.play_batch(shift=version)
                    await stage.until(Phase.ROLLING, version)
                await hive.until_quarantined(version=2)
                assert stage.engine.loaded == {"r1", "r2"}
                assert set(fitting(stage.engine)) == {"r1", "r2"}
                shown = render_status(stage.follower.hive)
                assert "replicas: 3, 1 of them quarantined" in shown
                assert f"    quarantined: it cannot load version 2: {NO_WEIGHTS}" in shown
                hive.mount()
                await hive.until(lambda engine: NINTH in engine.loaded)
                assert set(fitting(stage.engine)) == {"r1", "r2", NINTH}
                answer = (await ask(bus, stage.engine.replicas[NINTH].url, stage.engine.run, [1, 2, 3])).only
                assert set(answer.versions) == {2}
    assert not [event for event in stage.events if isinstance(event, EngineFailed | EngineSuspended)]


async def test_a_run_whose_only_replica_lacks_the_mount_is_suspended_and_goes_on_with_its_episodes(
    bus: Bus, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with staged(bus, tmp_path, serves=False) as stage:
        hive = Hive(stage, nats_url, tmp_path)
        async with hive.first():
            await stage.start(stage.job())
            await stage.until(Phase.ROLLING)
            claim = inbox.Claim(id=stage.id(), engine=ENGINE, claim="c", client="c", count=2)
            granted = await bus.inbox.request(claim)
            assert isinstance(granted, inbox.Granted)
            await stage.say(inbox.Touch(id=stage.id(), engine=ENGINE, confirmed=("c",)))
        with hive.ninth():
            await hive.until(lambda engine: bool(engine.suspended))
            assert stage.engine.suspended.startswith(f"no replica can serve version 0. {NINTH}: {NO_WEIGHTS}")
            assert tuple(stage.engine.open) == granted.episodes
            hive.mount()
            resumed = await asyncio.to_thread(subprocess.run, hive.command("resume"), check=True, timeout=PROCESS_S)
            assert resumed.returncode == 0
            await hive.until(lambda engine: not engine.suspended and NINTH in engine.loaded)
            assert (stage.engine.phase, tuple(stage.engine.open)) == (Phase.ROLLING, granted.episodes)
            results = tuple(inbox.EpisodeResult(episode=each, task="kept", reward=1.0) for each in granted.episodes)
            await bus.inbox.request(inbox.End(id=stage.id(), engine=ENGINE, client="c", results=results))
            await stage.play_batch()
            await stage.until(Phase.ROLLING, 1)
            batch = next(event for event in stage.events if isinstance(event, BatchReady))
            assert "kept" in [group.task for group in batch.groups]
