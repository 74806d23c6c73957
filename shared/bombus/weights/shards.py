"""Writes a model's tensors as safetensors files that transformers and vLLM read: one file, or several with an index.

The format: a little-endian uint64, that many bytes of JSON (name -> dtype, shape, byte range), then the data.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np

from bombus.weights.deltas import FULL_FILE, WIDTHS, Bits

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES_MAX = 5 * 10**9  # transformers' own limit
ALIGN = 8
METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True)
class TensorHead:
    """A tensor's entry in a file's header. `dtype` is safetensors' name for it, such as `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return WIDTHS[self.dtype] * prod(self.shape)


def safetensors_head(heads: Iterable[TensorHead], metadata: Mapping[str, str] | None) -> bytes:
    """Return the beginning of a safetensors file with these tensors, up to the first tensor's data."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for head in heads:
        header[head.name] = {
            "dtype": head.dtype,
            "shape": list(head.shape),
            "data_offsets": [end, end + head.bytes],
        }
        end += head.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def shards_of(heads: Iterable[TensorHead], bytes_max: int) -> list[list[TensorHead]]:
    """Divide tensors, in order, into files of at most `bytes_max` bytes. A larger tensor gets a file of its own."""
    shards: list[list[TensorHead]] = [[]]
    size = 0
    for head in heads:
        if shards[-1] and size + head.bytes > bytes_max:
            shards.append([])
            size = 0
        shards[-1].append(head)
        size += head.bytes
    return shards


def write_model(
    folder: Path,
    heads: Sequence[TensorHead],
    tensors: Iterator[tuple[str, Bits]],
    bytes_max: int = SHARD_BYTES_MAX,
) -> dict[str, str]:
    """Write the tensors, which must be in the same order as `heads`. Return each file's sha256 by the file's name."""
    shards = shards_of(heads, bytes_max)
    count = len(shards)
    names = [FULL_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    digests = {name: _write_file(folder / name, shard, tensors) for name, shard in zip(names, shards, strict=True)}
    if next(tensors, None) is not None:
        raise ValueError("there are more tensors than heads")
    if count > 1:
        place = {head.name: name for name, shard in zip(names, shards, strict=True) for head in shard}
        index = {"metadata": {"total_size": sum(head.bytes for head in heads)}, "weight_map": place}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return digests


def _write_file(path: Path, heads: Sequence[TensorHead], tensors: Iterator[tuple[str, Bits]]) -> str:
    digest = sha256()
    with path.open("wb") as file:
        start = safetensors_head(heads, METADATA)
        digest.update(start)
        file.write(start)
        for head in heads:
            name, bits = next(tensors)
            if name != head.name or bits.nbytes != head.bytes:
                raise ValueError(f"the next head is {head.name} of {head.bytes} bytes, not {name} of {bits.nbytes}")
            content = bits.view(np.uint8).data
            digest.update(content)
            file.write(content)
    return digest.hexdigest()
