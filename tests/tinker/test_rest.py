"""Every method of the SDK's REST client and its command for downloads, unmodified, against a whole hive."""

import io
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tinker
from tests.tinker.test_hive import BASE, learn, made
from tests.tinker.whole_hive import PYTHON, Hive
from tinker import types

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")

DAY_S = 86_400
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def service(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    metadata = {"team": "bees"}
    return tinker.ServiceClient(base_url=hive.url, api_key="tml-key", user_metadata=metadata)


@pytest.fixture
def rest(hive: Hive) -> Any:
    return tinker.RestClient(base_url=hive.url, api_key="tml-key")


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").split("/")[0]


def entry(rest: Any, path: str) -> Any:
    (found,) = [each for each in rest.list_checkpoints(run_of(path)).result().checkpoints if each.tinker_path == path]
    return found


def test_models_sessions_and_checkpoints_are_listed_with_what_their_clients_said_of_them(
    service: Any, rest: Any
) -> None:
    metadata = {"purpose": "a test"}
    model = service.create_lora_training_client(
        base_model=BASE, rank=4, seed=1, train_mlp=False, user_metadata=metadata
    ).result()
    path = model.save_state("listed", ttl_seconds=DAY_S, user_metadata={"step": "0"}).result().path
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run == rest.get_training_run(run_of(path)).result()
    assert (run.base_model, run.lora_rank, run.is_lora, run.user_metadata) == (BASE, 4, True, metadata)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    assert run in rest.list_training_runs(limit=100).result().training_runs
    kept = entry(rest, path)
    assert (kept.checkpoint_id, kept.checkpoint_type, kept.public) == ("weights/listed", "training", False)
    assert kept.user_metadata == {"step": "0"}
    assert (kept.expires_at - kept.time).total_seconds() == pytest.approx(DAY_S, abs=1)
    assert kept in rest.list_user_checkpoints(limit=100).result().checkpoints
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_attn) == (BASE, 4, False, True)
    session = run_of(path).split(":")[0]
    assert session in rest.list_sessions(limit=1000).result().sessions
    shown = rest.get_session(session).result()
    assert (shown.training_run_ids, shown.user_metadata) == ([run_of(path)], {"team": "bees"})
    search = types.SessionSearchRequest(user_metadata={"team": "bees"}, session_id=session)
    (summary,) = rest.search_sessions(search).result().sessions
    assert (summary.session_id, summary.checkpoints_count, summary.status.type) == (session, 1, "active")
    assert rest.get_server_capabilities().result().supported_models[0].model_name == BASE


def test_a_checkpoint_gets_another_lifetime_and_is_published(service: Any, rest: Any) -> None:
    path = made(service, rank=4, seed=2).save_weights_for_sampler("kept").result().path
    assert entry(rest, path).expires_at is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 2 * DAY_S).result()
    assert entry(rest, path).expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert entry(rest, path).expires_at is None
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert entry(rest, path).public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not entry(rest, path).public
    sampler = service.create_sampling_client(model_path=path).result()
    found = rest.get_sampler(sampler._sampling_session_id).result()
    assert (found.base_model, found.model_path) == (BASE, path)
    rest.delete_checkpoint(run_of(path), "sampler_weights/kept").result()
    assert rest.list_checkpoints(run_of(path)).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no checkpoint sampler_weights/kept"):
        rest.publish_checkpoint_from_tinker_path(path).result()


def test_weights_for_others_are_downloaded_by_their_links_and_as_an_archive(
    hive: Hive, service: Any, rest: Any, tmp_path: Path
) -> None:
    model = made(service, rank=4, seed=3)
    learn(model, 1)
    path = model.save_weights_external("out").result().path
    links = rest.get_external_weights_urls(path).result()
    assert set(links.urls) == ADAPTER
    for name, url in links.urls.items():
        with urllib.request.urlopen(url, timeout=60) as response:
            (tmp_path / name).write_bytes(response.read())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in weights.items() if "lora_A" in name} == {4}
    url = f"{hive.url}/api/v1/training_runs/{run_of(path)}/checkpoints/external_weights/out/archive"
    with (
        urllib.request.urlopen(url, timeout=60) as response,
        tarfile.open(fileobj=io.BytesIO(response.read())) as tar,
    ):
        assert set(tar.getnames()) == {f"out/{name}" for name in ADAPTER}
        file = tar.extractfile("out/adapter_model.safetensors")
        assert file is not None
        assert file.read() == (tmp_path / "adapter_model.safetensors").read_bytes()


def test_the_command_downloads_a_training_checkpoint(hive: Hive, service: Any, tmp_path: Path) -> None:
    path = made(service, rank=4, seed=4).save_state("to-download").result().path
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path)]
    environment = {
        "TINKER_BASE_URL": hive.url,
        "TINKER_API_KEY": "tml-key",
        "TINKER_TELEMETRY": "0",
        "HOME": str(tmp_path),
    }
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert {file.name for file in tmp_path.rglob("adapter_*")} == ADAPTER


def test_what_a_hive_does_not_have_is_refused_in_words(hive: Hive, service: Any, rest: Any) -> None:
    path = made(service, rank=4, seed=5).save_state("here").result().path
    session = run_of(path).split(":")[0]
    with pytest.raises(tinker.BadRequestError, match="not copied here"):
        rest.copy_weights(path, destination_project_id="p").result()
    with pytest.raises(tinker.BadRequestError, match="no projects"):
        rest.assign_session_project(session, "p").result()
    with pytest.raises(RuntimeError, match="not exported here"):
        rest.export_session_trace(session).result()
    with pytest.raises(RuntimeError, match="whoami requires JWT"):
        rest.whoami().result()
    admin = tinker.AdminClient(base_url=hive.url, api_key="tml-key")
    with pytest.raises(tinker.BadRequestError, match="has no billing"):
        admin.get_audit_log().result()
