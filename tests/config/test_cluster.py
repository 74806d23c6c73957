"""A cluster file: which processes it starts, what it refuses, and how flags and jobs combine with it."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bombus.cli import main
from bombus.config.cluster import Cluster, Jobs, is_cluster, parse_cluster, reconcile
from bombus.config.flags import flags_of
from bombus.config.parts import InferencePart
from bombus.config.placement import check_placement
from bombus.config.xorl import IGNORED
from bombus.errors import Code, Refused
from bombus.host.layout import Layout, Service, check_can_start, services
from bombus_inference import cli as inference_cli
from bombus_inference.settings import InferenceSettings
from bombus_trainer import cli as trainer_cli

ROOT = Path(__file__).parents[2]
HERE = Path()
EXAMPLE = ROOT / "examples/server/cluster.yaml"
TINY = {"bombus": {"model": {"path": "tiny"}}}


def engine(**parts: Any) -> dict[str, Any]:
    return {"engines": {"main": parts}}


def read_cluster(tree: dict[str, Any], folder: Path) -> tuple[Cluster, Jobs]:
    cluster, jobs = reconcile(*parse_cluster(tree, folder))
    check_placement(cluster)
    return cluster, jobs


def planned(tree: dict[str, Any]) -> list[Service]:
    cluster, jobs = read_cluster(tree, HERE)
    return services(Layout(cluster=cluster, jobs=jobs), "nats://bus:4222")


def test_each_process_without_a_port_of_its_own_gets_one_for_metrics_where_the_file_names_the_first() -> None:
    tree = {
        "metrics_port": 9464,
        "metrics_host": "10.0.0.7",
        "coordinator": {"count": 2},
        "gateway": {"count": 2},
        **engine(trainer={}, inference=[{}]),
    }
    found = {each.name: shlex.join(each.command) for each in planned(tree)}
    ports = {name: re.search(r"metrics[_-]port\W+(\d+)", words) for name, words in found.items()}
    assert {name: port[1] for name, port in ports.items() if port} == {
        "coordinator 1": "9464",
        "coordinator 2": "9465",
        "trainer main": "9466",
        "gateway 1": "9467",
        "gateway 2": "9468",
    }
    assert {name for name, words in found.items() if "10.0.0.7" in words} == {
        name for name, port in ports.items() if port
    }
    alone = planned({"metrics_port": 9464, **engine(trainer={}, inference=[{}])})
    assert "metrics" not in shlex.join(alone[-1].command), "a gateway alone has a port"
    assert not any("metrics" in shlex.join(each.command) for each in planned(engine(trainer={}, inference=[{}])))


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(Refused) as caught:
        read_cluster(tree, HERE)
    assert caught.value.code == Code.BAD_CONFIG
    return caught.value.why


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["up", "--dry-run", *words]) == 0
    return capsys.readouterr().out.splitlines()


def refused_up(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["up", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ---- what is started ----------------------------------------------------------------------------------------------


def test_the_example_describes_a_deployment_with_its_job() -> None:
    cluster, jobs = read_cluster(yaml.safe_load(EXAMPLE.read_text()), EXAMPLE.parent)
    assert jobs["main"].model.path == "Qwen/Qwen3-8B"
    main = cluster.engines["main"]
    assert main.trainer is not None
    assert (main.trainer.backend, main.trainer.processes, jobs["main"].trainer.backend) == ("verl", 4, "verl")
    assert main.replicas == 3


def options_in(line: str) -> dict[str, object]:
    """Return what a trainer's command line has after `--options`."""
    words = shlex.split(line)
    found: dict[str, object] = json.loads(words[words.index("--options") + 1])
    return found


