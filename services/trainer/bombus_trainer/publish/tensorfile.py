"""Writes safetensors files in one pass, hashing what it writes, without a second copy in memory or a second read."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from bombus.weights.checkpoints import Seal
from bombus.weights.shards import TensorHead, safetensors_head
from bombus_trainer.recovery.progress import advanced

CHUNK_BYTES = 16 << 20
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Shape:
    """The dtype and shape of a tensor that will be written, before its values are computed."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count * self.dtype.itemsize


def write_tensors(
    path: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, Tensor]],
    durable: bool,
    metadata: Mapping[str, str] | None = None,
) -> Seal:
    """Write `tensors` in the order of `shapes`, each computed when its turn comes. If `durable`, fsync the file."""
    heads = [TensorHead(name, _NAMES[shape.dtype], shape.size) for name, shape in shapes.items()]
    head = safetensors_head(heads, metadata)
    digest = sha256()
    size = 0
    expected = iter(shapes.items())
    with path.open("wb", buffering=0) as file:
        digest.update(head)
        size += file.write(head)
        for name, tensor in tensors:
            wanted, shape = next(expected)
            if name != wanted or tensor.dtype != shape.dtype or tuple(tensor.shape) != shape.size:
                raise ValueError(f"tensor {name} is not the {wanted} that was announced")
            data = memoryview(bytes_of(tensor).numpy().data)
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                size += _write_all(file.fileno(), chunk)
                advanced(written_bytes=len(chunk))
        if next(expected, None) is not None:
            raise ValueError("fewer tensors than announced")
        if durable:
            os.fsync(file.fileno())
    return Seal(size, digest.hexdigest())


def write_whole(
    path: Path, tensors: Mapping[str, Tensor], durable: bool, metadata: Mapping[str, str] | None = None
) -> Seal:
    """Write tensors that are all in memory. If `durable`, fsync the file."""
    return write_tensors(path, shapes_of(tensors), tensors.items(), durable, metadata)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in order, as uint8 on the CPU. The result is a view of the tensor's memory if
    possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # with one element or none, the stride may be anything, but `view` needs 1
        flat = flat.clone(memory_format=torch.contiguous_format).as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def _write_all(descriptor: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
    return done
