"""Draws a batch of tokens, each with its logprob under the distribution that it was drawn from.

That distribution is softmax(logits / temperature), truncated by min_p, then to top_k, then to top_p, and normalised
again; a request's bias and penalties are already applied to the logits (`edits.py`). Greedy sampling (temperature 0)
takes the most likely token and reports its logprob at temperature 1 without truncation. A row with `plain` set instead
gets the logprobs of softmax(logits) before all edits, at temperature 1 and without truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bombus_inference.backends.protocol import TopLogprobs
from bombus_inference.backends.torch.edits import LogitEdits


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one row's token. `uniform` in [0, 1) is the draw's only source of randomness, so the token does not
    depend on other rows."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float
    top_logprobs: int = 0
    min_p: float = 0.0
    edits: LogitEdits | None = None
    plain: bool = False

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def relative(self) -> bool:
        """Whether tokens far less likely than the most likely one are left out."""
        return self.temperature > 0 and self.min_p > 0


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: list[int]
    logprobs: list[float]
    tops: list[TopLogprobs]  # a row is empty if it requested none


def draw(logits_RV: Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw one token for each row of `logits_RV`, which may have any float type."""
    plain_RV = logits_RV.float()
    logits_RV = _edited(plain_RV, draws)
    if any(one.temperature not in (0.0, 1.0) for one in draws):
        temperatures = [one.temperature or 1.0 for one in draws]
        logits_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device)[:, None]
    if any(one.relative for one in draws):
        logits_RV = _above_min_p(logits_RV, [one.min_p if one.relative else 0.0 for one in draws])
    rows = [row for row, one in enumerate(draws) if one.truncated]
    if rows:
        index = torch.tensor(rows, device=logits_RV.device)
        truncated = _truncate(logits_RV[index], [draws[row] for row in rows])
        logits_RV = logits_RV.index_copy(0, index, truncated)
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    tokens_R1 = _choose(logprobs_RV, draws)
    if any(one.plain for one in draws):
        plain_R1 = torch.tensor([one.plain for one in draws], device=logits_RV.device)[:, None]
        logprobs_RV = torch.where(plain_R1, torch.log_softmax(plain_RV, dim=-1), logprobs_RV)
    chosen_R = logprobs_RV.gather(1, tokens_R1).squeeze(1)
    return Drawn(tokens_R1.squeeze(1).tolist(), chosen_R.tolist(), _tops(logprobs_RV, draws))


def _edited(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the logits with each row's edits applied, or the same tensor if no row has edits."""
    rows = [(row, one.edits) for row, one in enumerate(draws) if one.edits is not None]
    if not rows:
        return logits_RV
    logits_RV = logits_RV.clone()
    for row, edits in rows:
        edits.apply(logits_RV[row])
    return logits_RV


def _above_min_p(logits_RV: Tensor, min_p: Sequence[float]) -> Tensor:
    """Set to minus infinity every token less likely than its row's `min_p` times the most likely token."""
    below_R1 = torch.tensor(min_p, device=logits_RV.device).log()[:, None]  # minus infinity for a row without min_p
    return logits_RV.masked_fill(logits_RV < logits_RV.amax(dim=-1, keepdim=True) + below_R1, -torch.inf)


def _choose(logprobs_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose tokens by inverse transform sampling: the first with a cumulative probability above the uniform number."""
    greedy = [one.temperature == 0 for one in draws]
    if all(greedy):
        return logprobs_RV.argmax(dim=-1, keepdim=True)
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1)
    total_R1 = cumulative_RV[:, -1:]
    uniform_R1 = torch.tensor([one.uniform for one in draws], device=logprobs_RV.device)[:, None]
    # Rounding may raise the product to the total itself, which would select past the last token.
    target_R1 = torch.minimum(uniform_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    tokens_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True).clamp_(max=logprobs_RV.shape[1] - 1)
    if any(greedy):
        greedy_R1 = torch.tensor(greedy, device=logprobs_RV.device)[:, None]
        tokens_R1 = torch.where(greedy_R1, logprobs_RV.argmax(dim=-1, keepdim=True), tokens_R1)
    return tokens_R1


def _truncate(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Set to minus infinity all but the `top_k` most likely tokens, then all but the fewest that sum to `top_p`."""
    device = logits_RV.device
    vocabulary = logits_RV.shape[1]
    widths = [min(one.top_k or vocabulary, vocabulary) for one in draws]
    sorted_RK, tokens_RK = logits_RV.topk(max(widths), dim=-1)
    rank_K = torch.arange(sorted_RK.shape[1], device=device)
    sorted_RK = sorted_RK.masked_fill(rank_K >= torch.tensor(widths, device=device)[:, None], -torch.inf)
    probabilities_RK = torch.softmax(sorted_RK, dim=-1)
    before_RK = probabilities_RK.cumsum(dim=-1) - probabilities_RK
    top_p_R1 = torch.tensor([one.top_p for one in draws], device=device)[:, None]
    outside_RK = (before_RK >= top_p_R1) & (rank_K > 0)  # the most likely token always stays
    sorted_RK = sorted_RK.masked_fill(outside_RK & (top_p_R1 < 1), -torch.inf)
    return torch.full_like(logits_RV, -torch.inf).scatter(1, tokens_RK, sorted_RK)


def _tops(logprobs_RV: Tensor, draws: Sequence[Draw]) -> list[TopLogprobs]:
    tops: list[TopLogprobs] = [()] * len(draws)
    rows = [row for row, one in enumerate(draws) if one.top_logprobs]
    if not rows:
        return tops
    width = min(max(draws[row].top_logprobs for row in rows), logprobs_RV.shape[1])
    values, tokens = logprobs_RV[torch.tensor(rows, device=logprobs_RV.device)].topk(width, dim=-1)
    for row, its_tokens, its_values in zip(rows, tokens.tolist(), values.tolist()):
        pairs = list(zip(its_tokens, its_values))[: draws[row].top_logprobs]
        tops[row] = tuple(pair for pair in pairs if pair[1] > -torch.inf)
    return tops
