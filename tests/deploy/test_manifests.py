"""No manifest names a flag, a port, a variable or a metric that does not exist."""

import argparse
import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bombus.bus_address import VARIABLE
from bombus.cli import COMMANDS, load, main
from bombus.commands.deploy import RENDERERS
from bombus.commands.deployment import cluster_in
from bombus.config.cluster import Cluster, Jobs
from bombus.config.flags import Parser
from bombus.deploy import compose, kubernetes, skypilot, slurm
from bombus.deploy.containers import containers
from bombus.deploy.nodes import gpus_of, nodes_of
from bombus.errors import Refused
from bombus.host.supervisor import STOP_S
from bombus_inference.cli import settings_of
from bombus_trainer.options import add_options, options_of
from tests.deploy.clusters import JOB, LARGE, SMALL, read
from tests.metrics_page import documented

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r"\$\((\w+)\)|\$\{(\w+):\?[^}]*\}")
# What a manifest alone knows: it becomes a part of another variable, or of an argument.
OF_MANIFESTS = {kubernetes.POD_NAME}


class Running(NamedTuple):
    """A container as a manifest describes it."""

    name: str
    program: list[str]
    arguments: list[str]
    environment: dict[str, str]  # with an empty value for what comes from a secret
    port: int


@pytest.fixture(params=["small", "large"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, Jobs]:
    monkeypatch.setenv(VARIABLE, "nats://user:secret@bus:4222")
    return read({"small": SMALL, "large": LARGE}[request.param], tmp_path)


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def in_compose(files: Mapping[str, str]) -> Iterator[Running]:
    for name, service in yaml.safe_load(files["compose.yaml"])["services"].items():
        if not name.startswith("nats-"):
            probe = service.get("healthcheck", {}).get("test", [""])[-1]
            words = [word.replace("$$", "$") for word in service["command"]]
            port = int(probe.split(":")[2].partition("/")[0]) if probe else 0
            yield Running(name, service.get("entrypoint", []), words, service["environment"], port)


def in_kubernetes(files: Mapping[str, str]) -> Iterator[Running]:
    for text in (text for name, text in files.items() if name.endswith(".yaml") and name != "cluster.yaml"):
        for document in documents(text):
            if document["kind"] in ("Deployment", "Job"):
                (container,) = document["spec"]["template"]["spec"]["containers"]
                environment = {each["name"]: each.get("value", "") for each in container["env"]}
                port = container["ports"][0]["containerPort"] if "ports" in container else 0
                name = document["metadata"]["name"]
                yield Running(name, container.get("command", []), container["args"], environment, port)


WAYS: list[tuple[Callable[[Cluster, Jobs], Mapping[str, str]], Callable[[Mapping[str, str]], Iterator[Running]]]] = [
    (compose.render, in_compose),
    (kubernetes.render, in_kubernetes),
]


def parsed(words: list[str]) -> argparse.Namespace:
    """Parse a command line of `bombus` as bombus does. Raises `SystemExit` for what it does not know."""
    command = COMMANDS[words[0]]
    words = words[1:]
    if command.subcommands:
        command, words = command.subcommands[words[0]], words[1:]
    parser = Parser(prog="bombus", allow_abbrev=False)
    load(command.module, command.extra).add_arguments(parser)
    return parser.parse_args(words)


def check_command(running: Running) -> int:
    """Check a command line and its settings as the service does. Return the port at which it answers, or 0."""
    if running.program:
        assert running.program == ["tini", "--", "python", "-m", "bombus_trainer.torchrun"]
        parser = Parser(allow_abbrev=False)
        add_options(parser)
        worker = running.arguments.index("bombus_trainer.worker")
        return options_of(parser.parse_args(running.arguments[worker + 1 :])).metrics_port
    arguments = parsed(running.arguments)
    match running.arguments[0]:
        case "trainer":
            return options_of(arguments).metrics_port
        case "inference":
            return settings_of(arguments).http.port
        case "gateway" | "web":
            return int(arguments.port)
        case "coordinator":
            return int(arguments.metrics_port)
        case _:
            return 0


@cache
def named_in_the_product() -> frozenset[str]:
    """Return the strings that name a variable of ours anywhere but where manifests are rendered."""
    found = set()
    for path in [*ROOT.glob("shared/bombus/**/*.py"), *ROOT.glob("services/**/*.py")]:
        if "deploy" not in path.parts[-2]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("BOMBUS_"):
                    found.add(node.value)
    return frozenset(found)


def check_variables(running: Running, secrets: set[str]) -> None:
    referred = {found for text in [*running.environment.values(), *running.arguments] for found in _references(text)}
    for name, value in running.environment.items():
        if name.startswith("BOMBUS_"):
            assert name in named_in_the_product(), f"nothing reads {name}"
        elif not value and name not in secrets:
            assert name in OF_MANIFESTS & referred, f"nothing refers to {name}"
    assert referred <= {*running.environment, *secrets}


def _references(text: str) -> Iterator[str]:
    for found in REFERENCE.finditer(text.replace("$$", "")):
        yield found[1] or found[2]


@pytest.mark.parametrize("way", WAYS, ids=["compose", "kubernetes"])
def test_every_command_line_of_a_container_is_one_that_its_service_accepts(
    deployment: tuple[Cluster, Jobs], way: tuple[Any, Any]
) -> None:
    render, running_in = way
    cluster, jobs = deployment
    names = {container.name for container in containers(cluster)} | {"start"}
    secrets = {name for container in containers(cluster) for name in container.secrets}
    found = list(running_in(render(cluster, jobs)))
    assert {running.name for running in found} == names
    for running in found:
        assert check_command(running) == running.port, f"{running.name} answers at another port than it is asked at"
        check_variables(running, secrets)


def test_a_name_that_other_readers_of_yaml_take_for_a_number_is_quoted(tmp_path: Path) -> None:
    cluster, jobs = read({"engines": {"1e3": {"trainer": {}}}}, tmp_path)
    assert "        - '1e3'\n" in kubernetes.render(cluster, jobs)["gateway.yaml"]
    assert "    - '1e3'\n" in compose.render(cluster, jobs)["compose.yaml"]


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    running = next(in_compose(compose.render(*read(SMALL, tmp_path))))
    with pytest.raises(SystemExit):
        check_command(running._replace(arguments=[*running.arguments, "--metrics-prot", "1"]))
    with pytest.raises(AssertionError, match="nothing reads BOMBUS_NAST"):
        check_variables(running._replace(environment={"BOMBUS_NAST": "x"}), set())
    with pytest.raises(AssertionError, match="nothing refers to"):
        check_variables(running._replace(environment={"PASSWORT": ""}), set())


def test_gateways_are_scaled_by_a_metric_that_they_have(deployment: tuple[Cluster, Jobs]) -> None:
    scaled = [
        each for each in documents(kubernetes.render(*deployment)["gateway.yaml"]) if "Autoscaler" in each["kind"]
    ]
    ((metric,),) = [each["spec"]["metrics"] for each in scaled]
    exposed = {service: [name for name, *_ in metrics] for service, metrics in documented().items()}
    assert metric["pods"]["metric"]["name"] in exposed["Gateways"]
    assert metric["pods"]["metric"]["name"] not in exposed["Coordinators"]


def test_probes_services_and_policies_name_ports_that_pods_have(deployment: tuple[Cluster, Jobs]) -> None:
    files = kubernetes.render(*deployment)
    found = [each for name, text in files.items() if name.endswith(".yaml") for each in documents(text)]
    pods = [each["spec"]["template"] for each in found if each.get("kind") in ("Deployment", "StatefulSet", "Job")]

    def chosen(labels: Mapping[str, str]) -> list[dict[str, Any]]:
        return [pod["spec"]["containers"][0] for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]

    for pod in pods:
        (container,) = pod["spec"]["containers"]
        names = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {})
            target = asked.get("httpGet") or asked.get("tcpSocket")
            assert target is None or target["port"] in names
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())} | {"store"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for each in found:
        spec = each.get("spec", {})
        if each.get("kind") == "Service":
            ports = [{port["containerPort"] for port in pod["ports"]} for pod in chosen(spec["selector"])]
            assert ports
            assert all(port["port"] in open_ports for open_ports in ports for port in spec["ports"])
        if each.get("kind") == "NetworkPolicy" and spec["ingress"]:
            (pod,) = chosen(spec["podSelector"]["matchLabels"])
            allowed = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            assert allowed <= {port["containerPort"] for port in pod["ports"]}
        if each.get("kind") in ("PodDisruptionBudget",):
            assert len(chosen(spec["selector"]["matchLabels"])) == 1


def test_a_trainer_has_the_time_that_a_supervisor_would_give_it_to_keep_its_step(tmp_path: Path) -> None:
    cluster, jobs = read(SMALL, tmp_path)
    (pod,) = (
        each["spec"]["template"]["spec"] for each in documents(kubernetes.render(cluster, jobs)["trainer-main.yaml"])
    )
    service = yaml.safe_load(compose.render(cluster, jobs)["compose.yaml"])["services"]["trainer-main"]
    assert pod["terminationGracePeriodSeconds"] > STOP_S
    assert int(service["stop_grace_period"].removesuffix("s")) > STOP_S


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_cluster_is_divided_among_nodes_whose_files_bombus_up_accepts(nodes: int, tmp_path: Path) -> None:
    large = {**LARGE, "nats": "", "streams": {}, "deploy": {"nodes": nodes}}
    cluster, jobs = read(large, tmp_path)
    files = slurm.render(cluster, jobs)
    assert set(files) == {slurm.SCRIPT, *(f"node-{number}.yaml" for number in range(nodes))}
    replicas = []
    for number in range(nodes):
        path = tmp_path / f"node-{number}.yaml"
        path.write_text(files[path.name])
        part, own_jobs = cluster_in(path)
        assert own_jobs == ({} if number else jobs), "each job is started once"
        assert bool(part.coordinator.count) == bool(part.gateway.count) == (number == 0)
        replicas += [
            (name, kind.backend)
            for name, engine in part.engines.items()
            for kind in engine.inference
            for _ in range(kind.count)
        ]
    expected = [("big", "vllm"), ("big", "vllm"), ("big", "openai"), ("small", "torch"), ("small", "torch")]
    assert sorted(replicas) == sorted(expected)
    (asked,) = re.findall(r"--gpus-per-node=(\d+)", files[slurm.SCRIPT])
    assert int(asked) == max(gpus_of(part) for part in nodes_of(cluster)) == (8 if nodes == 1 else 4)
    for line in re.findall(r"exec bombus (up .*?)(?:'|$)", files[slurm.SCRIPT], re.MULTILINE):
        parsed(shlex.split(line))


def test_more_nodes_than_replicas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"deploy\.nodes is 3, but there are only 1 replicas"):
        slurm.render(*read({**SMALL, "deploy": {"nodes": 3}}, tmp_path))


