"""An environment of Atropos, unmodified, samples from a hive's model, and an outside trainer takes what it scored."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus import Job, SwarmClient
from bombus.weights.models import build_tiny
from tests.atropos.run_api import TRAINER
from tests.atropos.test_differential import PYTHON
from tests.effort import long_only
from tests.patience import wait_until
from tests.system.test_up import FRESH, Up, status_of

PROGRAM = Path(__file__).parent / "programs" / "environment.py"
STEPS = 3
LIMIT_S = 180.0
BATCH = 4

pytestmark = [
    long_only,
    pytest.mark.skipif(
        not list(PYTHON.parents[1].glob("lib/*/site-packages/transformers")),
        reason="needs a whole atroposlib in .venv-atropos: make test-atropos",
    ),
]


class EnvironmentHive:
    """A hive of an engine that plays episodes and one that takes rollout groups. `key` is that of an episode."""

    def __init__(self, up: Up, key: str, tokenizer: Path) -> None:
        self.up = up
        self.key = key
        self.tokenizer = tokenizer

    def calls(self) -> int:
        """Return how many calls were recorded."""
        streams = json.loads(status_of(self.up, "--json"))["streams"]
        return int(streams["calls"]["messages"])


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentHive]:
    folder = tmp_path_factory.mktemp("hive")
    tokenizer = folder / "tiny"
    build_tiny(tokenizer)
    file = folder / "cluster.yaml"
    file.write_text(json.dumps({"engines": {"main": {"trainer": {}, "inference": [{}]}, "scored": {}}}))
    up = Up(folder, "--config", str(file))
    with SwarmClient(up.url) as client:
        client.auto_sync_train_config_and_start_engine(Job(model="tiny", batch_size=2, num_repeat=4, bombus=FRESH))
        _, credentials = client.begin_episode(episode_type="eval")
        yield EnvironmentHive(up, credentials.api_key, tokenizer)
    assert up.interrupt() == []


@pytest.mark.parametrize("server_type", ["vllm", "sglang", "openai"])
def test_an_unmodified_environment_generates_scores_and_pushes(
    hive: EnvironmentHive, server_type: str, tmp_path: Path
) -> None:
    rollouts, before = f"{hive.up.url}/e/scored", hive.calls()
    with httpx.Client(base_url=rollouts, timeout=60) as trainer, (tmp_path / "log").open("w") as log:
        assert "uuid" in trainer.post("/register", json=TRAINER | {"batch_size": BATCH}).json()
        assert trainer.get("/batch").json() == {"batch": None}
        words = [rollouts, f"{hive.up.url}/e/main/v1", hive.key, server_type, str(hive.tokenizer), str(STEPS)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        with subprocess.Popen([str(PYTHON), str(PROGRAM), *words], stdout=log, stderr=log, env=environment) as running:
            batches: list[list[dict[str, Any]]] = []

            def is_over() -> bool:
                while (batch := trainer.get("/batch").json()["batch"]) is not None:
                    batches.append(batch)
                return running.poll() is not None

            try:
                wait_until(is_over, LIMIT_S)
            finally:
                running.kill()
        told = (tmp_path / "log").read_text()[-4000:]
        assert running.returncode == 0, told
        assert len(batches) >= STEPS, told
        assert trainer.get("/status").json()["current_step"] == len(batches)
    groups = [group for batch in batches for group in batch]
    assert {sum(len(group["tokens"]) for group in batch) for batch in batches} == {BATCH}
    assert hive.calls() - before >= len(groups), "what was sampled with an episode's key is recorded"
    for group in groups:
        for row, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
            begins = sum(mask == -100 for mask in masks)
            assert 0 < begins <= len(tokens)
            assert masks == [-100] * begins + tokens[begins:]
            if server_type != "openai":
                logprobs = group["inference_logprobs"][row]
                assert logprobs[:begins] == [1.0] * begins
                assert all(logprob <= 0.0 for logprob in logprobs[begins:])
