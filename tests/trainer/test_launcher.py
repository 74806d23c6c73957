"""The launcher of a trainer on several machines: what it runs here, and the commands that it prints for others."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.host.layout import Layout, services
from bombus_trainer.launcher import add_arguments, layout_of, main, worker_line
from bombus_trainer.options import TrainerOptions, add_options, options_of

NATS = "nats://10.0.0.1:4222"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def trainer(layout: Layout) -> list[str]:
    return [str(service) for service in services(layout, NATS) if service.kind == "trainer"]


def options_in(line: str) -> dict[str, object]:
    """Return the options in a rank's command line, as the rank reads them."""
    words = shlex.split(line)
    options = parsed_rank(words[words.index("bombus_trainer.worker") + 1 :])
    return options.model_dump(mode="json")


def parsed_rank(words: list[str]) -> TrainerOptions:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return options_of(parser.parse_args(words))


def test_the_line_to_type_on_a_machine_has_all_that_its_ranks_need(tmp_path: Path) -> None:
    words = ["--mode", "connect", "--nnodes", "4", "--nproc-per-node", "8", "--master-addr", "10.0.0.1"]
    words += ["--device", "cuda", "--data-dir", str(tmp_path), "--hive", "lab"]
    arguments = parsed(*words)
    layout, ranks = layout_of(arguments)
    assert worker_line(layout, ranks, "main", NATS, 2) == (
        "torchrun --nproc_per_node=8 --nnodes=4 --node_rank=2 --master_addr=10.0.0.1 --master_port=29500 "
        f'-m bombus_trainer.worker --nats {NATS} --hive lab --log-level info --options \'{{"engine": "main", '
        f'"folder": "{tmp_path}/engines", "device": "cuda", "operation_timeout_s": 1800.0}}\''
    )
    assert trainer(layout) == []


