"""`bombus demo` on a user's own folder, whose name says nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests import smollm2_wheel
from tests.small_models import small_llama

NAME = "bee-of-mine"
DEMO_S = 400.0
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SPECIALS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"}
HEADERS = ["<|start_header_id|>", "<|end_header_id|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama with the headers of Llama 3, as a user saves a model that they have fine-tuned."""
    folder = tmp_path_factory.mktemp("home") / NAME
    bpe = Tokenizer.from_str(smollm2_wheel.tokenizer_json())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=HEADERS, **SPECIALS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {f"{role}_id": tokenizer.convert_tokens_to_ids(token) for role, token in SPECIALS.items()}
    small_llama(vocab_size=len(tokenizer), max_position_embeddings=1024, **ids).save_pretrained(folder)
    return folder


def bombus(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bombus", *arguments],
        cwd=folder,
        env={**os.environ, "BOMBUS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
    )


def test_the_demo_trains_a_folder_of_any_name_with_its_own_template(folder: Path) -> None:
    home = folder.parent
    done = bombus(home, "demo", "--model", NAME, "--minutes", "0.01", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    curve = json.loads((home / "run" / "curve.json").read_text())
    assert curve["steps"][0]["episodes"] == 64
    assert curve["measured"][0]["version"] == 0
    assert curve["measured"][-1]["version"] == len(curve["steps"]), "the last measurement is of the newest version"
    assert (home / "run" / "reward.png").is_file()
    shown = bombus(home, "replay", "episode", "--data", "run/hive", "main-1-1", "--prompt")
    assert "⟦<|begin_of_text|>⟧⟦<|start_header_id|>⟧system⟦<|end_header_id|>⟧" in shown.stdout, shown.stderr
    assert AutoModelForCausalLM.from_pretrained(home / "run" / "model").config.vocab_size > 49_152
    assert AutoTokenizer.from_pretrained(home / "run" / "model").chat_template == TEMPLATE


def test_a_folder_without_a_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = bombus(tmp_path, "demo", "--model", "nowhere", "--out", "run")
    assert done.returncode == 2
    assert f"there is no model at {tmp_path / 'nowhere'}: a model's folder has a config.json" in done.stderr
    assert not (tmp_path / "run").exists()
