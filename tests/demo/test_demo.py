"""`bombus demo` on a user's own folder, whose name says nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from bombus.demo.folder import DemoOf, open_folder
from bombus.machine.process import free_port
from tests import smollm2_wheel
from tests.ctrl_c import heed_the_terminal
from tests.effort import long_only
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


@long_only
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


class Running:
    """A command of bombus that runs, and prints lines."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bombus", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=heed_the_terminal,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, wanted: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if re.search(wanted, line):
                return line
        raise AssertionError(f"it ended without {wanted}")

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=120)
        return self.process.returncode


def steps(folder: Path) -> list[dict[str, float]]:
    """Return the steps of a demo; their versions are without gaps."""
    found: list[dict[str, float]] = json.loads((folder / "run/tiny-1/curve.json").read_text())["steps"]
    assert [step["version"] for step in found] == list(range(len(found)))
    return found


@long_only
def test_a_demo_that_is_cut_in_two_goes_on_by_up_and_its_client_alone_and_reaches_what_a_whole_one_does(
    tmp_path: Path,
) -> None:
    demo = ["demo", "--tiny", "--turns", "1", "--minutes", "4", "--out", "run"]
    with Running(tmp_path, *demo) as first:
        first.until(r"step +10 ")
        assert first.interrupt() == 130
    before = steps(tmp_path)
    port = str(free_port())
    with Running(tmp_path, "up", "--port", port, "--threads", "1", "--data-dir", "run/tiny-1/hive") as up:
        second = bombus(tmp_path, *demo, "--url", up.until(r"^ready ").split()[1])
        up.interrupt()
    assert "run contains an earlier demo, which now resumes" in second.stdout
    # A policy may settle on one wrong letter of eight (0.875), whole or cut: then the demo says that it missed 0.9.
    assert re.search(r"reward 0.8: +[0-9.]+ s from the start", second.stdout), second.stdout + second.stderr
    after = steps(tmp_path)
    made = len(before) - 1  # the newest batch may have been played and not trained
    assert after[:made] == before[:made], "it goes on where it was"
    assert len(after) > len(before)
    audit = bombus(tmp_path, "audit", "--data", "run/tiny-1/hive")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "no differences: every token is accounted for" in audit.stdout


def test_a_folder_of_another_demo_or_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert "mine has something other than a demo in it" in bombus(tmp_path, "demo", "--tiny", "--out", "mine").stderr
    open_folder(tmp_path / "run", DemoOf("tiny", 0))
    refused = bombus(tmp_path, "demo", "--tiny", "--seed", "1", "--out", "run")
    assert refused.returncode == 2
    assert (
        "run has a demo of the model tiny with seed 0, but this one is of the model tiny with seed 1" in refused.stderr
    )
    alone = bombus(tmp_path, "demo", "--tiny", "--url", "http://127.0.0.1:1")
    assert "--url with --tiny needs --turns" in alone.stderr


def test_a_folder_without_a_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = bombus(tmp_path, "demo", "--model", "nowhere", "--out", "run")
    assert done.returncode == 2
    assert f"there is no model at {tmp_path / 'nowhere'}: a model's folder must have a config.json" in done.stderr
    assert not (tmp_path / "run").exists()
