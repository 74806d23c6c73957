"""LoRA adapters published without their base: as files, on their way out of a trainer and into a replica (R15)."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from transformers import AutoModelForCausalLM

from bombus.bus import Blobs, Bus
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.hive.events import Weights, WeightsReady
from bombus.hive.state import Phase
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_FORMAT, read_adapter_config
from bombus.weights.deltas import FULL_FILE, chain, file_sha256
from bombus.weights.merging import Adapter, save_merged
from bombus.weights.models import load_model
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.torch.adapters.own import LowRank, read_adapter
from bombus_inference.backends.torch.backend import TorchBackend, load_policy, read_state
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.fetching import Fetcher
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.options import TrainerOptions
from bombus_trainer.publish.export import (
    ModelPart,
    VersionTarget,
    digest_like,
    digest_of,
    export,
    export_adapter,
    export_base,
)
from tests.inference.backends.small_engines import finish, request, worst_difference
from tests.trainer.backends.test_executor import batch
from tests.trainer.small_batches import tiny_model_folder, tiny_settings
from tests.trainer.test_versions import play_versions, published
from tests.trainer.trainer_hive import ENGINE, Stage, staged

TARGETS = ("q_proj", "down_proj")


@dataclass
class Made:
    """Two versions of a trainer's adapters on one base, alone and merged."""

    executor: Executor
    base: Weights
    adapters: list[Weights]
    merged: list[Weights]

    def ready(self, version: int) -> WeightsReady:
        return WeightsReady(engine=ENGINE, run=1, version=version, weights=self.adapters[version])


@pytest.fixture(params=["float32", "bfloat16"])
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Made:
    chosen = tiny_settings(lora_rank=2, lora_alpha=8, target_modules=",".join(TARGETS), model={"dtype": request.param})
    executor = Executor(tiny_model_folder(tmp_path / "model", tied=True), chosen)
    root = tmp_path / "w"
    made = Made(executor, export_base(executor, root, 1), [], [])
    for version in (0, 1):
        made.adapters.append(export_adapter(executor, VersionTarget(root, version, 1, "tok"), made.base))
        made.merged.append(export(executor, VersionTarget(tmp_path / "merged", version, 1)))
        executor.train_step(batch(), version + 1)
    return made


# ---- files --------------------------------------------------------------------------------------------------------


def test_an_adapter_is_a_folder_that_peft_loads_on_top_of_its_base(made: Made) -> None:
    dtype = made.executor.policy.export_dtype
    base = AutoModelForCausalLM.from_pretrained(made.base.where, dtype=dtype)
    theirs = PeftModel.from_pretrained(base, made.adapters[1].where).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(made.merged[1].where, dtype=dtype).state_dict()
    assert theirs.keys() == ours.keys()
    changed = 0
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, atol=1e-6 if dtype == torch.float32 else 4e-3, rtol=0)
        changed += name.split(".")[-2] in TARGETS
    assert changed == 2 * 2, "two layers' two targets"


def test_the_first_adapter_adds_nothing_and_each_digest_identifies_its_weights(made: Made) -> None:
    assert made.base.sha256 == made.merged[0].sha256
    assert made.adapters[0].sha256 != made.adapters[1].sha256
    for weights in made.adapters:
        file = Path(weights.where) / ADAPTER_FILE
        assert (weights.format, weights.sha256) == (ADAPTER_FORMAT, file_sha256(file))
        assert weights.bytes == file.stat().st_size < made.base.bytes
        assert chain(weights) == [weights, made.base]
    assert digest_of(made.executor, part=ModelPart.BASE) == made.base.sha256, "training does not change the base"
    third = digest_like(made.executor, made.adapters[0])
    assert third not in {weights.sha256 for weights in made.adapters}
    assert digest_like(made.executor, made.merged[0]) == digest_of(made.executor) != third


