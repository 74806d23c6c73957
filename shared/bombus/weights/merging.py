"""Merges LoRA adapters into the weights of their base model, for engines that compute only with whole weights."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bombus.errors import EngineFault
from bombus.weights.adapters import (
    ADAPTER_FILE,
    LOW_A,
    PREFIX,
    Rounding,
    ScaleOf,
    adapter_names,
    merged,
    read_adapter_config,
)
from bombus.weights.deltas import FULL_FILE, UNSIGNED, Bits, TensorFile, copy_companions, patched

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
WEIGHT = ".weight"
CONFIG = "config.json"


class Adapter:
    """The adapter in a folder, which is merged into the tensors of one model, one after another."""

    def __init__(self, folder: Path, scale_of: ScaleOf | None = None) -> None:
        """Read the adapter. `scale_of` defaults to the scale in the adapter's configuration. Raises `EngineFault` if
        the adapter cannot be read."""
        self._scale_of = scale_of or _one_scale(read_adapter_config(folder).scale)
        try:
            self._factors = load_file(folder / ADAPTER_FILE)
        except (OSError, SafetensorError) as error:
            raise EngineFault(f"{folder / ADAPTER_FILE} cannot be read: {error}") from error
        self._left = set(self._factors)

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes the tensor with this name."""
        return name.endswith(WEIGHT) and adapter_names(name.removesuffix(WEIGHT))[0] in self._factors

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, merged in float32 if the adapter changes it. Raises `EngineFault` if the shapes differ."""
        if not self.changes(name):
            return weight
        layer = name.removesuffix(WEIGHT)
        names = adapter_names(layer)
        low_a, low_b = (self._factors.get(each, torch.empty(0, 0)).to(weight.device) for each in names)
        if weight.shape != (len(low_b), low_a.shape[-1]) or low_b.shape[-1] != len(low_a):
            raise EngineFault(f"the adapter's {names[0]} does not fit this model's {name}")
        self._left.difference_update(names)
        return merged(weight, low_a, low_b, self._scale_of(layer))

    def layers(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each layer's name, A [rank, in], and B [out, rank] times the adapter's scale.

        Raises `EngineFault` if the adapter has any other tensors.
        """
        for name, low_a in self._factors.items():
            layer = name.removeprefix(PREFIX).removesuffix(LOW_A)
            names = adapter_names(layer)
            if name == names[0] and names[1] in self._factors:
                self._left.difference_update(names)
                yield layer, low_a, self._scale_of(layer) * self._factors[names[1]].float()
        self.check_all_merged()

    def check_all_merged(self) -> None:
        """Raise `EngineFault` unless the whole adapter has been merged."""
        if self._left:
            raise EngineFault(f"the adapter has {sorted(self._left)[0]}, but this model has no such layer")


def _one_scale(scale: float) -> ScaleOf:
    return lambda layer: scale


def save_merged(base: Path, adapter: Path, into: Path) -> None:
    """Merge the adapter in `adapter` into the model in `base`, and write the result to the folder `into`.

    The result is in float32, so that nothing is lost to rounding. Raises `EngineFault` if the adapter does not fit.
    """
    added = Adapter(adapter)
    stored = load_file(base / FULL_FILE)
    state = {
        name: added.merge(name, tensor).float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }
    added.check_all_merged()
    copy_companions(base, into)
    config = json.loads((into / CONFIG).read_text())
    (into / CONFIG).write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True))
    save_file(state, into / FULL_FILE, metadata={"format": "pt"})


def merge_files(base: Path, adapter: Path, into: Path) -> None:
    """Merge the adapter in `adapter` into the model in `base`, one tensor at a time, and write the result to the folder
    `into`.

    The result has the dtypes of `base`. Rounding to bfloat16 loses most of what a few steps have added. Raises
    `EngineFault` if the adapter does not fit.
    """
    copy_companions(base, into)
    with TensorFile(base / FULL_FILE) as source, (into / FULL_FILE).open("wb") as out:
        out.write(source.head)
        for _, bits in merged_tensors(source, patched(source, ()), Adapter(adapter)):
            out.write(bits.data)


def merged_tensors(
    source: TensorFile,
    tensors: Iterable[tuple[str, Bits]],
    adapter: Adapter,
    dtype: str = "",
    rounding: Rounding | None = None,
) -> Iterator[tuple[str, Bits]]:
    """Yield the tensors of a model with the adapter merged into them, in their own dtypes or all in `dtype`.

    `source` has the tensors' dtypes and shapes. Raises `EngineFault` if the adapter does not fit, which may become
    clear only after the last tensor.
    """
    yield from merge_each(source, tensors, adapter, dtype, rounding)
    adapter.check_all_merged()


def merge_each(
    source: TensorFile, tensors: Iterable[tuple[str, Bits]], adapter: Adapter, dtype: str, rounding: Rounding | None
) -> Iterator[tuple[str, Bits]]:
    """Do the same as `merged_tensors` for one of a model's several files, without the check at the end."""
    for name, bits in tensors:
        own = source.dtype(name)
        if adapter.changes(name) or (own in DTYPES and dtype not in ("", own)):
            weight = torch.from_numpy(bits).view(DTYPES[own]).view(source.shape(name))
            exact = adapter.merge(name, weight)
            rounded = exact.to(DTYPES[dtype or own])
            if rounding is not None and adapter.changes(name):
                rounding.note(weight, exact, rounded)
            bits = _bits_of(rounded)
        yield name, bits


def _bits_of(tensor: Tensor) -> Bits:
    flat: Bits = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(UNSIGNED[tensor.dtype.itemsize])
    return flat
