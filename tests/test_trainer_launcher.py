"""The head of a trainer on several machines: what it runs here, and what it asks to be typed elsewhere."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.layout import Layout, services
from bombus_trainer.launcher import add_arguments, layout_of, main, worker_line

NATS = "nats://10.0.0.1:4222"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.host = arguments.api_host
    return arguments


def trainer(layout: Layout) -> list[str]:
    return [str(service) for service in services(layout, NATS) if service.kind == "trainer"]


def test_the_line_to_type_on_a_machine_has_all_that_its_ranks_need(tmp_path: Path) -> None:
    words = ["--mode", "connect", "--nnodes", "4", "--nproc-per-node", "8", "--master-addr", "10.0.0.1"]
    words += ["--device", "cuda", "--data-dir", str(tmp_path), "--hive", "lab"]
    arguments = parsed(*words)
    layout = layout_of(arguments)
    assert worker_line(layout, arguments, NATS, "2") == (
        "torchrun --nproc_per_node=8 --nnodes=4 --node_rank=2 --master_addr=10.0.0.1 --master_port=29500 "
        f"-m bombus_trainer.worker --nats {NATS} --hive lab --engine main --folder {tmp_path}/engines --device cuda "
        "--operation-timeout 1800"
    )
    assert trainer(layout) == []


def test_in_mode_auto_this_machine_is_node_0_and_the_job_is_verls(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("bombus: {model: {path: tiny}}")
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--config", str(tmp_path / "job.yaml"), "--api-port", "8080"]
    layout = layout_of(parsed(*words))
    (line,) = trainer(layout)
    assert "-m bombus_trainer.torchrun --nproc_per_node=1 --nnodes=2 --node_rank=0 --master_addr=127.0.0.1" in line
    assert line.endswith("--operation-timeout 1800.0")
    assert layout.jobs["main"].trainer.backend == "verl"
    assert layout.cluster.gateway.port == 8080


def test_a_cluster_file_says_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("hive: lab\nengines:\n  a: {inference: [{count: 3}]}\n  b: {}\n")
    layout = layout_of(parsed("--config", str(file), "--engine", "a"))
    assert layout.cluster.hive == "lab"
    assert len([service for service in services(layout, NATS) if service.kind == "inference"]) == 3
    assert len(trainer(layout)) == 1
    with pytest.raises(Refused, match="--engine c is none of the file's engines: a, b"):
        layout_of(parsed("--config", str(file), "--engine", "c"))


def test_nonsense_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "0"]) == 2
    assert capsys.readouterr().err == "bombus_trainer.launcher: --nnodes 0 is refused: it takes 1 to 4096\n"


def test_the_script_runs_the_launcher() -> None:
    script = Path(__file__).parent.parent / "deploy/run_multinode.sh"
    environment = {**os.environ, "BOMBUS_PYTHON": sys.executable}
    words = [str(script), "--help"]
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert "--nproc-per-node" in shown.stdout
    assert shlex.split(script.read_text().splitlines()[-1])[2:] == ["-m", "bombus_trainer.launcher", "$@"]