def test_the_line_finds_a_bus_with_a_password_and_does_not_show_it(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--data-dir", str(tmp_path / "a b")]
    address = "nats://me:secret@10.0.0.1:4222"
    layout, ranks = layout_of(parsed(*words))  # whose bus is our own
    own = worker_line(layout, ranks, "main", address, 1)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/nats-url").write_text(f"{address}\n")
    shown = own.replace("torchrun", "env; :", 1)  # instead of ranks
    assert f"BOMBUS_NATS={address}\n" in subprocess.run(["sh", "-c", shown], capture_output=True, text=True).stdout
    (tmp_path / "cluster.yaml").write_text(f"nats: {address}\nengines: {{main: {{}}}}")
    layout, ranks = layout_of(parsed(*words, "--config", str(tmp_path / "cluster.yaml")))
    given = worker_line(layout, ranks, "main", address, 1)
    assert given.startswith('BOMBUS_NATS="$BOMBUS_NATS" torchrun ')
    assert "secret" not in own + given


def test_in_mode_auto_this_machine_is_node_0_and_the_backend_is_verl(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("bombus: {model: {path: tiny}}")
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--config", str(tmp_path / "job.yaml"), "--api-port", "8080"]
    layout, _ = layout_of(parsed(*words))
    (line,) = trainer(layout)
    assert "-m bombus_trainer.torchrun --nproc_per_node=1 --nnodes=2 --node_rank=0 --master_addr=127.0.0.1" in line
    assert options_in(line)["operation_timeout_s"] == 1800.0
    assert layout.jobs["main"].trainer.backend == "verl"
    assert layout.cluster.gateway.port == 8080


def test_a_cluster_file_configures_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("hive: lab\nengines:\n  a: {inference: [{count: 3}]}\n  b: {}\n")
    layout, _ = layout_of(parsed("--config", str(file), "--engine", "a"))
    assert layout.cluster.hive == "lab"
    assert len([service for service in services(layout, NATS) if service.kind == "inference"]) == 3
    assert len(trainer(layout)) == 1
    with pytest.raises(Refused, match="--engine c is not one of the file's engines: a, b"):
        layout_of(parsed("--config", str(file), "--engine", "c"))


FILE = """
gateway: {host: 0.0.0.0, port: 8000}
engines:
  main:
    trainer: {device: cuda, threads: 3, weights_by: objects, weights_full_every: 8, bin_tokens: 9000, processes: 2}
    inference: [{device: cuda, count: 2}]
"""
RANKS = {"device": "cuda", "threads": 3, "weights_by": "objects", "weights_full_every": 8, "bin_tokens": 9000}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    return str(path)


def test_the_files_settings_of_ranks_and_gateway_hold_on_every_machine(file: str, tmp_path: Path) -> None:
    words = ["--config", file, "--nnodes", "2", "--trusted-network", "--debug-root", str(tmp_path)]
    layout, ranks = layout_of(parsed(*words))
    (here,) = trainer(layout)
    there = worker_line(layout, ranks, "main", NATS, 1)
    assert "--nproc_per_node=2" in here
    assert "--nproc_per_node=2" in there
    assert here.endswith(there[there.index(" -m bombus_trainer.worker") :]), "all ranks are told the same"
    assert options_in(there).items() >= {**RANKS, "operation_timeout_s": 1800.0, "debug_root": str(tmp_path)}.items()
    (gateway,) = [str(service) for service in services(layout, NATS) if service.kind == "gateway"]
    assert "--host 0.0.0.0 --port 8000" in gateway


def test_flags_win_over_the_file_and_apply_only_to_the_ranks(file: str) -> None:
    words = ["--config", file, "--device", "cpu", "--threads", "0", "--bin-tokens", "64", "--allow-download"]
    layout, ranks = layout_of(parsed(*words, "--nproc-per-node", "4", "--api-host", "127.0.0.1", "--api-port", "81"))
    assert (ranks.device, ranks.threads, ranks.bin_tokens, ranks.processes, ranks.weights_by) == (
        "cpu", 0, 64, 4, "objects",
    )  # fmt: skip
    assert ranks.allow_download
    assert (layout.cluster.gateway.host, layout.cluster.gateway.port) == ("127.0.0.1", 81)
    assert [part.device for part in layout.cluster.engines["main"].inference] == ["cuda"]


def test_without_a_file_the_defaults_are_those_of_the_flags() -> None:
    layout, ranks = layout_of(parsed())
    assert (layout.cluster.gateway.host, layout.cluster.gateway.port) == ("127.0.0.1", 10086)
    assert (ranks.backend, ranks.device, ranks.threads, ranks.processes) == ("verl", "cpu", 0, 1)
    assert layout.cluster.engines["main"].replicas == 1


def test_a_jobs_processes_are_those_of_all_machines(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("{model_path: tiny, data_parallel_shard_size: 128}")
    words = ["--config", str(job), "--nnodes"]
    assert layout_of(parsed(*words, "16"))[1].processes == 8
    assert layout_of(parsed(*words, "4", "--nproc-per-node", "32"))[1].processes == 32
    for more, why in (
        (
            ["4", "--nproc-per-node", "8"],
            "processes is 8 on each of 4 machines, but its job's trainer.processes is 128",
        ),
        (["3"], "its job's trainer.processes is 128, which cannot be divided evenly"),
        (["1"], "its job's trainer.processes is 128, but one machine starts at most 64"),
    ):
        with pytest.raises(Refused, match=why):
            layout_of(parsed(*words, *more))


def test_ranks_of_the_torch_backend_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engines: {main: {trainer: {backend: torch}}}")
    with pytest.raises(Refused, match=r"engines.main.trainer.backend is torch, but must be verl"):
        layout_of(parsed("--config", str(file)))


def test_ranks_see_the_gpus_that_the_file_gives_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text("engines: {main: {trainer: {devices: [0, 1]}, inference: [{devices: [1]}]}}")
    words = ["--config", str(file), "--nnodes", "2", "--mode"]
    with pytest.raises(Refused, match="GPU 1 is given to"):
        layout_of(parsed(*words, "auto"))
    layout, ranks = layout_of(parsed(*words, "connect"))  # the ranks may be elsewhere
    line = worker_line(layout, ranks, "main", NATS, 1)
    assert line.startswith("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 ")


def test_invalid_flags_are_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "0"]) == 2
    assert capsys.readouterr().err == "bombus_trainer.launcher: --nnodes 0 is refused: it must be from 1 to 4096\n"


@pytest.mark.parametrize("mode", ["auto", "connect"])
def test_what_cannot_start_here_is_refused_in_both_modes(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    file.write_text("engines: {main: {inference: [{backend: vllm}]}}")
    assert main(["--mode", mode, "--config", str(file)]) == 2
    assert "run `bombus install v" in capsys.readouterr().err


def test_the_script_runs_the_launcher() -> None:
    script = Path(__file__).parents[2] / "deploy/run_multinode.sh"
    environment = {**os.environ, "BOMBUS_PYTHON": sys.executable}
    words = [str(script), "--help"]
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert "--nproc-per-node" in shown.stdout
    assert shlex.split(script.read_text().splitlines()[-1])[2:] == ["-m", "bombus_trainer.launcher", "$@"]
