"""The parts of a cluster file that become processes, validated when they are created."""

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from bombus.config.flags import Flag, NoFlag
from bombus.hive.subjects import check_name

PROCESSES_MAX = 64
GPU_MAX = 1023
BASES_MAX = 64
MODELS_MAX_MAX = 4096  # upper bound of `models_max`
Count = Annotated[int, Field(ge=0, le=PROCESSES_MAX)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")]
Threads = Annotated[int, Field(ge=0, le=1024)]
Eager = Annotated[bool, Flag(name="--vllm-eager")]
MaxLoras = Annotated[int, Flag(name="--vllm-max-loras"), Field(ge=1, le=1024)]
MaxLoraRank = Annotated[int, Flag(name="--vllm-max-lora-rank", metavar="RANK"), Field(ge=1, le=512)]  # vLLM's limit
MaxRunning = Annotated[int, Field(ge=1, le=4096)]
HiveName = Annotated[str, AfterValidator(partial(check_name, what="hive"))]
EngineName = Annotated[str, AfterValidator(partial(check_name, what="engine"))]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]
InferenceHost = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}(:\d{1,5})?$")]
BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,139}=[^\x00-\x1f\x7f]{1,4096}$")]
Gpus = Annotated[
    tuple[Annotated[int, Field(ge=0, le=GPU_MAX)], ...],
    Field(max_length=PROCESSES_MAX, description="numbers of GPUs, such as [0, 1]"),
]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MetricsOptions(BaseModel):
    """Where processes without a port of their own serve metrics. For cluster files and the flags of each of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metrics_host: Annotated[str, Flag(help="where /metrics listens")] = Field(
        default="127.0.0.1", min_length=1, max_length=253
    )
    metrics_port: Annotated[int, Flag(metavar="PORT", help="the port of /metrics; 0: none")] = Field(
        default=0,
        ge=0,
        le=65_000,  # `bombus up` counts up from it
    )


class GatewayOptions(BaseModel):
    """A gateway's options: where clients reach it, and the names that they may use. Used in cluster files and by
    `bombus gateway`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[str, Flag(help="where it listens")] = "127.0.0.1"
    port: Annotated[int, Flag(metavar="PORT", help="0: any free port")] = Field(default=10086, ge=0, le=65_535)
    host_names: Annotated[
        tuple[HostName, ...],
        Flag(
            name="--host-name",
            metavar="NAME",
            help="a name by which clients reach the gateway (repeatable); without a client key, requests for "
            "names other than localhost, its address, and that of --public-url are refused",
        ),
    ] = Field(default=(), description="names of hosts, such as [hive.lan]")
    inference_hosts: Annotated[
        tuple[InferenceHost, ...],
        Flag(
            name="--inference-host",
            metavar="HOST[:PORT]",
            help="hosts on which training clients may have their own inference servers, which get "
            "their weights (repeatable)",
            default="none",
        ),
    ] = Field(default=(), description="hosts, with a port or without, such as [gpu-1, 10.0.0.7:30000]")
    bases: Annotated[
        tuple[BaseName, ...],
        Flag(
            name="--base",
            metavar="NAME=PATH",
            help="may be given several times: PATH is the base that training clients get by the name NAME, such as "
            "meta-llama/Llama-3.2-1B=smollm2",
        ),
    ] = Field(default=(), max_length=BASES_MAX, description="NAME=PATH, such as [meta-llama/Llama-3.2-1B=smollm2]")
    models_max: Annotated[
        int,
        Flag(
            metavar="N",
            help="how many models of training clients an engine may have at a time; once this limit is reached, each "
            "key still gets its share, and memory may allow fewer",
        ),
    ] = Field(default=64, ge=1, le=MODELS_MAX_MAX)
    record_samples: Annotated[
        bool, Flag(help="whether the samples of training clients are recorded in the log, for `bombus audit`")
    ] = False

    @field_validator("bases")
    @classmethod
    def _bases_have_names_of_their_own(cls, bases: tuple[str, ...]) -> tuple[str, ...]:
        names = [base.partition("=")[0] for base in bases]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice, but a name refers to one base")
        return bases


