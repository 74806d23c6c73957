"""The processes of a rendered compose.yaml, in a network of their own, with three real NATS servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bombus.deploy import compose
from tests.deploy.clusters import SMALL, read

pytestmark = pytest.mark.skipif(not os.environ.get("BOMBUS_DEPLOY"), reason="make test-deploy runs it")
ROOT = Path(__file__).parents[2]
ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def test_the_containers_of_compose_train_and_go_on_when_a_nats_server_and_a_coordinator_die(tmp_path: Path) -> None:
    for name, text in compose.render(*read(SMALL, tmp_path)).items():
        (tmp_path / name).write_text(text)
    command = [*ALONE, sys.executable, "-m", "tests.deploy.alone", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(tmp_path.glob("*.log")))
    assert not done.returncode, f"{done.stderr}\n{logs}"
    rewards = json.loads(done.stdout)
    assert sum(rewards[-2:]) > sum(rewards[:2]), "the reward rises"
