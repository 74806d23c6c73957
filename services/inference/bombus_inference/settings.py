"""The settings of a replica, which are also its command-line arguments. Invalid values are refused on creation."""

import argparse
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bombus.config.flags import Flag, check_range
from bombus.config.parts import (
    Device,
    Eager,
    EngineName,
    HiveName,
    HostName,
    MaxLoraRank,
    MaxLoras,
    MaxRunning,
    Threads,
)

KV_CACHE_BYTES = 2 << 30
KV_CACHE_MB_MAX = 1 << 22


def _whole_number(typed: str) -> int:
    try:
        return int(typed)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid int value: {typed!r}") from error


def _mebibytes(typed: str) -> int | None:
    """Return the number of bytes, or None for 0. Raises `Refused(BAD_CONFIG)`."""
    megabytes = _whole_number(typed)
    check_range("--kv-cache-mb", megabytes, 0, KV_CACHE_MB_MAX)
    return megabytes << 20 or None


def _adapter_mebibytes(typed: str) -> int:
    """Return the number of bytes. Raises `Refused(BAD_CONFIG)`."""
    megabytes = _whole_number(typed)
    check_range("--adapters-mb", megabytes, 0, KV_CACHE_MB_MAX)
    return megabytes << 20


def _tokens(typed: str) -> int | None:
    """Return the number of tokens, or None for 0."""
    return _whole_number(typed) or None


class ComputeSettings(BaseModel):
    """Limits and numerics of a backend. A setting that is None comes from the job or is left to the backend.

    If the job does not set the precision, a CPU uses float32. A CPU without bfloat16 instructions is slower in bfloat16
    as soon as several sequences run at the same time (bench/engine.py), and in float32 the logprobs agree with the
    trainer's to 1e-4. A GPU then uses the trainer's precision, which is the type in which the model is stored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Flag(default="the job's; for auto, float32 on a CPU and the model's own on a GPU"),
    ] = Field(default=None, description="type of weights, keys and values")
    device: Annotated[Device, Flag(declared_elsewhere=True)] = "cpu"
    kv_cache_bytes: Annotated[int | None, Flag(name="--kv-cache-mb", metavar="MB", read=_mebibytes, default="0")] = (
        Field(
            default=None,
            ge=1 << 12,
            le=1 << 42,
            description="memory for keys and values, in MiB; 0: 2048, or what vLLM finds free on its GPUs",
        )
    )
    block_tokens: Annotated[int, Flag(metavar="TOKENS")] = Field(
        default=8,
        ge=1,
        le=256,
        description="tokens in a block of the torch backend's KV cache; few, because the samples of a group share "
        "only whole blocks of their prompt",
    )
    max_model_len: Annotated[int | None, Flag(metavar="TOKENS", read=_tokens, default="0")] = Field(
        default=None,
        ge=2,
        le=1 << 23,
        description="the longest sequence, prompt and answer; 0: the job's, or less if the cache is too small",
    )
    max_running: MaxRunning = Field(default=128, description="how many sequences are decoded at the same time")
    max_waiting: int = Field(
        default=4096, ge=1, le=1 << 20, description="how many sequences may wait to run; more are refused"
    )
    prefill_tokens_max: Annotated[int, Flag(name="--max-prefill-tokens", metavar="TOKENS")] = Field(
        default=1024, ge=1, le=1 << 20, description="how many prompt tokens one step of the torch backend may have"
    )
    adapters_bytes: Annotated[
        int, Flag(name="--adapters-mb", metavar="MB", read=_adapter_mebibytes, default="1024")
    ] = Field(
        default=1 << 30,
        ge=0,
        le=1 << 42,
        description="room for LoRA adapters that are served in addition to the engine's own policy, in MiB; 0: none. "
        "With the torch backend this is memory, and adapters in use take twice their size; vLLM keeps copies of their "
        "files",
    )
    threads: Annotated[Threads, Flag(declared_elsewhere=True)] = 0

    @property
    def precision(self) -> str:
        """The type to compute in: `dtype`, or float32 if it is not set."""
        return self.dtype or "float32"

    @property
    def cache_bytes(self) -> int:
        return self.kv_cache_bytes or KV_CACHE_BYTES

    def length_within(self, *limits: int) -> int:
        """Return the smallest of these limits and, if it is set, `max_model_len`."""
        return min(limits if self.max_model_len is None else (*limits, self.max_model_len))


class VllmSettings(BaseModel):
    """Settings for vLLM as a child process. The type, device, lengths and memory in `ComputeSettings` also apply."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Annotated[
        Path | None, Flag(name="--vllm-python", metavar="PATH", default="the one from `bombus install vllm`")
    ] = Field(default=None, description="your own Python that has vLLM")
    tensor_parallel: int = Field(default=1, ge=1, le=1024, description="how many GPUs share the model")
    eager: Eager = Field(default=False, description="do not compile: vLLM starts sooner, but decodes a fifth slower")
    gpu_memory_utilization: Annotated[float | None, Flag(metavar="SHARE", default="vLLM's own")] = Field(
        default=None, gt=0, le=1, description="fraction of each GPU's memory to use, above 0 and at most 1"
    )
    max_loras: MaxLoras = Field(
        default=4, description="how many adapters one batch of an operations run may use; each takes GPU memory"
    )
    max_lora_rank: MaxLoraRank = Field(
        default=64,
        description="the highest adapter rank in an operations run; every adapter takes that much memory",
    )
    start_s: Annotated[float, Flag(name="--vllm-start-timeout", metavar="SECONDS")] = Field(
        default=900.0, gt=0, le=86_400, description="how long vLLM may take to become ready"
    )
    update_s: Annotated[float, Flag(name="--vllm-update-timeout", metavar="SECONDS")] = Field(
        default=300.0, gt=0, le=86_400, description="how long each step of a weight change may take"
    )
    health_s: Annotated[float, Flag(name="--vllm-health-timeout", metavar="SECONDS")] = Field(
        default=60.0, gt=0, le=86_400, description="stop a vLLM process that has been unhealthy for this long"
    )


