"""`bombus run-api` and `bombus atropos`."""

import json
from pathlib import Path

import httpx
import pytest
import yaml

from bombus.cli import main
from bombus.machine.process import free_port
from tests.atropos.run_api import TRAINER, run_api

GROUP = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [1.0, 0.0]}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["atropos", *arguments]) == 0
    return capsys.readouterr().out


def test_what_is_printed_is_yaml_of_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--model", "some/model", "--server-type", "sglang")
    assert yaml.safe_load("\n".join(line for line in out.splitlines() if not line.startswith("export"))) == {
        "env": {"rollout_server_url": "http://127.0.0.1:8000", "tokenizer_name": "some/model"},
        "openai": [
            {
                "base_url": "http://127.0.0.1:8000/v1",
                "api_key": "KEY",
                "model_name": "some/model",
                "server_type": "sglang",
                "health_check": False,
            }
        ],
    }
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in out


def test_an_engine_and_a_key_are_in_the_path_because_environments_send_no_headers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "--url", "https://h.test/", "--engine", "scored", "--inference-engine", "main", "--with-key")
    assert '  rollout_server_url: "https://h.test/k/CLIENT_KEY/e/scored"' in out.splitlines()
    assert '  - base_url: "https://h.test/e/main/v1"' in out.splitlines()


def test_another_server_can_be_sampled_from(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://gpu:9001", "http://gpu:9001/v1/"):
        assert '  - base_url: "http://gpu:9001/v1"' in printed(capsys, "--inference-url", url).splitlines()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a\nb", "http://a/?y", "http://a#z"])
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atropos", "--url", url]) == 2
    assert "it must be an address such as" in capsys.readouterr().err


def test_a_hive_beyond_loopback_needs_keys_or_a_trusted_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-api", "--host", "0.0.0.0", "--dry-run"]) == 2
    assert main(["run-api", "--host", "0.0.0.0", "--trusted-network", "--dry-run"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if " -m bombus " in line]
    assert [line.split(" -m bombus ")[1].split()[0] for line in commands] == ["coordinator", "gateway"]
    assert "--port 8000" in commands[1]


def test_groups_outlive_a_restart_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    with run_api(tmp_path, port=port) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/").json()["message"] == "AtroposLib API"
        assert "uuid" in client.post("/register", json=TRAINER).json()
        assert client.get("/batch").json() == {"batch": None}
        assert client.post("/scored_data", content=json.dumps(GROUP)).json() == {"status": "received"}
    with run_api(tmp_path, port=port) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/status").json() == {"current_step": 0, "queue_size": 1}
        (group,) = client.get("/batch").json()["batch"]
        assert group["tokens"] == GROUP["tokens"]
        assert client.get("/batch").json() == {"batch": None}
