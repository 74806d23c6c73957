"""The GPUs of each process in a deployment, and the check that no two processes share a GPU by accident.

Each of a trainer's processes gets one of its `devices`, in order. `gpus_of_replicas` returns the replicas' GPUs.
`bombus.host.layout` starts each process with only its own GPUs in CUDA_VISIBLE_DEVICES.
"""

from collections.abc import Iterator

from bombus.config.cluster import Cluster
from bombus.config.groups import bad_config
from bombus.config.parts import InferencePart, PlacedPart


def gpus_of_replicas(part: InferencePart) -> list[tuple[int, ...]]:
    """Return the GPUs of each replica, in consecutive groups of `tensor_parallel`; the groups are empty if `devices`
    is."""
    each = part.tensor_parallel
    return [part.devices[each * number : each * (number + 1)] for number in range(part.count)]


def check_placement(cluster: Cluster) -> None:
    """Raise `Refused(BAD_CONFIG)` if several parts use a GPU and not all of them allow sharing.

    If one part names its GPUs, every part that runs on a GPU must do so: parts that name none all use the first GPU.
    """
    placed = list(_parts_on_gpus(cluster))
    if not any(part.devices for _, part in placed):
        return
    holders: dict[int, tuple[str, PlacedPart]] = {}
    for name, part in placed:
        if part.device == "cuda" and not part.devices:
            raise bad_config(f"{name} runs on a GPU but names none, while other parts do: give it devices: [...]")
        gpus = part.devices or _gpus_from_first(part)
        for gpu in gpus:
            other_name, other = holders.setdefault(gpu, (name, part))
            twice = other is not part or gpus.count(gpu) > 1
            if twice and not (other.share_devices and part.share_devices):
                both = f"{other_name} and {name}" if other is not part else f"two replicas of {name}"
                raise bad_config(
                    f"GPU {gpu} is given to {both}: give each its own devices, or share_devices: true if that is "
                    "intended"
                )


def _parts_on_gpus(cluster: Cluster) -> Iterator[tuple[str, PlacedPart]]:
    """Yield the parts that run on this machine's GPUs, each with its place in the cluster file."""
    for name, engine in cluster.engines.items():
        if engine.trainer is not None and engine.trainer.device != "cpu":
            yield f"engines.{name}.trainer", engine.trainer
        for number, part in enumerate(engine.inference):
            if part.count and part.backend != "openai" and part.device != "cpu":
                yield f"engines.{name}.inference[{number}]", part


def _gpus_from_first(part: PlacedPart) -> tuple[int, ...]:
    """Return the GPUs that a part on cuda:N uses, from N on. A GPU that several replicas share appears once per
    replica."""
    first = int(part.device.partition(":")[2])
    if isinstance(part, InferencePart):
        return tuple(range(first, first + part.tensor_parallel)) * part.count
    return (first,)
