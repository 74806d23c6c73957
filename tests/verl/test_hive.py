"""GRPO through a whole hive, with the trainer in verl's environment and everything else in bombus' own.

Run by verl's Python. `BOMBUS_PYTHON` is that of the other environment (default: the .venv of this tree).
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster

from bombus import SwarmClient, Task, WorkflowOutput
from bombus.sdk.errors import WrongPhase
from bombus.sdk.job import Job
from bombus_trainer.backends.verl.state import writer_of
from tests.verl.processes import free_port

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("BOMBUS_PYTHON", str(ROOT / ".venv/bin/python"))
WAIT_S = 240.0
COMMAND = r"(^| )torchrun "  # for a machine; the address of the bus may stand before it
LENGTHS = {
    "max_prompt_length": 256,
    "max_response_length": 200,
    "max_response_length_in_one_turn": 64,
    "max_model_len": 512,
}


class Head:
    """A process in bombus' own environment that keeps a hive running, and what it has printed."""

    def __init__(self, folder: Path, module: str, *words: str) -> None:
        self.port = free_port()
        self.log = folder / "hive.log"
        self.lines: list[str] = []
        self.url = ""
        environment = {
            **os.environ,
            "BOMBUS_ENVIRONMENTS": str(Path(sys.prefix).parent),
            "BOMBUS_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", *module.split(), *words, "--data-dir", str(folder / "data"), "--threads", "1"],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip

    def until(self, pattern: str) -> str:
        """Return the first line that it prints and the pattern matches."""
        assert self.process.stdout is not None
        timer = threading.Timer(WAIT_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if re.search(pattern, line):
                    return line.rstrip()
        finally:
            timer.cancel()
        raise AssertionError(f"{pattern} was not printed:\n{self.lines}\n{self.log.read_text()[-6000:]}")

    def stop(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=90)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, "nothing is left behind"


def job(**trainer: object) -> Job:
    trainer = {"backend": "verl", "lr": 1e-3, "resume": "never", **trainer}
    return Job(model="tiny", batch_size=2, num_repeat=4, bombus={"rollout": LENGTHS, "trainer": trainer})


def agent(task: Task, credentials: Any) -> WorkflowOutput:
    """Play two turns. The reward depends on all tokens, so it rarely repeats in a group, and steps have a signal."""
    said = ""
    messages = [{"role": "user", "content": task.main_query}]
    for _ in range(2):
        answer = httpx.post(
            f"{credentials.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {credentials.api_key}"},
            json={"model": "any", "messages": messages, "max_tokens": 6, "temperature": 1.0},
            timeout=120,
        )
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"] or ""
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=sum(map(ord, said)) / 1000)


