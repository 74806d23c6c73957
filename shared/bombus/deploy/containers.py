"""The containers of a hive: one for each process that `bombus.host.layout` derives from a cluster file.

Compose and Kubernetes run several of the same container, restart them, and give each its GPUs. The cluster's counts and
GPU numbers therefore become properties of a container, and its process is alone.
"""

import itertools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from bombus.bus_address import BusUser
from bombus.config.cluster import BUS_OF_ENVIRONMENT, Cluster, EnginePart, Jobs
from bombus.config.groups import bad_config
from bombus.config.parts import TrainerPart
from bombus.deploy import nats
from bombus.deploy.nodes import cluster_file
from bombus.host.layout import FOR_EVERY_PROCESS, KEEP_FREED_MEMORY, UNLESS_SET, Layout, services
from bombus.host.supervisor import STOP_S
from bombus.logs import FORMAT_VARIABLE
from bombus.weights.models import CACHE_VARIABLE

DATA, CONFIG_FOLDER, CLUSTER = "/data", "/etc/bombus", "cluster.yaml"
USER = 10001  # of our images
EVERYWHERE = "0.0.0.0"
METRICS_PORT, REPLICA_PORT, GATEWAY_PORT, PAGE_PORT = 9464, 8000, 10086, 8265
GRACE_S = int(STOP_S) + 10  # a trainer reaches a good stopping point within `STOP_S`
HEALTHY = "healthy"  # the program of our images that asks a URL
_WITH_A_LOGIN = "nats://user:password@bus"  # it is not on a command line, but in a variable that the manifest sets
START = "start"
_KINDS = ("coordinator", "gateway", "trainer", "inference", "web")


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container that runs `count` times. `program` replaces the image's own, if it is given.

    `secrets` are variables whose values are not in the manifest. `port` is the one at which it answers HTTP.
    """

    kind: str
    name: str
    image: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    program: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    count: int = 1
    port: int
    gpus: int = 0
    writes: bool = False  # whether it needs the data volume for writing
    reads: bool = False

    @property
    def login(self) -> str:
        """Return the name of the file of `bombus init` with its login and keys."""
        return BusUser.OPERATOR if self.kind == START else self.kind

    @property
    def health(self) -> str:
        """Return the URL that answers while the process runs, if only that a key is missing. A replica's `/health`
        would also ask for weights."""
        path = "/metrics" if self.kind == "inference" else "/health"
        return f"http://127.0.0.1:{self.port}{path}"


def image_of(cluster: Cluster, target: str) -> str:
    """Return the name of an image of ours."""
    return cluster.deploy.image.replace("{target}", target).replace("{version}", version("bombus"))


def containers(cluster: Cluster) -> list[Container]:
    """Return the containers of a hive, in the order in which `bombus up` would start them.

    Raises `Refused(BAD_CONFIG)` for an engine that verl trains, as it needs an environment that no image has, and for
    two containers of the same name.
    """
    _check_backends(cluster)
    placed = _placed(cluster)
    ports = itertools.count(placed.metrics_port)
    parts = iter([part for engine in cluster.engines.values() for part in engine.inference if part.count])
    trainers = iter([engine.trainer for engine in cluster.engines.values() if engine.trainer is not None])
    by_folder = any(part.weights_by == "folder" for part in _trainers(cluster))
    found: list[Container] = []
    web = cluster.web.enabled and cluster.coordinator.count > 0  # otherwise it is where the coordinators are
    for service in services(Layout(cluster=placed, web=web), _WITH_A_LOGIN):
        if service.kind not in _KINDS:
            continue
        more: dict[str, Any] = {"port": placed.web.port}
        words = list(service.command[3:])  # after `python -m bombus`
        if service.kind == "coordinator":
            given = "count" in cluster.coordinator.model_fields_set  # otherwise one leads, and one stands by
            more = {"count": cluster.coordinator.count if given else 2, "port": next(ports)}
            more["writes"] = bool(cluster.coordinator.archive)
            del words[words.index("--name") : words.index("--name") + 2]  # whatever runs it gives it a name
        elif service.kind == "gateway":
            more = {"count": cluster.gateway.count, "port": placed.gateway.port}
        elif service.kind == "trainer":
            trainer = next(trainers)
            more = {"port": next(ports), "gpus": len(trainer.devices) or int(trainer.device != "cpu"), "writes": True}
            if trainer.processes > 1:
                more["program"] = ("tini", "--", "python", *service.command[1:3])
        elif service.kind == "inference":
            part = next(parts)
            words += ["--port", str(REPLICA_PORT)]
            more = {"count": part.count, "port": REPLICA_PORT, "reads": by_folder}
            more["gpus"] = part.tensor_parallel if part.device != "cpu" and part.backend != "openai" else 0
            more["secrets"] = (part.api_key_env,) if part.api_key_env else ()
        kept = {*UNLESS_SET, *FOR_EVERY_PROCESS, *(KEEP_FREED_MEMORY if service.kind == "trainer" else ())}
        environment = {FORMAT_VARIABLE: "json", CACHE_VARIABLE: f"{DATA}/cache" if more.get("writes") else "/tmp/cache"}
        environment |= {key: service.environment[key] for key in sorted(kept)}
        name = service.name.replace(" ", "-")
        if any(each.name == name for each in found):  # as of the first replicas of `a`, and those of `a-1`
            raise bad_config(f"two engines have a container {name}: give one of these engines another name")
        found.append(
            Container(
                kind=service.kind,
                name=name,
                image=image_of(cluster, "all" if service.kind == "web" else service.kind),
                arguments=tuple(words),
                environment=environment,
                **more,
            )
        )
    return [each for each in found if each.count]  # the others run elsewhere


def _check_backends(cluster: Cluster) -> None:
    for name, engine in cluster.engines.items():
        if engine.trainer is not None and engine.trainer.backend != "torch":
            raise bad_config(
                f"engines.{name}.trainer.backend is {engine.trainer.backend}, which no image contains: use Slurm "
                "(--to slurm), or leave the trainer out here and run it where verl is installed"
            )


def starter(cluster: Cluster) -> Container:
    """Return the container that starts the jobs of a cluster file, and ends."""
    return Container(
        kind=START,
        name=START,
        image=image_of(cluster, "gateway"),
        arguments=("deploy", "start", "--config", f"{CONFIG_FOLDER}/{CLUSTER}"),
        environment={FORMAT_VARIABLE: "json"},
        port=0,
    )


def start_file(cluster: Cluster, jobs: Jobs) -> str:
    """Return the cluster file for `starter`. It has no password."""
    return cluster_file(cluster.model_copy(update={"nats": BUS_OF_ENVIRONMENT, "credentials": ""}), jobs)


def _trainers(cluster: Cluster) -> list[TrainerPart]:
    return [engine.trainer for engine in cluster.engines.values() if engine.trainer is not None]


def _placed(cluster: Cluster) -> Cluster:
    """Return the cluster with one process of each kind, as it runs in a container."""
    streams = cluster.streams
    if not cluster.nats:
        streams = streams.model_copy(update={"replicas": streams.replicas or nats.SERVERS})
    return cluster.model_copy(
        update={
            "nats": _WITH_A_LOGIN,
            "credentials": "",
            "data_dir": DATA,
            "metrics_host": EVERYWHERE,
            "metrics_port": cluster.metrics_port or METRICS_PORT,
            "streams": streams,
            "gateway": cluster.gateway.model_copy(
                update={"count": 1, "host": EVERYWHERE, "port": cluster.gateway.port or GATEWAY_PORT}
            ),
            "web": cluster.web.model_copy(update={"host": EVERYWHERE, "port": cluster.web.port or PAGE_PORT}),
            "coordinator": cluster.coordinator.model_copy(
                update={"count": 1, "archive": f"{DATA}/archive" if cluster.coordinator.archive else ""}
            ),
            "engines": {name: _placed_engine(engine) for name, engine in cluster.engines.items()},
        }
    )


def _placed_engine(engine: EnginePart) -> EnginePart:
    trainer = engine.trainer and engine.trainer.model_copy(update={"devices": ()})
    replicas = tuple(
        part.model_copy(update={"count": 1, "devices": (), "host": EVERYWHERE})
        for part in engine.inference
        if part.count
    )
    return engine.model_copy(update={"trainer": trainer, "inference": replicas})
