"""A cluster file: the processes of a whole deployment, and the job of each engine, for `bombus up --config`."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from bombus.bus_address import VARIABLE
from bombus.config import xorl
from bombus.config.documents import BLOCKS, RunConfig, Tree, parse_job, read_job_file
from bombus.config.flags import Flag, typed
from bombus.config.groups import allowed, bad_config, nearest, shown
from bombus.config.parts import (
    PROCESSES_MAX,
    CoordinatorPart,
    DeployPart,
    GatewayPart,
    InferencePart,
    MetricsOptions,
    Part,
    TrainerPart,
    WebPart,
)
from bombus.config.streams import StreamLimits
from bombus.errors import Refused
from bombus.hive.subjects import check_name

log = logging.getLogger(__name__)


class EnginePart(Part):
    """One engine: a model that is trained and served. `job` is the job itself, or the path of its file relative to the
    folder of the cluster file. With a job, the engine is configured and started.

    An engine without `trainer` or `inference` is trained or served by processes on another machine.
    """

    job: str | Tree = Field(default="", description="a job's file, or its document")
    trainer: TrainerPart | None = None
    inference: tuple[InferencePart, ...] = Field(default=(), max_length=PROCESSES_MAX)

    @property
    def replicas(self) -> int:
        return sum(part.count for part in self.inference)


class Cluster(MetricsOptions, Part):
    """A whole deployment. `nats` is the URL of an external NATS server or cluster, or `$BOMBUS_NATS`, which stands for
    the value of that variable; if it is empty, bombus starts its own server. `credentials` is the folder that
    [`bombus init`](security.md#logins-of-services) made: each process gets its login from there, and `nats` is not
    needed. It and `data_dir` are relative to the working directory. What was acknowledged survives the end of any
    process (`durability: process`), or a power cut too (`power`): then data is synced to the disk before it is
    acknowledged.

    With `metrics_port`, the first coordinator serves [metrics](metrics.md) at that port of `metrics_host`. Each further
    process without a port of its own takes the next one: other coordinators, trainers, gateways that share a port."""

    hive: str = Field(default="main", description="a name of lower-case letters, digits and dashes")
    nats: str = Field(default="", max_length=4096)
    credentials: str = Field(default="", max_length=4096)
    data_dir: str = Field(default=".bombus", min_length=1, max_length=4096)
    durability: Annotated[
        Literal["process", "power"],
        Flag(help="failures that acknowledged work survives: the end of any process, or power cuts as well"),
    ] = "process"
    gateway: GatewayPart = GatewayPart()
    coordinator: CoordinatorPart = CoordinatorPart()
    web: WebPart = WebPart()
    streams: StreamLimits = StreamLimits()
    deploy: DeployPart = DeployPart()
    engines: dict[str, EnginePart] = Field(min_length=1, max_length=PROCESSES_MAX)

    @model_validator(mode="after")
    def _names_are_valid(self) -> "Cluster":
        check_name(self.hive, "hive")
        for name in self.engines:
            check_name(name, "engine")
        return self

    @model_validator(mode="after")
    def _replicas_have_servers(self) -> "Cluster":
        if (self.streams.replicas or 1) > 1 and not self.nats:
            raise ValueError(
                f"streams.replicas {self.streams.replicas} (--stream-replicas) is refused: bombus starts only a single "
                "NATS server; give the URLs of a cluster as nats (--nats)"
            )
        return self

    @model_validator(mode="after")
    def _a_server_of_ours_is_synced(self) -> "Cluster":
        if self.durability == "power" and self.nats:
            raise ValueError(
                "durability power (--durability) cannot be combined with nats (--nats): bombus syncs only "
                "a server that it starts. Leave durability out, and set sync_interval: always in the configuration of "
                "that server, or keep the streams on three servers (streams.replicas)"
            )
        return self


Jobs = dict[str, RunConfig]  # by engine name
BUS_OF_ENVIRONMENT = f"${VARIABLE}"  # as `nats`, the address is in this variable, since a password is not for a file
OLD_BACKEND = "engine"  # the former name of `inference[].backend`, still accepted
_ONE_MACHINE: Mapping[str, int] = MappingProxyType({})


def is_cluster(tree: Mapping[str, Any]) -> bool:
    """Return whether a document is a cluster file, not a job. Raises `Refused(BAD_CONFIG)` if it has keys of both."""
    cluster_keys = [key for key in tree if key in Cluster.model_fields]
    job_keys = [key for key in tree if key in BLOCKS or key in xorl.KEYS]
    if cluster_keys and job_keys:
        raise bad_config(
            f"{cluster_keys[0]} belongs to a cluster file and {job_keys[0]} to a job: put the job below "
            "engines.NAME.job"
        )
    return bool(cluster_keys)


def parse_cluster(tree: Mapping[str, Any], folder: Path) -> tuple[Cluster, Jobs]:
    """Return the deployment that a document describes, and its jobs. Paths of jobs are relative to `folder`.

    Cluster and jobs are not reconciled yet, because flags may still change the cluster: see `reconcile`. Raises
    `Refused(BAD_CONFIG)` with one sentence.
    """
    cluster = validated_cluster(tree)
    jobs: Jobs = {}
    for name, part in cluster.engines.items():
        if part.job:
            try:
                jobs[name] = parse_job(read_job_file(folder / part.job) if isinstance(part.job, str) else part.job)
            except Refused as error:
                raise bad_config(f"engines.{name}.job: {error.why}") from error
    return cluster, jobs


def validated_cluster(tree: Mapping[str, Any], flag_of: Callable[[str], str] = lambda place: "") -> Cluster:
    """Return the cluster in a document. Raises `Refused(BAD_CONFIG)`.

    `flag_of` returns the flag that set the value at a place such as `gateway.port`, or "" if no flag did.
    """
    try:
        return Cluster.model_validate_json(json.dumps(_with_backends(tree)))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise bad_config(_sentence(error, flag_of)) from error
        raise bad_config(f"the cluster file has a value that is not plain data: {error}") from error


def _with_backends(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document with `engine`, the former name of `backend` in `inference`, renamed to `backend`.

    Logs a warning for each. Raises `Refused(BAD_CONFIG)` if both are given.
    """
    engines = tree.get("engines")
    if not isinstance(engines, Mapping):
        return tree
    changed = {}
    for name, engine in engines.items():
        parts = engine.get("inference") if isinstance(engine, Mapping) else None
        if isinstance(parts, list):
            place = f"engines.{name}.inference"
            parts = [_with_backend(part, f"{place}[{number}]") for number, part in enumerate(parts)]
            engine = {**engine, "inference": parts}
        changed[name] = engine
    return {**tree, "engines": changed}


def _with_backend(part: Any, place: str) -> Any:
    if not isinstance(part, Mapping) or OLD_BACKEND not in part:
        return part
    if "backend" in part:
        raise bad_config(f"{place}.{OLD_BACKEND} is the old name of {place}.backend: give only one of them")
    log.warning("%s.%s is the old name of %s.backend: write backend", place, OLD_BACKEND, place)
    return {"backend" if key == OLD_BACKEND else key: value for key, value in part.items()}


def reconcile(cluster: Cluster, jobs: Jobs, machines: Mapping[str, int] = _ONE_MACHINE) -> tuple[Cluster, Jobs]:
    """Make trainers and their jobs agree on backend and processes: a setting that only one of the two gives also
    applies to the other.

    `machines` maps an engine to the number of machines that its trainer runs on, if that is not 1. The trainer's part
    then describes each machine, and its job's `processes` counts the processes on all of them. Raises
    `Refused(BAD_CONFIG)` if a trainer and its job disagree.
    """
    engines, settled = dict(cluster.engines), dict(jobs)
    for name, engine in cluster.engines.items():
        if engine.trainer is None:
            continue
        job = jobs.get(name)
        trainer = _reconciled_trainer(name, engine.trainer, job, machines.get(name, 1))
        engines[name] = engine.model_copy(update={"trainer": trainer})
        if job and trainer.backend != job.trainer.backend:
            changed = job.trainer.model_copy(update={"backend": trainer.backend})
            settled[name] = job.model_copy(update={"trainer": changed})
    return cluster.model_copy(update={"engines": engines}), settled


def _reconciled_trainer(name: str, part: TrainerPart, job: RunConfig | None, machines: int) -> TrainerPart:
    place = f"engines.{name}.trainer"
    of_job: Tree = {} if job is None else job.trainer.model_dump(include={"backend", "processes"}, exclude_unset=True)
    values: Tree = {"backend": part.backend, "processes": part.processes}
    if "processes" not in part.model_fields_set and part.devices:
        values["processes"] = len(part.devices)
    if of_job.get("processes"):
        total = of_job["processes"]
        here, rest = divmod(total, machines)
        if rest:
            raise bad_config(
                f"{place}: its job's trainer.processes is {total}, which cannot be divided evenly over {machines} "
                "machines"
            )
        if here > PROCESSES_MAX:
            raise bad_config(
                f"{place}: its job's trainer.processes is {total}, but one machine starts at most {PROCESSES_MAX}: "
                "start it on more machines, with `python -m bombus_trainer.launcher --nnodes N` (docs/verl.md)"
            )
        of_job["processes"] = here
    for field, value in of_job.items():
        if value and field in part.model_fields_set and values[field] != value:
            each = f" on each of {machines} machines" if field == "processes" and machines > 1 else ""
            total = value * machines if field == "processes" else value
            raise bad_config(f"{place}.{field} is {values[field]}{each}, but its job's trainer.{field} is {total}")
        values[field] = value or values[field]
    try:
        return TrainerPart.model_validate({**part.model_dump(exclude_unset=True), **values})
    except ValidationError as error:
        raise bad_config(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


# ---- the sentence for an invalid value ---------------------------------------------------------------------------


def _sentence(error: ValidationError, flag_of: Callable[[str], str]) -> str:
    problem = error.errors(include_url=False)[0]
    place, found = _at(problem["loc"])
    if problem["type"] == "extra_forbidden":
        stem, _, last = place.rpartition(".")
        model = found if isinstance(found, type) else Cluster
        meant = nearest(last, model.model_fields)
        return f"{stem}{'.' if stem else ''}{last} is unknown" + (f"; did you mean {meant}?" if meant else "")
    if place == "engines" and problem["type"] in ("missing", "too_short"):
        return "engines is missing: name at least one engine"
    if problem["type"] == "value_error" or not isinstance(found, FieldInfo) or part_of(found.annotation) is not None:
        words = problem["msg"].removeprefix("Value error, ")
        return f"{place}: {words}" if place else words
    flag = flag_of(place)
    given = f"{flag} {typed(problem['input'])}" if flag else f"{place} = {shown(problem['input'])}"
    return f"{given} is refused: {allowed(found)}"


def _at(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | type[Part] | None]:
    """Return the dotted name of a location and its field or, for an unknown key, the model that lacks the key."""
    names: list[str] = []
    model: type[Part] | None = Cluster
    found: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            names[-1] += f"[{part}]"
        elif model is None:
            break  # the rest names the union member that was tried
        elif part in model.model_fields and not (found is not None and _is_mapping(found.annotation)):
            names.append(part)
            found = model.model_fields[part]
            model = part_of(found.annotation) if not _is_mapping(found.annotation) else model
        elif found is not None and _is_mapping(found.annotation):
            names.append(str(part))  # an engine's name
            model, found = part_of(found.annotation), None
        else:
            return ".".join([*names, str(part)]), model
    return ".".join(names), found


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def part_of(kind: Any) -> type[Part] | None:
    """Return the model X in `X`, `X | None`, `tuple[X, ...]` or `dict[str, X]`, or None for any other type."""
    if isinstance(kind, type) and issubclass(kind, Part):
        return kind
    if get_origin(kind) in (tuple, dict, Union, UnionType):
        return next((found for found in map(part_of, get_args(kind)) if found is not None), None)
    return None
