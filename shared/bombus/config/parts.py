"""The parts of a cluster file that are processes: what each may be told, checked at birth."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bombus.config.flags import Flag

PROCESSES_MAX = 64
GPU_MAX = 1023
Count = Annotated[int, Field(ge=0, le=PROCESSES_MAX)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")]
Threads = Annotated[int, Field(ge=0, le=1024)]
Gpus = Annotated[
    tuple[Annotated[int, Field(ge=0, le=GPU_MAX)], ...],
    Field(max_length=PROCESSES_MAX, description="numbers of GPUs, such as [0, 1]"),
]


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


class PlacedPart(Part):
    """What runs on the CPU or on GPUs: on the CPU when neither `devices` nor `device` is given."""

    devices: Gpus = ()
    device: Device = Field(default_factory=lambda data: "cuda" if data.get("devices") else "cpu")
    share_devices: bool = False

    @model_validator(mode="after")
    def _device_is_one_of_devices(self) -> "PlacedPart":
        if self.devices and self.device != "cuda":
            raise ValueError(f"device {self.device} is refused beside devices, which are GPUs: leave it out")
        return self


class TrainerMachineOptions(BaseModel):
    """What the operator of a trainer's machine decides: in a cluster file, and by the flags of `bombus trainer`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: Annotated[Threads, Flag(help="threads of torch on the CPU; 0: one for each core")] = 0
    bin_tokens: Annotated[
        int,
        Flag(
            metavar="TOKENS",
            help="the most that a micro-batch holds, whatever a job's max_tokens_per_bin; 0: on a GPU what the job "
            "says, on a CPU 4096",
        ),
    ] = Field(default=0, ge=0, le=1 << 24)
    allow_download: Annotated[bool, Flag(help="models may be fetched from a hub")] = False
    weights_by: Annotated[
        Literal["folder", "objects"],
        Flag(help="how weights reach the replicas: in a folder that they share, or by the hive's object store"),
    ] = "folder"
    weights_full_every: Annotated[
        int,
        Flag(
            metavar="N",
            help="a full copy every N versions, and in between only what has changed; 0: 1 by a folder, 16 by the "
            "object store",
        ),
    ] = Field(default=0, ge=0, le=1024)
    weights_lora: Annotated[
        Literal["merged", "adapter"],
        Flag(
            help="what is published of a LoRA job: the model once and then only adapters, or in each step the model "
            "with the adapter merged into it"
        ),
    ] = "adapter"

    @field_validator("bin_tokens")
    @classmethod
    def _bins_hold_something(cls, tokens: int) -> int:
        return none_or_at_least(tokens, 16)


class TrainerPart(TrainerMachineOptions, PlacedPart):
    """What trains an engine. `threads` are torch's on the CPU for each process, 0 one for each core.

    Of `devices` each process has one, `device` is then cuda, and cpu otherwise; `share_devices` says that other parts
    may have them too. A micro-batch holds `bin_tokens` at most; 0 is what the job says on a GPU, and 4096 on a CPU.
    With `allow_download` models may be fetched from a hub.

    Weights reach replicas in a folder that they share, or by the hive's object store; a full copy every
    `weights_full_every` versions, and in between what has changed. Of a LoRA job it is once the model and then
    adapters alone, or in each step the model with the adapter `merged` into it.
    """

    backend: Literal["torch", "verl"] = "torch"
    processes: int = Field(default=1, ge=1, le=PROCESSES_MAX)

    @model_validator(mode="after")
    def _one_process_of_torch(self) -> "TrainerPart":
        said = "backend" in self.model_fields_set  # where it is left open, the job may still say verl
        if said and self.backend == "torch" and self.processes > 1:
            raise ValueError(f"processes {self.processes} is refused: backend torch has one; backend verl has many")
        if self.devices and "processes" in self.model_fields_set and len(self.devices) != self.processes:
            raise ValueError(f"devices names {_gpus(len(self.devices))}, and processes is {self.processes}: one each")
        return self


_NOT_OF_OTHERS = {
    "openai": ("url", "api_key_env", "model"),
    "vllm": ("tensor_parallel", "eager", "python", "gpu_memory_utilization"),
}
_NOT_OF_OPENAI = ("device", "devices", "share_devices", "threads", "dtype", "kv_cache_mb")


class InferencePart(PlacedPart):
    """Replicas of one kind. `url`, `model` and `api_key_env` are of engine openai; `tensor_parallel`, `eager` (no
    compilation), `python` (an interpreter with vLLM of your own) and `gpu_memory_utilization` are of vllm.

    Of `devices` each replica has `tensor_parallel`, in their order, `device` is then cuda, and cpu otherwise;
    `share_devices` says that other parts may have them too. `max_model_len` is in tokens; it and `dtype` are the job's
    when they are not given. `max_running` are sequences at once. `kv_cache_mb` is memory for keys and values, 0 the
    engine's own default, which for vLLM on GPUs is the share `gpu_memory_utilization` of them, 0 vLLM's own.
    `api_key_env` names the variable that holds the server's key.
    """

    engine: Literal["torch", "vllm", "openai"] = "torch"
    count: Count = 1
    threads: Threads = 0
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        default="", description="one of float32, bfloat16, float16"
    )
    max_model_len: int = Field(default=0, ge=0, le=1 << 23)
    max_running: int = Field(default=128, ge=1, le=4096)
    kv_cache_mb: int = Field(default=0, ge=0, le=1 << 22)
    tensor_parallel: int = Field(default=1, ge=1, le=PROCESSES_MAX)
    gpu_memory_utilization: float = Field(default=0.0, ge=0, le=1)
    eager: bool = False
    python: str = Field(default="", max_length=4096)
    url: str = Field(default="", pattern=r"^(https?://\S+)?$", description="http://HOST:PORT of a server that runs")
    model: str = Field(default="", max_length=1024)
    api_key_env: str = Field(default="", pattern=r"^([A-Za-z_]\w*)?$", description="the name of a variable")

    @field_validator("max_model_len")
    @classmethod
    def _sequences_hold_something(cls, tokens: int) -> int:
        return none_or_at_least(tokens, 2)

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

    @model_validator(mode="after")
    def _devices_are_enough(self) -> "InferencePart":
        needed = self.count * self.tensor_parallel
        if self.devices and len(self.devices) != needed:
            each = f" with {_gpus(self.tensor_parallel)} each" if self.tensor_parallel > 1 else ""
            raise ValueError(f"devices names {_gpus(len(self.devices))}, and {self.count} replicas{each} take {needed}")
        if self.gpu_memory_utilization and (self.kv_cache_mb or self.device == "cpu"):
            why = "kv_cache_mb says it already" if self.kv_cache_mb else "device is cpu"
            raise ValueError(f"gpu_memory_utilization means nothing here: {why}")
        return self


def none_or_at_least(value: int, least: int) -> int:
    """A number that may be 0, for what follows from others. Raises `ValueError` for one that is too small."""
    if 0 < value < least:
        raise ValueError(f"{value} is neither 0 nor at least {least}")
    return value


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
