"""Renders compose.yaml: a whole hive on one host, each process in a container of its own, with three NATS servers."""

from collections.abc import Mapping
from typing import Any

from bombus.bus_address import VARIABLE
from bombus.config.cluster import Cluster, Jobs
from bombus.deploy import nats
from bombus.deploy.containers import (
    CLUSTER,
    CONFIG_FOLDER,
    DATA,
    GRACE_S,
    HEALTHY,
    Container,
    containers,
    start_file,
    starter,
)
from bombus.deploy.nodes import HEAD, dumped

SECRET = "{0}:?set {0} in .env"  # Compose refuses to start without it
SHARED_MEMORY = "8gb"  # through which ranks on several GPUs exchange data
KEEP = {"restart": "unless-stopped"}
CHECKS = {"interval": "10s", "timeout": "5s", "start_period": "60s", "retries": 6}
HARDENED = {"read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


def render(cluster: Cluster, jobs: Jobs) -> Mapping[str, str]:
    """Return compose.yaml and the files that it mounts, by their names."""
    found = containers(cluster)
    password = _from_env(nats.PASSWORD)
    hosts = [f"nats-{number}" for number in range(nats.SERVERS)]
    bus = {VARIABLE: _from_env(VARIABLE)} if cluster.nats else nats.address(password, hosts)
    services: dict[str, Any] = {}
    if not cluster.nats:
        services |= {host: _nats(cluster, password, host, hosts) for host in hosts}
    waits = {} if cluster.nats else {"depends_on": {host: {"condition": "service_healthy"} for host in hosts}}
    for container in found:
        services[container.name] = {**_service(container, bus), **waits}
        if container.kind == "gateway":
            # Published on this host alone, and each gateway at a port of its own.
            last = container.port + container.count - 1
            services[container.name]["ports"] = [f"127.0.0.1:{container.port}-{last}:{container.port}"]
    if jobs:
        services["start"] = {**_service(starter(cluster), bus), **waits, "restart": "on-failure"}
        services["start"]["volumes"] = [f"./{CLUSTER}:{CONFIG_FOLDER}/{CLUSTER}:ro"]
    volumes: dict[str, Any] = {name: {} for name in ("data", *(() if cluster.nats else hosts))}
    tree = {"name": f"bombus-{cluster.hive}", "services": services, "volumes": volumes}
    files = {"compose.yaml": HEAD + dumped(tree)}
    if not cluster.nats:
        files[nats.CONFIG] = nats.configuration(cluster)
    return files | ({CLUSTER: start_file(cluster, jobs)} if jobs else {})


def _from_env(name: str) -> str:
    return f"${{{SECRET.format(name)}}}"


def _nats(cluster: Cluster, password: str, host: str, hosts: list[str]) -> dict[str, Any]:
    return {
        "image": cluster.deploy.nats_image,
        "command": ["--config", f"{nats.FOLDER}/{nats.CONFIG}"],
        "environment": nats.variables(password, host, hosts),
        "volumes": [f"./{nats.CONFIG}:{nats.FOLDER}/{nats.CONFIG}:ro", f"{host}:{nats.STORE}"],
        "healthcheck": {"test": ["CMD", "wget", "-q", "-O", "/dev/null", nats.health()], **CHECKS},
        **KEEP,
    }


def _service(container: Container, bus: Mapping[str, str]) -> dict[str, Any]:
    secrets = {name: _from_env(name) for name in container.secrets}
    service: dict[str, Any] = {
        "image": container.image,
        **({"entrypoint": list(container.program)} if container.program else {}),
        "command": [_literal(word) for word in container.arguments],
        "environment": {**container.environment, **bus, **secrets},
        **HARDENED,
        "stop_grace_period": f"{GRACE_S}s",
        **KEEP,
    }
    if container.port:
        service["healthcheck"] = {"test": ["CMD", HEALTHY, container.health], **CHECKS}
    if container.count > 1:
        service["deploy"] = {"replicas": container.count}
    if container.writes or container.reads:
        service["volumes"] = [f"data:{DATA}" + ("" if container.writes else ":ro")]
    if container.gpus > 1:
        service["shm_size"] = SHARED_MEMORY
    if container.gpus:
        device = {"driver": "nvidia", "count": container.gpus, "capabilities": ["gpu"]}
        service.setdefault("deploy", {})["resources"] = {"reservations": {"devices": [device]}}
    return service


def _literal(word: str) -> str:
    """Return a word in which Compose replaces nothing."""
    return word.replace("$", "$$")
