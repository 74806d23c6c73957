"""A hive of real processes, as Prometheus and an OpenTelemetry collector see it.

Prometheus is a real one, with the configuration, alerts and dashboard of deploy/.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AuthenticationError, OpenAI
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from bombus.machine.process import free_port
from tests.metrics_page import documented
from tests.otlp import Collector, Received, collecting
from tests.patience import wait_until
from tests.system.test_up import FRESH, READY_S, ROOT, Up

DEPLOY = ROOT / "deploy"
ADMIN, CLIENT = "admin-key-of-the-test", "client-key-of-the-test"
PROMPT = "the unmistakable prompt of a client"
ENGINE = "main"
NAMES = re.compile(r"\b(?:bombus|up)(?:_[a-z_]+)?\b")
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
NEEDS_VLLM = {"prefix_hit_ratio", "prefix_queried_tokens_total", "engine_starts_total"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (apt install prometheus)"
)


class Lab:
    """A hive that has made two steps, and what it tells."""

    def __init__(self, up: Up, port: int, collector: Collector, secrets: list[str]) -> None:
        self.up = up
        self.collector = collector
        self.port = port  # of the coordinator's metrics; the trainer's is the next one
        self.secrets = secrets
        show = [sys.executable, "-m", "bombus", "inference", "--nats", up.nats, "--show-key"]
        self.replica_key = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()

    def texts(self) -> dict[str, str]:
        """Return the metrics of each service."""
        (group,) = self._get(f"{self.up.url}/metrics/replicas", CLIENT).json()
        places = {
            "Gateways": (f"{self.up.url}/metrics", CLIENT),
            "Coordinators": (f"http://127.0.0.1:{self.port}/metrics", self.replica_key),
            "Trainers": (f"http://127.0.0.1:{self.port + 1}/metrics", self.replica_key),
            "Replicas": (f"http://{group['targets'][0]}/metrics", self.replica_key),
        }
        for url, _ in places.values():
            assert httpx.get(url).status_code == 401, "nobody reads metrics without a key"
        return {service: self._get(*place).text for service, place in places.items()}

    def _get(self, url: str, key: str) -> httpx.Response:
        return httpx.get(url, headers={"authorization": f"Bearer {key}"}).raise_for_status()


def free_pair() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            if port < 65_000 and probe.connect_ex(("127.0.0.1", port + 1)):
                return port


# Plays a group, and then another of episodes that are claimed and ended one by one. Prints what is secret.
PROGRAM = """
import json, sys
from openai import OpenAI
from bombus import Job, SwarmClient, Task, WorkflowOutput

url, key, job, prompt = sys.argv[1:]
task = Task(task_id="my-own-task", main_query=prompt)
secrets = [task.task_id, "my-own-name"]


def agent(task, credentials):
    model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key, max_retries=0)
    messages = [{"role": "user", "content": prompt}]
    reply = model.chat.completions.create(model="my-own-name", messages=messages, max_tokens=8)
    secrets.extend((credentials.api_key, credentials.episode_uuid))
    return WorkflowOutput(reward=float(len(set(reply.choices[0].message.content or ""))))


with SwarmClient(url, api_key=key) as client:
    client.auto_sync_train_config_and_start_engine(Job(**json.loads(job)))
    client.run_group(task, agent, 4)
with SwarmClient(f"{url}/k/{key}") as client:
    client.wait_for_status("ENGINE.ROLLING")
    for _ in range(4):
        episode, credentials = client.begin_episode()
        client.end_episode(task, episode, agent(task, credentials))
print(json.dumps(secrets))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    for name, key in (("admin", ADMIN), ("client", CLIENT)):
        (folder / name).write_text(key)
    port = free_pair()
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        up = Up(folder, "--admin-key-file", str(folder / "admin"), "--client-key-file", str(folder / "client"),
                "--metrics-port", str(port))  # fmt: skip
        job = {"model": "tiny", "batch_size": 1, "num_repeat": 4, "bombus": FRESH}
        command = [sys.executable, "-c", PROGRAM, up.url, ADMIN, json.dumps(job), PROMPT]
        played = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
        assert played.returncode == 0, played.stderr
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{up.url}/v1", api_key="sk-wrong", max_retries=0).models.list()
        wait_until(lambda: sum(span.name == "trainer.step" for span in collector.spans) == 2)
        yield Lab(up, port, collector, [ADMIN, CLIENT, PROMPT, *json.loads(played.stdout)])
        assert up.interrupt() == [], "Ctrl-C leaves no process running"


def kinds_of(text: str) -> dict[str, str]:
    lines = re.findall(r"^# TYPE (bombus_\w+) (\w+)$", text, re.MULTILINE)
    assert len(lines) == len(dict(lines)), "each metric is declared once"
    return dict(lines)


def test_each_service_exposes_what_the_page_lists_and_nothing_else(lab: Lab) -> None:
    for service, text in lab.texts().items():
        listed = {name: kind for name, kind, _, _ in documented()[service]}
        missing = listed.items() - kinds_of(text).items()
        assert kinds_of(text).items() <= listed.items()
        assert {name.removeprefix("bombus_inference_") for name, _ in missing} <= NEEDS_VLLM


