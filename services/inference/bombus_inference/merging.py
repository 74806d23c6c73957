"""A LoRA adapter and the model that it is on become one model's file, for engines that load no adapters themselves."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bombus.adapters import ADAPTER_FILE, adapter_names, merged, read_adapter_config
from bombus.deltas import FULL_FILE, UNSIGNED, TensorFile
from bombus.errors import EngineFault
from bombus_inference.patching import DTYPES


def merge(base: Path, adapter: Path, into: Path) -> None:
    """Write the model in `base` with the adapter in `adapter` merged into it as folder `into`, one tensor at a time.

    Raises `EngineFault` when the adapter is not of this model.
    """
    config = read_adapter_config(adapter)
    try:
        factors = load_file(adapter / ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"{adapter / ADAPTER_FILE} cannot be read: {error}") from error
    into.mkdir()
    for file in base.iterdir():
        if file.is_file() and file.name != FULL_FILE:
            shutil.copyfile(file, into / file.name)
    with TensorFile(base / FULL_FILE) as source, (into / FULL_FILE).open("wb") as out:
        out.write(source.head)
        for name in source.names:
            bits = source.bits(name)
            names = adapter_names(name.removesuffix(".weight"))
            low_a, low_b = (factors.pop(each, None) for each in names)
            if low_a is not None and low_b is not None:
                dtype = DTYPES.get(source.dtype(name))
                rows, columns, inner = len(low_b), low_a.shape[-1], len(low_a)
                if dtype is None or rows * columns != len(bits) or low_b.shape[-1] != inner:
                    raise EngineFault(f"the adapter's {names[0]} is not of this model's {name}")
                weight = torch.from_numpy(bits).view(dtype).view(rows, columns)
                whole = merged(weight, low_a, low_b, config.scale).to(dtype).contiguous()
                bits = whole.view(-1).view(torch.uint8).numpy().view(UNSIGNED[dtype.itemsize])
            out.write(bits.data)
    if factors:
        raise EngineFault(f"the adapter has {sorted(factors)[0]}, of which this model has no layer")