def test_an_adapter_describes_itself_and_a_configuration_that_differs_is_refused(made: Made) -> None:
    folder = Path(made.adapters[0].where)
    config = read_adapter_config(folder)
    assert (config.r, config.scale, config.target_modules) == (2, 4.0, sorted(TARGETS))
    text = (folder / ADAPTER_CONFIG).read_text()
    (folder / ADAPTER_CONFIG).write_text(text.replace("8.0", "16.0"))
    with pytest.raises(EngineFault, match="does not belong to the adapter next to it"):
        read_adapter_config(folder)
    with pytest.raises(EngineFault, match="cannot be read"):
        read_adapter_config(folder.parent)


def test_a_model_that_is_saved_merged_has_all_that_the_adapter_adds(made: Made, tmp_path: Path) -> None:
    save_merged(Path(made.base.where), Path(made.adapters[1].where), tmp_path / "saved")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").state_dict()
    expected = read_state(Path(made.base.where), ComputeSettings(dtype="float32"), Path(made.adapters[1].where))
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()


# ---- into a replica -----------------------------------------------------------------------------------------------


async def test_a_backend_that_loads_adapters_gets_them_unmerged(bus: Bus, made: Made, tmp_path: Path) -> None:
    fetcher = Fetcher(bus, ENGINE, tmp_path / "cache", adapters=True)
    for version in (0, 1):
        found = await fetcher.materialise(made.ready(version), lambda: 1)
        assert (found.folder, found.adapter) == (Path(made.base.where), Path(made.adapters[version].where))
    fetcher.close()


async def test_for_any_other_backend_an_adapter_becomes_the_file_that_its_trainer_would_have_merged(
    bus: Bus, made: Made, tmp_path: Path
) -> None:
    fetcher = Fetcher(bus, ENGINE, tmp_path / "cache")
    for version in (0, 1):
        found = await fetcher.materialise(made.ready(version), lambda: 1)
        assert found.adapter is None
        assert file_sha256(found.folder / FULL_FILE) == made.merged[version].sha256
        assert (found.folder / "config.json").is_file()
    assert len([place for place in (tmp_path / "cache").glob("*/*") if place.is_dir()]) == 1, "only the newest is kept"
    fetcher.close()


async def test_adapters_come_from_the_object_store_and_their_base_only_once(
    bus: Bus, made: Made, tmp_path: Path
) -> None:
    stored = [await store(bus, made.base)]
    fetcher = Fetcher(bus, ENGINE, tmp_path / "cache", adapters=True)
    for version in (0, 1):
        adapter = replace(await store(bus, made.adapters[version]), adapter_of=stored[0])
        ready = replace(made.ready(version), weights=adapter)
        found = await fetcher.materialise(ready, lambda: 1)
        assert found.adapter is not None
        assert file_sha256(found.folder / FULL_FILE) == made.base.sha256
        assert file_sha256(found.adapter / ADAPTER_FILE) == made.adapters[version].sha256
        await Blobs(bus).delete(f"{stored[0].objects}/{FULL_FILE}")
    places = {place.name for place in (tmp_path / "cache").glob("*/*") if place.is_dir()}
    assert places == {"base-epoch-1", "version-00000001-epoch-1"}
    fetcher.close()


async def store(bus: Bus, weights: Weights) -> Weights:
    """Move a version into the object store, as a trainer does; its folder is removed."""
    place = Path(weights.where)
    for file in place.iterdir():
        await Blobs(bus).put(f"weights/{ENGINE}/run-1/{place.name}/{file.name}", file.read_bytes())
    shutil.rmtree(place)
    return replace(weights, where=f"object:weights/{ENGINE}/run-1/{place.name}")


@pytest.mark.parametrize("what", ["adapter", "base"])
async def test_a_file_whose_digest_is_not_the_logs_is_refused(bus: Bus, made: Made, tmp_path: Path, what: str) -> None:
    damaged = {"adapter": Path(made.adapters[1].where) / ADAPTER_FILE, "base": Path(made.base.where) / FULL_FILE}[what]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fetcher = Fetcher(bus, ENGINE, tmp_path / "cache")
    with pytest.raises(EngineFault, match="the log says"):
        await fetcher.materialise(made.ready(1), lambda: 1)
    fetcher.close()