def test_any_mix_of_replicas_and_processes_is_started() -> None:
    kinds = [
        {"backend": "torch", "dtype": "bfloat16"},
        {"backend": "vllm", "count": 2, "kv_cache_mb": 512, "device": "cuda", "tensor_parallel": 4},
        {"backend": "openai", "url": "http://gpu7:8000", "api_key_env": "SERVER_KEY"},
    ]
    weights = {"weights_by": "objects", "weights_full_every": 10, "weights_lora": "merged"}
    trainer = {"backend": "verl", "processes": 2, **weights}
    found = planned(
        {
            "hive": "lab",
            "coordinator": {"count": 2},
            "gateway": {"port": 99, "count": 2},
            **engine(trainer=trainer, inference=kinds),
        }
    )
    assert [one.name for one in found] == [
        *("coordinator 1", "coordinator 2", "trainer main"),
        *("inference main 1", "inference main 2", "inference main 3", "inference main 4", "gateway 1", "gateway 2"),
    ]
    lines = {one.name: str(one) for one in found}
    torchrun = "-m bombus_trainer.torchrun --standalone --nproc-per-node=2 -m bombus_trainer.worker --nats"
    assert f"/verl/bin/python {torchrun}" in lines["trainer main"]
    assert options_in(lines["trainer main"]).items() >= weights.items()
    assert lines["inference main 1"].endswith("--engine main --device cpu --threads 0 --dtype bfloat16")
    vllm = "--engine main --backend vllm --device cuda --threads 0 --kv-cache-mb 512 --tensor-parallel 4"
    assert lines["inference main 2"].endswith(vllm)
    assert lines["inference main 4"].endswith("--backend openai --url http://gpu7:8000 --api-key-env SERVER_KEY")
    assert all("--nats nats://bus:4222 --hive lab" in line for line in lines.values())


def test_every_setting_of_a_part_reaches_its_process(tmp_path: Path) -> None:
    trainer = {"bin_tokens": 9000, "allow_download": True}
    python = tmp_path / "python"
    python.touch(0o755)
    vllm = {"backend": "vllm", "devices": [0], "max_model_len": 4096, "max_running": 32, "eager": True}
    vllm |= {"python": str(python), "gpu_memory_utilization": 0.5}
    vllm |= {"adapters_mb": 7, "max_loras": 2, "max_lora_rank": 16}
    openai = {"backend": "openai", "url": "http://gpu7:8000", "max_model_len": 99, "max_running": 9}
    found = planned(engine(trainer=trainer, inference=[vllm, openai]))
    lines = {one.name: str(one) for one in found}
    assert options_in(lines["trainer main"]).items() >= {"device": "cpu", **trainer}.items()
    flags = "--adapters-mb 7 --vllm-max-loras 2 --vllm-max-lora-rank 16 "
    flags += f"--vllm-eager --vllm-python {python} --gpu-memory-utilization 0.5"
    assert "--max-model-len 4096 --max-running 32 --backend vllm --device cuda" in lines["inference main 1"]
    assert lines["inference main 1"].endswith(flags)
    assert "--max-model-len 99 --max-running 9 --backend openai" in lines["inference main 2"]
    trainers, replicas = argparse.ArgumentParser(), argparse.ArgumentParser()
    trainer_cli.add_arguments(trainers)
    inference_cli.add_arguments(replicas)
    for one in found:
        if one.kind in ("trainer", "inference"):
            (trainers if one.kind == "trainer" else replicas).parse_args(one.command[4:])


def test_a_replica_and_its_part_of_a_cluster_file_have_the_same_defaults() -> None:
    """What a file says is left out of the command line where it is the part's default."""

    def settings(words: list[str]) -> InferenceSettings:
        parser = argparse.ArgumentParser()
        inference_cli.add_arguments(parser)
        return inference_cli.settings_of(parser.parse_args(words))

    flags, part = flags_of(InferencePart), InferencePart()
    names = ("backend", "max_model_len", "max_running", "kv_cache_mb", "adapters_mb", "max_loras", "max_lora_rank",
             "tensor_parallel")  # fmt: skip
    assert settings([word for name in names for word in (flags[name], str(getattr(part, name)))]) == settings([])


