"""Ulysses: each rank computes one part of each row, and around attention the ranks exchange parts of rows for heads.

Each rank of a group has all heads for its own part of a row. Before a layer's attention, the ranks exchange heads for
parts, so that each has the whole row for only some heads; afterwards the results are sent back (DeepSpeed Ulysses,
https://arxiv.org/abs/2309.14509). Attention itself is the torch backend's, which needs no flash-attn and computes each
sequence of a row alone. This module does not import verl.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from bombus.architectures.shapes import NOT_PASSED_ON
from bombus.errors import EngineFault
from bombus_trainer.backends.torch.attention import TrieAttention, plan, tree_attention
from bombus_trainer.backends.torch.transfer import to_device
from bombus_trainer.data.packing import Segment

NAME = "bombus_ulysses"


@dataclass(frozen=True, eq=False)
class SplitRow:
    """A row of S equal parts of P tokens, which the ranks of `group` compute in rank order.

    `attention` covers all S x P tokens, including padding.
    """

    group: dist.ProcessGroup
    tokens: int
    attention: TrieAttention

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def start(self) -> int:
        """The first token of this rank's part."""
        return dist.get_rank(self.group) * (self.tokens // self.ranks)

    @property
    def end(self) -> int:
        return self.start + self.tokens // self.ranks


def split_row(
    lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device, in_full: bool = False
) -> SplitRow:
    """Return a row of sequences of these lengths, end to end, padded to a multiple of the number of ranks in `group`.

    See `Block` for `in_full`.
    """
    padding = -sum(lengths) % dist.get_world_size(group)
    segments: list[Segment] = []
    start = 0
    for length in (*lengths, padding) if padding else lengths:
        segments.append(Segment(start, length, depth=0, parent=-1))
        start += length
    layout = plan(segments)
    return SplitRow(group, start, layout.tree(to_device(layout.arrays, device), in_full))


def joined(part_RN: Tensor, first: int, count: int, group: dist.ProcessGroup) -> Tensor:
    """Join the values of all ranks of `group` into [R, count]; this rank's `part_RN` begins at column `first`.

    Every rank computes the same loss from all values, but its gradient flows back only to its own values. The gradients
    summed over the ranks are therefore those of a single loss.
    """
    whole: Tensor = _Join.apply(part_RN, first, count, group)  # type: ignore[no-untyped-call]
    return whole


def ulysses_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    row: SplitRow | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention: query [1, heads, P, d], key [1, kv heads, P, d], value [1, kv heads, P, e] -> [1, P, heads,
    e].

    transformers calls this for every layer; `row` is our own argument, passed through the model's forward. Raises
    `EngineFault` for heads that the ranks cannot share, and in the same cases as `tree_attention`.
    """
    if row is None:
        raise EngineFault(NOT_PASSED_ON)
    ranks, heads = row.ranks, query.shape[1]
    check_heads(heads, ranks)
    if isinstance(sinks_H := options.get("s_aux"), Tensor):
        options["s_aux"] = sinks_H.chunk(ranks)[dist.get_rank(row.group)]
    sides = [query, *(_repeated(side, ranks) for side in (key, value))]
    query, key, value = _gathered(sides, row.group)
    out, _ = tree_attention(module, query, key, value, attention_mask, scaling, tree=row.attention, **options)
    parts_SPHE = _exchanged(out[0].unflatten(0, (ranks, -1)), row.group)
    return parts_SPHE.transpose(0, 1).flatten(1, 2)[None], None


def check_heads(heads: int, ranks: int) -> None:
    """Raise `EngineFault` unless `ranks` ranks can share the heads of a layer."""
    if heads % ranks:
        raise EngineFault(
            f"trainer.ulysses_parallel_size is {ranks}, but the model's layers have {heads} heads, which {ranks} ranks "
            f"cannot share: set it to a number that divides {heads}"
        )


def _repeated(side_1NPD: Tensor, ranks: int) -> Tensor:
    """Return key (or value) heads for every rank. If there are fewer heads than ranks, several ranks share a head."""
    heads = side_1NPD.shape[1]
    if heads % ranks == 0:
        return side_1NPD
    if ranks % heads:
        raise EngineFault(
            f"trainer.ulysses_parallel_size is {ranks}, but the model's layers have {heads} key heads: one number "
            "must be a multiple of the other"
        )
    return side_1NPD.repeat_interleave(ranks // heads, dim=1)


def _gathered(sides: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's heads of the whole row [1, h, S x P, D], in exchange for all heads [1, H, P, D] of its part.

    All sides are sent in one exchange.
    """
    ranks = dist.get_world_size(group)
    parts = [side[0].unflatten(0, (ranks, -1)) for side in sides]  # [S, h, P, D]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)
    taken = _exchanged(sent, group).split([part[0].numel() for part in parts], dim=1)
    return [flat.view(part.shape).transpose(0, 1).flatten(1, 2)[None] for flat, part in zip(taken, parts, strict=True)]


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `parts[r]` to rank r, and return the parts that the ranks sent here, in rank order."""
    exchanged: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts. It is its own transpose, so the backward pass exchanges gradients the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_RN: Tensor, first: int, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.place = slice(first, first + part_RN.shape[1])
        whole_RN = part_RN.new_zeros(part_RN.shape[0], count)
        whole_RN[:, ctx.place] = part_RN
        dist.all_reduce(whole_RN, group=group)  # the other ranks have zeros there
        return whole_RN

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_RN[:, ctx.place], None, None, None


AttentionInterface.register(NAME, ulysses_attention)