class GatewayPart(GatewayOptions, Part):
    """Where clients connect. `count` processes share the port; with 0, the gateway runs on another machine. `port` 0
    means any free port, which `bombus up` prints.

    A gateway without a client key answers requests for localhost, for its own address, and for `host_names`. Training
    clients may have their own inference servers, which get their weights, on `inference_hosts`. `bases` maps the names
    by which [training clients](training.md) ask for base models to the models themselves, given as in a job's
    `model.path`. `models_max` is how many training clients' models an engine may have at the same time. With
    `record_samples`, what training clients sample is recorded on the log, as episodes' calls are, and `bombus audit`
    accounts for it.
    """

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    count: Annotated[Count, NoFlag()] = 1


class WebPart(Part):
    """The page that shows the hive in a browser (see [web.md](web.md)), if the packages of `bombus[insight]` are
    installed. If the port is taken, any free one is used. Beyond loopback it needs the admin key.
    """

    enabled: bool = True
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    port: int = Field(default=8265, ge=0, le=65_535, description="0: any free port")


class LogOptions(Part):
    """Options for compacting a growing log, and for what is written to it. Used in cluster files and by the flags of
    `bombus coordinator`."""

    compact: Annotated[bool, Flag(help="whether the oldest events are removed once the log is over 60 % full")] = True
    archive: Annotated[
        str, Flag(metavar="DIR", help="a folder to which events are written before they are removed", default="none")
    ] = Field(default="", max_length=4096)
    raise_level: Annotated[
        bool, Flag(help="raise the log's feature level to this release's, after which older releases refuse the hive")
    ] = False

    @model_validator(mode="after")
    def _what_is_archived_is_removed(self) -> "LogOptions":
        if self.archive and not self.compact:
            raise ValueError("archive (--archive) has no effect without `compact`: nothing is removed from the log")
        return self


class CoordinatorPart(LogOptions):
    """The coordinator. One of `count` processes leads and the others stand by; with 0, it runs on another machine.

    With `compact` the leader removes the oldest events once the log is over 60 % full, until it is about 40 % full. If
    a folder `archive` (relative to the working directory) is given, the events are first written there. `raise_level`
    ends an upgrade (docs/storage.md): older releases can no longer take part.
    """

    count: Count = 1


class DeployPart(Part):
    """What [`bombus deploy render`](deploy.md) needs to know of a cluster, beyond what runs. `image` is the name of our
    images, in which `{target}` and `{version}` are replaced. `nodes` are for Slurm and SkyPilot: the first has all but
    the replicas, which the others share. Kubernetes adds gateways, up to `gateways_max`, while each has more than
    `gateway_calls` calls in flight. `data_size` is the size of the volume for checkpoints and weights, and
    `accelerator` is what SkyPilot calls the GPUs.
    """

    image: str = Field(default="bombus-{target}:{version}", pattern=r"^[A-Za-z0-9_./:@{}-]+$", max_length=512)
    nats_image: str = Field(
        default="docker.io/library/nats:2.15.1-alpine", pattern=r"^[A-Za-z0-9_./:@-]+$", max_length=512
    )
    nodes: int = Field(default=1, ge=1, le=PROCESSES_MAX)
    gateways_max: int = Field(default=8, ge=1, le=1000)
    gateway_calls: int = Field(default=256, ge=1, le=100_000)
    data_size: str = Field(default="100Gi", pattern=r"^[1-9][0-9]*[GT]i$", description="a size, such as 100Gi")
    accelerator: str = Field(
        default="H100", pattern=r"^[A-Za-z0-9_-]+$", max_length=64, description="a name, such as H100"
    )


class PlacedPart(Part):
    """A part that runs on the CPU or on GPUs. It runs on the CPU if neither `devices` nor `device` is given."""

    devices: Gpus = ()
    device: Device = Field(default_factory=lambda data: "cuda" if data.get("devices") else "cpu")
    share_devices: bool = False

    @model_validator(mode="after")
    def _devices_are_cuda(self) -> "PlacedPart":
        if self.devices and self.device != "cuda":
            raise ValueError(f"device {self.device} is refused alongside devices, which are GPUs: leave it out")
        return self