# ---- GPUs ---------------------------------------------------------------------------------------------------------


def visible_gpus(one: Service) -> str | None:
    return one.environment.get("CUDA_VISIBLE_DEVICES")


def test_each_process_sees_the_gpus_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    kinds = [{"backend": "vllm", "count": 2, "tensor_parallel": 2, "devices": [4, 5, 6, 7]}, {"devices": [3]}, {}]
    found = {
        one.name: one for one in planned(engine(trainer={"backend": "verl", "devices": [0, 1, 2]}, inference=kinds))
    }
    assert [visible_gpus(found[name]) for name in ("trainer main", "gateway")] == ["0,1,2", None]
    assert [visible_gpus(found[f"inference main {number}"]) for number in (1, 2, 3, 4)] == ["4,5", "6,7", "3", None]
    trainer = str(found["trainer main"])
    assert trainer.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1,2 ")
    assert "--nproc-per-node=3" in trainer
    assert options_in(trainer)["device"] == "cuda"
    assert "--device cuda " in str(found["inference main 3"])
    assert "--device cpu " in str(found["inference main 4"])


def test_gpus_are_positions_in_our_own_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    (found,) = [one for one in planned(engine(trainer={"devices": [1]})) if one.kind == "trainer"]
    assert visible_gpus(found) == "GPU-b"
    beyond, jobs = read_cluster(engine(trainer={"devices": [2]}), HERE)
    with pytest.raises(Refused, match="GPU 2 is not among the 2 of CUDA_VISIBLE_DEVICES"):
        check_can_start(Layout(cluster=beyond, jobs=jobs))


def test_a_gpu_is_given_twice_only_where_all_of_its_parts_share_devices() -> None:
    both = {"trainer": {"devices": [0]}, "inference": [{"devices": [0]}]}
    assert refusal(engine(**both)).startswith(
        "GPU 0 is given to engines.main.trainer and engines.main.inference[0]: give each its own devices, or share_dev"
    )
    assert "two replicas of engines.main.inference[0]" in refusal(engine(inference=[{"count": 2, "devices": [1, 1]}]))
    one = {"trainer": {"devices": [0], "share_devices": True}, "inference": [{"devices": [0]}]}
    assert "GPU 0 is given to" in refusal(engine(**one))
    planned(engine(trainer=one["trainer"], inference=[{"devices": [0], "share_devices": True}]))
    numbered = {"backend": "vllm", "device": "cuda:1", "tensor_parallel": 2}
    assert "GPU 2 is given to" in refusal(engine(trainer={"devices": [2]}, inference=[numbered]))


def test_once_one_part_names_its_gpus_every_part_on_a_gpu_has_to() -> None:
    why = refusal(engine(trainer={"device": "cuda"}, inference=[{"devices": [1]}]))
    assert why == "engines.main.trainer runs on a GPU but names none, while other parts do: give it devices: [...]"
    planned(engine(trainer={"device": "cuda"}, inference=[{"device": "cuda"}]))


def test_a_device_on_the_command_line_replaces_the_gpus_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(engine(trainer={"devices": [0]}, inference=[{"devices": [1]}])))
    assert not any("CUDA" in line for line in dry_run(capsys, "--config", str(file), "--device", "cpu"))
    on_gpus = dry_run(capsys, "--config", str(file), "--device", "cuda")
    assert [line.split("=")[2][0] for line in on_gpus if "CUDA" in line] == ["0", "1"]


def test_parts_that_are_left_out_are_not_started_here() -> None:
    elsewhere = {"nats": "nats://bus:4222", "gateway": {"count": 0}, "coordinator": {"count": 0}}
    assert [one.name for one in planned({**elsewhere, **engine(trainer={})})] == ["trainer main"]
    assert [one.name for one in planned({**elsewhere, **engine(inference=[{}])})] == ["inference main"]
    assert planned({**elsewhere, **engine()}) == []


