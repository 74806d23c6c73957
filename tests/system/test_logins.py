"""A hive whose services log in with credentials of `bombus init`, on a nats-server with its configuration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from bombus import Job, SwarmClient, Task, WorkflowOutput
from bombus.bus_address import BusUser
from bombus.host.credentials import read_environment
from bombus.machine.process import free_port
from tests.bus.guarded_server import guarded_server
from tests.bus.test_tls import trusting
from tests.system.test_up import Up


def agent(task: Task, credentials: object) -> WorkflowOutput:
    model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)  # type: ignore[attr-defined]
    messages = [{"role": "user", "content": task.main_query}]
    reply = model.chat.completions.create(model="any", messages=messages, max_tokens=4)  # type: ignore[arg-type]
    return WorkflowOutput(reward=float((reply.choices[0].message.content or "").count(task.task_id)))


@pytest.mark.parametrize("scheme", ["nats", "tls"])
def test_a_hive_trains_while_each_service_has_only_its_own_login(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, everything is encrypted: the bus, gateways, replicas, the page and metrics."""
    folder, cluster = tmp_path / "credentials", tmp_path / "cluster.yaml"
    engine = {"trainer": {"weights_by": "objects"}, "inference": [{}]}
    cluster.write_text(json.dumps({"credentials": str(folder), "engines": {"main": engine}}))
    with guarded_server(folder, "main", tls=["localhost"] if scheme == "tls" else []), trusting(folder, monkeypatch):
        up = Up(tmp_path, "--config", str(cluster), "--metrics-port", str(free_port()), "--gateways", "2")
        try:
            keys = read_environment(folder, "main", BusUser.GATEWAY)
            with SwarmClient(up.url, api_key=keys["BOMBUS_ADMIN_KEY"]) as client:
                job = Job(model="tiny", batch_size=1, num_repeat=2, lr=1e-3)
                client.auto_sync_train_config_and_start_engine(job)
                task = Task(task_id="a", main_query="a=")
                while client.get_global_step() < 2:
                    client.run_episodes_until_all_complete([task], lambda task: client.run_group(task, agent, 2))
            for kind, user in (("trainer", "trainer"), ("inference", "inference"), ("gateway", "gateway")):
                for process in up.services(kind):
                    assert process.environ()["BOMBUS_NATS"].startswith(f"{scheme}://main.{user}.1:")
            assert up.url.startswith("https://" if scheme == "tls" else "http://")
            assert f"listening at {up.url.split(':')[0]}://" in up.log.read_text(), "the replica"
            observer = read_environment(folder, "main", BusUser.OBSERVER)
            for command in (["status", "--json"], ["log", "check"], ["audit"], ["why"], ["replay", "timeline"]):
                told = subprocess.run(
                    [sys.executable, "-m", "bombus", *command],
                    env={**os.environ, **observer},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert told.returncode == 0, f"{command}: {told.stderr}"
        finally:
            left = up.interrupt()
        assert left == []
        assert "Traceback" not in up.log.read_text()