def test_a_skypilot_task_runs_a_command_and_mounts_the_file_that_it_names(tmp_path: Path) -> None:
    files = skypilot.render(*read({**LARGE, "nats": "", "streams": {}}, tmp_path))
    task = yaml.safe_load(files["bombus.sky.yaml"])
    words = shlex.split(task["run"])[1:]
    assert str(parsed(words[1:]).config) in task["file_mounts"]
    assert task["resources"]["accelerators"] == "H100:8"
    assert {path.removeprefix("./") for path in task["file_mounts"].values()} <= set(files)


def test_no_password_and_no_key_is_in_any_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nats://user:hunter2hunter2@bus:4222")
    monkeypatch.setenv("ELSEWHERE_KEY", "hunter3hunter3")
    cluster, jobs = read(LARGE, tmp_path)
    for name in RENDERERS:
        assert "hunter" not in json.dumps(dict(RENDERERS[name](cluster, jobs)))


def test_a_rendered_file_with_a_password_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    path, folder = tmp_path / "cluster.yaml", tmp_path / "rendered"
    path.write_text(yaml.safe_dump({**SMALL, "nats": "nats://user:hunter2@bus:4222"}))
    assert main(["deploy", "render", "--config", str(path), "--to", "slurm", "--out", str(folder)]) == 0
    assert {file.name for file in folder.iterdir() if "hunter2" in file.read_text()} == {"node-0.yaml"}
    assert (folder / "node-0.yaml").stat().st_mode & 0o077 == 0