def test_the_key_of_a_server_elsewhere_reaches_only_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sesame")
    served = {"backend": "openai", "url": "http://gpu7:8000", "api_key_env": "SERVER_KEY"}
    for one in planned(engine(trainer={}, inference=[{}, served])):
        assert ("sesame" in one.environment.values()) == (one.name == "inference main 2")
        assert "sesame" not in str(one)


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({}, "engines is missing: name at least one engine"),
        ({"engines": {}}, "engines is missing: name at least one engine"),
        ({"hive": "No Good", **engine()}, "hive 'No Good' is not a valid name"),
        ({"engines": {"Big One": {}}}, "engine 'Big One' is not a valid name"),
        (
            {"gateway": {"port": -1}, **engine()},
            "gateway.port = -1 is refused: it must be a whole number, at least 0, at m",
        ),
        ({"gateway": {"prot": 1}, **engine()}, "gateway.prot is unknown; did you mean port?"),
        ({"coordinator": {"count": "two"}, **engine()}, 'coordinator.count = "two" is refused: it must be a whole'),
        (engine(trianer={}), "engines.main.trianer is unknown; did you mean trainer?"),
        (
            engine(trainer={"backend": "jax"}),
            'engines.main.trainer.backend = "jax" is refused: it must be one of torch',
        ),
        (engine(trainer={"device": "gpu"}), 'engines.main.trainer.device = "gpu" is refused: it must be cpu, cuda or'),
        (engine(inference=[{}, {"count": -1}]), "engines.main.inference[1].count = -1 is refused: it must be a whole"),
        (
            engine(inference=[{"backend": "sglang"}]),
            'engines.main.inference[0].backend = "sglang" is refused: it must be one',
        ),
        (
            engine(inference=[{"backend": "openai"}]),
            "engines.main.inference[0]: url is missing: backend openai uses",
        ),
        (
            engine(inference=[{"url": "http://a"}]),
            "inference[0]: url has no effect with backend torch: it belongs to openai",
        ),
        (
            engine(inference=[{"tensor_parallel": 2}]),
            "tensor_parallel has no effect with backend torch: it belongs to vllm",
        ),
        (
            engine(inference=[{"backend": "openai", "url": "gpu7"}]),
            'url = "gpu7" is refused: it must be http://HOST:PORT',
        ),
        (engine(inference=[{"backend": "openai", "url": "http://a", "dtype": "float32"}]), "dtype has no effect with"),
        (engine(inference=[{"backend": "openai", "url": "http://a", "count": 2}]), "count 2 is refused: a single"),
        (engine(trainer={"bin_tokens": 3}), "engines.main.trainer.bin_tokens: 3 is neither 0 nor at least 16"),
        (
            engine(trainer={"backend": "verl", "devices": [0], "processes": 2}),
            "engines.main.trainer: devices names 1 GPU, but processes is 2: give one for each",
        ),
        (engine(trainer={"device": "cpu", "devices": [0]}), "device cpu is refused alongside devices, which are GPUs"),
        (engine(trainer={"devices": ["0"]}), 'engines.main.trainer.devices[0] = "0" is refused: it must be numbers of'),
        (
            engine(inference=[{"backend": "vllm", "count": 2, "tensor_parallel": 2, "devices": [0, 1]}]),
            "devices names 2 GPUs, but 2 replicas with 2 GPUs each take 4",
        ),
        (engine(inference=[{"eager": True}]), "eager has no effect with backend torch: it belongs to vllm"),
        (engine(inference=[{"backend": "vllm", "gpu_memory_utilization": 0.5}]), "has no effect here: device is cpu"),
        (engine(inference=[{"max_model_len": 1}]), "inference[0].max_model_len: 1 is neither 0 nor at least 2"),
        (engine(job=3), "engines.main.job = 3 is refused: it must be a job's file, or its document"),
        (
            engine(job={"bombus": {"trainer": {"lr": 7}}}),
            "engines.main.job: bombus.trainer.lr = 7 is refused: it must be a",
        ),
        (engine(job="nowhere.yaml"), "engines.main.job: nowhere.yaml: there is no such file"),
        (
            {**engine(), **TINY},
            "engines belongs to a cluster file and bombus to a job: put the job below engines.",
        ),
    ],
)
def test_a_mistake_is_named_in_one_sentence(tree: dict[str, Any], why: str) -> None:
    def read() -> None:
        if is_cluster(tree) or not tree:
            read_cluster(tree, HERE)

    with pytest.raises(Refused) as caught:
        read()
    assert why in caught.value.why
    assert "\n" not in caught.value.why