class OpenAISettings(BaseModel):
    """Settings for an external server, which runs vLLM (completions with token ids) or SGLang (`/generate`); the kind
    is detected automatically."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Flag(help="address of the server, such as http://10.0.0.7:8000; no default")] = Field(
        default="", pattern=r"^(https?://[^\s/@]+(/.*)?)?$", description="http://HOST:PORT of a running server"
    )
    api_key_env: Annotated[
        str, Flag(metavar="NAME", help="the environment variable with its key", default="it needs none")
    ] = Field(default="", pattern=r"^[A-Za-z_]?\w*$", description="the name of an environment variable with its key")
    model: Annotated[str, Flag(metavar="NAME", default="the first model that it lists")] = Field(
        default="", max_length=1024, description="the model's name on the server"
    )
    drain_s: Annotated[float, Flag(name="--openai-drain-timeout", metavar="SECONDS")] = Field(
        default=60.0, ge=0, le=86_400, description="how long open requests may continue before the weights change"
    )
    update_s: Annotated[float, Flag(name="--openai-update-timeout", metavar="SECONDS")] = Field(
        default=600.0, gt=0, le=86_400, description="how long the server may take to load new weights"
    )


class ServerSettings(BaseModel):
    """The address at which a replica listens, and the number of requests that it accepts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="where it listens")
    port: Annotated[int, Flag(metavar="PORT")] = Field(
        default=0, ge=0, le=65535, description="port to listen on; 0: any free port"
    )
    host_names: Annotated[tuple[HostName, ...], Flag(name="--host-name", metavar="NAME")] = Field(
        default=(),
        description="may be given several times: a name by which the replica is reached; requests for names other than "
        "localhost, its address, and that of --advertise-url are refused",
    )
    requests_max: Annotated[int, Flag(name="--max-requests")] = Field(
        default=1024, ge=1, le=1 << 20, description="how many requests may be open at a time; others get a 503"
    )
    drain_s: Annotated[float, Flag(name="--drain-timeout", metavar="SECONDS")] = Field(
        default=5.0, ge=0, le=600, description="how long open requests may continue when the replica stops"
    )


class InferenceSettings(BaseModel):
    """The settings of a replica on the bus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hive: Annotated[HiveName, Flag(declared_elsewhere=True)] = "main"
    engine: Annotated[EngineName, Flag(declared_elsewhere=True)] = "main"
    bus_url: Annotated[str, Flag(name="--nats", declared_elsewhere=True)] = "nats://127.0.0.1:4222"
    backend: Literal["torch", "vllm", "openai"] = Field(
        default="torch", description="torch in this process, vLLM as a child of it, or an external server"
    )
    http: ServerSettings = ServerSettings()
    advertise_url: Annotated[
        str, Flag(metavar="URL", default="where it listens; at every address, the one from which it reaches the bus")
    ] = Field(default="", description="how gateways reach it, such as http://10.0.0.7:8000")
    replica: Annotated[str, Flag(metavar="NAME", default="a new name")] = Field(
        default="", description="the replica's name in the log"
    )
    alive_every_s: Annotated[float, Flag(name="--alive-every", metavar="SECONDS")] = Field(
        default=1.0, gt=0, le=3, description="time between heartbeats; after 10 s without one, it counts as lost"
    )
    load_retry_s: Annotated[float, Flag(name="--load-retry", metavar="SECONDS")] = Field(
        default=1.0, gt=0, le=60, description="time between attempts to load weights"
    )
    cache: Annotated[Path | None, Flag(metavar="DIR", default="a temporary one")] = Field(
        default=None, description="a folder for weights that come in parts or as objects"
    )
    compute: ComputeSettings = ComputeSettings()
    vllm: VllmSettings = Field(
        default=VllmSettings(),
        title="--backend vllm",
        description="needs `bombus install vllm` once; see docs/inference.md",
    )
    openai: OpenAISettings = Field(
        default=OpenAISettings(),
        title="--backend openai",
        description="an external vLLM or SGLang that sees the trainer's folder",
    )

    @model_validator(mode="after")
    def _openai_has_a_url(self) -> "InferenceSettings":
        if self.backend == "openai" and not self.openai.url:
            raise ValueError("backend openai needs the url of a server, such as http://127.0.0.1:8000")
        return self
