"""The deployment that `bombus up` starts and `bombus doctor` checks: a cluster file or a job, and the flags that
override it."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bombus.config.cluster import Cluster, Jobs, is_cluster, parse_cluster, reconcile, validated_cluster
from bombus.config.documents import Tree, no_effect, parse_job, read_job_file
from bombus.config.flags import add_settings_arguments, check_range, flags_of, name_of
from bombus.config.parts import MODELS_MAX, PROCESSES_MAX
from bombus.config.placement import check_placement
from bombus.config.streams import StreamLimits
from bombus.errors import Code, Refused
from bombus.terminal import complain

DEFAULTS: Tree = {"trainer": {}, "inference": [{}]}  # for an engine that no file describes


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to run, which `bombus up` and `bombus doctor` share."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="a cluster file, or the job to start each engine with"
    )
    parser.add_argument("--host", metavar="HOST", help="where the gateway listens (default: 127.0.0.1)")
    parser.add_argument(
        "--host-name",
        action="append",
        metavar="NAME",
        help="a name by which clients reach the gateway, once or several times; without a client key, others than "
        "localhost and its address are refused",
    )
    parser.add_argument(
        "--inference-host",
        action="append",
        metavar="HOST[:PORT]",
        help="where clients of training operations may have inference servers that get their weights, once or several "
        "times (default: nowhere)",
    )
    parser.add_argument(
        "--base",
        action="append",
        metavar="NAME=PATH",
        help="what training clients mean by the name of a model, once or several times, such as "
        "meta-llama/Llama-3.2-1B=smollm2",
    )
    parser.add_argument(
        "--models-max",
        type=int,
        metavar="N",
        help=f"models of training clients on one engine at once, where memory allows (default: {MODELS_MAX})",
    )
    parser.add_argument(
        "--port",
        "--swarm-port",
        type=int,
        metavar="PORT",
        help="the gateway's port; 0: any that is free, which is printed (default: 10086)",
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="for the log, checkpoints and weights (default: .bombus, in this folder)"
    )
    parser.add_argument("--nats", metavar="URL", help="an external NATS server (default: our own is started)")
    parser.add_argument(
        "--hive", type=name_of("hive"), metavar="NAME", help="the hive's name (default: $BOMBUS_HIVE, or main)"
    )
    parser.add_argument(
        "--engine",
        action="append",
        type=name_of("engine"),
        metavar="NAME",
        help="an engine's name, once or several times; with a cluster file: only these of its engines (default: main)",
    )
    parser.add_argument("--gateways", type=int, metavar="N", help="how many gateways, sharing the port (default: 1)")
    parser.add_argument(
        "--coordinators", type=int, metavar="N", help="how many coordinators, of which one leads (default: 1)"
    )
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="how many inference replicas for each engine (default: 1)"
    )
    parser.add_argument("--trainer-backend", choices=("torch", "verl"), help="what trains each engine (default: torch)")
    parser.add_argument(
        "--trainer-processes",
        type=int,
        metavar="N",
        help="how many trainer processes for each engine, with verl (default: 1)",
    )
    parser.add_argument("--device", help="the device of trainers and replicas: cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="torch's threads on the CPU; 0: one for each core (default: 0)"
    )
    add_trainer_arguments(parser)
    parser.add_argument(
        "--compact",
        action=argparse.BooleanOptionalAction,
        help="whether the oldest events are removed once the log is over 60 %% full (default: they are)",
    )
    parser.add_argument(
        "--archive", metavar="DIR", help="a folder to which events are written before they are removed (default: none)"
    )
    add_settings_arguments(parser, StreamLimits)


def add_trainer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a trainer that depend on its machine. Those that are not given are None."""
    parser.add_argument(
        "--bin-tokens",
        type=int,
        metavar="N",
        help="the most tokens in a trainer's micro-batch; 0: on a GPU what the job says, on a CPU at most 4096 "
        "(default: 0)",
    )
    parser.add_argument(
        "--allow-download",
        action="store_true",
        default=None,
        help="let trainers fetch models from a hub (default: only where the cluster file says so)",
    )


def deployment(arguments: argparse.Namespace) -> tuple[Cluster, Jobs]:
    """Return what the file and the flags say; flags override the file. Raises `Refused(BAD_CONFIG)`."""
    check_counts(arguments, dict.fromkeys(("gateways", "coordinators", "replicas", "trainer_processes"), PROCESSES_MAX))
    plain, jobs = document(arguments.config, arguments.engine or ["main"], DEFAULTS)
    _choose_engines(plain["engines"], arguments.engine)
    jobs = {name: job for name, job in jobs.items() if name in plain["engines"]}
    cluster, jobs = reconcile(validated_cluster(_with_flags(plain, arguments), flag_of(arguments, FLAGS)), jobs)
    check_placement(cluster)
    return cluster, jobs


