"""Which GPUs each process of a deployment is given, and that no two are given the same one unawares."""

from collections.abc import Iterator

from bombus.config.cluster import Cluster
from bombus.config.parts import InferencePart, PlacedPart
from bombus.errors import Code, Refused


def gpus_of_replicas(part: InferencePart) -> list[tuple[int, ...]]:
    """The GPUs of each replica, empty where none are named: consecutive groups of `tensor_parallel`."""
    each = part.tensor_parallel
    return [part.devices[each * number : each * (number + 1)] for number in range(part.count)]


def check_placement(cluster: Cluster) -> None:
    """Raises `Refused(BAD_CONFIG)` when a GPU is given twice and not all who have it say that they share it.

    Once some part names its GPUs, each that runs on one has to: the default is the first GPU for everybody.
    """
    placed = list(_placed(cluster))
    if not any(part.devices for _, part in placed):
        return
    holders: dict[int, tuple[str, PlacedPart]] = {}
    for name, part in placed:
        if part.device == "cuda" and not part.devices:
            raise _refusal(f"{name} runs on a GPU and does not say which, and others do: give it devices: [...]")
        gpus = part.devices or _counted(part)
        for gpu in gpus:
            other, held = holders.setdefault(gpu, (name, part))
            twice = held is not part or gpus.count(gpu) > 1
            if twice and not (held.share_devices and part.share_devices):
                both = f"{other} and {name}" if held is not part else f"two replicas of {name}"
                raise _refusal(
                    f"GPU {gpu} is given to {both}: give each its own devices, or share_devices: true if that is meant"
                )


def _placed(cluster: Cluster) -> Iterator[tuple[str, PlacedPart]]:
    """Those that run on GPUs here, by their place in the cluster file."""
    for name, engine in cluster.engines.items():
        if engine.trainer is not None and engine.trainer.device != "cpu":
            yield f"engines.{name}.trainer", engine.trainer
        for number, part in enumerate(engine.inference):
            if part.count and part.backend != "openai" and part.device != "cpu":
                yield f"engines.{name}.inference[{number}]", part


def _counted(part: PlacedPart) -> tuple[int, ...]:
    """Those from N on, of a part on cuda:N."""
    first = int(part.device.partition(":")[2])
    if isinstance(part, InferencePart):
        return tuple(range(first, first + part.tensor_parallel)) * part.count
    return (first,)


def _refusal(why: str) -> Refused:
    return Refused(Code.BAD_CONFIG, why)
