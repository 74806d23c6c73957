"""Scores a prompt's tokens while the prompt is being computed: their logprobs at temperature 1, and the most likely
alternatives."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bombus.hive.generation import PromptScores
from bombus_inference.backends.answers import score_frames

LOGITS_MAX = 1 << 24  # elements of logits in memory at a time

Head = Callable[[slice], Tensor]  # returns the logits of these rows of hidden states


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """The logprobs of consecutive prompt tokens, and the `width` alternatives to each token, all in one list."""

    logprobs: list[float]
    top_tokens: list[int]
    top_logprobs: list[float]


class PromptScoring:
    """The scores of one prompt computed so far, from its first token on."""

    __slots__ = ("_logprobs", "_prompt", "_top_logprobs", "_top_tokens", "_width", "version")

    def __init__(self, prompt: Sequence[int], width: int) -> None:
        self._prompt = prompt
        self._width = width
        self.version = -1
        self.restart()

    def restart(self) -> None:
        """Forget all scores. What remains is the entry of the first token, which is NaN because nothing predicts that
        token."""
        self._logprobs = array("f", [math.nan])
        self._top_tokens = array("i", [0] * self._width)
        self._top_logprobs = array("f", [math.nan] * self._width)

    @property
    def complete(self) -> bool:
        return len(self._logprobs) == len(self._prompt)

    def targets(self, start: int, end: int) -> list[int]:
        """Return the tokens of the prompt that its hidden states [start, end) predict."""
        return list(self._prompt[start + 1 : end + 1])

    def take(self, start: int, piece: ScoredPiece, version: int) -> None:
        """Append the next scores, those of the tokens after `start`."""
        assert len(self._logprobs) == start + 1
        self._logprobs.extend(piece.logprobs)
        self._top_tokens.extend(piece.top_tokens)
        self._top_logprobs.extend(piece.top_logprobs)
        self.version = version

    def frames(self) -> list[PromptScores]:
        return score_frames(self._logprobs, self._top_tokens, self._top_logprobs, self._width, self.version)


def rows_at_once(vocabulary: int) -> int:
    """Return how many rows of logits may be in memory at a time."""
    return max(1, LOGITS_MAX // vocabulary)


def score(head: Head, first: int, targets: Sequence[int], width: int, at_once: int) -> ScoredPiece:
    """Score `targets`, `at_once` at a time. The hidden state in row `first` predicts the first of them, the next row
    the next, and so on."""
    piece = ScoredPiece([], [], [])
    for start in range(0, len(targets), at_once):
        here = targets[start : start + at_once]
        logits_NV = head(slice(first + start, first + start + len(here))).float()
        total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
        chosen_N1 = logits_NV.gather(1, torch.tensor(here, device=logits_NV.device)[:, None])
        piece.logprobs.extend((chosen_N1 - total_N1).squeeze(1).tolist())
        if width:
            values_NK, tokens_NK = logits_NV.topk(width, dim=-1)
            piece.top_tokens.extend(tokens_NK.flatten().tolist())
            piece.top_logprobs.extend((values_NK - total_N1).flatten().tolist())
    return piece