def test_a_job_is_not_a_cluster_file() -> None:
    assert not is_cluster(TINY)
    assert not is_cluster({"model_path": "tiny", "seed": 1})
    assert is_cluster(engine())


def test_the_old_name_of_a_replicas_backend_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(engine(inference=[{"backend": "vllm"}, {"engine": "vllm", "max_running": 9}])))
    lines = dry_run(capsys, "--config", str(file))
    assert ["--backend vllm" in line for line in lines if "--engine main" in line and "inference" in line] == [True] * 2
    warning = "engines.main.inference[1].engine is the old name of engines.main.inference[1].backend: write backend"
    assert [record.getMessage() for record in caplog.records] == [warning]

    assert refusal(engine(inference=[{"engine": "vllm", "backend": "vllm"}])) == (
        "engines.main.inference[0].engine is the old name of engines.main.inference[0].backend: give only one of them"
    )
    # The engine that a replica serves is the one that it stands below: its name is not taken for a backend.
    assert 'inference[0].backend = "main" is refused' in refusal(engine(inference=[{"engine": "main"}]))


@pytest.mark.parametrize("words", [("up", "--dry-run"), ("doctor",)])
def test_the_warning_about_an_old_key_reaches_the_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(engine(inference=[{"engine": "vllm"}])))
    command = [sys.executable, "-m", "bombus", *words, "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "engines.main.inference[0].engine is the old name of" in done.stderr
    assert "is the old name of" not in done.stdout


# ---- trainers and their jobs --------------------------------------------------------------------------------------


def test_what_a_trainer_or_its_job_leaves_open_is_taken_from_the_other() -> None:
    verl = {"bombus": {"model": {"path": "tiny"}, "trainer": {"backend": "verl", "processes": 4}}}
    cluster, jobs = read_cluster(engine(job=verl, trainer={"device": "cuda"}), HERE)
    trainer = cluster.engines["main"].trainer
    assert trainer is not None
    assert (trainer.backend, trainer.processes, trainer.device) == ("verl", 4, "cuda")

    _, jobs = read_cluster(engine(job=TINY, trainer={"backend": "verl", "processes": 4}), HERE)
    assert jobs["main"].trainer.backend == "verl"


def test_a_trainer_and_a_job_that_differ_are_refused() -> None:
    verl = {"bombus": {"trainer": {"backend": "verl", "processes": 4}}}
    why = refusal(engine(job=verl, trainer={"backend": "torch"}))
    assert why == "engines.main.trainer.backend is torch, but its job's trainer.backend is verl"
    assert refusal(engine(job=verl, trainer={"devices": [0, 1]})) == (
        "engines.main.trainer: devices names 2 GPUs, but processes is 4: give one for each"
    )
    why = refusal(engine(job=verl, trainer={"processes": 8}))
    assert why == "engines.main.trainer.processes is 8, but its job's trainer.processes is 4"


def test_more_processes_than_one_machine_starts_need_several_machines() -> None:
    job = {"model_path": "tiny", "data_parallel_shard_size": 128}
    assert refusal(engine(job=job, trainer={})) == (
        "engines.main.trainer: its job's trainer.processes is 128, but one machine starts at most 64: start it on more "
        "machines, with `python -m bombus_trainer.launcher --nnodes N` (docs/verl.md)"
    )


def test_a_key_of_a_job_without_effect_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("{model_path: tiny, output_dir: out, enable_full_shard: false}")
    assert main(["up", "--dry-run", "--config", str(file)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"engine main: {key} of the job has no effect: {IGNORED[key]}" for key in ("output_dir", "enable_full_shard")
    ]


def test_what_cannot_run_here_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path))
    for parts, why in (
        ({"inference": [{"backend": "vllm"}]}, r"'vllm' is not installed .* run `bombus install vllm` first"),
        ({"trainer": {"backend": "verl"}}, r"'verl' is not installed"),
        ({"inference": [{"backend": "openai", "url": "http://a", "api_key_env": "NO_KEY"}]}, "NO_KEY holds no key"),
        (
            {"inference": [{"backend": "vllm", "python": "/nowhere/python"}]},
            "/nowhere/python is not an interpreter",
        ),
    ):
        cluster, _ = read_cluster(engine(**parts), HERE)
        with pytest.raises(Refused, match=f"engine main: .*{why}"):
            check_can_start(Layout(cluster=cluster))


