"""The deployment that `bombus up` starts and `bombus doctor` checks: a cluster file or a job, and the flags that
override it."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bombus.bus_address import VARIABLE, BusUser
from bombus.config.cluster import (
    BUS_OF_ENVIRONMENT,
    Cluster,
    Jobs,
    is_cluster,
    parse_cluster,
    reconcile,
    validated_cluster,
)
from bombus.config.documents import Tree, no_effect, parse_job, read_job_file
from bombus.config.flags import Flag, check_range, name_of
from bombus.config.overrides import STREAM_FLAGS, Overrides, add_overrides, flag_of, typed_overrides
from bombus.config.parts import PROCESSES_MAX
from bombus.config.placement import check_placement
from bombus.errors import Code, Refused
from bombus.host.credentials import read_environment
from bombus.terminal import complain

DEFAULTS: Tree = {"trainer": {}, "inference": [{}]}  # used for an engine that is not described in a file

# The options that are up to the operator of a trainer's machine.
TRAINER_FLAGS: Overrides = {
    "trainer.bin_tokens": Flag(
        metavar="N",
        help="the most tokens in a trainer's micro-batch; 0: the job's limit on a GPU, at most 4096 on a CPU",
    ),
    "trainer.allow_download": Flag(
        help="let trainers fetch models from a hub", default="only where the cluster file says so"
    ),
}
HIVE_FLAGS: Overrides = {
    "gateway.host": Flag(help="where the gateway listens"),
    "gateway.host_names": Flag(
        help="a name by which clients reach the gateway (repeatable); without a client key, names other "
        "than localhost and its address are refused",
    ),
    "gateway.inference_hosts": Flag(
        help="hosts where training clients may have inference servers that get their weights (repeatable)",
        default="nowhere",
    ),
    "gateway.bases": Flag(
        help="the model that training clients get by a name of their own (repeatable), such as "
        "meta-llama/Llama-3.2-1B=smollm2",
    ),
    "gateway.models_max": Flag(help="the most models of training clients on an engine at a time, if memory allows"),
    "gateway.record_samples": Flag(help="record the samples of training clients in the log, for `bombus audit`"),
    "gateway.port": Flag(also="--swarm-port", help="the gateway's port; 0: any free port, which is printed"),
    "data_dir": Flag(metavar="DIR", help="for the log, checkpoints and weights", default=".bombus, in this folder"),
    "durability": Flag(),
    "metrics_port": Flag(help="the first port of /metrics of coordinators and trainers; 0: none"),
    "metrics_host": Flag(help="where these ports are"),
    "credentials": Flag(metavar="DIR", help="what bombus init made: a login for each service", default="none"),
    "nats": Flag(metavar="URL", help="an external NATS server", default="our own is started"),
    "hive": Flag(metavar="NAME", help="the hive's name", default="$BOMBUS_HIVE, or main", read=name_of("hive")),
}
DEVICE = Flag(help="the device of trainers and replicas: cpu, cuda or cuda:N")
THREADS = Flag(help="torch's threads on the CPU; 0: one for each core")
PROCESS_FLAGS: Overrides = {
    "gateway.count": Flag(name="--gateways", help="how many gateways share the port"),
    "coordinator.count": Flag(name="--coordinators", help="how many coordinators, of which one leads"),
    "inference.count": Flag(name="--replicas", help="how many inference replicas for each engine"),
    "inference.host": Flag(name="--replica-host", help="where replicas listen", default="the file's, or 127.0.0.1"),
    "trainer.backend": Flag(name="--trainer-backend", help="what trains each engine"),
    "trainer.processes": Flag(name="--trainer-processes", help="how many trainer processes for each engine"),
    "trainer.device": DEVICE,
    "inference.device": DEVICE,
    "trainer.threads": THREADS,
    "inference.threads": THREADS,
    **TRAINER_FLAGS,
    "coordinator.compact": Flag(default="they are"),
    "coordinator.archive": Flag(),
    "coordinator.raise_level": Flag(),
    **STREAM_FLAGS,
}
FLAGS = {**HIVE_FLAGS, **PROCESS_FLAGS}


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to run, which `bombus up` and `bombus doctor` share."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="a cluster file, or the job to start each engine with"
    )
    add_overrides(parser, HIVE_FLAGS)
    parser.add_argument(
        "--engine",
        action="append",
        type=name_of("engine"),
        metavar="NAME",
        help="an engine's name (repeatable); with a cluster file: start only these engines (default: main)",
    )
    add_overrides(parser, PROCESS_FLAGS)


def deployment(arguments: argparse.Namespace) -> tuple[Cluster, Jobs]:
    """Return the cluster and jobs from the file, as overridden by the flags. Raises `Refused(BAD_CONFIG)`."""
    check_counts(arguments, dict.fromkeys(("gateways", "coordinators", "replicas", "trainer_processes"), PROCESSES_MAX))
    plain, jobs = document(arguments.config, arguments.engine or ["main"], DEFAULTS)
    _choose_engines(plain["engines"], arguments.engine)
    jobs = {name: job for name, job in jobs.items() if name in plain["engines"]}
    cluster, jobs = reconcile(validated_cluster(_with_flags(plain, arguments), flag_of(arguments, FLAGS)), jobs)
    check_placement(cluster)
    return cluster, jobs


def cluster_in(path: Path) -> tuple[Cluster, Jobs]:
    """Return the cluster in a cluster file, and its jobs. Its `nats` is as written, even if that is $BOMBUS_NATS.

    Raises `Refused(BAD_CONFIG)`.
    """
    plain, jobs = document(path, [], {})
    if not plain["engines"]:
        raise Refused(Code.BAD_CONFIG, f"{path} is a job: write a cluster file that has it below engines.main.job")
    cluster, jobs = reconcile(validated_cluster(plain), jobs)
    check_placement(cluster)
    return cluster, jobs


def document(config: Path | None, names: Sequence[str], engine: Tree) -> tuple[Tree, Jobs]:
    """Return a cluster file, as written, and its jobs.

    For a job file, or without a file, the cluster has an engine for each of `names`, described by `engine`.

    Raises `Refused(BAD_CONFIG)`.
    """
    tree = read_job_file(config) if config is not None else {}
    if config is not None and is_cluster(tree):
        cluster, jobs = parse_cluster(tree, config.parent)
        return cluster.model_dump(mode="json", exclude_unset=True), jobs
    jobs = {name: parse_job(tree) for name in names} if config is not None else {}
    return {"engines": dict.fromkeys(names, engine)}, jobs


def bus_address(nats: str) -> str:
    """Return the address of the bus that a cluster file gives, which may be `$BOMBUS_NATS`."""
    if nats != BUS_OF_ENVIRONMENT:
        return nats
    if not os.environ.get(VARIABLE):
        raise Refused(Code.BAD_CONFIG, f"nats is {BUS_OF_ENVIRONMENT}, but the variable is not set")
    return os.environ[VARIABLE]


def put_over(part: Tree, flags: Tree) -> Tree:
    """Return a trainer's or replica's part with the flags applied. A device other than a GPU removes the GPU
    numbers."""
    kept = {key: value for key, value in part.items() if key != "devices" or flags.get("device", "cuda") == "cuda"}
    return {**kept, **flags}


def tell_ignored(jobs: Jobs) -> None:
    """Print a line for each key of a job that has no effect here, in case its author relies on it."""
    for name, job in jobs.items():
        for key in job.ignored:
            complain(f"engine {name}: {no_effect(key)}")


def check_counts(arguments: argparse.Namespace, most: Mapping[str, int]) -> None:
    """Raise `Refused(BAD_CONFIG)` for a typed count that is not between 1 and its limit; `most` maps attributes to
    limits."""
    for name, limit in most.items():
        if getattr(arguments, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), 1, limit)


def check_engine(name: str, engines: Tree) -> None:
    """Raise `Refused(BAD_CONFIG)` if the file has no engine of that name."""
    if name not in engines:
        raise Refused(Code.BAD_CONFIG, f"--engine {name} is not one of the file's engines: {', '.join(engines)}")


def _choose_engines(engines: Tree, wanted: list[str] | None) -> None:
    for name in wanted or ():
        check_engine(name, engines)
    for name in [name for name in engines if wanted and name not in wanted]:
        del engines[name]


def _with_flags(plain: Tree, arguments: argparse.Namespace) -> Tree:
    """Return the document, overridden by the flags."""
    typed = typed_overrides(arguments, FLAGS)
    engines = plain["engines"].items()
    hive = plain.get("hive") or os.environ.get("BOMBUS_HIVE", "main")
    whole = {**plain, "nats": bus_address(plain.get("nats", "")), "hive": hive, **typed[""]}
    if whole.get("credentials"):
        own = read_environment(Path(whole["credentials"]), whole["hive"], BusUser.OPERATOR)
        whole["nats"] = own[VARIABLE]
    return {
        **whole,
        **{part: {**plain.get(part, {}), **typed[part]} for part in ("gateway", "coordinator", "streams")},
        "engines": {
            name: _engine_with_flags(name, part, typed["trainer"], typed["inference"]) for name, part in engines
        },
    }


def _engine_with_flags(name: str, part: Tree, trainer: Tree, replica: Tree) -> Tree:
    kinds = list(part.get("inference", ()))
    if "count" in replica and len(kinds) != 1:
        raise Refused(
            Code.BAD_CONFIG, f"--replicas does not apply to engine {name}: its file has {len(kinds)} kinds of replicas"
        )
    elsewhere = {
        key: value for key, value in replica.items() if key in ("count", "host")
    }  # for a server that we do not start
    kinds = [put_over(kind, elsewhere if kind.get("backend") == "openai" else replica) for kind in kinds]
    changed = {**part, "inference": kinds}
    if part.get("trainer") is not None:
        changed["trainer"] = put_over(part["trainer"], trainer)
    return changed