async def test_an_adapter_of_another_model_is_refused(bus: Bus, made: Made, tmp_path: Path) -> None:
    wider = Executor(tiny_model_folder(tmp_path / "wider", tied=True, hidden_size=64), made.executor.settings)
    other = replace(made.adapters[1], adapter_of=export_base(wider, tmp_path / "other", 1))
    fetcher = Fetcher(bus, ENGINE, tmp_path / "cache")
    with pytest.raises(EngineFault, match="does not fit this model's"):
        await fetcher.materialise(replace(made.ready(1), weights=other), lambda: 1)
    fetcher.close()


async def test_our_engine_in_float32_computes_with_the_trainers_weights_whatever_the_dtype_of_the_base(
    made: Made,
) -> None:
    """The adapter is merged in the engine's precision, not in the file's: bfloat16 rounds most of a step away."""
    compute = ComputeSettings(dtype="float32", kv_cache_bytes=4 << 20)
    adapter = Adapter(Path(made.adapters[1].where))
    state = read_state(Path(made.base.where), compute, Path(made.adapters[1].where))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    exact = dict(made.executor.policy.dense_weights())
    changed = [name for name in state if adapter.changes(name)]
    assert len(changed) == 2 * 2
    for name, value in state.items():
        expected = adapter.merge(name, exact[name]).to(value.dtype)
        assert torch.equal(value, expected), name
    policy = load_policy(Path(made.base.where), compute, Path(made.adapters[1].where))
    engine = Engine(policy, compute, run=1, version=1)
    mine = dict(engine._model.named_parameters())
    assert mine.keys() == state.keys()
    assert all(torch.equal(mine[name], value) for name, value in state.items())
    engine.add(1, request([1, 2, 3]))
    answer = finish(engine)[1].only
    model = load_model(Path(made.base.where))
    with torch.no_grad():
        for name, value in state.items():
            model.get_parameter(name).copy_(value)
    assert worst_difference(model, [1, 2, 3], answer) < 1e-4


def logprobs(engine: Engine) -> list[float]:
    engine.add(1, request([1, 2, 3]))
    return finish(engine)[1].only.logprobs


async def test_our_engine_in_half_precision_computes_adapters_beside_its_weights_and_exchanges_them_alone(
    made: Made,
) -> None:
    compute = ComputeSettings(dtype="bfloat16", kv_cache_bytes=4 << 20)
    base, adapters = Path(made.base.where), [Path(weights.where) for weights in made.adapters]
    engine = Engine(load_policy(base, compute, adapters[0]), compute, run=1, version=0)
    first = logprobs(engine)
    assert first == logprobs(Engine(load_policy(base, compute), compute, run=1, version=0)), "it adds nothing"
    engine.swap_weights(None, 1, 1, read_adapter(adapters[1], compute))
    second = logprobs(engine)
    assert second == logprobs(Engine(load_policy(base, compute, adapters[1]), compute, run=1, version=1)) != first
    state = {name: value.to(torch.bfloat16) for name, value in read_state(base, compute).items()}
    assert all(torch.equal(engine._model.get_parameter(name), value) for name, value in state.items())
    engine.swap_weights(state, 2, 1)
    assert logprobs(engine) == first, "without an adapter it is the base"
    engine.swap_weights(state, 3, 1, read_adapter(adapters[1], compute))
    wrong = {"model.layers.0.mlp.down_proj": LowRank(torch.zeros(2, 3), torch.zeros(3, 2))}
    with pytest.raises(EngineFault, match="does not fit this model's"):
        engine.swap_weights(None, 4, 1, wrong)
    with pytest.raises(EngineFault, match="no such layer"):
        engine.swap_weights(None, 4, 1, {"lm_head": wrong["model.layers.0.mlp.down_proj"]})
    assert (engine.version, logprobs(engine)) == (3, second), "what is refused changes nothing"


