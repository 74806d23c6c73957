"""The torch backend: our own engine in a thread of this process."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from bombus.architectures.probing import refusing, sequence_limit
from bombus.architectures.shapes import layer_shapes
from bombus.errors import Code, EngineFault, Refused, in_one_line
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Generate
from bombus.weights.canary import CanaryFailed
from bombus.weights.deltas import FULL_FILE
from bombus.weights.merging import Adapter
from bombus.weights.models import load_model
from bombus_inference.backends.adapter_folders import check_address
from bombus_inference.backends.limits import NO_ADAPTERS
from bombus_inference.backends.protocol import (
    NOTHING_LOADED,
    UNLOADED,
    AdapterUse,
    Deliver,
    Policy,
    ReportStage,
    with_precision,
)
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.adapters.own import (
    LowRank,
    check_adapter,
    is_computed_beside,
    read_adapter,
    set_adapter,
)
from bombus_inference.backends.torch.adapters.reading import read_loaded
from bombus_inference.backends.torch.checking import check_faithful
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import read_patches
from bombus_inference.backends.torch.thread import EngineThread
from bombus_inference.settings import ComputeSettings

T = TypeVar("T")

# The engine's thread takes the interpreter's lock thousands of times a second. With Python's default switch interval of
# 5 ms, it would spend more time waiting than computing whenever the HTTP side is busy.
SWITCH_INTERVAL_S = 0.0005

TRIAL_CACHE_BYTES = 64 << 20  # for small models that are checked but never served
COUNTERS = ("steps", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions", "swaps", "adapter_evictions")
GAUGES = ("running", "waiting", "blocks", "blocks_held", "adapters", "adapter_bytes")
ALL_ALIKE: Mapping[str, torch.dtype] = {}  # every tensor has the engine's type


class TorchBackend:
    """Serves a policy from this process. If the engine fails, the process ends, so `lost` is never set."""

    loads_adapters = True
    constrains = False

    def __init__(self, settings: ComputeSettings, deliver: Deliver) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.run = 0
        self.version = -1
        self.sequence_tokens = 0
        self.lost = asyncio.Event()
        self.thread = EngineThread(deliver)
        self._settings = settings
        self._run_settings = settings  # with this run's precision
        self._dtypes = ALL_ALIKE
        self._loading = asyncio.Lock()  # adapters are read one at a time, which limits memory use
        self._base: Path | None = None  # the folder of the model under the engine's adapter

    @property
    def failed(self) -> asyncio.Future[None]:
        return self.thread.failed

    def add(self, ticket: int, request: Generate) -> None:
        self.thread.add(ticket, request)

    def abort(self, ticket: int) -> None:
        self.thread.abort(ticket)

    async def load(self, policy: Policy, report_stage: ReportStage) -> CanaryCheck | None:
        """Swap weights within a run, or create a new engine for a new run.

        Files are read in a thread while the old version continues to serve.
        """
        try:
            return await self._load(policy)
        except CanaryFailed:
            self.version = -1
            raise

    async def _load(self, policy: Policy) -> CanaryCheck | None:
        run, version = policy.run, policy.version
        serving = self.version >= 0 and self.run == run
        if serving and policy.delta is not None and policy.base == self.version:
            patches = await asyncio.to_thread(read_patches, policy.delta, self._run_settings)
            check = await self.thread.change(
                lambda engine: engine.patch_weights(patches, version, run), policy.expected
            )
        elif serving:
            state, adapter = await _in_thread(self._read, policy)
            check = await self.thread.change(
                lambda engine: engine.swap_weights(state, version, run, adapter), policy.expected
            )
        else:
            await self.unload()
            self._run_settings = await asyncio.to_thread(with_precision, self._settings, policy)
            engine, check = await _in_thread(self._make_engine, policy)
            self.sequence_tokens, self._dtypes = engine.max_model_len, engine.dtypes
            await self.thread.install(engine, UNLOADED)
        self.run, self.version = run, version
        self._base = policy.folder if policy.adapter is not None and is_computed_beside(self._run_settings) else None
        return check

    def _read(self, policy: Policy) -> tuple[dict[str, Tensor] | None, dict[str, LowRank]]:
        """Read the weights that this policy needs: the model's, unless the engine has them, and the adapter's."""
        settings = self._run_settings
        if policy.adapter is None or not is_computed_beside(settings):
            return read_state(policy.folder, settings, policy.adapter, self._dtypes), {}
        state = None if policy.folder == self._base else read_state(policy.folder, settings, dtypes=self._dtypes)
        return state, read_adapter(policy.adapter, settings)

    def _make_engine(self, policy: Policy) -> tuple[Engine, CanaryCheck | None]:
        engine = make_engine(policy, self._run_settings)
        return engine, None if policy.expected is None else engine.check_canary(policy.expected)

    async def unload(self) -> None:
        self.version = -1
        await self.thread.install(None, UNLOADED)

    async def load_adapter(self, address: str, folder: Path) -> bool:
        check_address(address)
        if not self._settings.adapters_bytes:
            raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)
        async with self._loading:
            if self.version < 0:
                raise Refused(Code.NO_REPLICA, NOTHING_LOADED.why)
            try:
                adapter = await asyncio.to_thread(read_loaded, address, folder, self._run_settings)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not _lacks_memory(error):
                    raise
                why = f"there is not enough memory for adapter {address}: lower --adapters-mb or --kv-cache-mb"
                raise Refused(Code.OVERLOADED, why) from error
            return await self.thread.add_adapter(address, adapter)

    async def unload_adapter(self, address: str) -> None:
        check_address(address)
        await self.thread.remove_adapter(address)

    async def adapters(self) -> list[AdapterUse]:
        return await self.thread.adapters()

    async def metrics(self) -> Mapping[str, float]:
        stats = self.thread.stats
        if stats is None:
            return {}
        values: dict[str, float] = {f"{name}_total": getattr(stats, name) for name in COUNTERS}
        values["kv_cache_usage_ratio"] = stats.blocks_held / stats.blocks
        return values | {name: getattr(stats, name) for name in GAUGES}

    async def stop(self) -> None:
        await self.thread.stop()


async def _in_thread(read: Callable[[Policy], T], policy: Policy) -> T:
    """Read a policy without changing what is served. Raises `EngineFault` if the policy cannot be read or memory runs
    out."""
    try:
        return await asyncio.to_thread(read, policy)
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _lacks_memory(error):
            raise
        raise EngineFault(f"version {policy.version} cannot be loaded: {in_one_line(error)}") from error


def _lacks_memory(error: RuntimeError) -> bool:
    """Return whether an error says that memory ran out. torch has an error type for GPU memory, but none for CPU
    memory."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def make_engine(policy: Policy, settings: ComputeSettings) -> Engine:
    """Load a policy and create its engine. Raises `EngineFault` unless the engine computes the policy's model
    correctly."""
    model = load_policy(policy.folder, settings, policy.adapter)
    with refusing(model.config, "served"):
        layer_shapes(model, attention.PLAN)
    limit = sequence_limit(model.config, settings.length_within(policy.max_model_len))
    check_faithful(model, settings.block_tokens, limit)
    return Engine(model, settings, run=policy.run, version=policy.version, job_tokens=policy.max_model_len)


