"""Renders compose.yaml: a whole hive on one host, each process in a container of its own, with three NATS servers."""

from collections.abc import Mapping
from typing import Any

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

HOSTS = [f"nats-{number}" for number in range(nats.SERVERS)]
SECRET = "{0}:?set {0} in .env"  # Compose refuses to start without it
SHARED_MEMORY = "8gb"  # through which ranks on several GPUs exchange data
KEEP = {"restart": "unless-stopped"}
CHECKS = {"interval": "10s", "timeout": "5s", "start_period": "60s", "retries": 6}
HARDENED = {"read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


def render(cluster: Cluster, jobs: Jobs) -> Mapping[str, str]:
    """Return compose.yaml and the files that it mounts, by their names."""
    found = containers(cluster)
    hosts = [] if cluster.nats else HOSTS
    services: dict[str, Any] = {host: _nats(cluster, host) for host in hosts}
    waits = {} if cluster.nats else {"depends_on": {host: {"condition": "service_healthy"} for host in hosts}}
    for container in found:
        services[container.name] = {**_service(cluster, container), **waits}
        if container.kind in ("gateway", "web"):
            # Published on this host alone, and each gateway at a port of its own.
            last = container.port + container.count - 1
            services[container.name]["ports"] = [f"127.0.0.1:{container.port}-{last}:{container.port}"]
    if jobs:
        services["start"] = {**_service(cluster, starter(cluster)), **waits, "restart": "on-failure"}
        services["start"]["volumes"] = [f"./{CLUSTER}:{CONFIG_FOLDER}/{CLUSTER}:ro"]
    volumes: dict[str, Any] = {name: {} for name in ("data", *hosts)}
    tree = {"name": f"bombus-{cluster.hive}", "services": services, "volumes": volumes}
    return {"compose.yaml": HEAD + dumped(tree)} | ({CLUSTER: start_file(cluster, jobs)} if jobs else {})


def _nats(cluster: Cluster, host: str) -> dict[str, Any]:
    return {
        "image": cluster.deploy.nats_image,
        "command": nats.arguments(host),
        "volumes": [f"./{nats.SECRETS}:{nats.FOLDER}:ro", f"{host}:{nats.STORE}"],
        "healthcheck": {"test": ["CMD", "wget", "-q", "-O", "/dev/null", nats.health()], **CHECKS},
        **KEEP,
    }


def _service(cluster: Cluster, container: Container) -> dict[str, Any]:
    secrets = {name: f"${{{SECRET.format(name)}}}" for name in container.secrets}
    service: dict[str, Any] = {
        "image": container.image,
        **({"entrypoint": list(container.program)} if container.program else {}),
        "command": [_literal(word) for word in container.arguments],
        "environment": {**container.environment, **secrets},
        "env_file": [nats.login(cluster, container.login)],
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