async def test_in_half_precision_a_replica_reads_the_model_only_once(made: Made) -> None:
    async def ignore_stage(_: str) -> None:
        pass

    compute = ComputeSettings(dtype="bfloat16", kv_cache_bytes=4 << 20)
    base, adapters = Path(made.base.where), [Path(weights.where) for weights in made.adapters]
    expected = logprobs(Engine(load_policy(base, compute, adapters[1]), compute, run=1, version=1))
    backend = TorchBackend(compute, lambda _: None)
    try:
        for version, adapter in enumerate(adapters):
            policy = Policy(folder=base, run=1, version=version, max_model_len=64, adapter=adapter)
            await backend.load(policy, ignore_stage)
            (base / FULL_FILE).unlink(missing_ok=True)
        assert backend.version == 1
        assert await backend.thread.call(lambda engine: engine is not None and logprobs(engine)) == expected
    finally:
        await backend.stop()


# ---- out of a trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path) as stage:
        yield stage


def adapter_options(stage: Stage, **more: object) -> TrainerOptions:
    return stage.options.model_copy(update={"weights_lora": "adapter", **more})


def lora_job(stage: Stage) -> RunConfig:
    return stage.job(lora_rank=2)


async def test_r15_only_adapters_are_published_and_their_base_is_kept(stage: Stage) -> None:
    first = stage.train("first", adapter_options(stage))
    await stage.start(lora_job(stage))
    await play_versions(stage, 3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    made = published(stage)
    bases = {weights.adapter_of for weights in made}
    assert len(bases) == 1
    (base,) = bases
    assert base is not None
    assert [weights.format for weights in made] == [ADAPTER_FORMAT] * 4
    kept = {place.name for place in stage.options.folder.glob("weights/*/main/run-1/*")}
    assert {Path(base.where).name, *(Path(weights.where).name for weights in made[-2:])} <= kept
    assert Path(made[0].where).name not in kept
    assert all(file_sha256(Path(weights.where) / ADAPTER_FILE) == weights.sha256 for weights in made[-2:])
    stage.train("second", adapter_options(stage))
    await play_versions(stage, 5)
    assert {weights.adapter_of for weights in published(stage)} == bases, "a restarted trainer publishes no other base"


async def test_a_base_that_is_gone_is_published_again(stage: Stage) -> None:
    first = stage.train("first", adapter_options(stage))
    await stage.start(lora_job(stage))
    await play_versions(stage, 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    (base,) = {weights.adapter_of for weights in published(stage)}
    assert base is not None
    shutil.rmtree(base.where)
    stage.train("second", adapter_options(stage))
    await play_versions(stage, 2)
    again = published(stage)[-1].adapter_of
    assert again is not None
    assert again.where != base.where
    assert again.sha256 == base.sha256 == file_sha256(Path(again.where) / FULL_FILE)


async def test_in_the_object_store_the_base_is_stored_once_and_stays(stage: Stage) -> None:
    stage.train(options=adapter_options(stage, weights_by="objects"))
    await stage.start(lora_job(stage))
    await play_versions(stage, 3)
    await stage.play_batch(shift=3)
    await stage.until(Phase.ROLLING, 4)
    names = await Blobs(stage.bus).names("weights/")
    assert len([name for name in names if name.endswith(FULL_FILE) and "adapter" not in name]) == 1
    newest = published(stage)[-1]
    assert newest.adapter_of is not None
    assert f"{newest.objects}/{ADAPTER_FILE}" in names
    assert f"{newest.adapter_of.objects}/{FULL_FILE}" in names


async def test_a_job_without_lora_is_published_in_full_all_the_same(stage: Stage) -> None:
    stage.train(options=adapter_options(stage))
    await stage.start(stage.job())
    await play_versions(stage, 1)
    assert [weights.adapter_of for weights in published(stage)] == [None, None]
