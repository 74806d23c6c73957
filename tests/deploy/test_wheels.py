"""The wheel as its users install it, outside this checkout: the client alone, and all of bombus."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from bombus.machine.process import free_port
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
# Plays one episode with what the standard library has: the client needs no SDK of a model's API.
PROGRAM = """
import importlib.util, json, sys, urllib.request
import bombus
from bombus import Job, SwarmClient, Task

def agent(task, credentials):
    body = json.dumps({"model": credentials.model, "max_tokens": 4, "messages": [{"role": "user", "content": "2"}]})
    headers = {"authorization": f"Bearer {credentials.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{credentials.base_url}/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return float(json.load(answer)["usage"]["completion_tokens"])

with SwarmClient(sys.argv[1], verbose=False) as client:
    client.auto_sync_train_config_and_start_engine(Job(model="tiny", batch_size=1, num_repeat=2))
    (group,) = client.run_episodes_until_all_complete(
        [Task(task_id="two")], lambda task: client.run_group(task, agent, 2)
    )
heavy = [name for name in ("torch", "nats", "fastapi", "transformers", "numpy") if importlib.util.find_spec(name)]
print(json.dumps({"at": bombus.__file__, "heavy": heavy, "rewards": [episode.reward for episode in group]}))
"""


def run(*command: object, cwd: Path) -> str:
    """Run a command outside the checkout, without the variables by which it could be found."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BOMBUS_NATS")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S * 4
    )
    assert not done.returncode, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def built(source: Path, folder: Path, kind: str) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def test_the_source_package_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built(ROOT, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("bombus-*")
    again = built(unpacked, tmp_path / "wheel", "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert [(each.filename, each.CRC) for each in one.infolist()] == [
            (each.filename, each.CRC) for each in other.infolist()
        ]


def test_all_of_bombus_runs_from_its_wheel_and_the_client_alone_plays_in_its_hive(wheel: Path, tmp_path: Path) -> None:
    for name in ("all", "client"):
        run(UV, "venv", "--python", sys.executable, tmp_path / name, cwd=tmp_path)
    everything, client = (tmp_path / name / "bin/python" for name in ("all", "client"))
    run(UV, "pip", "install", "--system-certs", "--python", client, wheel, cwd=tmp_path)
    # What bombus depends on is that of this environment: only its own code has to come from the wheel.
    run(UV, "pip", "install", "--offline", "--no-deps", "--python", everything, wheel, cwd=tmp_path)
    (installed,) = (tmp_path / "all/lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(everything, "-m", "bombus", "--version", cwd=tmp_path).startswith(f"{version('bombus')}, feature level ")

    up = [everything, "-m", "bombus", "up", "--port", free_port(), "--data-dir", tmp_path / "hive", "--threads", 1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{sysconfig.get_path('scripts')}:{environment['PATH']}"  # which has nats-server
    with (tmp_path / "up.log").open("wb") as log:
        hive = subprocess.Popen(
            list(map(str, up)),
            cwd=tmp_path,
            env={**environment, "BOMBUS_PARENT": str(os.getpid())},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert hive.stdout is not None
        said = []
        for line in hive.stdout:
            said.append(line)
            if line.startswith("ready "):
                break
        assert said, (tmp_path / "up.log").read_text()
        played = json.loads(run(client, "-c", PROGRAM, said[-1].split()[1], cwd=tmp_path))
        page = next(word for line in said for word in line.split() if word.startswith("http") and line.count("page"))
        shown = run(everything, "-c", f"import httpx; print(httpx.get('{page}').text)", cwd=tmp_path)
    finally:
        hive.terminate()
        hive.wait(PATIENCE_S)
    assert played["at"].startswith(str(tmp_path / "client"))
    assert played["heavy"] == []
    assert len(played["rewards"]) == 2
    assert all(0 < reward <= 4 for reward in played["rewards"])
    assert "</html>" in shown
