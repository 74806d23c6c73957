"""Divides a cluster among several machines, each with a `bombus up` and a cluster file of its own."""

import re
from collections import defaultdict
from typing import Any, TypeVar

import yaml

from bombus.config.cluster import BUS_OF_ENVIRONMENT, Cluster, EnginePart, Jobs
from bombus.config.groups import bad_config
from bombus.config.parts import InferencePart, TrainerPart
from bombus.config.placement import gpus_of_replicas

Placed = TypeVar("Placed", TrainerPart, InferencePart)
_LIKE_A_NUMBER = re.compile(r"[-+.]?\d")
HEAD = "# Rendered by `bombus deploy render`: change the cluster file, and render again.\n"


def node_file(number: int | str) -> str:
    """Return the name of the cluster file of a machine."""
    return f"node-{number}.yaml"


def nodes_of(cluster: Cluster) -> list[Cluster]:
    """Return the cluster of each machine. The first one has everything but the replicas, which the others share.

    Each machine numbers its GPUs from 0. Raises `Refused(BAD_CONFIG)` if there are fewer replicas than machines.
    """
    count = cluster.deploy.nodes
    if count == 1:
        return [cluster]
    first, dealt = _Gpus(), [_Gpus() for _ in range(count - 1)]
    trainers, replicas = dict[str, EnginePart](), [defaultdict[str, list[InferencePart]](list) for _ in dealt]
    turn = 0
    for name, engine in cluster.engines.items():
        trainer = engine.trainer and first.take(engine.trainer, engine.trainer.processes)
        trainers[name] = engine.model_copy(update={"trainer": trainer, "inference": ()})
        for part in engine.inference:
            for _ in gpus_of_replicas(part):
                placed = dealt[turn % len(dealt)].take(part, part.tensor_parallel)
                replicas[turn % len(dealt)][name].append(placed.model_copy(update={"count": 1}))
                turn += 1
    if turn < len(dealt):
        raise bad_config(f"deploy.nodes is {count}, but there are only {turn} replicas for the nodes after the first")
    without = cluster.gateway.model_copy(update={"count": 0}), cluster.coordinator.model_copy(update={"count": 0})
    others = {
        "nats": cluster.nats or BUS_OF_ENVIRONMENT,
        "durability": "process",
        "gateway": without[0],
        "coordinator": without[1],
        "web": cluster.web.model_copy(update={"enabled": False}),
        "metrics_port": 0,
    }
    return [cluster.model_copy(update={"engines": trainers})] + [
        cluster.model_copy(
            update={
                **others,
                "data_dir": f"{cluster.data_dir}/node-{number}",
                "engines": {name: EnginePart(inference=tuple(parts)) for name, parts in found.items()},
            }
        )
        for number, found in enumerate(replicas, 1)
    ]


def gpus_of(cluster: Cluster) -> int:
    """Return how many GPUs a machine needs for its cluster."""
    parts = [part for engine in cluster.engines.values() for part in (engine.trainer, *engine.inference) if part]
    named = {number for part in parts for number in part.devices}
    return len(named) or int(any(part.device != "cpu" for part in parts))


def cluster_file(cluster: Cluster, jobs: Jobs) -> str:
    """Return a cluster file that contains its jobs. Where to deploy is left out, since that is done."""
    tree: dict[str, Any] = cluster.model_dump(mode="json", exclude_unset=True, exclude={"deploy"})
    for name, engine in tree["engines"].items():
        engine.pop("job", None)
        if name in jobs and cluster.coordinator.count:
            engine["job"] = {"bombus": jobs[name].model_dump(mode="json", exclude_unset=True)}
    return HEAD + dumped(tree)


def dumped(tree: object) -> str:
    return str(yaml.dump(tree, Dumper=_Plain, sort_keys=False, width=110))


class _Plain(yaml.SafeDumper):  # type: ignore[misc] # PyYAML has no types
    """Writes values that occur twice in full, and texts of several lines as such."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: Any, text: str) -> Any:
    # The readers of Kubernetes and Compose take more texts for numbers than PyYAML does, such as 1e3.
    style = "|" if "\n" in text else "'" if _LIKE_A_NUMBER.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _text)


class _Gpus:
    """The GPUs of a machine that are not taken yet."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, part: Placed, count: int) -> Placed:
        """Return the part with GPUs of this machine, if it runs on GPUs."""
        if part.device == "cpu" or (isinstance(part, InferencePart) and part.backend == "openai"):
            return part
        self._next += count
        return part.model_copy(update={"devices": tuple(range(self._next - count, self._next)), "device": "cuda"})
