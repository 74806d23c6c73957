"""Reads an adapter to be served beside the engine's own policy, and checks that its address is the requested one."""

from pathlib import Path

import torch

from bombus.errors import Code, EngineFault, Refused, in_one_line
from bombus.weights.adapters import ADAPTER_FILE
from bombus.weights.merging import Adapter
from bombus_inference.backends.adapter_folders import adapter_config, check_address, check_content, check_size
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank
from bombus_inference.settings import ComputeSettings

RANK_MAX = 1024


def read_loaded(address: str, folder: Path, settings: ComputeSettings) -> LoadedAdapter:
    """Return the adapter in `folder`, in the engine's type and on its device. Raises `Refused` if it cannot be served.

    `address` is the SHA-256 of the adapter's tensor file. If that file's metadata contains a configuration, it must
    equal the configuration in the folder.
    """
    check_address(address)
    file = folder / ADAPTER_FILE
    try:
        check_size(file, 2 * settings.adapters_bytes)  # the file may be float32 on a half-precision engine
        check_content(file, address)
        config = adapter_config(folder)
        adapter = Adapter(folder, config.scale_of)
        device, dtype = settings.device, getattr(torch, settings.precision)
        layers = {name: LowRank(a.to(device, dtype), b.to(device, dtype)) for name, a, b in adapter.layers()}
    except (EngineFault, OSError) as error:
        why = str(error) if isinstance(error, EngineFault) else in_one_line(error)
        raise Refused(Code.MALFORMED, f"the adapter in {folder} cannot be served: {why}") from error
    _check_layers(folder, layers)
    return LoadedAdapter(layers, {name: config.scale_of(name) for name in layers})


def _check_layers(folder: Path, layers: dict[str, LowRank]) -> None:
    if not layers:
        raise Refused(Code.MALFORMED, f"the adapter in {folder} has no layers")
    for name, low_rank in layers.items():
        if low_rank.low_a.dim() != 2 or low_rank.low_b.dim() != 2 or not 0 < len(low_rank.low_a) <= RANK_MAX:
            why = f"the adapter's {name} is not two matrices with a rank from 1 to {RANK_MAX}"
            raise Refused(Code.MALFORMED, why)
        # The adapter shares matrix products with other adapters, and zero times infinity is not zero.
        if not (low_rank.low_a.isfinite().all() and low_rank.low_b.isfinite().all()):
            raise Refused(Code.MALFORMED, f"the adapter's {name} has values that are not finite numbers")
