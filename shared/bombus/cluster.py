"""A cluster file: the processes of a whole deployment, and the job of each engine. `bombus up --config` starts it."""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from bombus import xorl
from bombus.config_groups import allowed, shown
from bombus.errors import Code, Refused
from bombus.flags import typed
from bombus.job import BLOCKS, RunConfig, Tree, parse_job, read_job_file
from bombus.subjects import check_name

PROCESSES_MAX = 64
Count = Annotated[int, Field(ge=0, le=PROCESSES_MAX)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")]
Threads = Annotated[int, Field(ge=0, le=1024)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GatewayPart(Part):
    """Where clients come in: `count` processes share the port, 0 leaves it to another machine."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    port: int = Field(default=10086, ge=1, le=65_535)
    count: Count = 1


class CoordinatorPart(Part):
    """One of `count` leads, the others stand by; 0 leaves it to another machine."""

    count: Count = 1


class TrainerPart(Part):
    """What trains an engine. `threads` are torch's on the CPU for each process, 0 one for each core.

    Weights reach replicas in a folder that they share, or by the hive's object store; a full copy every
    `weights_full_every` versions, and in between what has changed. Of a LoRA job it is once the model and then
    adapters alone, or in each step the model with the adapter `merged` into it.
    """

    backend: Literal["torch", "verl"] = "torch"
    device: Device = "cpu"
    threads: Threads = 0
    processes: int = Field(default=1, ge=1, le=PROCESSES_MAX)
    weights_by: Literal["folder", "objects"] = "folder"
    weights_full_every: int = Field(default=0, ge=0, le=1024)
    weights_lora: Literal["merged", "adapter"] = "adapter"

    @model_validator(mode="after")
    def _one_process_of_torch(self) -> "TrainerPart":
        said = "backend" in self.model_fields_set  # where it is left open, the job may still say verl
        if said and self.backend == "torch" and self.processes > 1:
            raise ValueError(f"processes {self.processes} is refused: backend torch has one; backend verl has many")
        return self


_NOT_OF_OTHERS = {"openai": ("url", "api_key_env", "model"), "vllm": ("tensor_parallel",)}
_NOT_OF_OPENAI = ("device", "threads", "dtype", "kv_cache_mb")


class InferencePart(Part):
    """Replicas of one kind. `url`, `model` and `api_key_env` are of engine openai, `tensor_parallel` of vllm.

    `kv_cache_mb` is memory for keys and values; `dtype` and it are the engine's own default when they are not given.
    `api_key_env` names the variable that holds the server's key.
    """

    engine: Literal["torch", "vllm", "openai"] = "torch"
    count: Count = 1
    device: Device = "cpu"
    threads: Threads = 0
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        default="", description="one of float32, bfloat16, float16"
    )
    kv_cache_mb: int = Field(default=0, ge=0, le=1 << 22)
    tensor_parallel: int = Field(default=1, ge=1, le=PROCESSES_MAX)
    url: str = Field(default="", pattern=r"^(https?://\S+)?$", description="http://HOST:PORT of a server that runs")
    model: str = Field(default="", max_length=1024)
    api_key_env: str = Field(default="", pattern=r"^([A-Za-z_]\w*)?$", description="the name of a variable")

    @model_validator(mode="after")
    def _is_of_its_engine(self) -> "InferencePart":
        given = self.model_fields_set
        for engine, fields in _NOT_OF_OTHERS.items():
            for name in fields:
                if name in given and engine != self.engine:
                    raise ValueError(f"{name} means nothing with engine {self.engine}: it is of {engine}")
        if self.engine != "openai":
            return self
        for name in _NOT_OF_OPENAI:
            if name in given:
                raise ValueError(f"{name} means nothing with engine openai: the server there has its own")
        if not self.url:
            raise ValueError("url is missing: engine openai is a server that runs elsewhere")
        if self.count > 1:
            raise ValueError(f"count {self.count} is refused: one replica stands for the server at {self.url}")
        return self


class EnginePart(Part):
    """`job` is a file beside this one, or a job's document; with it the engine is configured and started.

    Without `trainer` or `inference` it is trained or served from elsewhere.
    """

    job: str | Tree = Field(default="", description="a job's file, or its document")
    trainer: TrainerPart | None = None
    inference: tuple[InferencePart, ...] = Field(default=(), max_length=PROCESSES_MAX)

    @property
    def replicas(self) -> int:
        return sum(part.count for part in self.inference)


class Cluster(Part):
    """`nats` is the URL of an external server or cluster, empty starts our own. `data_dir` is as seen from here."""

    hive: str = Field(default="main", description="a name of lower-case letters, digits and dashes")
    nats: str = Field(default="", max_length=4096)
    data_dir: str = Field(default=".bombus", min_length=1, max_length=4096)
    gateway: GatewayPart = GatewayPart()
    coordinator: CoordinatorPart = CoordinatorPart()
    engines: dict[str, EnginePart] = Field(min_length=1, max_length=PROCESSES_MAX)

    @model_validator(mode="after")
    def _names_are_names(self) -> "Cluster":
        check_name(self.hive, "hive")
        for name in self.engines:
            check_name(name, "engine")
        return self


Jobs = dict[str, RunConfig]  # by engine


def is_cluster(tree: Mapping[str, Any]) -> bool:
    """Whether a document is a cluster file and not a job. Raises `Refused(BAD_CONFIG)` when it is both."""
    ours = [key for key in tree if key in Cluster.model_fields]
    jobs = [key for key in tree if key in BLOCKS or key in xorl.KEYS]
    if ours and jobs:
        raise _refusal(f"{ours[0]} is of a cluster file and {jobs[0]} of a job: put the job below engines.NAME.job")
    return bool(ours)


def read_cluster(tree: Mapping[str, Any], folder: Path) -> tuple[Cluster, Jobs]:
    """The deployment that a document describes, and its jobs; their files are looked for from `folder`.

    What a trainer or its job leaves open is taken from the other. Raises `Refused(BAD_CONFIG)` with one sentence.
    """
    cluster = validated_cluster(tree)
    jobs: Jobs = {}
    for name, part in cluster.engines.items():
        if part.job:
            try:
                jobs[name] = parse_job(read_job_file(folder / part.job) if isinstance(part.job, str) else part.job)
            except Refused as error:
                raise _refusal(f"engines.{name}.job: {error.why}") from error
    return agreed(cluster, jobs)


def validated_cluster(tree: Mapping[str, Any], flag_of: Callable[[str], str] = lambda place: "") -> Cluster:
    """`flag_of` has the flag that gave the value of a place, where one did. Raises `Refused(BAD_CONFIG)`."""
    try:
        return Cluster.model_validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise _refusal(_sentence(error, flag_of)) from error
        raise _refusal(f"the cluster file is not plain data: {error}") from error


def agreed(cluster: Cluster, jobs: Jobs) -> tuple[Cluster, Jobs]:
    """Trainers and jobs that say the same of backend and processes: what one leaves open is taken from the other.

    Raises `Refused(BAD_CONFIG)` where they differ.
    """
    engines, settled = dict(cluster.engines), dict(jobs)
    for name, engine in cluster.engines.items():
        part, job = engine.trainer, jobs.get(name)
        if part is None:
            continue
        values: Tree = {"backend": part.backend, "processes": part.processes}
        for field in values:
            asked = getattr(job.trainer, field) if job and field in job.trainer.model_fields_set else None
            if not asked:
                continue
            if field in part.model_fields_set and values[field] != asked:
                said = f"engines.{name}.trainer.{field} is {values[field]}"
                raise _refusal(f"{said}, and its job's trainer.{field} is {asked}")
            values[field] = asked
        trainer = _refusing(TrainerPart, {**part.model_dump(exclude_unset=True), **values}, f"engines.{name}.trainer")
        engines[name] = engine.model_copy(update={"trainer": trainer})
        if job and trainer.backend != job.trainer.backend:
            changed = job.trainer.model_copy(update={"backend": trainer.backend})
            settled[name] = job.model_copy(update={"trainer": changed})
    return cluster.model_copy(update={"engines": engines}), settled


def _refusing(part: type[TrainerPart], values: Tree, name: str) -> TrainerPart:
    try:
        return part.model_validate(values)
    except ValidationError as error:
        raise _refusal(f"{name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


# ---- what is wrong, in words -------------------------------------------------------------------------------------


def _sentence(error: ValidationError, flag_of: Callable[[str], str]) -> str:
    problem = error.errors(include_url=False)[0]
    where, found = _at(problem["loc"])
    if problem["type"] == "extra_forbidden":
        stem, _, last = where.rpartition(".")
        holder = found if isinstance(found, type) else Cluster
        close = difflib.get_close_matches(last, holder.model_fields, n=1)
        return f"{stem}{'.' if stem else ''}{last} is unknown" + (f"; did you mean {close[0]}?" if close else "")
    if where == "engines" and problem["type"] in ("missing", "too_short"):
        return "engines is missing: name at least one engine"
    if problem["type"] == "value_error" or not isinstance(found, FieldInfo) or part_of(found.annotation) is not None:
        words = problem["msg"].removeprefix("Value error, ")
        return f"{where}: {words}" if where else words
    flag = flag_of(where)
    said = f"{flag} {typed(problem['input'])}" if flag else f"{where} = {shown(problem['input'])}"
    return f"{said} is refused: {allowed(found)}"


def _at(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | type[Part] | None]:
    """A place's name, and the field there; for an unknown field the model that lacks it."""
    names: list[str] = []
    model: type[Part] | None = Cluster
    found: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            names[-1] += f"[{part}]"
        elif model is None:
            break  # the member of a union that was tried
        elif part in model.model_fields and not (found is not None and _is_mapping(found.annotation)):
            names.append(part)
            found = model.model_fields[part]
            model = part_of(found.annotation) if not _is_mapping(found.annotation) else model
        elif found is not None and _is_mapping(found.annotation):
            names.append(str(part))  # the name of an engine
            model, found = part_of(found.annotation), None
        else:
            return ".".join([*names, str(part)]), model
    return ".".join(names), found


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def part_of(kind: Any) -> type[Part] | None:
    """The model in `X`, `X | None`, `tuple[X, ...]` or `dict[str, X]`."""
    if isinstance(kind, type) and issubclass(kind, Part):
        return kind
    if get_origin(kind) in (tuple, dict, Union, UnionType):
        return next((found for found in map(part_of, get_args(kind)) if found is not None), None)
    return None


def parts() -> Iterator[tuple[str, type[Part]]]:
    """Every part of a cluster file with the path to it, for the page that describes them."""
    yield "", Cluster
    yield "gateway", GatewayPart
    yield "coordinator", CoordinatorPart
    yield "engines.NAME", EnginePart
    yield "engines.NAME.trainer", TrainerPart
    yield "engines.NAME.inference[]", InferencePart


def _refusal(why: str) -> Refused:
    return Refused(Code.BAD_CONFIG, why)
