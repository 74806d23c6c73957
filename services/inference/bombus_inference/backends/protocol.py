"""The protocol of a replica's backends: torch in this process, vLLM as a child process, or an external server."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bombus.errors import Code, Refused
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Fault, Generate, encode_frame
from bombus.weights.canary import Expected
from bombus_inference.model_files import read_config
from bombus_inference.settings import ComputeSettings

NOTHING_LOADED = Fault(why="this replica has no weights yet", code=Code.NO_REPLICA, retry=True)
UNLOADED = Fault(why="the engine was stopped", code=Code.WRONG_PHASE)
STOPPING = Fault(why="the replica stops", code=Code.NO_REPLICA, retry=True)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Encoded frames for one ticket. If the request failed, `fault` is set and is the last frame in `body`."""

    ticket: int
    body: bytes
    done: bool
    fault: Fault | None = None


def failure(ticket: int, fault: Fault) -> Delivery:
    return Delivery(ticket, encode_frame(fault), True, fault)


def refusal_fault(refused: Refused) -> Fault:
    """Return the fault that answers a refused request. Some refusals allow a retry on another replica."""
    retry = refused.code in (Code.OVERLOADED, Code.WRONG_PHASE)
    return Fault(why=refused.why, code=refused.code, retry=retry)


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter that is loaded in addition to the policy. `uses` is the number of open requests that use it."""

    address: str
    bytes: int
    uses: int


@dataclass(frozen=True, slots=True)
class Policy:
    """One version of a run's policy, with its checked weights in `folder`.

    `max_model_len` (tokens) and `dtype` come from the job. If the version was published as a delta, `delta` is the file
    that turns version `base` into it. With an `adapter`, a folder in peft's layout, the policy is that adapter on top
    of the model in `folder`; only backends that load adapters are given one. `beside` is true in an operations run,
    where the policy does not change and requests may name other adapters beside it. `expected` is what the policy must
    compute, or None if its trainer does not say.
    """

    folder: Path
    run: int
    version: int
    max_model_len: int
    delta: Path | None = None
    base: int = -1
    adapter: Path | None = None
    dtype: str = "auto"
    beside: bool = False
    expected: Expected | None = None


def with_precision(settings: ComputeSettings, policy: Policy) -> ComputeSettings:
    """Return these settings with `dtype` set. Raises `EngineFault` if the model does not state its type."""
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
    """Serves one policy. Each request has a ticket, a number that the caller chooses.

    After a ticket is added, deliveries arrive for it until one is `done` or the ticket is aborted. `failed` receives
    the exception that ends this process (because of a bug, or because memory ran out). `lost` is set when the weights
    are gone but can be reloaded.
    """

    @property
    def loads_adapters(self) -> bool:
        """Whether the backend loads LoRA adapters as adapters. Otherwise they are merged into the model first."""

    @property
    def constrains(self) -> bool:
        """Whether the backend can enforce a request's `constraint` with the model that it serves."""

    @property
    def run(self) -> int:
        """The run whose policy is served."""

    @property
    def version(self) -> int:
        """The policy version that is served; -1 if none is."""

    @property
    def sequence_tokens(self) -> int:
        """The length of the longest sequence that is served, prompt and answer together. It is 0 until a policy is
        loaded."""

    @property
    def failed(self) -> asyncio.Future[None]: ...

    @property
    def lost(self) -> asyncio.Event: ...

    def add(self, ticket: int, request: Generate) -> None: ...

    def abort(self, ticket: int) -> None:
        """Forget a request. Does nothing if it has ended or was never added."""

    async def load(self, policy: Policy, report_stage: ReportStage) -> CanaryCheck | None:
        """Serve this policy. Within a run, weights change in place while requests run; a new run starts from scratch.

        A slow load calls `report_stage` with each of its stages. Raises `EngineFault` if the policy cannot be served;
        weights are never served under a wrong version. Before serving, the backend compares what the policy computes
        with what is `expected`. It returns the result, or None if the two could not be compared. If they differ, it
        raises `CanaryFailed` and serves nothing.
        """

    async def unload(self) -> None:
        """Stop serving and release the memory. Open requests end with a fault."""

    async def load_adapter(self, address: str, folder: Path) -> bool:
        """Load an adapter for requests that name it, while serving continues. Return False if it was already loaded.

        `address` is the SHA-256 of the adapter's file in `folder`, in hex. The adapter is dropped when its run's engine
        ends, or when no request uses it and other adapters need the room. Raises `Refused` if the adapter cannot be
        loaded.
        """

    async def unload_adapter(self, address: str) -> None:
        """Drop an adapter. Raises `Refused` while a request uses it, or if it is not loaded."""

    async def adapters(self) -> list[AdapterUse]:
        """Return the loaded adapters, least recently used first."""

    async def metrics(self) -> Mapping[str, float]:
        """Return metrics by name. Metrics with names that end in `_total` only grow."""

    async def stop(self) -> None:
        """End everything. Open requests end with a fault that allows a retry on another replica."""
