"""What Kubernetes, Compose and SkyPilot themselves say about the rendered manifests, and about misspelt ones."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bombus.bus_address import VARIABLE
from bombus.commands.init import make_credentials
from bombus.config.cluster import Cluster, Jobs
from bombus.deploy import compose, kubernetes, skypilot
from tests.deploy.clusters import LARGE, SMALL, read

BIN = Path(os.environ.get("BOMBUS_DEPLOY", ""))
pytestmark = pytest.mark.skipif(Path() == BIN, reason="make test-deploy runs it")
RELEASES = ("1.34", "1.37")
SECRETS = {"ELSEWHERE_KEY": "secret"}
SKY = "import sys, sky; [sky.Task.from_yaml(path) for path in sys.argv[1:]]"


@pytest.fixture(params=["small", "large"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, Jobs]:
    monkeypatch.setenv(VARIABLE, "nats://user:secret@bus:4222")
    return read({"small": SMALL, "large": LARGE}[request.param], tmp_path)


def said(folder: Path, *command: str, environment: Mapping[str, str] = {}) -> str:
    """Return what a program says that refuses what it is given, or nothing."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "HOME": str(folder), **environment}, capture_output=True, text=True
    )
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


def written(files: Mapping[str, str], folder: Path, word: str = "", by: str = "") -> list[str]:
    """Write files, in which a word that must be there is misspelt, and return their names."""
    assert not word or any(word in text for text in files.values())
    for name, text in files.items():
        (folder / name).write_text(text.replace(word, by) if word else text)
    return list(files)


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_knows_every_field(deployment: tuple[Cluster, Jobs], tmp_path: Path, release: str) -> None:
    def refusals(word: str = "", by: str = "") -> str:
        names = written(kubernetes.render(*deployment), tmp_path, word, by)
        manifests = [name for name in names if name not in ("kustomization.yaml", "cluster.yaml")]
        return said(tmp_path, str(BIN / "kubernetes-validate"), "--strict", "-k", release, *manifests)

    assert not refusals()
    assert "terminationGracePeriod" in refusals("terminationGracePeriodSeconds", "terminationGracePeriod")


def test_compose_reads_the_file_and_refuses_to_start_without_its_secrets(
    deployment: tuple[Cluster, Jobs], tmp_path: Path
) -> None:
    def refusals(word: str = "", by: str = "", secrets: Mapping[str, str] = SECRETS) -> str:
        written(compose.render(*deployment), tmp_path, word, by)
        return said(tmp_path, str(BIN / "docker-compose"), "config", "--quiet", environment=secrets)

    hive = deployment[0].hive
    assert f"secrets/{hive}/" in refusals()
    make_credentials(tmp_path / "secrets", hive, ",".join(compose.HOSTS))
    assert not refusals()
    assert "stop_grace_perod" in refusals("stop_grace_period", "stop_grace_perod")
    if hive == "large":
        assert "set ELSEWHERE_KEY in .env" in refusals(secrets={"ELSEWHERE_KEY": ""})


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    for tree in (SMALL, {**LARGE, "nats": "", "streams": {}}):
        files = skypilot.render(*read(tree, tmp_path))
        written(files, tmp_path)
        assert not said(tmp_path, str(BIN / "python"), "-c", SKY, "bombus.sky.yaml")
        written(files, tmp_path, "image_id", "image_di")
        assert "image_di" in said(tmp_path, str(BIN / "python"), "-c", SKY, "bombus.sky.yaml")