class TrainerMachineOptions(BaseModel):
    """Settings chosen by the operator of a trainer's machine. Used in cluster files and by the flags of `bombus
    trainer`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: Annotated[Threads, Flag(help="torch's threads on the CPU; 0: one for each core")] = 0
    bin_tokens: Annotated[
        int,
        Flag(
            metavar="TOKENS",
            help="the most tokens of a micro-batch, even if a job's max_tokens_per_bin is higher; 0: the job's limit "
            "on a GPU, at most 4096 on a CPU",
        ),
    ] = Field(default=0, ge=0, le=1 << 24)
    stall_s: Annotated[
        float,
        Flag(
            metavar="SECONDS",
            help="how long the first work of a kind may go without progress before the trainer is replaced; later the "
            "limit follows from its pace; 0: it is replaced only after a day without progress",
        ),
    ] = Field(default=600.0, ge=0.0, le=86_400.0)
    allow_download: Annotated[bool, Flag(help="models may be downloaded from a hub")] = False
    weights_by: Annotated[
        Literal["folder", "objects"],
        Flag(help="how weights reach the replicas: in a shared folder, or through the hive's object store"),
    ] = "folder"
    weights_full_every: Annotated[
        int,
        Flag(
            metavar="N",
            help="publish a full copy every N versions, and only the changes in between; 0: 1 with a folder, 16 with "
            "the object store",
        ),
    ] = Field(default=0, ge=0, le=1024)
    weights_lora: Annotated[
        Literal["merged", "adapter"],
        Flag(
            help="adapter: a LoRA job publishes the model once, and then only adapters; merged: in each step, the "
            "model with the adapter merged into it"
        ),
    ] = "adapter"

    @field_validator("bin_tokens")
    @classmethod
    def _bins_hold_something(cls, tokens: int) -> int:
        return none_or_at_least(tokens, 16)


class TrainerPart(TrainerMachineOptions, PlacedPart):
    """The processes that train an engine. `threads` is the number of CPU threads that torch uses in each; 0 means one
    for each core.

    Each process gets one of `devices`, and `device` is then cuda. If neither is given, `device` is cpu. `share_devices`
    lets other parts use the same GPUs. A micro-batch has at most `bin_tokens` tokens; 0 means the job's limit on a GPU,
    and at most 4096 on a CPU. With `allow_download`, models may be downloaded from a hub. A trainer whose work makes no
    progress for `stall_s` is replaced; once the trainer's pace is known, the limit follows from that.

    Weights reach replicas through a shared folder, or through the hive's object store. A full copy is made every
    `weights_full_every` versions (0 means 1 with a folder, 16 with the object store); in between, only changes are
    sent. A LoRA job publishes the model once and then only adapters or, with `merged`, the model with the adapter
    merged into it at each step.
    """

    backend: Literal["torch", "verl"] = "torch"
    processes: int = Field(default=1, ge=1, le=PROCESSES_MAX)

    @model_validator(mode="after")
    def _each_process_has_a_device(self) -> "TrainerPart":
        if self.devices and "processes" in self.model_fields_set and len(self.devices) != self.processes:
            raise ValueError(
                f"devices names {_gpus(len(self.devices))}, but processes is {self.processes}: give one for each"
            )
        return self


_FIELDS_OF = {
    "openai": ("url", "api_key_env", "model"),
    "vllm": ("tensor_parallel", "eager", "python", "gpu_memory_utilization", "max_loras", "max_lora_rank"),
}
_NOT_FOR_OPENAI = ("device", "devices", "share_devices", "threads", "dtype", "kv_cache_mb", "adapters_mb")


class InferencePart(PlacedPart):
    """Replicas of one kind, which serve the engine in whose section they are listed. `backend` is the software that
    runs them. Gateways on other machines reach replicas only with a `host` beyond loopback, such as 0.0.0.0.

    `url`, `model` and `api_key_env` are for the backend openai; `tensor_parallel`, `eager` (no compilation), `python`
    (an interpreter with your own vLLM), `gpu_memory_utilization`, `max_loras` and `max_lora_rank` are for the backend
    vllm.

    Each replica gets `tensor_parallel` of `devices`, in order, and `device` is then cuda. If neither is given, `device`
    is cpu. `share_devices` lets other parts use the same GPUs. `max_model_len` is in tokens; it and `dtype` default to
    the job's values. `max_running` is the most sequences that run at the same time. `kv_cache_mb` is memory for keys
    and values; 0 means the backend's own default, which for vLLM on GPUs is the fraction `gpu_memory_utilization` of
    their memory (0 means vLLM's own default). `api_key_env` names the environment variable that holds the server's key.

    `adapters_mb` is memory for LoRA adapters that training clients sample from, in addition to the engine's own policy;
    0 means none. vLLM has up to `max_loras` of them in one batch, of ranks up to `max_lora_rank`.
    """

    backend: Literal["torch", "vllm", "openai"] = "torch"
    count: Count = 1
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    threads: Threads = 0
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        default="", description="one of float32, bfloat16, float16"
    )
    max_model_len: int = Field(default=0, ge=0, le=1 << 23)
    max_running: MaxRunning = 128
    kv_cache_mb: int = Field(default=0, ge=0, le=1 << 22)
    adapters_mb: int = Field(default=1024, ge=0, le=1 << 22)
    max_loras: MaxLoras = 4
    max_lora_rank: MaxLoraRank = 64
    tensor_parallel: int = Field(default=1, ge=1, le=PROCESSES_MAX)
    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1)
    eager: Eager = False
    python: str = Field(default="", max_length=4096)
    url: str = Field(
        default="", pattern=r"^(https?://[^\s/@]+(/\S*)?)?$", description="http://HOST:PORT of a running server"
    )
    model: str = Field(default="", max_length=1024)
    api_key_env: str = Field(default="", pattern=r"^([A-Za-z_]\w*)?$", description="an environment variable")

    @field_validator("max_model_len")
    @classmethod
    def _max_model_len_holds_a_sequence(cls, tokens: int) -> int:
        return none_or_at_least(tokens, 2)

    @model_validator(mode="after")
    def _fields_belong_to_the_backend(self) -> "InferencePart":
        given = self.model_fields_set
        for backend, fields in _FIELDS_OF.items():
            for name in fields:
                if name in given and backend != self.backend:
                    raise ValueError(f"{name} has no effect with backend {self.backend}: it belongs to {backend}")
        if self.backend != "openai":
            return self
        for name in _NOT_FOR_OPENAI:
            if name in given:
                raise ValueError(f"{name} has no effect with backend openai: the server there has its own")
        if not self.url:
            raise ValueError("url is missing: backend openai uses a server that runs elsewhere")
        if self.count > 1:
            raise ValueError(f"count {self.count} is refused: a single replica stands for the server at {self.url}")
        return self

    @model_validator(mode="after")
    def _devices_are_enough(self) -> "InferencePart":
        needed = self.count * self.tensor_parallel
        if self.devices and len(self.devices) != needed:
            each = f" with {_gpus(self.tensor_parallel)} each" if self.tensor_parallel > 1 else ""
            raise ValueError(f"devices names {_gpus(len(self.devices))}, but {self.count} replicas{each} take {needed}")
        if self.gpu_memory_utilization and (self.kv_cache_mb or self.device == "cpu"):
            why = "kv_cache_mb already sets this" if self.kv_cache_mb else "device is cpu"
            raise ValueError(f"gpu_memory_utilization has no effect here: {why}")
        return self


def none_or_at_least(value: int, least: int) -> int:
    """Return a value that may be 0 (meaning that other settings determine it). Raises `ValueError` between 0 and
    `least`."""
    if 0 < value < least:
        raise ValueError(f"{value} is neither 0 nor at least {least}")
    return value


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
