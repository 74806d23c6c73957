"""Fetching weights: deltas on the current version, a whole chain of deltas, or a full copy."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from bombus.architectures.miniatures import write_miniature
from bombus.bus import Blobs, Bus
from bombus.bus.wire import ReceivedMessage
from bombus.errors import Code, EngineFault
from bombus.hive.events import OBJECTS, Weights, WeightsReady
from bombus.hive.inbox import Answer, Done, Refusal
from bombus.weights.deltas import DELTA_FILE, FULL_FILE, file_sha256
from bombus_inference.backends.torch.backend import load_policy, read_state
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import TensorPatch, fitting_patches, read_patches
from bombus_inference.fetching import FetchedWeights, Fetcher
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_engines import Answers, engine_for, finish, llama, qwen, request
from tests.weights.delta_versions import write_full, write_versions

COMPUTE = ComputeSettings(kv_cache_bytes=4 << 20, max_model_len=256)


def some_versions(count: int, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Tensor]]:
    """Return versions of two tensors, each with a few changed elements in one of them."""
    torch.manual_seed(0)
    versions = [{"a": torch.randn(50, 40).to(dtype), "b": torch.randn(30).to(dtype)}]
    for number in range(1, count):
        tensors = {name: tensor.clone() for name, tensor in versions[-1].items()}
        tensors["ab"[number % 2]].view(-1)[number::9] += 1.0
        versions.append(tensors)
    return versions


def ready(version: int, weights: Weights, run: int = 1) -> WeightsReady:
    return WeightsReady(engine="main", run=run, version=version, weights=weights)


@dataclass
class Given:
    """Versions as a trainer writes them, and a fetcher with its own cache."""

    bus: Bus
    folder: Path
    cache: Path
    tensors: list[dict[str, Tensor]]
    made: list[Weights]
    fetcher: Fetcher

    async def fetch(self, version: int) -> FetchedWeights:
        return await self.fetcher.materialise(ready(version, self.made[version]), lambda: 1)

    def is_whole(self, version: int, folder: Path) -> bool:
        return file_sha256(folder / FULL_FILE) == self.made[version].sha256 and (folder / "config.json").is_file()


@pytest.fixture
async def given(bus: Bus, tmp_path: Path) -> AsyncIterator[Given]:
    tensors = some_versions(5)
    made = write_versions(tmp_path / "trainer", tensors)
    (tmp_path / "trainer/0/config.json").write_text("{}")
    fetcher = Fetcher(bus, "main", tmp_path / "cache")
    yield Given(bus, tmp_path, tmp_path / "cache", tensors, made, fetcher)
    fetcher.close()
    assert list((tmp_path / "cache").glob("*")) == []


async def into_store(given: Given, version: int) -> None:
    """Copy a version's files to the object store, as the trainer would."""
    place = Path(given.made[version].where)
    for file in place.iterdir():
        await Blobs(given.bus).put(f"weights/main/run-1/v{version}/{file.name}", file.read_bytes())


@asynccontextmanager
async def trainer(bus: Bus, give: Callable[[str], Answer], nonsense: int = 0) -> AsyncIterator[list[str]]:
    """Act as the trainer of epoch 1, which gets requests for full copies. Yields these.

    The first `nonsense` answers are not messages.
    """
    requests: list[str] = []

    async def on_request(message: ReceivedMessage) -> None:
        requests.append(message.data.decode())
        if len(requests) <= nonsense:
            await bus.client.publish(message.reply, b"\xa2\xc3(")
            return
        await bus.answer(message.reply, give(message.data.decode()))

    subscription = await bus.client.subscribe(bus.subjects.full_copies("main", 1), cb=on_request)
    yield requests
    await subscription.unsubscribe()


# ---- from folders -------------------------------------------------------------------------------------------------


async def test_each_delta_is_applied_to_the_current_version(given: Given) -> None:
    first = await given.fetch(0)
    assert (first.folder, first.delta) == (Path(given.made[0].where), None)
    for version in (1, 2, 3):
        found = await given.fetch(version)
        assert given.is_whole(version, found.folder)
        assert (found.delta, found.base) == (Path(given.made[version].where) / DELTA_FILE, version - 1)
        assert sum(place.is_dir() for place in given.cache.glob("*/*")) == 1, "only the newest version is kept"


