"""The manager of vLLM's process, with another process in its place: it starts, watches and ends all of it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from bombus.errors import EngineFault
from bombus.machine.environments import environment_python
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, AdapterConfig
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm import keeper
from bombus_inference.backends.vllm.server import VllmServer, vllm_arguments, vllm_environment
from bombus_inference.settings import ComputeSettings, VllmSettings
from tests.inference.backends.http_backends import ignore_stage
from tests.patience import PATIENCE_S

CHILD = Path(__file__).with_name("child_process.py")
START_S = 60.0


@pytest.fixture
async def server() -> AsyncIterator[VllmServer]:
    server = VllmServer()
    yield server
    await server.stop()


def command(server: VllmServer, how: str = "") -> list[str]:
    return [sys.executable, str(CHILD), str(server.socket), *([how] if how else [])]


async def start(server: VllmServer, how: str = "", start_s: float = START_S) -> list[psutil.Process]:
    """The child and its own child."""
    await server.start(command(server, how), vllm_environment(ComputeSettings(), VllmSettings()), start_s, ignore_stage)
    return psutil.Process(server.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are still there, after giving the kernel time to remove them."""
    _, left = psutil.wait_procs(processes, timeout=30)
    return [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


async def test_it_is_ready_once_it_answers_and_stopping_leaves_no_process(server: VllmServer) -> None:
    processes = await start(server)
    assert len(processes) == 2
    assert server.socket.parent.stat().st_mode & 0o777 == 0o700, "no other user can enter"
    await server.stop()
    assert server.ended.is_set()
    assert alive(processes) == []
    assert not server.socket.parent.exists()


async def test_its_last_words_are_the_reason_why_it_did_not_start(server: VllmServer) -> None:
    with pytest.raises(EngineFault, match="did not start; its last output: RuntimeError: no such model: nowhere"):
        await start(server, "dies")
    assert server.ended.is_set()


async def test_a_start_that_takes_too_long_is_given_up(server: VllmServer) -> None:
    with pytest.raises(EngineFault, match="not ready within 1 s"):
        await start(server, "deaf", start_s=1.0)
    assert server.ended.is_set()


async def test_cancelling_a_start_ends_the_process(server: VllmServer) -> None:
    stages: asyncio.Queue[str] = asyncio.Queue()
    starting = asyncio.create_task(server.start(command(server, "deaf"), os.environ, START_S, stages.put))
    assert await stages.get() == "starting vLLM"
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.ended.is_set()


@pytest.mark.parametrize("whom", ["keeper", "child"])
async def test_when_one_of_them_is_killed_all_end(server: VllmServer, whom: str) -> None:
    """When a vLLM is killed, its engine stays, with all of its memory."""
    processes = await start(server)
    os.kill(server.pid if whom == "keeper" else processes[0].pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await server.ended.wait()
    assert alive(processes) == []


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even if that process is killed, and even if the child ignores SIGTERM."""
    started = (
        "import os, subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-I', {keeper.__file__!r}, str(os.getpid()), *sys.argv[1:]],"
        " stdout=1, start_new_session=True); import signal; signal.pause()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", started, sys.executable, str(CHILD), str(tmp_path / "s"), "stubborn"],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline().split()[1]))
    family = [engine, *engine.parents()[:2]]
    parent.kill()
    parent.wait(10)
    assert alive(family) == []


def policy(folder: Path) -> Policy:
    return Policy(folder, run=1, version=0, max_model_len=512)


def test_vllm_gets_the_options_that_a_trainer_needs_and_a_private_socket(tmp_path: Path) -> None:
    compute = ComputeSettings(dtype="bfloat16", max_running=32, kv_cache_bytes=1 << 30)
    words = vllm_arguments(policy(tmp_path), tmp_path / "s", compute, VllmSettings(tensor_parallel=4), 512)
    for name, value in {
        "--uds": str(tmp_path / "s"), "--logprobs-mode": "processed_logprobs", "--max-num-seqs": "32",
        "--max-model-len": "512", "--dtype": "bfloat16", "--kv-cache-memory-bytes": str(1 << 30),
        "--tensor-parallel-size": "4", "--structured-outputs-config": '{"backend": "xgrammar"}',
    }.items():  # fmt: skip
        assert words[words.index(name) + 1] == value
    assert "--host" not in words
    assert "--enforce-eager" not in words


def test_the_layers_of_the_policys_adapter_and_no_others_have_lora(tmp_path: Path) -> None:
    config = AdapterConfig(r=4, lora_alpha=8.0, target_modules=["model.layers.0.mlp.up_proj", "q_proj"])
    (tmp_path / ADAPTER_CONFIG).write_text(config.to_json())
    save_file({"x": np.zeros(1)}, tmp_path / ADAPTER_FILE, metadata={ADAPTER_CONFIG: config.to_json()})
    adapted = replace(policy(tmp_path), adapter=tmp_path)
    words = vllm_arguments(adapted, tmp_path / "s", ComputeSettings(), VllmSettings(), 512)
    first = words.index("--lora-target-modules") + 1
    assert words[first : first + 3] == ["q_proj", "up_proj", "--enable-scale-out"]


def test_on_a_gpu_vllm_sizes_its_cache_itself_unless_a_size_is_set(tmp_path: Path) -> None:
    def words(vllm: VllmSettings, device: str, kv_cache_bytes: int | None = None) -> list[str]:
        compute = ComputeSettings(device=device, kv_cache_bytes=kv_cache_bytes)
        return vllm_arguments(policy(tmp_path), tmp_path / "s", compute, vllm, 512)

    cache, share = "--kv-cache-memory-bytes", "--gpu-memory-utilization"
    assert not {cache, share} & set(words(VllmSettings(), "cuda"))
    assert cache in words(VllmSettings(), "cuda", 1 << 30)
    cpu = words(VllmSettings(), "cpu")
    assert cpu[cpu.index(cache) + 1] == str(2 << 30)
    shared = words(VllmSettings(gpu_memory_utilization=0.4), "cuda:1")
    assert shared[shared.index(share) + 1] == "0.4"


def test_a_model_on_several_gpus_gets_its_device_and_the_following_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = ComputeSettings(device="cuda:2"), VllmSettings(tensor_parallel=2)
    assert vllm_environment(*settings)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert vllm_environment(*settings)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(EngineFault, match="GPU 3 is not among the 3 of CUDA_VISIBLE_DEVICES"):
        vllm_environment(*settings)


def test_its_environment_is_ours_without_keys_and_python_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMBUS_ADMIN_KEY", "s")
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cpu = vllm_environment(ComputeSettings(threads=3), VllmSettings())
    assert not {"BOMBUS_ADMIN_KEY", "PYTHONPATH"} & cpu.keys()
    assert (cpu["OMP_NUM_THREADS"], cpu["VLLM_HOST_IP"]) == ("3", "127.0.0.1")
    assert vllm_environment(ComputeSettings(device="cuda:2"), VllmSettings())["CUDA_VISIBLE_DEVICES"] == "2"


def test_what_torch_compiles_is_kept_for_the_next_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOMBUS_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    settings = ComputeSettings(), VllmSettings()
    assert Path(vllm_environment(*settings)["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert vllm_environment(*settings)["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(EngineFault, match="run `bombus install vllm` first"):
        environment_python("vllm")
