"""Applies a delta to the weights of a running engine: only what changed is written, in place, between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bombus.errors import EngineFault
from bombus.weights.deltas import DeltaFile
from bombus.weights.merging import DTYPES
from bombus_inference.settings import ComputeSettings


@dataclass(frozen=True, eq=False)
class TensorPatch:
    """New `values` [N] for the elements `where` [N] of a flattened tensor. `where` is None if all of them are new."""

    values: Tensor
    where: Tensor | None


def read_patches(delta: Path, settings: ComputeSettings) -> dict[str, TensorPatch]:
    """Return a delta's changes in the engine's type, on its device, converted as they would be in a full copy."""
    dtype = getattr(torch, settings.precision)
    patches: dict[str, TensorPatch] = {}
    with DeltaFile(delta) as file:
        for name, found in file.patches():
            if file.dtype(name) not in DTYPES:
                raise EngineFault(f"{name} is {file.dtype(name)}, a type that no weight of this engine has")
            values = torch.from_numpy(found.values).view(DTYPES[file.dtype(name)]).to(settings.device, dtype)
            where = None if found.gaps is None else torch.from_numpy(found.positions()).to(settings.device)
            patches[name] = TensorPatch(values, where)
    return patches


@torch.no_grad()
def apply_patches(parameters: Mapping[str, nn.Parameter], patches: Mapping[str, TensorPatch]) -> None:
    """Write the patches. Raises `EngineFault`, having changed nothing, when one does not fit its parameter.

    Patches of other names are ignored.
    """
    matching = {name: patch for name, patch in patches.items() if name in parameters}
    for name, patch in matching.items():
        parameter = parameters[name]
        size = parameter.numel()
        last = -1 if patch.where is None or not len(patch.where) else int(patch.where[-1])
        if (patch.where is None and len(patch.values) != size) or last >= size or not parameter.is_contiguous():
            raise EngineFault(f"the delta's {name} is not this model's")
    for name, patch in matching.items():
        flat = parameters[name].data.view(-1)
        values = patch.values.to(flat.dtype)
        if patch.where is None:
            flat.copy_(values)
        else:
            flat.index_copy_(0, patch.where, values)