async def test_a_new_replica_applies_the_whole_chain_of_deltas(given: Given) -> None:
    found = await given.fetch(4)
    assert given.is_whole(4, found.folder)
    assert found.delta is None
    on_top = await given.fetcher.materialise(ready(4, given.made[4]), lambda: 1)
    assert on_top.folder == found.folder


async def test_a_replica_that_missed_a_version_applies_the_whole_chain_of_deltas(given: Given) -> None:
    await given.fetch(0)
    found = await given.fetch(2)
    assert given.is_whole(2, found.folder)
    assert found.delta is None


async def test_the_same_version_of_another_run_is_not_used_as_a_base(given: Given) -> None:
    await given.fetch(1)
    found = await given.fetcher.materialise(ready(2, given.made[2], run=2), lambda: 1)
    assert given.is_whole(2, found.folder)
    assert found.delta is None


@pytest.mark.parametrize("what", ["damaged", "gone", "of another version"])
async def test_r15_a_delta_that_does_not_give_what_the_log_says_is_replaced_by_a_full_copy(
    given: Given, what: str
) -> None:
    await given.fetch(1)
    place = Path(given.made[2].where)
    delta = place / DELTA_FILE
    if what == "damaged":
        content = bytearray(delta.read_bytes())
        content[-1] ^= 1
        delta.write_bytes(content)
    elif what == "gone":
        delta.unlink()
    else:  # its own digest and its base are right, but it makes another version of it
        other = write_versions(given.folder / "other", [given.tensors[1], given.tensors[3]])[1]
        delta.write_bytes((Path(other.where) / DELTA_FILE).read_bytes())
        given.made[2] = replace(given.made[2], delta_sha256=other.delta_sha256)

    def give(where: str) -> Answer:
        assert where == str(place)
        write_full(place / FULL_FILE, given.tensors[2])
        (place / "config.json").write_text("{}")
        return Done()

    async with trainer(given.bus, give) as requests:
        found = await given.fetch(2)
    assert given.is_whole(2, found.folder)
    assert (found.folder, found.delta) == (place, None)
    assert len(requests) == 1
    after = await given.fetch(3)  # deltas are applied on top of the full copy
    assert given.is_whole(3, after.folder)
    assert after.base == 2


async def test_without_a_full_copy_both_reasons_are_reported_and_the_current_version_stays(given: Given) -> None:
    before = (await given.fetch(1)).folder
    (Path(given.made[2].where) / DELTA_FILE).write_bytes(b"nothing of use")
    async with trainer(given.bus, lambda _: Refusal(code=Code.WRONG_PHASE, why="it was lost")):
        with pytest.raises(EngineFault, match=r"has sha256 .*; and no full copy is available: it was lost"):
            await given.fetch(2)
    assert given.is_whole(1, before)


async def test_a_full_copy_is_requested_again_after_an_answer_that_cannot_be_read(given: Given) -> None:
    await given.fetch(1)
    place = Path(given.made[2].where)
    (place / DELTA_FILE).unlink()

    def give(_: str) -> Answer:
        write_full(place / FULL_FILE, given.tensors[2])
        (place / "config.json").write_text("{}")
        return Done()

    async with trainer(given.bus, give, nonsense=1) as requests:
        found = await given.fetch(2)
    assert given.is_whole(2, found.folder)
    assert len(requests) == 2


async def test_a_full_copy_with_another_digest_is_not_loaded(given: Given) -> None:
    place = Path(given.made[1].where)
    (place / DELTA_FILE).unlink()

    def give(_: str) -> Answer:
        write_full(place / FULL_FILE, given.tensors[3])
        return Done()

    async with trainer(given.bus, give):
        with pytest.raises(EngineFault, match="the log says"):
            await given.fetch(1)


# ---- from the object store ----------------------------------------------------------------------------------------


async def test_without_a_shared_folder_everything_comes_from_the_object_store(given: Given) -> None:
    stems = [f"weights/main/run-1/v{version}" for version in range(3)]
    tensors, made = given.tensors[:3], []
    for version, weights in enumerate(write_versions(given.folder / "again", tensors)):
        given.made[version] = weights
        made.append(weights)
    (given.folder / "again/0/config.json").write_text("{}")
    for version in range(3):
        await into_store(given, version)
        given.made[version] = replace(made[version], where=OBJECTS + stems[version])
    first = await given.fetch(0)
    assert first.folder.is_relative_to(given.cache)
    assert given.is_whole(0, first.folder)
    second = await given.fetch(1)
    assert given.is_whole(1, second.folder)
    assert second.base == 0
    assert second.delta is not None
    assert second.delta.is_file()


