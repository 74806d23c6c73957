"""The canary of a version in a whole hive: a replica with other weights is quarantined, and another serves."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bombus.bus import Bus
from bombus.hive.events import ReplicaQuarantined, WeightsLoaded, WeightsReady
from bombus.hive.pacing import fitting
from bombus.hive.state import Phase
from bombus.hive.status.text import render_status
from bombus_inference import service
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings, InferenceSettings
from tests.host.test_doctor import by_name, streams_of
from tests.inference.test_service import ask
from tests.trainer.trainer_hive import WAIT_S, Stage, staged

STALE = "r2"


async def until_loaded(stage: Stage, version: int) -> WeightsLoaded:
    """Return the report of the replica that was stale, once it serves this version."""

    def found() -> list[WeightsLoaded]:
        loaded = [each for each in stage.events if isinstance(each, WeightsLoaded)]
        return [each for each in loaded if (each.replica, each.version) == (STALE, version)]

    await stage.follower.wait_for(lambda _: bool(found()), WAIT_S)
    return found()[0]


async def test_a_replica_with_last_versions_weights_is_quarantined_with_both_figures_and_another_serves(
    bus: Bus, nats_url: str, hive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Engine.swap_weights

    def forgetful(engine: Engine, state: Any, version: int, run: int, *others: Any) -> None:
        swap(engine, None if version == 1 else state, version, run, *others)

    monkeypatch.setattr(Engine, "swap_weights", forgetful)
    compute = ComputeSettings(dtype="float32", kv_cache_bytes=4 << 20, max_model_len=256)
    settings = InferenceSettings(
        hive=hive, bus_url=nats_url, replica=STALE, alive_every_s=0.05, load_retry_s=60, compute=compute
    )
    async with staged(bus, tmp_path) as stage:
        stage.train()
        replica = asyncio.create_task(service.run(settings))
        await stage.start(stage.job(lr=1e-5))
        loaded = await until_loaded(stage, 0)
        assert loaded.canary is not None
        assert loaded.canary.difference < 1e-6
        await stage.play_batch()
        await stage.until(Phase.ROLLING, 1)
        await stage.follower.wait_for(lambda _: stage.engine.replicas[STALE].quarantined is not None, WAIT_S)
        (quarantined,) = [each for each in stage.events if isinstance(each, ReplicaQuarantined)]
        assert (quarantined.replica, quarantined.version) == (STALE, 1)
        assert "version 1" in quarantined.reason
        assert " here and " in quarantined.reason
        assert " at the trainer (" in quarantined.reason
        assert set(fitting(stage.engine)) == {"r1"}, "it gets no calls, and the other one does"
        answer = await ask(bus, stage.engine.replicas[STALE].url, stage.engine.run, [1, 2, 3])
        assert answer.fault is not None, "no token is sampled with its weights"
        shown = render_status(stage.follower.hive)
        assert f"quarantined: it cannot load version 1: {quarantined.reason}" in shown
        found = by_name(await asyncio.to_thread(streams_of, tmp_path / "doctor", nats_url, hive))
        assert quarantined.reason in found[f"engine main: {STALE}"].detail

        await stage.play_batch(shift=1)
        await stage.until(Phase.ROLLING, 2)
        assert (await until_loaded(stage, 2)).canary is not None
        assert stage.engine.replicas[STALE].quarantined is None
        assert "canary: " in render_status(stage.follower.hive)
        replica.cancel()
        with suppress(asyncio.CancelledError):
            await replica
    versions = [each.version for each in stage.events if isinstance(each, WeightsLoaded) and each.replica == STALE]
    assert versions == [0, 2], "it has never served version 1"
    assert all(each.canary is not None for each in stage.events if isinstance(each, WeightsReady))