def make_steps(client: SwarmClient, first: int, last: int) -> None:
    tasks = [Task(task_id="a", main_query="a="), Task(task_id="b", main_query="b=")]
    for _ in range(first, last + 1):
        client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 4))
    client.wait_for_status("ENGINE.ROLLING")
    assert client.get_global_step() == last


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of the steps that are kept."""
    found = sorted((folder / "data/engines/checkpoints").rglob("manifest.json"))
    return [json.loads(path.read_bytes()) for path in found]


def ranks_of(manifest: dict[str, Any]) -> int:
    """Return how many ranks have written a checkpoint."""
    return len({writer_of(name) for name in manifest["files"]})


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Head, Path]]:
    folder = tmp_path_factory.mktemp("one")
    head = Head(folder, "bombus up", "--trainer-backend", "verl", "--port", str(free_port()))
    head.url = head.until("^ready ").split()[1]
    yield head, folder
    head.stop()


def test_two_grpo_steps_are_made_by_verl_through_the_whole_hive(one: tuple[Head, Path]) -> None:
    head, folder = one
    with SwarmClient(head.url) as client:
        client.auto_sync_train_config_and_start_engine(job())
        make_steps(client, 1, 2)
        client.stop_engine()
    manifests = checkpoints(folder)
    assert [each["facts"]["step"] for each in manifests] == [1, 2]
    assert {each["facts"]["backend"] for each in manifests} == {"verl"}
    assert manifests[1]["facts"]["metrics"]["grad_norm"] > 0
    # Before the first update and after it: the replica samples from what verl computes.
    assert all(each["facts"]["metrics"]["kl_sampler_abs"] < 1e-3 for each in manifests)


def test_a_loss_that_verl_does_not_have_ends_the_run_in_one_sentence(one: tuple[Head, Path]) -> None:
    head, _ = one
    with SwarmClient(head.url) as client:
        client.sync_train_config(job(loss="clever"))
        with pytest.raises(WrongPhase, match=r"loss = 'clever' is not in verl's registry, which has"):
            client.start_engine()
        status, reply = client.get_engine_status()
        assert status == "ENGINE.OFFLINE"
        assert "sapo, vanilla" in reply["failure"]


@contextmanager
def nodes(lines: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the printed commands as they are typed: each line is a machine."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    typed = [line.replace("torchrun ", "exec torchrun ", 1) for line in lines]
    started = [subprocess.Popen(["bash", "-c", line], env=environment) for line in typed]
    try:
        yield started
    finally:
        for each in started:
            each.send_signal(signal.SIGTERM)
        for each in started:
            each.wait(60)


def test_two_machines_train_together_and_the_launcher_prints_the_commands(tmp_path: Path) -> None:
    head = Head(
        tmp_path, "bombus_trainer.launcher", "--mode", "connect", "--nnodes", "2", "--nproc-per-node", "1",
        "--master-port", str(free_port()), "--api-port", str(port := free_port()),
    )  # fmt: skip
    try:
        lines = [head.until(COMMAND) for _ in range(2)]
        head.until("^waiting for the trainer of engine main: 2 ranks on 2 machines, once a job is started")
        with nodes(lines) as (_, second):
            head.until("^ready ")
            with SwarmClient(f"http://127.0.0.1:{port}") as client:
                client.auto_sync_train_config_and_start_engine(job())
                make_steps(client, 1, 2)
            assert [(ranks_of(each), each["facts"]["step"]) for each in checkpoints(tmp_path)] == [(2, 1), (2, 2)]
            assert second.poll() is None
    finally:
        head.stop()


def test_in_mode_auto_the_launcher_is_a_machine_itself_and_prints_commands_for_the_others(tmp_path: Path) -> None:
    head = Head(
        tmp_path, "bombus_trainer.launcher", "--mode", "auto", "--nnodes", "2", "--nproc-per-node", "1",
        "--master-port", str(free_port()), "--api-port", str(port := free_port()),
    )  # fmt: skip
    try:
        line = head.until(COMMAND)
        assert "--node_rank=1" in line
        head.until("^waiting for the trainer of engine main: 2 ranks on 2 machines, once a job is started")
        with nodes([line]) as (second,):
            head.until("^ready ")
            with SwarmClient(f"http://127.0.0.1:{port}") as client:
                client.auto_sync_train_config_and_start_engine(job(ulysses_parallel_size=2))
                make_steps(client, 1, 2)
            manifests = checkpoints(tmp_path)
            assert [ranks_of(each) for each in manifests] == [2, 2]
            # Both compute parts of the same sequences: the replica samples from what they compute together.
            assert all(each["facts"]["metrics"]["kl_sampler_abs"] < 1e-3 for each in manifests)
            assert manifests[1]["facts"]["metrics"]["grad_norm"] > 0
            assert second.poll() is None
    finally:
        head.stop()


def test_a_rank_that_is_killed_costs_no_step(tmp_path: Path) -> None:
    words = ["--trainer-backend", "verl", "--trainer-processes", "2", "--port", str(free_port())]
    head = Head(tmp_path, "bombus up", *words)
    try:
        url = head.until("^ready ").split()[1]
        with SwarmClient(url) as client:
            client.auto_sync_train_config_and_start_engine(job(lora_rank=4))
            make_steps(client, 1, 1)
            ranks = [
                process
                for process in psutil.Process(head.process.pid).children(recursive=True)
                if "bombus_trainer.worker" in process.cmdline() and "RANK" in process.environ()
            ]
            (second,) = [process for process in ranks if process.environ().get("RANK") == "1"]
            second.kill()
            make_steps(client, 2, 2)
        first, second_manifest = checkpoints(tmp_path)
        assert (ranks_of(first), ranks_of(second_manifest)) == (2, 2)
        assert second_manifest["facts"]["trainer_epoch"] > first["facts"]["trainer_epoch"]
    finally:
        head.stop()


@contextmanager
def ray_nodes(number: int) -> Iterator[list[str]]:
    """Run a Ray cluster of so many nodes with a CPU each, and yield the arguments that name it. Ray runs a cluster of
    its own for the ranks if there are none."""
    if not number:
        yield []
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(number - 1):
            cluster.add_node(num_cpus=1)
        yield ["--ray-address", cluster.address]
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("number", [0, 2])
def test_ray_places_the_ranks_of_a_trainer(tmp_path: Path, number: int) -> None:
    with ray_nodes(number) as where:
        ray_places_two_ranks(tmp_path, where)


def ray_places_two_ranks(tmp_path: Path, where: Sequence[str]) -> None:
    head = Head(tmp_path, "bombus_trainer.launcher", "--mode", "connect", "--api-port", str(port := free_port()))
    try:
        words = shlex.split(head.until(COMMAND))
        said = words[words.index("bombus_trainer.worker") + 1 :]
        command = [sys.executable, "-m", "bombus_trainer.ray_ranks", "--ranks", "2", *where, *said]
        bus = {"BOMBUS_NATS": (tmp_path / "data/nats-url").read_text().strip()}
        ranks = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **bus})
        try:
            head.until("^ready ")
            with SwarmClient(f"http://127.0.0.1:{port}") as client:
                client.auto_sync_train_config_and_start_engine(job())
                make_steps(client, 1, 1)
            assert [ranks_of(each) for each in checkpoints(tmp_path)] == [2]
        finally:
            family = psutil.Process(ranks.pid).children(recursive=True)
            ranks.terminate()
            ranks.wait(60)
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, "nothing of Ray is left behind"
    finally:
        head.stop()
