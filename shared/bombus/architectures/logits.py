"""Computes logits from the output layer. Some families scale them or apply a soft cap."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class LogitsForm:
    """How logits follow from the output layer's output z: cap tanh(scale z / cap), or scale z if there is no cap."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "LogitsForm":
        """Read the form from a configuration: Cohere's factor, Granite's divisor, Gemma's cap."""
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        cap = getattr(text, "final_logit_softcapping", None) or None
        return cls(float(scale) / float(divisor), None if cap is None else float(cap))

    def __call__(self, outputs: Tensor) -> Tensor:
        scaled = outputs if self.scale == 1.0 else outputs * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d z, where `logits` are the results."""
        return self.scale if self.cap is None else self.scale * (1.0 - (logits / self.cap) ** 2)


AS_IS = LogitsForm()
