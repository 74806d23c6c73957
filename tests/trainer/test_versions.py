"""Policy versions as a trainer publishes them: full copies and deltas, which are kept, and how they reach replicas."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bombus.bus import Blobs, Bus
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.hive import inbox
from bombus.hive.events import Weights, WeightsReady
from bombus.hive.inbox import Done, Refusal, decode_answer
from bombus.hive.state import Hive, Phase
from bombus.weights.deltas import DELTA_FILE, DELTA_FORMAT, FULL_FILE, FULL_FORMAT, chain, file_sha256, rebuild
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.options import TrainerOptions
from bombus_trainer.publish.export import VersionTarget, export, export_delta
from bombus_trainer.publish.host_copy import HostCopy
from bombus_trainer.versions import check_fits
from tests.trainer.backends.test_executor import batch
from tests.trainer.small_batches import tiny_model_folder, tiny_settings
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, staged
from tests.weights.delta_versions import Tensors, write_full, write_versions

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ODD = (float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-40)


Sketch = tuple[tuple[int, ...], torch.dtype, float]  # a tensor's shape and type, and the share of it that changes
SKETCHES = st.tuples(
    st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (40, 30), (70, 400)]),
    st.sampled_from((*FLOATS, torch.int64, torch.uint8)),
    st.sampled_from((0.0, 0.0001, 0.01, 0.3, 1.0)),
)


def two_versions(sketches: list[Sketch], seed: int) -> tuple[Tensors, Tensors]:
    """Draw tensors, and the same with some elements changed, including unusual values."""
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    random = np.random.default_rng(seed)
    for number, (shape, dtype, share) in enumerate(sketches):
        old = torch.from_numpy(np.asarray(random.normal(size=shape) * 100)).to(dtype)
        new = old.clone()
        where = torch.from_numpy(np.asarray(random.random(size=shape) < share))
        if dtype in FLOATS:
            new[where] = torch.tensor(random.choice([*ODD, *random.normal(size=6)], size=int(where.sum()))).to(dtype)
        else:
            new[where] += 1
        before[f"layer.{number}.weight"], after[f"layer.{number}.weight"] = old, new
    return before, after


@settings(max_examples=60, deadline=None)
@given(st.lists(SKETCHES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_full_file_and_a_delta_are_the_next_full_file_bit_for_bit(sketches: list[Sketch], seed: int) -> None:
    versions = two_versions(sketches, seed)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        _, second = write_versions(root, versions)
        wanted = write_full(root / "wanted", versions[1])
        assert (second.bytes, second.sha256) == (wanted.bytes, wanted.sha256)
        found = rebuild(root / "0" / FULL_FILE, [root / "1" / DELTA_FILE], root / "made")
        assert found == wanted.sha256
        assert (root / "made").read_bytes() == (root / "wanted").read_bytes()


def test_a_delta_is_a_safetensors_file_that_names_what_it_changes(tmp_path: Path) -> None:
    old = {"a": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.ones(3)}
    new = {"a": old["a"].clone(), "b": old["b"]}
    new["a"][1, 2] = 5.0
    first, second = write_versions(tmp_path, [old, new])
    found = load_file(tmp_path / "1" / DELTA_FILE)
    assert found.keys() == {"a", "gaps:a"}
    assert found["a"].tolist() == [5.0]
    assert found["gaps:a"].tolist() == [6]
    assert chain(second) == [second, first]
    assert second.delta_bytes == (tmp_path / "1" / DELTA_FILE).stat().st_size


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}, {"model": {"dtype": "bfloat16"}}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_steps_published_as_deltas_give_the_bytes_of_full_copies(
    tmp_path: Path, changes: dict[str, object], tied: bool
) -> None:
    executor = Executor(tiny_model_folder(tmp_path / "model", tied), tiny_settings(lr=1e-4, **changes))
    held = HostCopy()
    newest = export(executor, VersionTarget(tmp_path / "w", 0, 1), held=held)
    file = Path(newest.where) / FULL_FILE
    for step in (1, 2, 3):
        executor.train_step(batch(), step)
        ready = WeightsReady(engine=ENGINE, run=1, version=step - 1, weights=newest)
        newest = export_delta(executor, VersionTarget(tmp_path / "w", step, 1, "tok"), held, ready)
        full = export(executor, VersionTarget(tmp_path / "full", step, 1))
        assert (newest.bytes, newest.sha256) == (full.bytes, full.sha256)
        if newest.format == DELTA_FORMAT:
            assert [path.name for path in Path(newest.where).iterdir()] == [DELTA_FILE]
            assert rebuild(file, [Path(newest.where) / DELTA_FILE], tmp_path / str(step)) == full.sha256
            file = tmp_path / str(step)
        else:  # in float32 every step changes nearly everything
            assert executor.policy.export_dtype == torch.float32
            assert file_sha256(Path(newest.where) / FULL_FILE) == full.sha256
    if executor.policy.export_dtype == torch.bfloat16:
        assert newest.format == DELTA_FORMAT


# ---- on the bus ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path) as stage:
        yield stage


def delta_options(stage: Stage, **more: object) -> TrainerOptions:
    return stage.options.model_copy(update={"weights_full_every": 3, **more})


def bfloat16_job(stage: Stage) -> RunConfig:
    job = stage.job(lr=1e-4, resume="never")
    return job.model_copy(update={"model": job.model.model_copy(update={"dtype": "bfloat16"})})


def published(stage: Stage) -> list[Weights]:
    return [event.weights for event in stage.events if isinstance(event, WeightsReady)]


async def play_versions(stage: Stage, last: int) -> None:
    """Play batches until the engine has made version `last`."""
    for version in range(max(stage.engine.version, 0), last):
        await stage.until(Phase.ROLLING, version)
        await stage.play_batch(shift=version)
    await stage.until(Phase.ROLLING, last)


def made_of_chain(weights: Weights, into: Path) -> str:
    links = chain(weights)
    files = [Path(link.where) / DELTA_FILE for link in reversed(links[:-1])]
    return rebuild(Path(links[-1].where) / FULL_FILE, files, into)


async def test_r15_every_third_version_is_a_full_copy_and_what_two_versions_are_made_of_is_kept(stage: Stage) -> None:
    trainer = stage.train(options=delta_options(stage))
    await stage.start(bfloat16_job(stage))
    for version, formats in enumerate("fddfddf"):
        await play_versions(stage, version)
        newest = published(stage)[-1]
        assert newest.format == (FULL_FORMAT if formats == "f" else DELTA_FORMAT), version
        assert made_of_chain(newest, stage.folder / "made") == newest.sha256
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    kept = sorted(place.name[:16] for place in stage.options.folder.glob("weights/*/main/run-1/*"))
    assert kept[-4:] == [f"version-{version:08d}" for version in (3, 4, 5, 6)]
    assert not any((stage.options.folder / "weights").glob("*/main/run-1/version-0000000[01]*"))


async def test_a_trainer_that_was_started_again_goes_on_with_deltas_of_what_the_log_names(stage: Stage) -> None:
    first = stage.train("first", delta_options(stage, weights_full_every=8))
    await stage.start(bfloat16_job(stage))
    await play_versions(stage, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stage.train("second", delta_options(stage, weights_full_every=8))
    await play_versions(stage, 4)
    assert [weights.format for weights in published(stage)] == [FULL_FORMAT] + [DELTA_FORMAT] * 4
    newest = published(stage)[-1]
    assert made_of_chain(newest, stage.folder / "made") == newest.sha256


async def ask_full_copy(stage: Stage, where: str) -> Done | Refusal:
    subject = stage.bus.subjects.full_copies(ENGINE, stage.engine.trainer_epoch)
    reply = await stage.bus.requests.request(subject, where.encode(), timeout_s=WAIT_S)
    answer = decode_answer(reply.data)
    assert isinstance(answer, Done | Refusal)
    return answer


def trained_by(stage: Stage, trainer: str, _: Hive) -> bool:
    return stage.engine.trainer == trainer


async def test_a_trainer_gives_a_full_copy_of_its_newest_version_also_after_a_restart(stage: Stage) -> None:
    for life in ("first", "second"):
        trainer = stage.train(life, delta_options(stage, weights_full_every=8))
        if life == "first":
            await stage.start(bfloat16_job(stage))
            await play_versions(stage, 1)
        await stage.follower.wait_for(partial(trained_by, stage, life), WAIT_S)
        newest = published(stage)[-1]
        assert newest.format == DELTA_FORMAT
        assert isinstance(await ask_full_copy(stage, newest.where), Done), life
        file = Path(newest.where) / FULL_FILE
        assert file_sha256(file) == newest.sha256
        assert (Path(newest.where) / "tokenizer.json").is_file()
        file.unlink()
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)


async def test_a_full_copy_goes_through_the_object_store_where_weights_do(stage: Stage) -> None:
    stage.train(options=delta_options(stage, weights_by="objects"))
    await stage.start(bfloat16_job(stage))
    await play_versions(stage, 1)
    newest = published(stage)[-1]
    assert newest.format == DELTA_FORMAT
    for _ in range(2):  # also when an object was lost
        assert isinstance(await ask_full_copy(stage, newest.where), Done)
        blob = await Blobs(stage.bus).get(f"{newest.objects}/{FULL_FILE}")
        assert sha256(blob).hexdigest() == newest.sha256
        assert f"{newest.objects}/config.json" in await Blobs(stage.bus).names(f"{newest.objects}/")
        await Blobs(stage.bus).delete(f"{newest.objects}/{FULL_FILE}")


async def test_a_full_copy_of_a_version_that_the_trainer_does_not_hold_is_refused_with_a_sentence(stage: Stage) -> None:
    stage.train(options=delta_options(stage, weights_full_every=8))
    await stage.start(bfloat16_job(stage))
    await play_versions(stage, 2)
    for where in (published(stage)[1].where, "/etc", "object:../../etc/passwd", "\udcff", "x" * 300):
        answer = await ask_full_copy(stage, where.encode(errors="replace").decode())
        assert isinstance(answer, Refusal)
        assert "only those of its newest version" in answer.why


@pytest.mark.parametrize(
    ("size", "room", "why"),
    [
        (10**9 + 1, 0, "a shared folder is required"),
        (900_000_000, 2 << 30, "has 2147.5 MB, but must hold 3 versions of 900.0 MB"),
    ],
)
def test_r15_weights_too_large_for_the_object_store_are_refused_with_a_way_out(size: int, room: int, why: str) -> None:
    with pytest.raises(EngineFault, match=why) as refused:
        check_fits(size, room)
    assert "--weights-by folder" in str(refused.value)
    check_fits(10**9, 0)
    check_fits(700_000_000, 2 << 30)


async def test_weights_go_through_the_object_store_and_old_ones_are_removed_from_it(stage: Stage) -> None:
    stage.train(options=delta_options(stage, weights_by="objects"))
    await stage.start(bfloat16_job(stage))
    await play_versions(stage, 4)
    await stage.play_batch(shift=4)
    await stage.until(Phase.ROLLING, 5)  # after which the leftovers of version 4 are gone
    places: dict[str, set[str]] = {}
    for name in await Blobs(stage.bus).names("weights/"):
        folder, _, file = name.rpartition("/")
        places.setdefault(folder, set()).add(file)
    wheres = [weights.where for weights in published(stage)]
    assert all(where.startswith("object:weights/main/run-1/version-") for where in wheres)
    assert {f"object:{folder}" for folder in places} >= {wheres[3], wheres[4], wheres[5]}
    assert not {f"object:{folder}" for folder in places} & set(wheres[:2])
    assert places[wheres[4].removeprefix("object:")] == {DELTA_FILE}
    full = places[wheres[3].removeprefix("object:")]
    assert full >= {FULL_FILE, "config.json", "tokenizer.json"}
    blob = await Blobs(stage.bus).get(f"{wheres[3].removeprefix('object:')}/{FULL_FILE}")
    assert sha256(blob).hexdigest() == published(stage)[3].sha256


async def test_a_second_runs_trainer_removes_the_objects_of_the_first(stage: Stage) -> None:
    stage.train(options=delta_options(stage, weights_by="objects"))
    await stage.start(bfloat16_job(stage))
    await play_versions(stage, 1)
    await stage.bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
    await stage.follower.wait_for(lambda _: stage.engine.phase == Phase.OFFLINE, WAIT_S)
    await stage.restart()
    await play_versions(stage, 1)
    await stage.play_batch()
    await stage.until(Phase.ROLLING, 2)
    assert all(name.startswith("weights/main/run-2/") for name in await Blobs(stage.bus).names("weights/"))