# A part of a cluster file and its field, and the flag that overrides it.
FLAGS = {
    ("gateway", "host"): "--host",
    ("gateway", "port"): "--port",
    ("gateway", "host_names"): "--host-name",
    ("gateway", "inference_hosts"): "--inference-host",
    ("gateway", "bases"): "--base",
    ("gateway", "models_max"): "--models-max",
    ("trainer", "device"): "--device",
    ("trainer", "threads"): "--threads",
    ("trainer", "bin_tokens"): "--bin-tokens",
    ("inference", "device"): "--device",
    ("inference", "threads"): "--threads",
    ("coordinator", "archive"): "--archive",
    ("", "data_dir"): "--data-dir",
    ("", "nats"): "--nats",
    **{("streams", field): flag for field, flag in flags_of(StreamLimits).items()},
}
# The fields of `streams`, and the attributes of the parsed arguments that override them.
STREAM_ATTRIBUTES = {field: flag.removeprefix("--").replace("-", "_") for field, flag in flags_of(StreamLimits).items()}


def flag_of(arguments: argparse.Namespace, flags: Mapping[tuple[str, str], str]) -> Callable[[str], str]:
    """Return a function from a place in the document to the flag that gave its value, "" if the file gave it."""

    def flag(place: str) -> str:
        part, _, field = place.rpartition(".")
        found = flags.get((part.rpartition(".")[2].partition("[")[0], field), "")
        is_given = found and getattr(arguments, found.removeprefix("--").replace("-", "_")) is not None
        return found if is_given else ""

    return flag


def document(config: Path | None, names: Sequence[str], engine: Tree) -> tuple[Tree, Jobs]:
    """Return a cluster file, as it is written, and its jobs.

    From a job file, or without a file, make one that has engines of these names, each described by `engine`.

    Raises `Refused(BAD_CONFIG)`.
    """
    tree = read_job_file(config) if config is not None else {}
    if config is not None and is_cluster(tree):
        cluster, jobs = parse_cluster(tree, config.parent)
        return cluster.model_dump(mode="json", exclude_unset=True), jobs
    jobs = {name: parse_job(tree) for name in names} if config is not None else {}
    return {"engines": dict.fromkeys(names, engine)}, jobs


def given(arguments: argparse.Namespace, **flags: str) -> Tree:
    """Return the values of the flags that were given, under these keys."""
    found = {key: getattr(arguments, flag) for key, flag in flags.items()}
    return {key: value for key, value in found.items() if value is not None}


def put_over(part: Tree, flags: Tree) -> Tree:
    """Return a trainer's or a replica's part with flags put over it. A device other than GPUs removes their numbers."""
    kept = {key: value for key, value in part.items() if key != "devices" or flags.get("device", "cuda") == "cuda"}
    return {**kept, **flags}


def tell_ignored(jobs: Jobs) -> None:
    """Print a line for each key of a job that has no effect here, as its author may rely on it."""
    for name, job in jobs.items():
        for key in job.ignored:
            complain(f"engine {name}: {no_effect(key)}")


def check_counts(arguments: argparse.Namespace, most: Mapping[str, int]) -> None:
    """Raise `Refused(BAD_CONFIG)` for a count that was given and is not within 1 to `most`, by its attribute."""
    for name, limit in most.items():
        if getattr(arguments, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), 1, limit)


def check_engine(name: str, engines: Tree) -> None:
    """Raise `Refused(BAD_CONFIG)` when the file has no engine of that name."""
    if name not in engines:
        raise Refused(Code.BAD_CONFIG, f"--engine {name} is none of the file's engines: {', '.join(engines)}")


def _choose_engines(engines: Tree, wanted: list[str] | None) -> None:
    for name in wanted or ():
        check_engine(name, engines)
    for name in [name for name in engines if wanted and name not in wanted]:
        del engines[name]


def _with_flags(plain: Tree, arguments: argparse.Namespace) -> Tree:
    """Return the document with the flags put over it."""
    torch = given(arguments, device="device", threads="threads")
    trainer = torch | given(arguments, backend="trainer_backend", processes="trainer_processes")
    trainer |= given(arguments, bin_tokens="bin_tokens", allow_download="allow_download")
    gateway = given(arguments, host="host", port="port", count="gateways", host_names="host_name", bases="base")
    gateway |= given(arguments, inference_hosts="inference_host", models_max="models_max")
    engines = plain["engines"].items()
    return {
        **plain,
        "hive": arguments.hive or plain.get("hive") or os.environ.get("BOMBUS_HIVE", "main"),
        **given(arguments, nats="nats", data_dir="data_dir"),
        "gateway": {**plain.get("gateway", {}), **gateway},
        "coordinator": {
            **plain.get("coordinator", {}),
            **given(arguments, count="coordinators", compact="compact", archive="archive"),
        },
        "streams": {**plain.get("streams", {}), **given(arguments, **STREAM_ATTRIBUTES)},
        "engines": {name: _engine_with_flags(name, part, torch, trainer, arguments.replicas) for name, part in engines},
    }


def _engine_with_flags(name: str, part: Tree, torch: Tree, trainer: Tree, replicas: int | None) -> Tree:
    kinds = list(part.get("inference", ()))
    if replicas is not None and len(kinds) != 1:
        raise Refused(
            Code.BAD_CONFIG, f"--replicas does not apply to engine {name}: its file has {len(kinds)} kinds of replicas"
        )
    count = {"count": replicas} if replicas is not None else {}
    kinds = [put_over(kind, (torch if kind.get("backend") != "openai" else {}) | count) for kind in kinds]
    changed = {**part, "inference": kinds}
    if part.get("trainer") is not None:
        changed["trainer"] = put_over(part["trainer"], trainer)
    return changed