def test_what_is_printed_can_be_written_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, jobs = read(SMALL, tmp_path)
    assert main(["deploy", "render", "--config", str(tmp_path / "cluster.yaml"), "--to", "compose"]) == 0
    expected = "".join(f"# ---- {name}\n{text}" for name, text in compose.render(cluster, jobs).items())
    assert capsys.readouterr().out == expected


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(SMALL, tmp_path)
    path = str(tmp_path / "cluster.yaml")
    assert main(["deploy", "render", "--config", path, "--to", "compose", "--out", path]) == 2
    assert "cluster.yaml/compose.yaml cannot be written: File exists" in capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS, ids=["compose", "kubernetes"])
def test_what_runs_elsewhere_has_no_container(tmp_path: Path, way: tuple[Any, Any]) -> None:
    render, running_in = way
    tree = {**SMALL, "nats": "$BOMBUS_NATS", "gateway": {"count": 0}, "coordinator": {"count": 0}}
    found = running_in(render(*read(tree, tmp_path)))
    assert {running.name for running in found} == {"trainer-main", "inference-main", "start"}


def test_containers_of_one_name_are_refused(tmp_path: Path) -> None:
    engines: dict[str, Any] = {"a": {"inference": [{}, {}]}, "a-1": {"inference": [{}]}}
    with pytest.raises(Refused, match="two engines have a container inference-a-1"):
        containers(read({"engines": engines}, tmp_path)[0])


