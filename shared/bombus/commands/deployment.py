"""What `bombus up` and `bombus doctor` are asked about: a cluster file or a job, and the flags that win over it."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from bombus.cluster import PROCESSES_MAX, Cluster, Jobs, agreed, is_cluster, read_cluster, validated_cluster
from bombus.errors import Code, Refused
from bombus.flags import check_range, name_of
from bombus.job import Tree, parse_job, read_job_file

DEFAULTS: Tree = {"trainer": {}, "inference": [{}]}  # of an engine that no file describes


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to run: `bombus doctor` takes the same."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="a cluster file, or the job to start each engine with"
    )
    parser.add_argument("--host", metavar="HOST", help="where the gateway listens (default: 127.0.0.1)")
    parser.add_argument("--port", "--swarm-port", type=int, metavar="PORT", help="of the gateway (default: 10086)")
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
        help="may be given several times; with a cluster file: only these of its engines (default: main)",
    )
    parser.add_argument("--gateways", type=int, metavar="N", help="how many, sharing the port (default: 1)")
    parser.add_argument("--coordinators", type=int, metavar="N", help="how many, of which one leads (default: 1)")
    parser.add_argument("--replicas", type=int, metavar="N", help="for inference, of each engine (default: 1)")
    parser.add_argument("--trainer-backend", choices=("torch", "verl"), help="of each engine (default: torch)")
    parser.add_argument("--trainer-processes", type=int, metavar="N", help="of each engine, with verl (default: 1)")
    parser.add_argument("--device", help="of trainers and replicas: cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch on the CPU; 0: one for each core (default: 0)"
    )


def deployment(arguments: argparse.Namespace) -> tuple[Cluster, Jobs]:
    """What the file and the flags say, flags first. Raises `Refused(BAD_CONFIG)`."""
    for name in ("gateways", "coordinators", "replicas", "trainer_processes"):
        if getattr(arguments, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), 1, PROCESSES_MAX)
    tree = read_job_file(arguments.config) if arguments.config is not None else {}
    if is_cluster(tree):
        cluster, jobs = read_cluster(tree, arguments.config.parent)
        plain = cluster.model_dump(mode="json", exclude_unset=True)
        _choose_engines(plain["engines"], arguments.engine)
        jobs = {name: job for name, job in jobs.items() if name in plain["engines"]}
    else:
        names = arguments.engine or ["main"]
        plain = {"engines": dict.fromkeys(names, DEFAULTS)}
        jobs = {name: parse_job(tree) for name in names} if arguments.config is not None else {}
    return agreed(validated_cluster(_with_flags(plain, arguments), _flag_of(arguments)), jobs)


# The part of a cluster file and its field, and the flag that wins over it.
FLAGS = {
    ("gateway", "host"): "--host",
    ("gateway", "port"): "--port",
    ("trainer", "device"): "--device",
    ("trainer", "threads"): "--threads",
    ("inference", "device"): "--device",
    ("inference", "threads"): "--threads",
    ("", "data_dir"): "--data-dir",
    ("", "nats"): "--nats",
}


def _flag_of(arguments: argparse.Namespace) -> Callable[[str], str]:
    """The flag that gave a value, by its place in the document; empty for what the file says."""

    def flag(place: str) -> str:
        part, _, field = place.rpartition(".")
        found = FLAGS.get((part.rpartition(".")[2].partition("[")[0], field), "")
        given = found and getattr(arguments, field) is not None
        return found if given else ""

    return flag


def _choose_engines(engines: Tree, wanted: list[str] | None) -> None:
    for name in wanted or ():
        if name not in engines:
            raise Refused(Code.BAD_CONFIG, f"--engine {name} is none of the file's engines: {', '.join(engines)}")
    for name in [name for name in engines if wanted and name not in wanted]:
        del engines[name]


def _with_flags(plain: Tree, arguments: argparse.Namespace) -> Tree:
    """The document with what the flags say put in."""

    def said(**names: str) -> Tree:
        """Of these keys, those whose flag was given."""
        found = {key: getattr(arguments, flag) for key, flag in names.items()}
        return {key: value for key, value in found.items() if value is not None}

    torch = said(device="device", threads="threads")
    trainer = torch | said(backend="trainer_backend", processes="trainer_processes")
    engines = plain["engines"].items()
    return {
        **plain,
        "hive": arguments.hive or plain.get("hive") or os.environ.get("BOMBUS_HIVE", "main"),
        **said(nats="nats", data_dir="data_dir"),
        "gateway": {**plain.get("gateway", {}), **said(host="host", port="port", count="gateways")},
        "coordinator": {**plain.get("coordinator", {}), **said(count="coordinators")},
        "engines": {name: _engine_with_flags(name, part, torch, trainer, arguments.replicas) for name, part in engines},
    }


def _engine_with_flags(name: str, part: Tree, torch: Tree, trainer: Tree, replicas: int | None) -> Tree:
    kinds = [dict(kind) for kind in part.get("inference", ())]
    if replicas is not None and len(kinds) != 1:
        raise Refused(
            Code.BAD_CONFIG, f"--replicas says nothing of engine {name}: its file has {len(kinds)} kinds of replicas"
        )
    for kind in kinds:
        kind.update(torch if kind.get("engine") != "openai" else {})
        kind.update({"count": replicas} if replicas is not None else {})
    changed = {**part, "inference": kinds}
    if part.get("trainer") is not None:
        changed["trainer"] = {**part["trainer"], **trainer}
    return changed