def check_model(folder: Path, tokens: int) -> None:
    """Raise `EngineFault` unless this backend can serve the model in `folder` with sequences of `tokens` tokens."""
    policy = Policy(folder, run=0, version=0, max_model_len=tokens)
    make_engine(policy, ComputeSettings(kv_cache_bytes=TRIAL_CACHE_BYTES))


def read_state(
    folder: Path,
    settings: ComputeSettings,
    adapter: Path | None = None,
    dtypes: Mapping[str, torch.dtype] = ALL_ALIKE,
) -> dict[str, Tensor]:
    """Return the tensors by name, in the engine's type and on its device. If there is an adapter, it is merged into
    them.

    `dtypes` gives the types of those tensors whose type in the engine differs from the engine's own. The returned
    tensors are copies, because the trainer may remove the file. Raises `EngineFault` if the files cannot be used.
    """
    merging = Adapter(adapter) if adapter is not None else None
    mapped = _map(folder)
    usual = getattr(torch, settings.precision)
    if merging is None:
        return {name: tensor.to(settings.device, dtypes.get(name, usual), copy=True) for name, tensor in mapped.items()}
    state: dict[str, Tensor] = {}
    for name, tensor in mapped.items():
        merged = merging.merge(name, tensor.to(settings.device))
        state[name] = merged.to(settings.device, dtypes.get(name, usual), copy=merged is tensor)
    merging.check_all_merged()
    return state


def _map(folder: Path) -> dict[str, Tensor]:
    """Map the tensors in a version's file into memory; each is read when it is used."""
    try:
        mapped: dict[str, Tensor] = load_file(folder / FULL_FILE)
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"{folder / FULL_FILE} cannot be read: {error}") from error
    return mapped


def _merge_into(model: nn.Module, folder: Path, adapter: Path) -> None:
    """Merge an adapter into `model`, which was loaded from `folder`. Only the tensors that the adapter changes are
    reread."""
    merging = Adapter(adapter)
    for name, tensor in _map(folder).items():
        if merging.changes(name):
            parameter = model.get_parameter(name)
            parameter.copy_(merging.merge(name, tensor.to(parameter.device)))
    merging.check_all_merged()


def load_policy(folder: Path, settings: ComputeSettings, adapter: Path | None = None) -> PreTrainedModel:
    """Load the model in `folder`, with the adapter, if any, for use by an `Engine`. Raises `EngineFault` if this is not
    possible."""
    attention.register()
    model = load_model(folder, settings.precision, attention.NAME)
    model.to(settings.device)
    model.requires_grad_(False)
    if adapter is not None and is_computed_beside(settings):
        beside = read_adapter(adapter, settings)
        check_adapter(model, beside)
        set_adapter(model, beside)
    elif adapter is not None:
        _merge_into(model, folder, adapter)
    return model
