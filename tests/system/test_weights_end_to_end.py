"""Weights from end to end: a real trainer, a real bus, and a real replica that serves what it was sent."""

import asyncio
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bombus.bus import Bus
from bombus.config.job import RunConfig
from bombus.hive.events import WeightsLoaded, WeightsReady
from bombus.weights.adapters import ADAPTER_FORMAT
from bombus.weights.deltas import DELTA_FORMAT, FULL_FORMAT
from bombus_inference import service
from bombus_inference.settings import ComputeSettings, InferenceSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.settings import TrainerSettings
from tests.inference.backends.small_engines import worst_difference
from tests.inference.test_service import ask
from tests.trainer.trainer_hive import WAIT_S, Stage, staged

VERSIONS = 4
REPLICA = "r2"


class Publication(NamedTuple):
    """What the trainer is told about publishing, and the format of each version that results."""

    options: dict[str, object]
    formats: list[str]


@pytest.fixture
def replica_settings(nats_url: str, hive: str, tmp_path: Path) -> InferenceSettings:
    compute = ComputeSettings(dtype="float32", kv_cache_bytes=4 << 20, max_model_len=256)
    return InferenceSettings(
        hive=hive, bus_url=nats_url, replica=REPLICA, cache=tmp_path / "cache", load_retry_s=0.2, compute=compute
    )


async def url_once_serving(stage: Stage, version: int) -> str:
    """Wait until the replica serves this version, and return its URL."""

    def loaded() -> bool:
        events = [each for each in stage.events if isinstance(each, WeightsLoaded)]
        return any((event.replica, event.version) == (REPLICA, version) for event in events)

    await stage.follower.wait_for(lambda _: loaded() and REPLICA in stage.engine.replicas, WAIT_S)
    return stage.engine.replicas[REPLICA].url


def trained_model(stage: Stage, job: RunConfig) -> PreTrainedModel:
    """The newest version, built from the checkpoint alone."""
    executor = Executor(stage.folder / "model", TrainerSettings.of_job(job))
    done = stage.engine.step_done
    if done is not None:
        executor.restore(Path(done.checkpoint), done.checkpoint_digest)
    with TemporaryDirectory() as folder:
        where = export(executor, VersionTarget(Path(folder), 0, 0)).where
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    return model


@pytest.mark.parametrize("way", ["folder", "objects"])
@pytest.mark.parametrize(
    "publication",
    [
        Publication({"weights_full_every": 1}, [FULL_FORMAT] * 5),
        Publication({"weights_full_every": 3}, [FULL_FORMAT, DELTA_FORMAT, DELTA_FORMAT, FULL_FORMAT, DELTA_FORMAT]),
        Publication({}, [ADAPTER_FORMAT] * 5),
    ],
    ids=["full", "deltas", "adapters"],
)
async def test_a_replica_serves_each_version_that_was_trained(
    bus: Bus, tmp_path: Path, replica_settings: InferenceSettings, way: str, publication: Publication
) -> None:
    async with staged(bus, tmp_path) as stage:
        lora = publication.formats[0] == ADAPTER_FORMAT
        job = stage.job(lr=1e-4, lora_rank=4 if lora else 0)
        dtype = "float32" if lora else "bfloat16"  # merged for the comparison, adapters would be rounded
        job = job.model_copy(update={"model": job.model.model_copy(update={"dtype": dtype})})
        stage.train(options=stage.options.model_copy(update={"weights_by": way, **publication.options}))
        replica = asyncio.create_task(service.run(replica_settings))
        await stage.start(job)
        for version in range(VERSIONS + 1):
            url = await url_once_serving(stage, version)
            answer = (await ask(bus, url, stage.engine.run, [1, 2, 3])).only
            assert set(answer.versions) == {version}
            wanted = await asyncio.to_thread(trained_model, stage, job)
            assert worst_difference(wanted, [1, 2, 3], answer) < 1e-4, version
            if version < VERSIONS:
                await stage.play_batch(shift=version)
        replica.cancel()
        with suppress(asyncio.CancelledError):
            await replica
    assert [event.weights.format for event in stage.events if isinstance(event, WeightsReady)] == publication.formats
    assert not list((tmp_path / "cache").glob("*"))
