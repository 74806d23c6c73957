"""The processes of a hive on this machine: what `bombus up` keeps running, in which order, with which GPUs and keys.

`bombus.config.placement` decides which GPUs a process gets; this module sets the process's environment variables
accordingly.
"""

import itertools
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bombus.bus_address import bus_arguments, bus_environment
from bombus.config.cluster import Cluster, EnginePart, Jobs
from bombus.config.flags import typed_flags
from bombus.config.parts import InferencePart, MetricsOptions, TrainerMachineOptions, TrainerPart
from bombus.config.placement import gpus_of_replicas
from bombus.errors import Code, EngineFault, Refused
from bombus.host.credentials import bus_login
from bombus.host.doctor_streams import check_room
from bombus.insight.trackers.adapters import ADAPTERS as TRACKERS
from bombus.insight.trackers.adapters import KEY_VARIABLES as TRACKER_KEYS
from bombus.insight.trackers.adapters import is_installed
from bombus.machine import watchdog
from bombus.machine.environments import environment_python, environments_folder
from bombus.machine.hardware import gpu_environment
from bombus.machine.hive_keys import KEY_VARIABLES, HiveKeys
from bombus.machine.process import PARENT_VARIABLE

ONE_ENGINE = Cluster(engines={"main": EnginePart(trainer=TrainerPart(), inference=(InferencePart(),))})
GATEWAY_SILENCE_S = 20.0  # a gateway whose event loop is stuck keeps all of its calls waiting
# A training step frees and allocates the same large blocks over and over. glibc would return each block to the kernel,
# which clears it before the next use. That takes 6 to 10 % of a step on a CPU.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
# Torch's threads must not busy-wait for each other on the cores that trainer and replica share.
UNLESS_SET = {"OMP_WAIT_POLICY": "PASSIVE"}
FOR_EVERY_PROCESS = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a trainer's ranks on several machines meet, and how long they wait for each other."""

    nnodes: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    operation_timeout_s: float = 1800.0

    def torchrun(self, node: str, processes: int) -> tuple[str, ...]:
        """Return torchrun's options on machine number `node`, which runs `processes` ranks."""
        ranks = ("--nproc_per_node", processes), ("--nnodes", self.nnodes), ("--node_rank", node)
        leader = ("--master_addr", self.address), ("--master_port", self.port)
        return tuple(f"{name}={value}" for name, value in (*ranks, *leader))


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment that `bombus up` was asked to start: a cluster, and the settings that apply to this start only."""

    cluster: Cluster = ONE_ENGINE
    jobs: Jobs = {}
    nats_port: int = 0
    nats_host: str = ""  # the name of this machine, if others may reach our own NATS server
    debug_root: Path | None = None  # folder below which jobs may let trainers write samples
    log_level: str = "info"
    keys: HiveKeys = HiveKeys()
    trusted_network: bool = False  # gateways may listen anywhere without keys
    web: bool = False  # whether the page in the browser is served
    rendezvous: Rendezvous | None = None  # set if the trainer's ranks are on several machines

    @property
    def data_dir(self) -> Path:
        return Path(self.cluster.data_dir)


class Service(msgspec.Struct, frozen=True):
    """A process to keep running. `kind` is its subcommand, and `name` its name in the log.

    `environment` contains all of the process's variables; `gpus` contains only those that select the GPUs for the
    process. The process is killed after it has been silent for `silence_s` seconds, or never if that is 0.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    gpus: Mapping[str, str] = {}
    silence_s: float = 0.0

    def __str__(self) -> str:
        """Return the command line as a user could type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.gpus.items()), shlex.join(self.command)])


def check_can_start(layout: Layout) -> None:
    """Raise `Refused` if the deployment cannot start.

    The reason is a full disk, `--durability power` on a system without inotify, an environment that is not installed,
    an API key that is not set, or a GPU that our own CUDA_VISIBLE_DEVICES does not list.
    """
    check_room(layout.cluster)
    if layout.cluster.durability == "power" and sys.platform != "linux":
        raise Refused(Code.BAD_CONFIG, "--durability power needs Linux, which reports which files must be synced")
    for name, engine in layout.cluster.engines.items():
        used: set[str] = {engine.trainer.backend} if engine.trainer is not None else set()
        used |= {part.backend for part in engine.inference if part.count and not part.python}
        for backend in used & {"vllm", "verl"}:
            try:
                environment_python(backend)
            except EngineFault as error:
                raise Refused(Code.BAD_CONFIG, f"engine {name}: {error}") from error
        for placed in (engine.trainer, *engine.inference):
            gpu_environment(placed.devices if placed is not None else ())
        for part in engine.inference:
            if part.api_key_env and not os.environ.get(part.api_key_env):
                raise Refused(Code.BAD_CONFIG, f"engine {name}: the variable {part.api_key_env} holds no key; set it")
            if part.python and not os.access(part.python, os.X_OK):
                raise Refused(
                    Code.BAD_CONFIG, f"engine {name}: python {part.python} is not an interpreter on this machine"
                )


def services(layout: Layout, nats: str) -> list[Service]:
    """Return the processes of a hive, in the order in which they start.

    Raises `Refused(BAD_CONFIG)` if our own CUDA_VISIBLE_DEVICES does not list a GPU that is needed.
    """
    cluster = layout.cluster
    common = _common(layout, nats)
    environment = {**_environment(layout), **bus_environment(nats)}
    # A restarted coordinator has the same name as before, and therefore the same lease.
    stem = f"{socket.gethostname()}-{os.getpid()}"
    kept = [] if cluster.nats else ["--watch-disk", str((layout.data_dir / "nats").absolute())]
    kept += typed_flags(cluster.streams)
    kept += typed_flags(cluster.coordinator, "compact", "raise_level")
    kept += ["--archive", str(Path(cluster.coordinator.archive).absolute())] if cluster.coordinator.archive else []

    ports = itertools.count(cluster.metrics_port) if cluster.metrics_port else itertools.repeat(0)

    def metrics() -> MetricsOptions:
        """Return where the next process without a port of its own serves metrics."""
        return MetricsOptions(metrics_host=cluster.metrics_host, metrics_port=next(ports))

    def login(kind: str) -> Mapping[str, str]:
        return bus_login(Path(cluster.credentials), cluster.hive, kind) if cluster.credentials else {}

    def service(
        kind: str, name: str, *arguments: str, more: Mapping[str, str] = {}, gpus: Sequence[int] = ()
    ) -> Service:
        without_port = kind == "coordinator" or (kind == "gateway" and cluster.gateway.count > 1)
        own = typed_flags(metrics()) if without_port else []
        command = (sys.executable, "-m", "bombus", kind, *common, *arguments, *own)
        seen = gpu_environment(gpus) if gpus else {}
        silence_s = GATEWAY_SILENCE_S if kind == "gateway" else 0.0
        return Service(kind, name, command, {**environment, **login(kind), **more, **seen}, seen, silence_s)

    found = [
        service("coordinator", f"coordinator{which}", "--name", f"{stem}{which or ' 1'}".replace(" ", "-"), *kept)
        for which in _numbered(cluster.coordinator.count)
    ]
    for name, engine in cluster.engines.items():
        if engine.trainer is not None:
            command = _trainer(engine.trainer, name, layout, nats, metrics())
            seen = gpu_environment(engine.trainer.devices) if engine.trainer.devices else {}
            variables = {**KEEP_FREED_MEMORY, **environment, **login("trainer"), **seen}
            found.append(Service("trainer", f"trainer {name}", command, variables, seen, engine.trainer.stall_s))
        kinds = [(part, gpus) for part in engine.inference for gpus in gpus_of_replicas(part)]
        for which, (part, gpus) in zip(_numbered(len(kinds)), kinds, strict=True):
            key = {part.api_key_env: os.environ.get(part.api_key_env, "")} if part.api_key_env else {}
            found.append(service("inference", f"inference {name}{which}", *_replica(part, name), more=key, gpus=gpus))
    engines = [argument for name in cluster.engines for argument in ("--engine", name)]
    listening = ["--host", cluster.gateway.host, "--port", str(cluster.gateway.port), "--reuse-port", *engines]
    listening += typed_flags(cluster.gateway, "host_names", "inference_hosts", "bases", "models_max", "record_samples")
    listening += ["--trusted-network"] if layout.trusted_network else []
    listening += layout.keys.files.arguments()
    keys = layout.keys.environment()  # the other processes run models and need no keys
    found += [
        service("gateway", f"gateway{which}", *listening, more=keys) for which in _numbered(cluster.gateway.count)
    ]
    if any(map(is_installed, TRACKERS)) and cluster.coordinator.count:  # else the machine of the coordinators tracks
        tracking = {name: os.environ[name] for name in TRACKER_KEYS if name in os.environ}
        folder = str((layout.data_dir / "trackers").absolute())
        found.append(service("track", "track", "--follow", "--folder", folder, more=tracking))
    if layout.web:
        shown = ["--host", cluster.web.host, "--port", str(cluster.web.port), "--reuse-port"]
        shown += ["--trusted-network"] if layout.trusted_network else []
        shown += layout.keys.files.arguments()
        found.append(service("web", "web", *shown, more=keys))
    return found


def _environment(layout: Layout) -> dict[str, str]:
    """Return the variables for every process.

    API keys are left out, because each key is only for the replica that uses it. The variables of our own watchdog are
    left out too.
    """
    replicas = [part for engine in layout.cluster.engines.values() for part in engine.inference]
    kept_back = {*KEY_VARIABLES, *TRACKER_KEYS, *watchdog.VARIABLES, *(part.api_key_env for part in replicas)}
    return {
        **UNLESS_SET,
        **{name: value for name, value in os.environ.items() if name not in kept_back},
        PARENT_VARIABLE: str(os.getpid()),
        **FOR_EVERY_PROCESS,
    }


def _common(layout: Layout, nats: str) -> tuple[str, ...]:
    return (*bus_arguments(nats), "--hive", layout.cluster.hive, "--log-level", layout.log_level)


def trainer_arguments(part: TrainerPart, engine: str, layout: Layout, nats: str, **more: object) -> list[str]:
    """Return the arguments of a trainer's ranks, which are the same for every rank and machine, with `more` options."""
    folder = str((layout.data_dir / "engines").absolute())
    options: dict[str, object] = {"engine": engine, "folder": folder, "device": part.device, **more}
    options |= part.model_dump(mode="json", include=set(TrainerMachineOptions.model_fields), exclude_defaults=True)
    if layout.debug_root is not None:
        options["debug_root"] = str(layout.debug_root)
    if layout.rendezvous is not None:
        options["operation_timeout_s"] = layout.rendezvous.operation_timeout_s
    return [*_common(layout, nats), "--options", json.dumps(options)]


