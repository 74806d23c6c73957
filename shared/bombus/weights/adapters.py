"""LoRA adapters as files that peft and vLLM read: what a policy version adds to a model that stays as it is (R15)."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bombus.errors import EngineFault
from bombus.weights.deltas import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FORMAT = "safetensors-lora"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"  # a file's name, and in the tensors' metadata its content: the digest covers it
PREFIX = "base_model.model."


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """In peft's words. `r` is the rank, `target_modules` are the last parts of the layers' names."""

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


def adapter_names(layer: str) -> tuple[str, str]:
    """What A [rank, in] and B [out, rank] of a layer are called in the file."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def merged(weight: "Tensor", low_a: "Tensor", low_b: "Tensor", scale: float) -> "Tensor":
    """The dense weight W + scale B A [out, in], in float32 (Hu et al. 2021, arXiv:2106.09685)."""
    return weight.float() + scale * (low_b.float() @ low_a.float())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Of the adapter in `folder`, as its digest covers it. Raises `EngineFault`, so when its file differs."""
    with TensorFile(folder / ADAPTER_FILE) as file:
        text = file.metadata.get(ADAPTER_CONFIG, "")
    try:
        config = msgspec.json.decode(text, type=AdapterConfig)
        beside = (folder / ADAPTER_CONFIG).read_text()
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineFault(f"the adapter in {folder} does not say how it is made: {error}") from error
    if beside != text or config.r < 1:
        raise EngineFault(f"{folder / ADAPTER_CONFIG} is not that of the adapter beside it")
    return config
