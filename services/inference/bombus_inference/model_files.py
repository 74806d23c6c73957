"""Reads facts about a model from its folder without loading it: sizes from its configuration, shapes from a header."""

import json
import struct
from pathlib import Path

import msgspec

from bombus.errors import EngineFault
from bombus.hive.decoding import decoded

HEADER_BYTES_MAX = 100 << 20

Shapes = dict[str, tuple[int, ...]]


class TextModelConfig(msgspec.Struct, frozen=True):
    """The text part of `config.json`. `context` is in tokens; `dtype` is the type in which the weights are stored."""

    vocabulary: int
    context: int
    dtype: str = ""

    @property
    def training_dtype(self) -> str:
        """The type in which a trainer without a configured precision exports and, on a GPU, computes."""
        return "bfloat16" if self.dtype in ("bfloat16", "float16") else "float32"


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Tensor)


def read_config(folder: Path) -> TextModelConfig:
    """Read `config.json`. Raises `EngineFault`."""
    try:
        document = json.loads((folder / "config.json").read_text())
        config = document.get("text_config", document)
        dtype = next((part[key] for part in (config, document) for key in ("dtype", "torch_dtype") if key in part), "")
        return TextModelConfig(int(config["vocab_size"]), int(config["max_position_embeddings"]), str(dtype))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFault(f"{folder / 'config.json'} does not say how large the model is: {error}") from error


def read_shapes(path: Path) -> Shapes:
    """Return the shape of each tensor in a safetensors file. Raises `EngineFault` if the file cannot be read as one.

    Such a file starts with the length of its JSON header.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_BYTES_MAX:
                raise ValueError(f"its header would have {length} bytes")
            header = decoded(_header.decode, file.read(length))
        header.pop("__metadata__", None)
        return {name: decoded(_tensor.decode, raw).shape for name, raw in header.items()}
    except (OSError, ValueError, struct.error) as error:  # msgspec's errors are subclasses of ValueError
        raise EngineFault(f"{path} is not a safetensors file: {error}") from error


def check_same_shapes(before: Shapes, path: Path) -> None:
    """Raise `EngineFault` unless the tensors in the file at `path` have these shapes.

    vLLM itself only warns about a difference, and then serves a mixture of old and new tensors.
    """
    after = read_shapes(path)
    missing = [name for name in before if name not in after]
    if missing:
        raise EngineFault(f"the new weights lack {len(missing)} tensors, such as {missing[0]}")
    for name, shape in before.items():
        if after[name] != shape:
            raise EngineFault(f"{name} is {list(after[name])}, but the model's is {list(shape)}")