def test_no_metric_names_what_only_its_client_may_see(lab: Lab) -> None:
    secrets = [*lab.secrets, lab.replica_key]
    for service, text in lab.texts().items():
        assert [secret for secret in secrets if secret in text] == [], service
    labels = set(re.findall(r'[{,](\w+)="', "".join(lab.texts().values())))
    assert labels <= {"engine", "outcome", "kind", "code", "phase", "fate", "state", "stream", "le"}


@needs_promtool
def test_promtool_has_nothing_to_say_about_names_units_and_help(lab: Lab) -> None:
    for service, text in lab.texts().items():
        ours = "".join(line for line in text.splitlines(keepends=True) if "process_" not in line)
        told = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True)
        assert (told.returncode, told.stdout + told.stderr) == (0, ""), service


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_alerts(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    for name in ("client.key", "replica.key"):
        (tmp_path / "deploy" / name).write_text("key")
    told = subprocess.run(
        ["promtool", "check", "config", "--lint-fatal", str(tmp_path / "deploy/prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def expressions() -> list[str]:
    """Return every expression of the alerts and of the dashboard."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [rule["expr"] for rule in group["rules"]] + [each["expr"] for panel in panels for each in panel["targets"]]


def names_in(expression: str) -> set[str]:
    """Return the metrics that an expression names, without the suffixes of histograms."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return {HISTOGRAM.sub("", name) for name in NAMES.findall(bare)}


def test_alerts_and_dashboard_use_only_what_a_hive_exposes(lab: Lab) -> None:
    exposed = set().union(*(kinds_of(text) for text in lab.texts().values())) | {"up"}
    for expression in expressions():
        assert names_in(expression), expression
        assert names_in(expression) <= exposed, expression


ALARMS = {
    "BombusTargetDown": ({'up{job="bombus"}': "0x20"}, "5m"),
    "BombusNoLeader": ({"bombus_coordinator_leading": "1 0x20"}, "5m"),
    "BombusInboxLag": ({"bombus_coordinator_inbox_lag_messages": "5000x20"}, "10m"),
    "BombusRunSuspended": ({'bombus_engine_suspended{engine="main"}': "0 1x20"}, "5m"),
    "BombusReplicaQuarantined": ({'bombus_engine_replicas{engine="main",state="quarantined"}': "0 1x20"}, "5m"),
    "BombusNoReplica": (
        {
            'bombus_engine_replicas{engine="main",state="serving"}': "0x20",
            'bombus_engine_phase{engine="main",phase="rolling"}': "1x20",
        },
        "10m",
    ),
    "BombusNoStep": (
        {
            'bombus_engine_last_step_timestamp_seconds{engine="main"}': "7x200",
            'bombus_engine_phase{engine="main",phase="offline"}': "0x200",
            'bombus_engine_operations_total{engine="main",state="executed"}': "0x200",
        },
        "90m",
    ),
    "BombusStepFails": ({'bombus_engine_step_failures{engine="main"}': "2x20"}, "1m"),
    "BombusStreamNearlyFull": (
        {'bombus_stream_size_bytes{stream="calls"}': "85x20", 'bombus_stream_limit_bytes{stream="calls"}': "100x20"},
        "10m",
    ),
    "BombusRefusesWork": ({"bombus_hive_full": "1x20"}, "1m"),
    "BombusDiskNearlyFull": ({"bombus_disk_free_bytes": "5x20", "bombus_disk_size_bytes": "100x20"}, "10m"),
    "BombusManyErrors": (
        {
            'bombus_gateway_refusals_total{code="internal"}': "0+60x20",
            'bombus_gateway_calls_total{engine="main",outcome="complete"}': "0+60x20",
        },
        "12m",
    ),
}


@needs_promtool
def test_each_alert_fires_at_what_it_is_for_and_no_other_does(tmp_path: Path) -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(ALARMS)
    sound = {"bombus_coordinator_leading": "1x200"}
    tests = []
    for alarm, (series, at) in ALARMS.items():
        given = [{"series": name, "values": values} for name, values in {**sound, **series}.items()]
        fires = {
            name: [f"count(ALERTS{{alertname='{name}',alertstate='firing'}})", 1.0 if name == alarm else None]
            for name in ALARMS
        }
        expected = [
            {"expr": expression, "eval_time": at, "exp_samples": [{"value": count}] if count else []}
            for expression, count in fires.values()
        ]
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": expected})
    file = tmp_path / "tests.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "15s", "tests": tests})
    )
    told = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


class Prometheus:
    """A Prometheus with the files of deploy/, which scrapes every second."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        shutil.copytree(DEPLOY, folder)
        (folder / "client.key").write_text(CLIENT)
        (folder / "replica.key").write_text(lab.replica_key)
        file = folder / "prometheus.yml"
        text = file.read_text().replace("15s", "1s").replace("http://127.0.0.1:10086", lab.up.url)
        for written, here in {"10086": lab.up.url.rpartition(":")[2], "9464": lab.port, "9465": lab.port + 1}.items():
            text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{here}")
        file.write_text(text)
        self.url = f"http://127.0.0.1:{free_port()}"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address={self.url.removeprefix('http://')}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def result(self, expression: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expression)["result"])

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def prometheus(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path_factory.mktemp("prometheus") / "deploy", lab)
    try:
        wait_until(running.is_ready)
        wait_until(lambda: len(running.result('count_over_time(up{job=~"bombus.*"}[1m]) > 2')) == 4)
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)


@needs_prometheus
def test_prometheus_scrapes_every_service_of_a_hive(prometheus: Prometheus) -> None:
    assert [float(each["value"][1]) for each in prometheus.result("up")] == [1.0] * 4
    assert float(prometheus.result("max(bombus_coordinator_leading)")[0]["value"][1]) == 1
    assert float(prometheus.result("sum(bombus_trainer_steps_total)")[0]["value"][1]) == 2
    stored = set(prometheus.ask("label/__name__/values"))
    for expression in expressions():
        used = set(NAMES.findall(re.sub(r'"[^"]*"', "", expression)))
        assert used <= stored, f"{expression} names what was not stored"


@needs_prometheus
def test_every_panel_and_rule_is_answered_and_nothing_alarms_about_a_sound_hive(prometheus: Prometheus) -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            asked = target["expr"].replace("$engine", ENGINE).replace("$__rate_interval", "1m")
            assert prometheus.result(asked), f"{panel['title']} has no points"
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.ask("rules")["groups"][0]["rules"]))
    assert len(rules) > 10
    alarmed = {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}
    assert alarmed <= {"BombusNoStep"}, "which is pending for the first hour without a step"


# ---- traces -------------------------------------------------------------------------------------------------------


def test_one_episode_is_traced_from_the_sdk_through_every_service_into_its_step(lab: Lab) -> None:
    spans = lab.collector.spans
    by_id = {span.id: span for span in spans}

    def path(span: Received) -> list[str]:
        """Return the names from the root of the trace down to this span."""
        above = path(by_id[span.parent]) if span.parent else []
        about = span.attributes.get("url.path") or span.attributes.get("bombus.message") or ""
        return [*above, f"{span.service.removeprefix('bombus-')} {span.name} {about}".strip()]

    (group,) = [span for span in spans if span.name == "sdk.group"]
    traced = [span for span in spans if span.trace == group.trace]
    claimed = [
        "client sdk.group",
        "client sdk.request /claim_episodes",
        "gateway gateway.command claim",
        "coordinator coordinator.decide claim",
    ]
    for call in [span for span in traced if span.name == "chat"]:
        episode = call.attributes["gen_ai.conversation.id"]
        assert path(call) == [*claimed, "gateway chat"]
        below = [span for span in traced if span.parent == call.id]
        (generated,) = [span for span in below if span.name == "inference.generate"]
        assert generated.attributes["gen_ai.conversation.id"] == episode
        assert generated.attributes["gen_ai.response.id"] == call.attributes["gen_ai.response.id"]
        assert [path(span)[-1] for span in below if span != generated] == [
            "coordinator coordinator.decide call.recorded"
        ]
        (agent,) = [span for span in traced if span.attributes.get("gen_ai.operation.name") == "invoke_agent"
                    and span.attributes["gen_ai.conversation.id"] == episode]  # fmt: skip
        assert path(agent) == ["client sdk.group", "client invoke_agent"]
        assert call.kind == generated.kind == Span.SPAN_KIND_SERVER
        assert call.attributes["gen_ai.request.model"] == "tiny"
        assert call.attributes["gen_ai.usage.output_tokens"] > 0
        assert call.attributes["gen_ai.usage.input_tokens"] == generated.attributes["gen_ai.usage.input_tokens"] > 0
    assert sum(span.name == "chat" for span in traced) == 4
    (step,) = [span for span in traced if span.name == "trainer.step"]
    assert path(step) == [
        "client sdk.group",
        "client sdk.request /end_episodes",
        "gateway gateway.command end",
        "coordinator coordinator.decide end",
        "trainer trainer.step",
    ]
    assert step.attributes["bombus.step"] == 1


def test_a_step_is_linked_to_the_traces_of_episodes_that_were_claimed_one_by_one(lab: Lab) -> None:
    spans = lab.collector.spans
    (group,) = [span for span in spans if span.name == "sdk.group"]
    (step,) = [span for span in spans if span.name == "trainer.step" and span.trace != group.trace]
    calls = [span for span in spans if span.name == "chat" and span.trace != group.trace]
    assert len({span.trace for span in calls}) == 4
    assert step.links == {span.trace for span in calls}


def test_spans_have_the_names_of_the_conventions_and_nothing_that_only_a_client_may_see(lab: Lab) -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.isupper() and isinstance(value, str)}
    names = {name for span in lab.collector.spans for name in span.attributes}
    assert {name for name in names if name.startswith("gen_ai.")} <= known
    assert not names & {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"}
    sent = b"".join(body for _, body in lab.collector.bodies)
    assert [secret for secret in [*lab.secrets, lab.replica_key] if secret.encode() in sent] == []
