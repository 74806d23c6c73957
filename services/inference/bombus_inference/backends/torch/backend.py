"""The embedded engine: torch in a thread of this process."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.hive.generation import Generate
from bombus.weights.deltas import FULL_FILE
from bombus.weights.merging import Adapter
from bombus.weights.models import load_model
from bombus_inference.backends.protocol import UNLOADED, Deliver, Policy, Tell, settled
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import read_patches
from bombus_inference.backends.torch.worker import Worker
from bombus_inference.settings import EngineSettings

# The engine's thread asks for the interpreter's lock thousands of times a second; at Python's 5 ms it would wait more
# than it computes whenever the HTTP side is busy.
SWITCH_INTERVAL_S = 0.0005

COUNTERS = ("steps", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions", "swaps")
GAUGES = ("running", "waiting", "blocks", "blocks_held")


class TorchBackend:
    """An engine that breaks takes its process along, so nothing is ever lost that could be brought in again."""

    loads_adapters = True

    def __init__(self, settings: EngineSettings, deliver: Deliver) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.run = 0
        self.version = -1
        self.lost = asyncio.Event()
        self.worker = Worker(deliver)
        self._settings = settings
        self._serving = settings  # as they are in this run

    @property
    def failed(self) -> asyncio.Future[None]:
        return self.worker.failed

    def add(self, ticket: int, request: Generate) -> None:
        self.worker.add(ticket, request)

    def abort(self, ticket: int) -> None:
        self.worker.abort(ticket)

    async def bring_in(self, policy: Policy, tell: Tell) -> None:
        """A swap within a run, a fresh engine for a new one. Files are read in a thread, the old version serving."""
        run, version = policy.run, policy.version
        serving = self.version >= 0 and self.run == run
        if serving and policy.delta is not None and policy.base == self.version:
            patches = await asyncio.to_thread(read_patches, policy.delta, self._serving)
            await self.worker.patch(patches, version, run)
        elif serving:
            state = await asyncio.to_thread(read_state, policy.folder, self._serving, policy.adapter)
            await self.worker.swap(state, version, run)
        else:
            await self.unload()
            self._serving = await asyncio.to_thread(settled, self._settings, policy)
            engine = await asyncio.to_thread(
                make_engine,
                policy.folder,
                self._serving,
                run=run,
                version=version,
                job_tokens=policy.max_model_len,
                adapter=policy.adapter,
            )
            await self.worker.install(engine, UNLOADED)
        self.run, self.version = run, version

    async def unload(self) -> None:
        self.version = -1
        await self.worker.install(None, UNLOADED)

    async def metrics(self) -> Mapping[str, float]:
        stats = self.worker.stats
        if stats is None:
            return {}
        values: dict[str, float] = {f"{name}_total": getattr(stats, name) for name in COUNTERS}
        return values | {name: getattr(stats, name) for name in GAUGES}

    async def stop(self) -> None:
        await self.worker.stop()


def read_state(folder: Path, settings: EngineSettings, adapter: Path | None = None) -> dict[str, Tensor]:
    """The tensors by name, of the engine's type and on its device, the adapter in folder `adapter` merged into them.

    Copied: the trainer may remove the file.
    """
    added = Adapter(adapter) if adapter is not None else None
    mapped = _map(folder)
    dtype = getattr(torch, settings.precision)
    if added is None:
        return {name: tensor.to(settings.device, dtype, copy=True) for name, tensor in mapped.items()}
    state: dict[str, Tensor] = {}
    for name, tensor in mapped.items():
        whole = added.merge(name, tensor.to(settings.device))
        state[name] = whole.to(settings.device, dtype, copy=whole is tensor)
    added.check_all_merged()
    return state


def _map(folder: Path) -> dict[str, Tensor]:
    """The tensors in the file of a version, each read when it is used."""
    try:
        mapped: dict[str, Tensor] = load_file(folder / FULL_FILE)
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"{folder / FULL_FILE} cannot be read: {error}") from error
    return mapped


def _merge_into(model: nn.Module, folder: Path, adapter: Path) -> None:
    """Of the file in `folder`, which `model` was loaded from, only what the adapter changes is read again."""
    added = Adapter(adapter)
    for name, tensor in _map(folder).items():
        if added.changes(name):
            parameter = model.get_parameter(name)
            parameter.copy_(added.merge(name, tensor.to(parameter.device)))
    added.check_all_merged()


def make_engine(
    folder: Path,
    settings: EngineSettings,
    *,
    run: int,
    version: int,
    job_tokens: int | None = None,
    adapter: Path | None = None,
) -> Engine:
    """A fresh engine for the model in `folder`, with an adapter on it where there is one, and sequences of `job_tokens`
    at most. Raises `EngineFault`.
    """
    attention.register()
    model = load_model(folder, settings.precision, attention.NAME)
    model.to(settings.device)
    model.requires_grad_(False)
    if adapter is not None:
        _merge_into(model, folder, adapter)
    return Engine(model, settings, run=run, version=version, job_tokens=job_tokens)