async def test_an_object_that_is_not_there_is_a_fault_with_its_name(given: Given) -> None:
    weights = Weights(where=f"{OBJECTS}weights/main/run-1/gone", sha256="0" * 64)
    with pytest.raises(EngineFault, match="the object store has no weights/main/run-1/gone/model"):
        await given.fetcher.materialise(ready(0, weights), lambda: 1)


async def test_the_cache_of_a_killed_replica_is_removed_and_that_of_a_running_one_is_not(given: Given) -> None:
    other = Fetcher(given.bus, "main", given.cache)
    kept = (await other.materialise(ready(1, given.made[1]), lambda: 1)).folder
    orphan = given.cache / "bombus-weights-orphan"
    orphan.mkdir()
    (orphan / "lock").touch()
    await given.fetch(2)
    assert not orphan.exists()
    assert given.is_whole(1, kept)
    other.close()
    assert not kept.exists()


# ---- on a running engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", [llama, qwen])
def test_a_delta_applied_in_place_equals_the_full_copy_in_the_engines_type(
    tmp_path: Path, make: Callable[[], PreTrainedModel], served: str
) -> None:
    model = make().to(torch.bfloat16)
    old = {name: value.detach().clone() for name, value in model.named_parameters()}
    new = {name: value.clone() for name, value in old.items()}
    for number, value in enumerate(new.values()):
        flat = value.view(-1)
        flat[number % len(flat) :: 7] *= 1.25
    first, second = write_versions(tmp_path, [old, new])
    model.config.save_pretrained(tmp_path / "0")
    settings = COMPUTE.model_copy(update={"dtype": served})
    engine = Engine(load_policy(Path(first.where), settings), settings, run=1, version=0)
    engine.patch_weights(read_patches(Path(second.where) / DELTA_FILE, settings), 1, 1)
    assert engine.version == 1
    write_full(tmp_path / "0" / FULL_FILE, new)
    state = read_state(tmp_path / "0", settings)
    mine = dict(engine._model.named_parameters())
    assert mine.keys() == state.keys()
    assert all(torch.equal(mine[name], state[name]) for name in mine)


def test_the_bias_that_chooses_experts_comes_with_a_version_and_stays_in_float32(tmp_path: Path) -> None:
    write_miniature(AutoConfig.for_model("deepseek_v3"), tmp_path)
    settings = COMPUTE.model_copy(update={"dtype": "bfloat16"})
    engine = Engine(load_policy(tmp_path, settings), settings, run=1, version=0)
    (name,) = [name for name in engine.dtypes if name.endswith("e_score_correction_bias")]
    stored = load_policy(tmp_path, COMPUTE).state_dict()  # as a trainer names them: its experts are in one tensor
    save_file(stored | {name: stored[name] + 0.001}, tmp_path / FULL_FILE, metadata={"format": "pt"})
    engine.swap_weights(read_state(tmp_path, settings, dtypes=engine.dtypes), 1, 1)
    assert torch.equal(engine._model.state_dict()[name], stored[name] + 0.001)

    engine.patch_weights({name: TensorPatch(stored[name], None)}, 2, 1)
    assert torch.equal(engine._model.state_dict()[name], stored[name])


def test_a_request_that_is_running_goes_on_under_the_new_version(tmp_path: Path) -> None:
    model = llama()
    old = {name: value.detach() for name, value in model.named_parameters()}
    new = {name: value * 1.5 for name, value in old.items()}
    _, second = write_versions(tmp_path, [old, new])
    patches = read_patches(Path(second.where) / DELTA_FILE, COMPUTE)
    engine = engine_for(model)
    engine.add(0, request([1, 2, 3], max_tokens=8, stream=True))
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step())
    engine.patch_weights(patches, 1, 1)
    finish(engine, answers)
    assert answers[0].only.versions == [0] * 3 + [1] * 5


def test_a_delta_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(20, 20)
    old = dict(large.named_parameters())
    new = {name: value.detach() + 1 for name, value in old.items()}
    _, second = write_versions(tmp_path, [old, new])
    before = {name: value.detach().clone() for name, value in small.named_parameters()}
    with pytest.raises(EngineFault, match="does not fit this model's"):
        fitting_patches(dict(small.named_parameters()), read_patches(Path(second.where) / DELTA_FILE, COMPUTE))
    assert all(torch.equal(before[name], value) for name, value in small.named_parameters())
