"""What serves a policy behind the replica's HTTP door: torch here, vLLM as a child, or a server elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bombus.errors import Code
from bombus.hive.generation import Fault, Generate, encode_frame
from bombus_inference.model_files import read_config
from bombus_inference.settings import ComputeSettings

NOTHING_LOADED = Fault(why="this replica has no weights yet", code=Code.NO_REPLICA, retry=True)
UNLOADED = Fault(why="the engine was stopped", code=Code.WRONG_PHASE)
STOPPING = Fault(why="the replica stops", code=Code.NO_REPLICA, retry=True)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Encoded frames for one ticket. `fault` is set where the request failed; `body` then ends with it."""

    ticket: int
    body: bytes
    done: bool
    fault: Fault | None = None


def failure(ticket: int, fault: Fault) -> Delivery:
    return Delivery(ticket, encode_frame(fault), True, fault)


@dataclass(frozen=True, slots=True)
class Policy:
    """One version of a run's policy. `folder` holds its checked weights; `max_model_len` tokens is the job's limit, and
    `dtype` what it says of the precision.

    `delta` is the file that makes it of version `base`, where there is one. With an `adapter` (a folder in peft's
    layout) the policy is that on top of what is in `folder`; only backends that load adapters are given one.
    """

    folder: Path
    run: int
    version: int
    max_model_len: int
    delta: Path | None = None
    base: int = -1
    adapter: Path | None = None
    dtype: str = "auto"


def with_precision(settings: ComputeSettings, policy: Policy) -> ComputeSettings:
    """These settings with a precision. Raises `EngineFault` when the model does not say what it is."""
    if settings.dtype is not None:
        return settings
    dtype = policy.dtype
    if dtype == "auto":
        dtype = "float32" if settings.device == "cpu" else read_config(policy.folder).training_dtype
    return ComputeSettings(**(settings.model_dump() | {"dtype": dtype}))


TopLogprobs = tuple[tuple[int, float], ...]  # token ids and their logprobs, the most likely first
Deliver = Callable[[list[Delivery]], None]
ReportStage = Callable[[str], Awaitable[None]]


class InferenceBackend(Protocol):
    """Tickets are the caller's own numbers; every one that is added gets deliveries until one is `done`, or is aborted.

    `failed` is completed with the exception that ends this process (a bug, out of memory). `lost` is set when what was
    served is gone and can be brought in again.
    """

    @property
    def loads_adapters(self) -> bool:
        """Whether LoRA adapters are brought in as such; else they are merged first."""

    @property
    def run(self) -> int:
        """The run of what is served."""

    @property
    def version(self) -> int:
        """The policy version that is served, -1 for nothing."""

    @property
    def failed(self) -> asyncio.Future[None]: ...

    @property
    def lost(self) -> asyncio.Event: ...

    def add(self, ticket: int, request: Generate) -> None: ...

    def abort(self, ticket: int) -> None:
        """Forget a request; one that is over or was never there is no error."""

    async def load(self, policy: Policy, report_stage: ReportStage) -> None:
        """Serve this policy: in place within a run, whose requests go on; from scratch for another run.

        `report_stage` is given stages of what takes long. Raises `EngineFault`; never serves under a wrong label.
        """

    async def unload(self) -> None:
        """Serve nothing, and give the memory back. Open requests end with a fault."""

    async def metrics(self) -> Mapping[str, float]:
        """By name; those that end in `_total` only grow."""

    async def stop(self) -> None:
        """End everything. Open requests end with a fault that may be tried elsewhere."""
