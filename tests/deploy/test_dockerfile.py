"""The Dockerfile names only what exists: targets, extras, lock files, commands, flags and ports."""

import json
import re
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from bombus.cli import COMMANDS, main
from tests.deploy.dockerfile import ROOT, STAGES, TARGETS, TEXT, command, health_url, installed
from tests.lock import LOCKS, entries

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FLAG = re.compile(r"--[a-z][a-z0-9-]+")


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    named = words[: 2 if COMMANDS[words[0]].subcommands else 1]
    with pytest.raises(SystemExit):
        main([*named, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_a_command_with_flags_that_exist_on_the_port_that_its_health_check_asks(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(target)
    told = help_of(words, capsys)
    flags = {word for word in words if word.startswith("--")}
    assert flags
    assert flags <= set(FLAG.findall(told))
    asked = urlsplit(health_url(target))
    of_port = [after for flag, after in pairwise(words) if flag in ("--port", "--metrics-port")]
    assert str(asked.port) in (of_port or re.findall(r"--port PORT.*?\(default:\s+(\d+)\)", told, re.DOTALL))
    exposed = re.findall(r"^EXPOSE (\d+)$", STAGES[target], re.MULTILINE)
    assert exposed in ([], [str(asked.port)])


def test_all_targets_are_built_and_their_extras_and_locks_exist() -> None:
    script = (ROOT / "deploy/images.sh").read_text()
    assert f"targets=({' '.join(TARGETS)})" in script
    locked = {name: entries((LOCKS / f"{name}.txt").read_text()) for name in ("build", "run", "cpu", "cuda")}
    named = re.findall(r"locks/(\w+)\.txt", (ROOT / "deploy/install.sh").read_text())
    assert {"build", "run"} == set(named), "and the one of torch, by its name"
    assert "ARG TORCH=cpu" in TEXT
    for target in TARGETS:
        extras, left_out = installed(target)
        assert extras
        assert set(extras) <= EXTRAS.keys()
        assert set(left_out) <= locked["run"].keys()


def test_images_without_torch_are_not_built_on_it() -> None:
    for target in TARGETS:
        (on,) = re.findall(rf"^FROM (\S+) AS {target}-build$", TEXT, re.MULTILINE)
        assert on == ("tools" if target in ("coordinator", "gateway", "environment") else "torch")


def test_what_is_copied_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE) for word in line.split()[:-1]]
    assert kept == {*copied}
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (401, 0), (503, 1)])
def test_the_health_check_takes_any_answer_below_500(status: int, code: int) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/health"
        healthy = [sys.executable, "-IS", str(ROOT / "deploy/healthy"), url]
        assert subprocess.run(healthy, timeout=30).returncode == code
    assert subprocess.run(healthy, timeout=30, stderr=subprocess.DEVNULL).returncode == 1, "nobody listens any more"


def test_the_bill_of_materials_has_every_package_once() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "deploy/sbom.py"), sys.prefix], capture_output=True, text=True, check=True
    )
    bill = json.loads(made.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    refs = [part["bom-ref"] for part in bill["components"]]
    assert len(refs) == len(set(refs))
    packages = distributions(path=[str(Path(pytest.__file__).parents[1])])
    here = {(each.metadata["Name"], each.version) for each in packages}
    assert here <= {(part["name"], part["version"]) for part in bill["components"]}
    assert ("pytest", pytest.__version__) in here
