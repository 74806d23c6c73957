"""What an operator may set for a replica. Nonsense is refused when the settings are made."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from bombus.hive.subjects import check_name

KV_CACHE_BYTES = 2 << 30


class ComputeSettings(BaseModel):
    """Limits and numerics of one engine. What is None follows from the job, or suits the engine.

    A job that leaves the precision open gets float32 on a CPU, because one without bfloat16 instructions is slower in
    bfloat16 as soon as several sequences run at once (bench/engine.py), and because its logprobs then agree with the
    trainer's to 1e-4. On a GPU it gets what the trainer computes in: what the model is stored in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="none: the job's precision"
    )
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    kv_cache_bytes: int | None = Field(
        default=None, ge=1 << 12, le=1 << 42, description="none: 2 GiB, or what vLLM finds free on its GPUs"
    )
    block_tokens: int = Field(default=8, ge=1, le=256, description="short: a group shares its prompt by whole blocks")
    max_model_len: int | None = Field(
        default=None, ge=2, le=1 << 23, description="tokens; none: the job's, as far as the cache holds one sequence"
    )
    max_running: int = Field(default=128, ge=1, le=4096, description="sequences in one decode step")
    max_waiting: int = Field(default=4096, ge=1, le=1 << 20, description="sequences that wait for a place")
    prefill_tokens_max: int = Field(default=1024, ge=1, le=1 << 20, description="prompt tokens in one step")
    choices_max: int = Field(default=128, ge=1, le=4096, description="n of one request")
    threads: int = Field(default=0, ge=0, le=1024, description="torch's threads; 0: one for each core")

    @property
    def precision(self) -> str:
        """What is computed in where no job says more."""
        return self.dtype or "float32"

    @property
    def cache_bytes(self) -> int:
        return self.kv_cache_bytes or KV_CACHE_BYTES

    def length_within(self, *limits: int) -> int:
        """The least of these limits and our own, where there is one."""
        return min(limits if self.max_model_len is None else (*limits, self.max_model_len))


class VllmSettings(BaseModel):
    """vLLM as a child process. What `ComputeSettings` says of type, device, lengths and memory holds for it too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path | None = Field(default=None, description="that has vLLM; none: the one of `bombus install vllm`")
    tensor_parallel: int = Field(default=1, ge=1, le=1024, description="GPUs that share the model")
    eager: bool = Field(default=False, description="no compilation: starts sooner, decodes a fifth slower")
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of each GPU for weights, keys and values; none: vLLM's own"
    )
    start_s: float = Field(default=900.0, gt=0, le=86_400, description="until it must be ready")
    update_s: float = Field(default=300.0, gt=0, le=86_400, description="for each step of a change of weights")
    health_s: float = Field(default=60.0, gt=0, le=86_400, description="without a sign of health it is ended")


class OpenAISettings(BaseModel):
    """A server elsewhere: vLLM's completions with token ids, or SGLang's `/generate`; which one is found out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(default="", pattern=r"^(https?://[^\s/]+(/.*)?)?$", description="http://HOST:PORT of a server")
    model: str = Field(default="", max_length=1024, description="its name there; empty: the first that it lists")
    api_key_env: str = Field(
        default="", pattern=r"^[A-Za-z_]?\w*$", description="the name of a variable, which holds its key"
    )
    drain_s: float = Field(default=60.0, ge=0, le=86_400, description="open requests may finish before new weights")
    update_s: float = Field(default=600.0, gt=0, le=86_400, description="for the server to load new weights")


class ServerSettings(BaseModel):
    """Where a replica listens, and how much it takes in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0: any free one")
    requests_max: int = Field(default=1024, ge=1, le=1 << 20, description="open at once; more are answered 503")
    body_bytes_max: int = Field(default=16 << 20, ge=1 << 10, le=1 << 30)
    drain_s: float = Field(default=5.0, ge=0, le=600, description="how long a stopping replica finishes requests")


class InferenceSettings(BaseModel):
    """A replica on the bus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hive: str = "main"
    engine: str = "main"
    replica: str = Field(default="", description="its name on the log; empty: made up at start")
    bus_url: str = "nats://127.0.0.1:4222"
    advertise_url: str = Field(default="", description="how gateways reach it; empty: where it listens")
    alive_every_s: float = Field(default=1.0, gt=0, le=60)
    load_retry_s: float = Field(default=1.0, gt=0, le=60, description="between attempts to load weights")
    cache: Path | None = Field(default=None, description="for weights that are fetched; none: the system's folder")
    backend: Literal["torch", "vllm", "openai"] = "torch"
    compute: ComputeSettings = ComputeSettings()
    vllm: VllmSettings = VllmSettings()
    openai: OpenAISettings = OpenAISettings()
    http: ServerSettings = ServerSettings()

    @field_validator("hive", "engine")
    @classmethod
    def _is_a_name(cls, name: str, info: ValidationInfo) -> str:
        return check_name(name, info.field_name or "")

    @model_validator(mode="after")
    def _backend_is_whole(self) -> "InferenceSettings":
        if self.backend == "openai" and not self.openai.url:
            raise ValueError("backend openai needs the url of a server, such as http://127.0.0.1:8000")
        return self
