"""Edits to the logits of a request's next token, with vLLM's semantics and in vLLM's order.

First the logit bias is added, then the penalties are applied: repetition, frequency, presence. Temperature and
truncation follow (`sampling.py`). The order is from vLLM's `Sampler.forward`, steps 5 and 6 of its docstring
(vllm/v1/sample/sampler.py), and the formulas are from `apply_penalties` (vllm/model_executor/layers/utils.py).
"""

from array import array
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from bombus.hive.records import SamplingParams


class LogitEdits:
    """The parameters of one sequence, and the tokens that they apply to."""

    __slots__ = ("_bias", "_counts", "_frequency", "_places", "_presence", "_repetition", "_tokens")

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int]) -> None:
        self._bias = sampling.logit_bias
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        # Each distinct token, and how often it was sampled. Of the penalties, only repetition applies to the prompt.
        self._tokens = array("q", dict.fromkeys(prompt) if self._repetition != 1 else ())
        self._counts = array("f", [0.0] * len(self._tokens))
        self._places = {token: place for place, token in enumerate(self._tokens)}

    @classmethod
    def of(cls, sampling: SamplingParams, prompt: Iterable[int]) -> "LogitEdits | None":
        """Return the edits for one sequence of a request, or None if the request asks for no edits."""
        penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        return cls(sampling, prompt) if penalties or sampling.logit_bias else None

    def accept(self, token: int) -> None:
        """Count a sampled token."""
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0.0)
        self._counts[place] += 1

    def apply(self, logits_V: Tensor) -> None:
        """Edit the logits of the next token in place."""
        device = logits_V.device
        if self._bias:
            biased = torch.tensor(list(self._bias), device=device)
            logits_V[biased] += torch.tensor(list(self._bias.values()), dtype=logits_V.dtype, device=device)
        if not self._tokens:
            return
        tokens_K = torch.from_numpy(np.array(self._tokens)).to(device)
        counts_K = torch.from_numpy(np.array(self._counts)).to(device)
        seen_K = logits_V[tokens_K]
        if self._repetition != 1:
            seen_K = torch.where(seen_K > 0, seen_K / self._repetition, seen_K * self._repetition)
        logits_V[tokens_K] = seen_K - self._frequency * counts_K - self._presence * (counts_K > 0)
