"""Attention over a flat row of trie segments: each segment attends to all of its ancestors, and causally to itself.

It is registered with transformers under a name, so that a model's own layers call it. Segments of similar size are
computed together: padding inside a block is bounded by `WASTE_MAX`, and never reaches the model's other layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bombus_trainer.data.packing import Segment
from bombus_trainer.data.sequences import Ints

NAME = "bombus_tree"
WASTE_MAX = 1.3  # a block may compute at most this many times what its segments need
CALL_COST = 1 << 14  # the cost of one more kernel call, in query-key products


@dataclass(frozen=True, eq=False)
class Block:
    """B segments attended together: padded rows of their queries [B, Q] and keys [B, K].

    A segment's keys are its ancestors' tokens in order, then its own, so query i attends to keys up to offset + i.
    Padding comes last, where only padding attends to it. `mask_BQK` is None when all offsets are zero: plain causal
    attention.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    mask_BQK: Tensor | None


@dataclass(frozen=True, eq=False)
class TrieAttention:
    """The attention of one bin, as tensors. `where_T` is the place of each row's result in the blocks' results."""

    blocks: tuple[Block, ...]
    where_T: Tensor


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A row's attention cut into blocks, as arrays by name, to be moved to a device before `tree` is called."""

    arrays: dict[str, Ints]
    masked: tuple[bool, ...]  # for each block: whether it has a segment with ancestors

    def tree(self, moved: Mapping[str, Tensor]) -> TrieAttention:
        """Return the attention with `moved`, the tensors of `arrays` on a device. It may have other tensors too."""
        blocks = []
        for number, masked in enumerate(self.masked):
            queries_BQ, keys_BK, offsets_B = (moved[f"{what}.{number}"] for what in ("queries", "keys", "offsets"))
            mask_BQK = None
            if masked:
                sees_BQ = offsets_B[:, None] + torch.arange(queries_BQ.shape[1], device=offsets_B.device)
                mask_BQK = torch.arange(keys_BK.shape[1], device=offsets_B.device) <= sees_BQ[:, :, None]
            blocks.append(Block(queries_BQ, keys_BK, mask_BQK))
        return TrieAttention(tuple(blocks), moved["where"])


def plan(segments: Sequence[Segment]) -> AttentionPlan:
    """Cut a row's attention into blocks."""
    keys = _key_rows(segments)
    lengths = [(len(keys[index]), segment.length) for index, segment in enumerate(segments)]
    arrays: dict[str, Ints] = {}
    masked: list[bool] = []
    where_T = np.zeros(sum(segment.length for segment in segments), dtype=np.int64)
    base = 0
    for number, members in enumerate(_batches(lengths)):
        wide = max(lengths[index][1] for index in members)
        long = max(lengths[index][0] for index in members)
        queries_BQ = np.zeros((len(members), wide), dtype=np.int64)
        keys_BK = np.zeros((len(members), long), dtype=np.int64)
        for line, index in enumerate(members):
            segment = segments[index]
            rows = np.arange(segment.start, segment.start + segment.length)
            queries_BQ[line, : segment.length] = rows
            keys_BK[line, : len(keys[index])] = keys[index]
            where_T[rows] = base + line * wide + np.arange(segment.length)
        base += len(members) * wide
        offsets_B = np.array([segments[index].depth for index in members])
        masked.append(bool(offsets_B.any()))
        arrays |= {f"queries.{number}": queries_BQ, f"keys.{number}": keys_BK, f"offsets.{number}": offsets_B}
    return AttentionPlan({**arrays, "where": where_T}, tuple(masked))


def _key_rows(segments: Sequence[Segment]) -> list[Ints]:
    rows: list[Ints] = []
    for segment in segments:
        own = np.arange(segment.start, segment.start + segment.length)
        rows.append(own if segment.parent < 0 else np.concatenate([rows[segment.parent], own]))
    return rows


def _batches(lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Group (keys, queries) sizes so that padding costs less than fewer calls save.

    Segments without ancestors (keys == queries) have groups of their own: they need no mask.
    """
    order = sorted(range(len(lengths)), key=lambda index: (_rooted(lengths[index]), *lengths[index], index))
    batches: list[list[int]] = []
    needed, wide = 0, 0
    for index in order:
        keys, queries = lengths[index]
        if batches and _rooted(lengths[batches[-1][0]]) == _rooted(lengths[index]):
            padded = (len(batches[-1]) + 1) * keys * max(wide, queries)
            needs = needed + keys * queries
            if padded <= WASTE_MAX * needs + CALL_COST:
                batches[-1].append(index)
                needed, wide = needs, max(wide, queries)
                continue
        batches.append([index])
        needed, wide = keys * queries, queries
    return batches


def _rooted(length: tuple[int, int]) -> bool:
    return length[0] == length[1]


def tree_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TrieAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend: query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d].

    transformers calls this for every layer with the keyword arguments of its own backends, most of which are unused
    here; `tree` is ours, passed through the model's forward.
    """
    if sliding_window is not None:
        raise NotImplementedError("sliding-window attention")
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    query_TE = query[0].transpose(0, 1).reshape(-1, heads * size)
    key_TE = key[0].transpose(0, 1).reshape(-1, kv_heads * size)
    value_TE = value[0].transpose(0, 1).reshape(-1, kv_heads * size)
    results = []
    for block in tree.blocks:
        out = scaled_dot_product_attention(
            _take(query_TE, block.queries_BQ, heads),
            _take(key_TE, block.keys_BK, kv_heads),
            _take(value_TE, block.keys_BK, kv_heads),
            attn_mask=None if block.mask_BQK is None else block.mask_BQK[:, None],
            is_causal=block.mask_BQK is None,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        results.append(out.transpose(1, 2).reshape(-1, heads * size))
    flat = torch.cat(results) if len(results) > 1 else results[0]
    return flat.index_select(0, tree.where_T).view(1, -1, heads, size), None


def _take(rows_TE: Tensor, index_BL: Tensor, heads: int) -> Tensor:
    """Gather rows [T, heads x d] at [B, L] -> [B, heads, L, d]."""
    taken = rows_TE.index_select(0, index_BL.reshape(-1))
    return taken.view(*index_BL.shape, heads, -1).transpose(1, 2)


AttentionInterface.register(NAME, tree_attention)
