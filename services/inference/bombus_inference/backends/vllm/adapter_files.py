"""Checks adapters and copies them for vLLM, which rereads an adapter's files whenever it has dropped the adapter from
memory.

vLLM copies an adapter's tensors into its own buffers without checking their shapes, and ignores layers that the model
does not have. Adapters with either defect are refused here.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bombus.errors import Code, EngineFault, Refused, in_one_line
from bombus.weights.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    LOW_A,
    PREFIX,
    AdapterConfig,
    adapter_names,
)
from bombus.weights.deltas import Bits, TensorFile
from bombus.weights.lora_folders import PeftConfig
from bombus_inference.backends.adapter_folders import adapter_config, check_address, check_content, check_size
from bombus_inference.model_files import Shapes

WEIGHT = ".weight"
_IN_A_LAYER = re.compile(r"\.layers\.\d+\.")
_OF_EXPERTS = re.compile(r"\.(experts\.|gate$|router$)")  # layers in the router or the experts of a mixture model


@dataclass(slots=True, eq=False)
class CopiedAdapter:
    """An adapter in our own folder. `uses` is the number of open requests that use it."""

    folder: Path
    scales: Mapping[str, float]
    bytes: int
    uses: int = 0


@dataclass(frozen=True)
class AdapterRules:
    """One engine's limits on adapters. `shapes` are the shapes of the model's tensors."""

    shapes: Shapes
    rank_max: int
    bytes_max: int
    precision: str


def copy_adapter(address: str, source: Path, folder: Path, rules: AdapterRules) -> CopiedAdapter:
    """Copy the adapter in `source` to the new `folder`, with a configuration that contains only checked values.

    Raises `Refused` if the adapter cannot be served. A failure leaves no files behind.
    """
    check_address(address)
    try:
        return _copied(address, source, folder, rules)
    except (EngineFault, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        why = str(error) if isinstance(error, EngineFault) else in_one_line(error)
        raise Refused(Code.MALFORMED, f"the adapter in {source} cannot be served: {why}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_zeros(folder: Path, shapes: Shapes) -> None:
    """Write an adapter that changes nothing to the new `folder`. Raises `EngineFault` if no layer can have an
    adapter."""
    layer = next(iter(adaptable_layers(shapes)), None)
    if layer is None:
        raise EngineFault("vLLM serves no adapters on this model: none of its layers supports them")
    folder.mkdir()
    out, inside = shapes[layer + WEIGHT]
    low_a, low_b = adapter_names(layer)
    values = {low_a: np.zeros((1, inside), np.float32), low_b: np.zeros((out, 1), np.float32)}
    save_file(values, folder / ADAPTER_FILE)
    config = AdapterConfig(r=1, lora_alpha=1.0, target_modules=[layer.rpartition(".")[2]])
    (folder / ADAPTER_CONFIG).write_text(config.to_json())


def adaptable_layers(shapes: Shapes) -> list[str]:
    """Return the names of the layers that may have adapters."""
    layers = [name.removesuffix(WEIGHT) for name in shapes if name.endswith(WEIGHT)]
    return [layer for layer in layers if _takes_adapter(layer, shapes)]


def _takes_adapter(layer: str, shapes: Shapes) -> bool:
    is_matrix = len(shapes.get(layer + WEIGHT, ())) == 2
    return is_matrix and _IN_A_LAYER.search(layer) is not None and _OF_EXPERTS.search(layer) is None


def _copied(address: str, source: Path, folder: Path, rules: AdapterRules) -> CopiedAdapter:
    check_size(source / ADAPTER_FILE, rules.bytes_max)
    folder.mkdir()
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        shutil.copyfile(source / name, folder / name)
    file = folder / ADAPTER_FILE
    check_size(file, rules.bytes_max)
    check_content(file, address)
    config = adapter_config(folder)
    layers = _checked_layers(folder, config, rules)
    scales = {layer: config.scale_of(layer) for layer in layers}
    rank = max(map(config.rank_of, layers))
    if rank > rules.rank_max:
        raise Refused(
            Code.UNSUPPORTED,
            f"the adapter in {source} has rank {rank}, but this replica serves ranks up to {rules.rank_max}: start "
            "it with a higher --vllm-max-lora-rank",
        )
    (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(_written(layers, config)))
    return CopiedAdapter(folder, scales, file.stat().st_size)


def _written(layers: Sequence[str], config: PeftConfig) -> dict[str, object]:
    """Return a configuration that names these layers, with each layer's own rank and alpha where layers may differ in
    them."""
    alphas = {layer: config.scale_of(layer) * config.rank_of(layer) for layer in layers}
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    rank = max(map(config.rank_of, layers))
    plain = AdapterConfig(r=rank, lora_alpha=alphas[layers[0]], target_modules=targets)
    written: dict[str, object] = msgspec.structs.asdict(plain)
    if config.has_patterns:
        written["rank_pattern"] = {re.escape(layer): config.rank_of(layer) for layer in layers}
        written["alpha_pattern"] = {re.escape(layer): alpha for layer, alpha in alphas.items()}
    return written


def _checked_layers(folder: Path, config: PeftConfig, rules: AdapterRules) -> list[str]:
    """Return the names of an adapter's layers. Raises `EngineFault` if it contains anything that cannot be served."""
    with TensorFile(folder / ADAPTER_FILE) as file:
        layers = [name.removeprefix(PREFIX).removesuffix(LOW_A) for name in file.names if name.endswith(LOW_A)]
        named = {name for layer in layers for name in adapter_names(layer)}
        for name in file.names:
            if name not in named:
                raise EngineFault(f"it has {name}, which is not part of a pair of low-rank matrices")
        if not layers:
            raise EngineFault("it has no layers")
        for layer in layers:
            _check_layer(file, layer, config.rank_of(layer), rules)
    return layers


def _check_layer(file: TensorFile, layer: str, rank: int, rules: AdapterRules) -> None:
    if not _takes_adapter(layer, rules.shapes):
        raise EngineFault(f"it has {layer}, but for this model vLLM serves adapters only on linear layers")
    out, inside = rules.shapes[layer + WEIGHT]
    for name, wanted in zip(adapter_names(layer), ((rank, inside), (out, rank)), strict=True):
        if name not in file:
            raise EngineFault(f"it lacks {name}")
        if file.shape(name) != wanted:
            raise EngineFault(f"its {name} is {list(file.shape(name))}, but this model's is {list(wanted)}")
        if not _is_finite(file.dtype(name), file.bits(name), rules.precision):
            raise EngineFault(f"its {name} has values that are not finite numbers in {rules.precision}")


def _is_finite(dtype: str, bits: Bits, precision: str) -> bool:
    values = _floats(dtype, bits)
    if values is None:
        return False
    with np.errstate(over="ignore"):
        narrowed = values.astype(np.float16 if precision == "float16" else np.float32)
    return bool(np.isfinite(narrowed).all())


def _floats(dtype: str, bits: Bits) -> NDArray[np.floating] | None:
    """Return the values of a tensor, or None if its type is not floating-point."""
    match dtype:
        case "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        case "F16":
            return bits.view(np.float16)
        case "F32":
            return bits.view(np.float32)
        case "F64":
            return bits.view(np.float64)
        case _:
            return None
