"""Adapters on their way to vLLM: what is copied and what is refused, and which of them it is told to load and drop."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from bombus.errors import Code, EngineFault, Refused
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.deltas import FULL_FILE, file_sha256
from bombus.weights.lora_folders import peft_config
from bombus_inference.backends.vllm.adapter_files import AdapterRules, copy_adapter, write_zeros
from bombus_inference.backends.vllm.adapters import LOAD, UNLOAD, VllmAdapters
from bombus_inference.model_files import Shapes, read_shapes
from tests.inference.backends.small_adapters import (
    SCALE,
    address_of,
    random_adapter,
    write_adapter,
    write_with_patterns,
)
from tests.inference.backends.small_engines import llama, save

Q_PROJ = "model.layers.0.self_attn.q_proj"
LOW_A, LOW_B = f"base_model.model.{Q_PROJ}.lora_A.weight", f"base_model.model.{Q_PROJ}.lora_B.weight"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def shapes(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    return read_shapes(save(model, tmp_path_factory.mktemp("model")) / FULL_FILE)


def rules(shapes: Shapes, **other: object) -> AdapterRules:
    return AdapterRules(**({"shapes": shapes, "rank_max": 8, "bytes_max": 1 << 20, "precision": "float32"} | other))  # type: ignore[arg-type]


def test_a_copy_has_the_tensors_and_a_configuration_that_says_the_same(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    address = write_adapter(tmp_path / "given", random_adapter(model, 1, rank=4), scale=0.5)
    given = json.loads((tmp_path / "given" / ADAPTER_CONFIG).read_text())
    copied = copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes))
    assert ({*copied.scales.values()}, copied.bytes) == ({0.5}, (tmp_path / "given" / ADAPTER_FILE).stat().st_size)
    assert file_sha256(tmp_path / "copy" / ADAPTER_FILE) == address
    assert json.loads((tmp_path / "copy" / ADAPTER_CONFIG).read_text()) == given


def test_a_rank_stabilised_scale_is_written_as_an_ordinary_one(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "given", random_adapter(model, 1, rank=4))
    tensors = load_file(tmp_path / "given" / ADAPTER_FILE)
    save_file(tensors, tmp_path / "given" / ADAPTER_FILE)  # without a configuration in its metadata
    config = {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"}
    (tmp_path / "given" / ADAPTER_CONFIG).write_text(json.dumps(config))
    address = file_sha256(tmp_path / "given" / ADAPTER_FILE)
    copied = copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes))
    assert set(copied.scales.values()) == {3.0}  # 6 / sqrt(4)
    written = json.loads((tmp_path / "copy" / ADAPTER_CONFIG).read_text())
    assert (written["r"], written["lora_alpha"], "q_proj" in written["target_modules"]) == (4, 12.0, True)


def test_the_rank_and_the_alpha_of_each_layer_are_written_where_they_differ(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    """vLLM 0.32 and 0.33 match patterns as peft does, by the names of layers in the file."""
    address, scaled, first = write_with_patterns(tmp_path / "given", model)
    copied = copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes))
    assert file_sha256(tmp_path / "copy" / ADAPTER_FILE) == address
    assert (copied.scales[first], len(set(copied.scales.values()))) == (6.0, 2)
    written = peft_config(tmp_path / "copy")
    assert {layer: (written.rank_of(layer), written.scale_of(layer)) for layer in scaled} == {
        layer: (2, 6.0) if layer == first else (4, SCALE) for layer in scaled
    }
    with pytest.raises(Refused, match="has rank 4, but this replica serves ranks up to 3"):
        copy_adapter(address, tmp_path / "given", tmp_path / "again", rules(shapes, rank_max=3))


Tensors = dict[str, Tensor]


def renamed(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(Q_PROJ, name): each for key, each in tensors.items() if key in (LOW_A, LOW_B)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors | {LOW_A: torch.zeros(4, 16)}, "this model's is"),
        (lambda tensors: tensors | {LOW_A: torch.zeros(3, 32)}, "this model's is"),
        (lambda tensors: tensors | {LOW_B: torch.full((32, 4), torch.nan)}, "not finite"),
        (lambda tensors: tensors | {LOW_B: torch.full((32, 4), torch.inf, dtype=torch.bfloat16)}, "not finite"),
        (lambda tensors: tensors | {LOW_B: torch.zeros(32, 4, dtype=torch.int32)}, "not finite"),
        (lambda tensors: {name: each for name, each in tensors.items() if name != LOW_B}, "it lacks"),
        (lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.zeros(1)}, "not part of a pair"),
        (lambda tensors: {}, "no layers"),
        (renamed("model.layers.7.self_attn.q_proj"), "only on linear layers"),
        (renamed("lm_head"), "only on linear layers"),
        (renamed("model.layers.0.mlp.experts.3.up_proj"), "only on linear layers"),
    ],
)  # fmt: skip
def test_what_vllm_would_pass_over_or_compute_wrongly_is_refused_and_leaves_nothing(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
    write_adapter(tmp_path / "given", random_adapter(model, 1, rank=4, targets=("q_proj",)))
    tensors = change(load_file(tmp_path / "given" / ADAPTER_FILE))
    save_file(tensors, tmp_path / "given" / ADAPTER_FILE)
    address = file_sha256(tmp_path / "given" / ADAPTER_FILE)
    with pytest.raises(Refused, match=words) as refused:
        copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes))
    assert refused.value.code == Code.MALFORMED
    assert not (tmp_path / "copy").exists()


def test_values_beyond_half_precision_are_refused_where_that_is_computed_in(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    factors = random_adapter(model, 1, rank=4)
    factors[Q_PROJ][1][0, 0] = 70_000.0
    address = write_adapter(tmp_path / "given", factors)
    copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes))
    with pytest.raises(Refused, match="not finite numbers in float16"):
        copy_adapter(address, tmp_path / "given", tmp_path / "half", rules(shapes, precision="float16"))


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        ({"rank_max": 3}, Code.UNSUPPORTED, "has rank 4, .* up to 3: start it with a higher --vllm-max-lora-rank"),
        ({"bytes_max": 1000}, Code.TOO_LARGE, "reads at most 1000: start it with a larger --adapters-mb"),
    ],
)
def test_an_adapter_beyond_the_limits_is_refused(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path, limits: dict[str, int], code: Code, words: str
) -> None:
    address = write_adapter(tmp_path / "given", random_adapter(model, 1, rank=4))
    with pytest.raises(Refused, match=words) as refused:
        copy_adapter(address, tmp_path / "given", tmp_path / "copy", rules(shapes, **limits))
    assert refused.value.code == code
    assert not (tmp_path / "copy").exists()


def test_another_file_than_the_address_means_is_refused(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "given", random_adapter(model, 1))
    with pytest.raises(Refused, match="it was damaged or overwritten"):
        copy_adapter(address_of(1), tmp_path / "given", tmp_path / "copy", rules(shapes))
    with pytest.raises(Refused, match="cannot be served"):
        copy_adapter(address_of(1), tmp_path / "nothing", tmp_path / "copy", rules(shapes))


def test_the_adapter_of_zeros_is_on_one_layer_and_a_model_without_any_has_none(shapes: Shapes, tmp_path: Path) -> None:
    write_zeros(tmp_path / "zeros", shapes)
    tensors = load_file(tmp_path / "zeros" / ADAPTER_FILE)
    assert len(tensors) == 2
    assert all(not tensor.any() for tensor in tensors.values())
    copy_adapter(file_sha256(tmp_path / "zeros" / ADAPTER_FILE), tmp_path / "zeros", tmp_path / "copy", rules(shapes))
    with pytest.raises(EngineFault, match="none of its layers supports them"):
        write_zeros(tmp_path / "none", {"model.embed_tokens.weight": (60, 32)})


class Sent:
    """What vLLM was told: the routes and names, in order. It refuses names that end with `refuses`."""

    def __init__(self, refuses: str = "-never") -> None:
        self.told: list[tuple[str, str]] = []
        self.refuses = refuses

    async def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        name = str(body["lora_name"])
        self.told.append((path, name))
        return httpx.Response(400, text="vLLM's own words") if name.endswith(self.refuses) else httpx.Response(200)


async def test_vllm_is_told_of_each_adapter_once_and_drops_the_least_recently_used(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    (tmp_path / "copies").mkdir()
    given = {
        write_adapter(tmp_path / str(seed), random_adapter(model, seed)): tmp_path / str(seed) for seed in range(3)
    }
    one, two, three = given
    size = (given[one] / ADAPTER_FILE).stat().st_size
    sent = Sent()
    adapters = VllmAdapters(tmp_path / "copies", rules(shapes, bytes_max=2 * size), sent.post)
    await adapters.begin()
    assert await adapters.load(one, given[one])
    assert not await adapters.load(one, given[one])
    assert await adapters.load(two, given[two])
    with adapters.using(one) as name:
        assert name == f"{one[:16]}-1"
        with pytest.raises(Refused, match="1 requests use adapter"):
            await adapters.unload(one)
    assert await adapters.load(three, given[three])
    assert [each.address for each in adapters.listed()] == [one, three]
    with pytest.raises(Refused, match="does not have adapter") as refused, adapters.using(two):
        raise AssertionError("it is gone")
    assert refused.value.code == Code.UNKNOWN_MODEL
    await adapters.unload(three)
    names = [f"{one[:16]}-1", f"{two[:16]}-3", f"{three[:16]}-4"]
    assert sent.told == [
        (LOAD, "zeros"), (LOAD, names[0]), (LOAD, names[1]), (LOAD, names[2]), (UNLOAD, names[1]), (UNLOAD, names[2]),
    ]  # fmt: skip
    assert sorted(each.name for each in (tmp_path / "copies").iterdir()) == sorted(["zeros", names[0]])
    with adapters.using("") as name:
        assert name == "zeros"


async def test_what_vllm_refuses_is_refused_in_its_words_and_leaves_nothing(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    (tmp_path / "copies").mkdir()
    address = write_adapter(tmp_path / "given", random_adapter(model, 1))
    adapters = VllmAdapters(tmp_path / "copies", rules(shapes), Sent(refuses="-1").post)
    with pytest.raises(Refused, match="vLLM's own words") as refused:
        await adapters.load(address, tmp_path / "given")
    assert refused.value.code == Code.MALFORMED
    assert adapters.listed() == []
    assert list((tmp_path / "copies").iterdir()) == []
    assert await adapters.load(address, tmp_path / "given"), "under another name"


async def test_a_vllm_that_does_not_answer_may_be_asked_again(
    model: LlamaForCausalLM, shapes: Shapes, tmp_path: Path
) -> None:
    async def gone(path: str, body: dict[str, object]) -> httpx.Response:
        raise httpx.ConnectError("it has ended")

    (tmp_path / "copies").mkdir()
    adapters = VllmAdapters(tmp_path / "copies", rules(shapes), gone)
    address = write_adapter(tmp_path / "given", random_adapter(model, 1))
    with pytest.raises(Refused, match="try again later") as refused:
        await adapters.load(address, tmp_path / "given")
    assert refused.value.code == Code.NO_REPLICA
