"""Runs recipes of tinker-cookbook as the programs that they are, offline, in a folder with tokenizers and data sets."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

MODEL = "Qwen/Qwen3-8B-Base"  # a name that recipes know; here it is another model
SL: dict[str, Any] = {"batch_size": 16, "learning_rate": 1e-2, "train_on_what": "last_assistant_message"}
NOWHERE = "http://127.0.0.1:9"  # what is asked of the network fails at once
STEP_LOGGED = "Wrote metrics to"


class Recipes:
    """Recipes that train against `url`, whose logs are folders of `folder`."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self.url = url
        self.environment = {
            **os.environ,
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-any",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
            "HTTPS_PROXY": NOWHERE,
        }

    def run(self, recipe: str, log: str, **options: Any) -> list[dict[str, float]]:
        """Run a recipe to its end, and return the metrics of each step that its log has, of earlier runs too."""
        program = self._start(recipe, log, options)
        output, _ = program.communicate()
        self._finish_sessions()
        assert program.returncode == 0, output[-4000:]
        return self.metrics(log)

    def run_until(self, steps: int, recipe: str, log: str, **options: Any) -> None:
        """Run a recipe, and kill it after it has logged so many steps."""
        program = self._start(recipe, log, options)
        assert program.stdout is not None
        seen = []
        with program.stdout:
            for line in program.stdout:
                seen.append(line)
                if sum(STEP_LOGGED in each for each in seen) == steps:
                    program.kill()
                    break
        assert program.wait() < 0, "".join(seen)[-4000:]
        self._finish_sessions()

    def _finish_sessions(self) -> None:
        """Finish all sessions, which recipes leave open: a hive takes so many models, and keeps silent ones an hour."""
        for model in httpx.get(f"{self.url}/api/v1/session_info").json()["registered_models"]:
            httpx.post(f"{self.url}/api/v1/sessions/{model.partition(':')[0]}/finish", json={}).raise_for_status()

    def _start(self, recipe: str, log: str, options: Mapping[str, Any]) -> "subprocess.Popen[str]":
        words = [f"{name}={value}" for name, value in {"model_name": MODEL, **options}.items()]
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={self.log(log)}", *words]
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log(self, name: str) -> Path:
        return self._folder / name

    def metrics(self, log: str) -> list[dict[str, float]]:
        return _lines(self.log(log) / "metrics.jsonl")

    def checkpoints(self, log: str) -> list[dict[str, Any]]:
        return _lines(self.log(log) / "checkpoints.jsonl")

    def begin_at(self, log: str, checkpoint: Mapping[str, Any]) -> None:
        """Make a log whose recipe begins at batch 0 with a checkpoint, by its own way to resume."""
        self.log(log).mkdir()
        (self.log(log) / "checkpoints.jsonl").write_text(json.dumps({**checkpoint, "batch": 0}) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