def _trainer(part: TrainerPart, engine: str, layout: Layout, nats: str, metrics: MetricsOptions) -> tuple[str, ...]:
    arguments = trainer_arguments(part, engine, layout, nats, **metrics.model_dump(exclude_defaults=True))
    python, backend = sys.executable, list[str]()
    if part.backend == "verl":
        python, backend = str(environments_folder().absolute() / "verl" / "bin" / "python"), ["--backend", "verl"]
    if layout.rendezvous is not None:
        where = layout.rendezvous.torchrun("0", part.processes)
    elif part.processes > 1:
        where = ("--standalone", f"--nproc-per-node={part.processes}")
    else:
        return (python, "-m", "bombus", "trainer", *arguments, *backend)
    return (python, "-m", "bombus_trainer.torchrun", *where, "-m", "bombus_trainer.worker", *arguments)


def _replica(part: InferencePart, engine: str) -> list[str]:
    words = ["--engine", engine, *typed_flags(part, "host", "max_model_len", "max_running", "backend")]
    if part.backend == "openai":
        return words + typed_flags(part, "url", "model", "api_key_env")
    words += ["--device", part.device, "--threads", str(part.threads)]
    words += typed_flags(part, "dtype", "kv_cache_mb", "adapters_mb", "max_loras", "max_lora_rank", "eager")
    words += ["--vllm-python", str(Path(part.python).absolute())] if part.python else []
    return words + typed_flags(part, "gpu_memory_utilization", "tensor_parallel")


def _numbered(count: int) -> list[str]:
    """Return a name suffix for each of `count` processes: a number, or nothing if there is only one."""
    return [""] if count == 1 else [f" {number}" for number in range(1, count + 1)]
