"""Moves a micro-batch's arrays to the device in one transfer, since several transfers would wait for each other."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16

Arrays = Mapping[str, NDArray[np.generic]]


def to_device(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays as tensors on `device`, by name. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return split_buffer(join_arrays(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def join_arrays(arrays: Arrays, pinned: bool = False) -> Tensor:
    """Copy all arrays into one buffer of bytes, each at a multiple of `ALIGN`."""
    buffer = torch.zeros(_offsets(arrays)[-1], dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays.values(), _offsets(arrays), strict=False):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer[start : start + len(flat)] = torch.from_numpy(flat)
    return buffer


def split_buffer(buffer: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    """Return views into the buffer that `join_arrays` made from `arrays`, on whichever device the buffer now is."""
    tensors: dict[str, Tensor] = {}
    for (name, array), start in zip(arrays.items(), _offsets(arrays), strict=False):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors[name] = buffer[start : start + array.nbytes].view(dtype).view(array.shape)
    return tensors


def _offsets(arrays: Arrays) -> list[int]:
    """Return where each array begins, and where the last one ends."""
    places = [0]
    for array in arrays.values():
        places.append(places[-1] + -(-array.nbytes // ALIGN) * ALIGN)
    return places
