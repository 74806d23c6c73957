"""How a layer turns queries and keys into attention weights, read from the arguments of its attention function.

transformers calls our attention function with the keyword arguments of its own backends. Arguments that change the
result are applied, and unknown arguments are refused, since ignoring one would make the model silently wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bombus.errors import EngineFault

# Arguments that do not change results here: dropout, which an RL policy does not use; outputs that are not read; and
# positions, which have already been applied.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns the product of a query and a key into an attention weight.

    A token sees the last `window` tokens, including itself, or all tokens if `window` is None. `softcap` c turns a
    score s into c tanh(s / c). `sinks_H` is an extra score for each head that takes part in the softmax but has no
    value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether a fused kernel, which never has all scores in memory, can compute the attention."""
        return self.softcap is None and self.sinks_H is None

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def shares(self, scores: Tensor, heads_first: int = 0) -> Tensor:
        """Return the softmax over the last dimension, without the share that goes to the sinks.

        Dimensions `heads_first` and `heads_first` + 1 of `scores` together index the query heads.
        """
        if self.sinks_H is None:
            return torch.softmax(scores, dim=-1)
        heads = scores.shape[heads_first : heads_first + 2]
        sinks = self.sinks_H.view(*heads, *([1] * (scores.ndim - heads_first - 2))).to(scores.dtype)
        with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.softmax(with_sink, dim=-1)[..., :-1]


def read_scoring(
    query: Tensor, attention_mask: Tensor | None, scaling: float | None, options: Mapping[str, object]
) -> Scoring:
    """Read an attention function's keyword arguments. Raises `EngineFault` for unknown or unsupported arguments."""
    if attention_mask is not None:
        raise EngineFault("its layers attend through a mask of their own")
    left = {name: value for name, value in options.items() if value is not None and name not in WITHOUT_EFFECT}
    window, softcap, sinks = (left.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if left.pop("is_causal", True) is not True:
        raise EngineFault("its layers attend in both directions")
    if left:
        raise EngineFault(f"its attention is passed {', '.join(sorted(left))}, which is not known here")
    assert window is None or isinstance(window, int)
    assert softcap is None or isinstance(softcap, float | int)
    assert sinks is None or isinstance(sinks, Tensor)
    return Scoring(query.shape[-1] ** -0.5 if scaling is None else float(scaling), window, softcap, sinks)


def hidden(back: Tensor, window: int | None) -> Tensor:
    """Return which keys a query does not see: later keys, and keys that are `window` or more tokens earlier.

    `back` is how many tokens each key is before the query.
    """
    return back < 0 if window is None else (back < 0) | (back >= window)


def attend_in_full(
    query_BNGQD: Tensor, key_BNKD: Tensor, value_BNKE: Tensor, mask_BQK: Tensor, scoring: Scoring
) -> Tensor:
    """Compute attention with all scores in memory, in float32: [B, N, G, Q, E]; G query heads share each of N key
    heads.

    `mask_BQK` is added to the scores.
    """
    rows, kv_heads, groups, queries, size = query_BNGQD.shape
    folded = query_BNGQD.reshape(rows, kv_heads, groups * queries, size)
    scores = (folded @ key_BNKD.transpose(-1, -2)).float() * scoring.scaling
    scores_BNGQK = scoring.capped(scores).view(rows, kv_heads, groups, queries, -1) + mask_BQK[:, None, None]
    shares = scoring.shares(scores_BNGQK, heads_first=1).to(value_BNKE.dtype)
    out = shares.view(rows, kv_heads, groups * queries, -1) @ value_BNKE
    return out.view(rows, kv_heads, groups, queries, -1)