# ---- flags --------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    two: dict[str, Any] = {"engines": {"big": {"trainer": {}, "inference": [{"count": 3}]}, "small": {"trainer": {}}}}
    two["web"] = {"enabled": False}
    file.write_text(yaml.safe_dump({"hive": "lab", "gateway": {"port": 99}, "data_dir": "here", **two}))
    lines = dry_run(capsys, "--config", str(file))
    assert len(lines) == 1 + 2 + 3 + 1
    assert "--port 99" in lines[-1]
    assert all("--hive lab" in line for line in lines)

    flags = ("--port", "77", "--hive", "other", "--engine", "big", "--replicas", "1", "--device", "cuda")
    lines = dry_run(capsys, "--config", str(file), *flags, "--coordinators", "2", "--nats", "nats://bus:1")
    assert [line.split()[3] for line in lines] == ["coordinator", "coordinator", "trainer", "inference", "gateway"]
    assert "--port 77" in lines[-1]
    assert all("--nats nats://bus:1 --hive other" in line for line in lines)
    assert options_in(lines[2])["device"] == "cuda"
    assert "--device cuda" in lines[3]
    trainer = dry_run(capsys, "--config", str(file), "--bin-tokens", "64", "--allow-download")[1]
    assert options_in(trainer).items() >= {"bin_tokens": 64, "allow_download": True}.items()
    assert "not one of the file's engines: big, small" in refused_up(capsys, "--config", str(file), "--engine", "tiny")
    assert "engine small: its file has 0 kinds" in refused_up(capsys, "--config", str(file), "--replicas", "2")


def test_a_flag_wins_over_the_backend_that_a_job_would_have_taken_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(engine(job=TINY, trainer={"backend": "verl"})))
    flags = ("--config", str(file), "--trainer-backend", "torch")
    (trainer,) = [line for line in dry_run(capsys, *flags) if "--options" in line]
    assert " -m bombus trainer " in trainer


def test_a_job_alone_is_for_every_engine_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    job = str(EXAMPLE.parent / "qwen3_8b_full.yaml")
    lines = dry_run(capsys, "--config", job, "--engine", "a", "--engine", "b")
    trainers = [line for line in lines if "--options" in line]
    assert len(trainers) == 2
    assert all("--nproc-per-node=8" in line for line in trainers), "the job's data_parallel_shard_size"


def test_a_part_made_in_code_is_checked_too() -> None:
    with pytest.raises(ValueError, match="url is missing"):
        InferencePart(backend="openai")
    assert Cluster.model_validate(engine()).gateway.port == 10086
