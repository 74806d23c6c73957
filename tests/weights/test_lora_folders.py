"""The folder of a LoRA run, named as a model: its base with the adapter merged into it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from bombus.errors import EngineFault
from bombus.weights.adapters import ADAPTER_CONFIG
from bombus.weights.lora_folders import peft_config
from bombus.weights.models import load_model, load_tokenizer_files, resolve_model
from tests.trainer.small_batches import tiny_model_folder

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_model_folder(tmp_path / "base")


def adapter(base: Path, folder: Path, std: float = 0.3, **config: Any) -> Path:
    """Save an adapter as peft does, which changes its model a lot."""
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **config)
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(str(folder))
    return folder


def as_peft_computes(base: Path, folder: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_is_the_model_that_peft_computes(
    base: Path, tmp_path: Path, shards: str, rslora: bool
) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded := tmp_path / "sharded", max_shard_size=shards)
    shutil.copyfile(base / "tokenizer.json", sharded / "tokenizer.json")
    folder = adapter(sharded, tmp_path / "adapter", use_rslora=rslora)
    found = resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32")
    with torch.no_grad():
        logits = load_model(found)(TOKENS).logits
    torch.testing.assert_close(logits, as_peft_computes(sharded, folder), atol=1e-5, rtol=1e-5)
    assert "tokenizer.json" in load_tokenizer_files(found)
    assert resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32") == found, "it is made once"


PATTERNS: dict[str, Any] = {
    # A last part, a whole name, the first of two that match, a part of a part, which does not, and an expression.
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3, "proj": 7},
    "alpha_pattern": {"model.layers.1.mlp.down_proj": 16, r".*\.0\.mlp\.down_proj": 2.5},
}


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_alphas_of_layers_are_those_that_peft_finds(base: Path, tmp_path: Path, rslora: bool) -> None:
    folder = adapter(base, tmp_path / "adapter", use_rslora=rslora, **PATTERNS)
    config = peft_config(folder)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    layers = {name: each for name, each in theirs.get_base_model().named_modules() if hasattr(each, "lora_A")}
    assert {name: (config.rank_of(name), config.scale_of(name)) for name in layers} == {
        name: (each.r["default"], each.scaling["default"]) for name, each in layers.items()
    }
    assert len({config.scale_of(name) for name in layers}) > 2
    found = resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32")
    with torch.no_grad():
        logits = load_model(found)(TOKENS).logits
    torch.testing.assert_close(logits, as_peft_computes(base, folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "why"), [({"rank_pattern": {"q": 0}}, "r 0"), ({"alpha_pattern": {"(": 1}}, "not a regular expression")]
)
def test_patterns_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    tmp_path.joinpath(ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 8, **wrong}))
    with pytest.raises(EngineFault, match=why):
        peft_config(tmp_path)


def test_a_merged_model_keeps_the_precision_of_its_base_unless_float32_is_wanted(tmp_path: Path) -> None:
    folder = adapter(tiny_model_folder(tmp_path / "half", dtype=torch.bfloat16), tmp_path / "adapter")
    for dtype in ("bfloat16", "float32"):
        found = resolve_model(str(folder), cache=tmp_path / "cache", dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(found, dtype="auto")
        assert {str(value.dtype) for value in model.parameters()} == {f"torch.{dtype}"}


def test_an_adapter_that_would_be_rounded_away_is_refused_with_the_precision_that_keeps_it(tmp_path: Path) -> None:
    folder = adapter(tiny_model_folder(tmp_path / "half", dtype=torch.bfloat16), tmp_path / "adapter", std=1e-6)
    with pytest.raises(
        EngineFault, match=r"% of the adapter in .* would be rounded away .* set model.dtype to float32"
    ):
        resolve_model(str(folder), cache=tmp_path / "cache")
    assert resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32").is_dir()


def test_what_is_not_merged_here_is_refused_in_words(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter", use_dora=True)
    with pytest.raises(EngineFault, match=r"has use_dora in its configuration, .* merge it with peft, and name"):
        resolve_model(str(folder), cache=tmp_path / "cache")


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_of_a_base_that_its_training_changed_is_refused_by_the_name_of_the_method(
    tmp_path: Path, method: str
) -> None:
    tmp_path.joinpath(ADAPTER_CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 8, "init_lora_weights": method}))
    with pytest.raises(
        EngineFault, match=rf"init_lora_weights '{method}', .* path_initial_model_for_weight_conversion"
    ):
        peft_config(tmp_path)


def test_an_adapter_whose_first_values_come_from_elsewhere_is_taken(tmp_path: Path) -> None:
    for method in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        text = json.dumps({"r": 4, "lora_alpha": 8, "init_lora_weights": method})
        tmp_path.joinpath(ADAPTER_CONFIG).write_text(text)
        assert peft_config(tmp_path).scale_of("model.layers.0.q_proj") == 2


def test_an_adapter_whose_base_is_not_known_or_not_there_is_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    shutil.rmtree(base)
    with pytest.raises(EngineFault, match=rf"is for the model {base}: there is no model at {base}"):
        resolve_model(str(folder), cache=tmp_path / "cache")
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(EngineFault, match="does not name its base model"):
        resolve_model(str(folder), cache=tmp_path / "cache")


def test_a_trainers_checkpoint_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003-epoch-1-attempt-3"
    folder.mkdir()
    (folder / "state.safetensors").write_bytes(b"")
    with pytest.raises(EngineFault, match=r"is a trainer's checkpoint: .* `bombus export`, and name that"):
        resolve_model(str(folder), cache=tmp_path / "cache")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_adapter_with_another_scale_or_other_texts_is_another_model(base: Path, tmp_path: Path) -> None:
    """With another lora_alpha the model that had been merged with the old one was found."""
    folder = adapter(base, tmp_path / "adapter")
    found = [resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32")]
    edit(folder / ADAPTER_CONFIG, lora_alpha=32)
    found.append(resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32"))
    with torch.no_grad():
        logits = load_model(found[-1])(TOKENS).logits
    torch.testing.assert_close(logits, as_peft_computes(base, folder), atol=1e-5, rtol=1e-5)
    (base / "generation_config.json").write_text('{"top_k": 7}')
    found.append(resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32"))
    assert (found[-1] / "generation_config.json").read_text() == '{"top_k": 7}'
    assert len(set(found)) == 3


def test_an_adapter_whose_base_is_itself_is_refused(base: Path, tmp_path: Path) -> None:
    """The base was looked for without end."""
    folder, other = adapter(base, tmp_path / "adapter"), adapter(base, tmp_path / "other")
    edit(other / ADAPTER_CONFIG, base_model_name_or_path=str(folder))
    assert resolve_model(str(other), cache=tmp_path / "cache", dtype="float32").is_dir(), "one on top of another"
    for wrong in (folder, other):
        edit(folder / ADAPTER_CONFIG, base_model_name_or_path=str(wrong))
        with pytest.raises(EngineFault, match=rf"the adapter in {folder} has itself as its base: give the model"):
            resolve_model(str(folder), cache=tmp_path / "cache")


def test_only_files_at_most_two_levels_deep_are_copied(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    (deep := base / "one" / "two").mkdir(parents=True)
    for place in (deep, deep.parent):
        (place / "notes.txt").write_text("notes")
    (base / "gone.txt").symlink_to(tmp_path / "nowhere")
    (base / "loop").symlink_to(base)
    (base / "folder.json").mkdir()
    os.mkfifo(base / "pipe.txt")
    found = resolve_model(str(folder), cache=tmp_path / "cache", dtype="float32")
    texts = {str(path.relative_to(found)) for path in found.rglob("*.txt")}
    assert texts == {"one/notes.txt"}
    assert not (found / "loop").exists()
