"""Applies a delta to the weights of a running engine: writes only what changed, in place, between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bombus.errors import EngineFault
from bombus.weights.deltas import DeltaFile
from bombus.weights.merging import DTYPES
from bombus_inference.settings import ComputeSettings


@dataclass(frozen=True, eq=False)
class TensorPatch:
    """New `values` [N] for those elements of a flattened tensor whose indices are `where` [N]. `where` is None if every
    element is new."""

    values: Tensor
    where: Tensor | None


def read_patches(delta: Path, settings: ComputeSettings) -> dict[str, TensorPatch]:
    """Return a delta's changes on the engine's device, in the types of the file."""
    patches: dict[str, TensorPatch] = {}
    with DeltaFile(delta) as file:
        for name, found in file.patches():
            if file.dtype(name) not in DTYPES:
                raise EngineFault(f"{name} has type {file.dtype(name)}, which no weight of this engine has")
            values = torch.from_numpy(found.values).view(DTYPES[file.dtype(name)]).to(settings.device)
            where = None if found.gaps is None else torch.from_numpy(found.positions()).to(settings.device)
            patches[name] = TensorPatch(values, where)
    return patches


def fitting_patches(tensors: Mapping[str, Tensor], patches: Mapping[str, TensorPatch]) -> dict[str, TensorPatch]:
    """Return the patches whose names are in `tensors`.

    Raises `EngineFault` if a patch does not fit its tensor.
    """
    matching = {name: patch for name, patch in patches.items() if name in tensors}
    for name, patch in matching.items():
        tensor = tensors[name]
        size = tensor.numel()
        last = -1 if patch.where is None or not len(patch.where) else int(patch.where[-1])
        if (patch.where is None and len(patch.values) != size) or last >= size or not tensor.is_contiguous():
            raise EngineFault(f"the delta's {name} does not fit this model's")
    return matching


@torch.no_grad()
def apply_patches(tensors: Mapping[str, Tensor], patches: Mapping[str, TensorPatch]) -> None:
    """Write patches that have passed `fitting_patches`."""
    for name, patch in patches.items():
        flat = tensors[name].data.view(-1)
        values = patch.values.to(flat.dtype)
        if patch.where is None:
            flat.copy_(values)
        else:
            flat.index_copy_(0, patch.where, values)
