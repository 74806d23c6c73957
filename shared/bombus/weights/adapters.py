"""LoRA adapters as files that peft and vLLM read: a policy version's addition to a fixed base model (R15)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bombus.errors import EngineFault
from bombus.hive.decoding import decoded
from bombus.weights.deltas import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FORMAT = "safetensors-lora"
ADAPTER_FILE = "adapter_model.safetensors"
# The name of both a file and a key in the tensor file's metadata. Both have the same content, so that the digest covers
# it.
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM 0.32 accepts for max-lora-rank
ScaleOf = Callable[[str], float]  # maps a layer's name to the scale of its product B A
LOW_A, LOW_B = ".lora_A.weight", ".lora_B.weight"


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """peft's configuration of an adapter. `r` is the rank, and `target_modules` are full layer names or their last
    parts."""

    r: int
    lora_alpha: float
    target_modules: list[str]
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"
    bias: str = "none"

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


_config = msgspec.json.Decoder(AdapterConfig)


def adapter_names(layer: str) -> tuple[str, str]:
    """Return the names that a layer's A [rank, in] and B [out, rank] have in the file."""
    return f"{PREFIX}{layer}{LOW_A}", f"{PREFIX}{layer}{LOW_B}"


def merged(weight: "Tensor", low_a: "Tensor", low_b: "Tensor", scale: float) -> "Tensor":
    """Return the dense weight W + scale B A [out, in], in float32 (Hu et al. 2021, arXiv:2106.09685)."""
    return weight.float() + scale * (low_b.float() @ low_a.float())


@dataclass
class Rounding:
    """A measure of how much of an adapter is lost to rounding in a merge: the squared norms of what the adapter adds,
    and of the lost part."""

    added: float = 0.0
    lost: float = 0.0

    @property
    def share_lost(self) -> float:
        """Return the norm of the lost part, as a fraction of the norm of what the adapter adds."""
        return (self.lost / self.added) ** 0.5 if self.added else 0.0

    def note(self, before: "Tensor", exact: "Tensor", rounded: "Tensor") -> None:
        self.added += float((exact - before.float()).square().sum())
        self.lost += float((exact - rounded.float()).square().sum())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the configuration in the metadata of the adapter in `folder`, which the adapter's digest covers.

    Raises `EngineFault` if the configuration cannot be read, or if the configuration file beside the adapter differs
    from it.
    """
    with TensorFile(folder / ADAPTER_FILE) as file:
        text = file.metadata.get(ADAPTER_CONFIG, "")
    try:
        config = decoded(_config.decode, text)
        beside = (folder / ADAPTER_CONFIG).read_text()
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineFault(f"the configuration of the adapter in {folder} cannot be read: {error}") from error
    if beside != text or config.r < 1:
        raise EngineFault(f"{folder / ADAPTER_CONFIG} does not belong to the adapter next to it")
    return config