@pytest.mark.parametrize("tree", [{**SMALL, "hive": "a-"}, {"engines": {"a-": {"trainer": {}}}}])
def test_a_name_that_kubernetes_refuses_is_not_rendered(tmp_path: Path, tree: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="the name a- ends with a dash"):
        kubernetes.render(*read(tree, tmp_path))


@pytest.mark.parametrize("to", ["compose", "kubernetes"])
def test_each_container_gets_the_login_of_its_service_alone_from_files_that_init_makes(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read({**SMALL, "credentials": "elsewhere"}, tmp_path)
    words = ["--config", str(tmp_path / "cluster.yaml"), "--to", to, "--out", str(tmp_path)]
    assert main(["deploy", "render", *words]) == 0
    (command,) = re.findall(r"make the logins: bombus (init .*)", capsys.readouterr().err)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    if to == "compose":
        services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
        files = {name: each["env_file"] for name, each in services.items() if "env_file" in each}
        assert {each["volumes"][0] for name, each in services.items() if "nats" in name} == {"./secrets:/etc/nats:ro"}
    else:
        made = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["secretGenerator"]
        logins = {each["name"]: each["envs"] for each in made if "envs" in each}
        read_by = {path.stem: documents(path.read_text())[0] for path in tmp_path.glob("*.yaml")}
        files = {
            name: logins[source["secretRef"]["name"]]
            for name, each in read_by.items()
            if each.get("kind") in ("Deployment", "Job")
            for source in each["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        }
        (of_nats,) = [each["files"] for each in made if "files" in each]
        assert all((tmp_path / file.partition("=")[2]).exists() for file in of_nats)
        mounted = documents((tmp_path / "nats.yaml").read_text())[1]["spec"]["template"]["spec"]["volumes"][0]["secret"]
        assert [item["key"] for item in mounted["items"]] == [file.partition("=")[0] for file in of_nats]
        assert {f"secrets/{item['path']}" for item in mounted["items"]} == {file.partition("=")[2] for file in of_nats}
    users = {"coordinator": "coordinator", "gateway": "gateway", "start": "operator"}
    users |= {"trainer-main": "trainer", "inference-main": "inference", "web": "web"}
    assert files == {name: [f"secrets/demo/{user}.env"] for name, user in users.items()}
    assert all((tmp_path / file).read_text().startswith(VARIABLE) for (file,) in files.values())


def test_credentials_that_a_machine_of_a_cloud_would_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="credentials is a folder that the machine of a cloud does not have"):
        skypilot.render(*read({**SMALL, "credentials": "secrets"}, tmp_path))


def test_an_engine_that_verl_trains_is_refused_where_there_are_only_our_images(tmp_path: Path) -> None:
    tree = {"engines": {"main": {"trainer": {"backend": "verl"}, "inference": [{}]}}}
    with pytest.raises(Refused, match="no image contains"):
        compose.render(*read(tree, tmp_path))


def test_a_job_survives_being_written_into_a_cluster_file(tmp_path: Path) -> None:
    cluster, jobs = read(SMALL, tmp_path)
    written = yaml.safe_load(slurm.render(cluster, jobs)["node-0.yaml"])
    assert written["engines"]["main"]["job"]["bombus"]["model"] == JOB["bombus"]["model"]
    again = read(written, tmp_path)
    assert again[1] == jobs
