"""Reads an adapter that is to be served beside the engine's own policy, and checks that it is the one that is meant."""

import re
from pathlib import Path

import torch

from bombus.errors import Code, EngineFault, Refused, in_one_line
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.deltas import TensorFile, file_sha256
from bombus.weights.lora_folders import PeftConfig, peft_config
from bombus.weights.merging import Adapter
from bombus_inference.backends.torch.adapters.own import LowRank
from bombus_inference.backends.torch.adapters.store import LoadedAdapter
from bombus_inference.settings import ComputeSettings

RANK_MAX = 1024
_ADDRESS = re.compile(r"[0-9a-f]{64}")


def check_address(address: str) -> None:
    """Raise `Refused` for what cannot be the address of an adapter."""
    if not _ADDRESS.fullmatch(address):
        raise Refused(Code.MALFORMED, f"{address[:80]!r} is not the address of an adapter: 64 hexadecimal digits")


def read_loaded(address: str, folder: Path, settings: ComputeSettings) -> LoadedAdapter:
    """Return the adapter in `folder`, in the engine's type and on its device. Raises `Refused`.

    `address` is the SHA-256 of its file of tensors. Where that has the configuration in its metadata, the two of them
    must agree.
    """
    check_address(address)
    file = folder / ADAPTER_FILE
    try:
        _check_file(file, address, settings.adapters_bytes)
        config = _config(folder)
        adapter = Adapter(folder, config.scale)
        device, dtype = settings.device, getattr(torch, settings.precision)
        layers = {name: LowRank(a.to(device, dtype), b.to(device, dtype)) for name, a, b in adapter.layers()}
    except (EngineFault, OSError) as error:
        why = str(error) if isinstance(error, EngineFault) else in_one_line(error)
        raise Refused(Code.MALFORMED, f"the adapter in {folder} cannot be served: {why}") from error
    _check_layers(folder, layers)
    return LoadedAdapter(layers, config.scale)


def _check_file(file: Path, address: str, bytes_max: int) -> None:
    size = file.stat().st_size
    if size > 2 * bytes_max:  # it may be in float32, and the engine in half precision
        why = f"{file} has {size} bytes; this replica has room for {bytes_max} by --adapters-mb"
        raise Refused(Code.TOO_LARGE, why)
    found = file_sha256(file)
    if found != address:
        why = f"{file} has the address {found} and not {address}: it is damaged, or was written again. Save it again"
        raise Refused(Code.MALFORMED, why)


def _config(folder: Path) -> PeftConfig:
    config = peft_config(folder)
    with TensorFile(folder / ADAPTER_FILE) as file:
        inside = file.metadata.get(ADAPTER_CONFIG)
    if inside is not None and inside != (folder / ADAPTER_CONFIG).read_text():
        raise EngineFault(f"its {ADAPTER_CONFIG} is not the one in the metadata of {ADAPTER_FILE}")
    return config


def _check_layers(folder: Path, layers: dict[str, LowRank]) -> None:
    if not layers:
        raise Refused(Code.MALFORMED, f"the adapter in {folder} has no layers")
    for name, low_rank in layers.items():
        if low_rank.low_a.dim() != 2 or low_rank.low_b.dim() != 2 or not 0 < len(low_rank.low_a) <= RANK_MAX:
            why = f"the adapter's {name} is not two matrices of a rank from 1 to {RANK_MAX}"
            raise Refused(Code.MALFORMED, why)
        # It shares matrix products with other adapters, and zero times infinity is not zero.
        if not (low_rank.low_a.isfinite().all() and low_rank.low_b.isfinite().all()):
            raise Refused(Code.MALFORMED, f"the adapter's {name} has values that are not finite numbers")
