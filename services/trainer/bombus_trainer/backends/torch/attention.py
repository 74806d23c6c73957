"""Attention over a flat row of trie segments: each segment attends to all of its ancestors, and causally to itself.

It is registered with transformers under a name, so that a model's own layers call it. Segments of similar size are
computed together, as a block. `WASTE_MAX` limits a block's padding, which never reaches the model's other layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bombus.architectures.scoring import Scoring, attend_in_full, hidden, read_scoring
from bombus.architectures.shapes import NOT_PASSED_ON, ShapeRecorder
from bombus.errors import EngineFault
from bombus_trainer.data.packing import Segment
from bombus_trainer.data.sequences import Ints

NAME = "bombus_tree"
WASTE_MAX = 1.3  # a block may compute at most this multiple of the work that is needed
CALL_COST = 1 << 14  # the cost of another kernel call, in query-key products
MASK_ELEMENTS_MAX = 1 << 22  # for a block of several segments; one mask is kept per window of the model
MASK_ALIGNMENT = 8  # fused kernels copy a mask unless its rows start at multiples of this


@dataclass(frozen=True, eq=False)
class Block:
    """B segments whose attention is computed together: padded rows of their queries [B, Q] and keys [B, K].

    A segment's keys are its ancestors' tokens in order, then its own tokens. So query i attends to keys up to offset +
    i, and a key's index is its position in the sequence. Padding comes last, so only padding attends to it. A padded
    query attends as if it were at the last key, because a window that contains no keys would produce NaN. `causal` says
    that all offsets are zero, so that without a window this is plain causal attention. `in_full` computes all scores in
    memory, in float32, even if a fused kernel could avoid that.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    offsets_B: Tensor
    causal: bool
    in_full: bool = False
    masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the mask to add to the scores, [B, G x Q, K], with `groups` (G) query heads folded into rows.

        It is made once and shared by all layers with this window.
        """
        mask = self.masks.get((window, groups, dtype))
        if mask is None:
            rows, queries, keys = *self.queries_BQ.shape, self.keys_BK.shape[1]
            device = self.offsets_B.device
            sees_BQ = (self.offsets_B[:, None] + torch.arange(queries, device=device)).clamp(max=keys - 1)
            back_BQK = sees_BQ[:, :, None] - torch.arange(keys, device=device)
            aligned = -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
            mask = torch.zeros((rows, groups, queries, aligned), dtype=dtype, device=device)[..., :keys]
            mask.masked_fill_(hidden(back_BQK, window)[:, None], -torch.inf)
            mask = mask.view(rows, groups * queries, keys)
            self.masks[window, groups, dtype] = mask
        return mask

    def is_plain(self, window: int | None) -> bool:
        """Return whether this is causal attention to the whole row."""
        return self.causal and (window is None or self.keys_BK.shape[1] <= window)


@dataclass(frozen=True, eq=False)
class TrieAttention:
    """One bin's attention, as tensors. The results of all blocks are concatenated, and `where_T` is the index of each
    token's result among them."""

    blocks: tuple[Block, ...]
    where_T: Tensor


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A row's attention cut into blocks, as named arrays that are moved to a device before `tree` is called."""

    arrays: dict[str, Ints]
    causal: tuple[bool, ...]  # for each block: whether all of its segments lack ancestors

    def tree(self, moved: Mapping[str, Tensor], in_full: bool = False) -> TrieAttention:
        """Return the attention. `moved` has the tensors of `arrays` on a device, and may have others.

        See `Block` for `in_full`.
        """
        blocks = []
        for number, causal in enumerate(self.causal):
            queries_BQ, keys_BK, offsets_B = (moved[f"{what}.{number}"] for what in ("queries", "keys", "offsets"))
            blocks.append(Block(queries_BQ, keys_BK, offsets_B, causal, in_full))
        return TrieAttention(tuple(blocks), moved["where"])


def plan(segments: Sequence[Segment]) -> AttentionPlan:
    """Cut a row's attention into blocks."""
    keys = _key_rows(segments)
    lengths = [(len(keys[index]), segment.length) for index, segment in enumerate(segments)]
    arrays: dict[str, Ints] = {}
    causal: list[bool] = []
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
        causal.append(not offsets_B.any())
        arrays |= {f"queries.{number}": queries_BQ, f"keys.{number}": keys_BK, f"offsets.{number}": offsets_B}
    return AttentionPlan({**arrays, "where": where_T}, tuple(causal))


def _key_rows(segments: Sequence[Segment]) -> list[Ints]:
    rows: list[Ints] = []
    for segment in segments:
        own = np.arange(segment.start, segment.start + segment.length)
        rows.append(own if segment.parent < 0 else np.concatenate([rows[segment.parent], own]))
    return rows


def _batches(lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Group segments by their (keys, queries) sizes, so that padding costs less than the calls that it saves.

    Segments without ancestors (keys == queries) are grouped separately, since they need no mask.
    """
    order = sorted(range(len(lengths)), key=lambda index: (_rooted(lengths[index]), *lengths[index], index))
    batches: list[list[int]] = []
    needed, wide = 0, 0
    for index in order:
        keys, queries = lengths[index]
        if batches and _rooted(lengths[batches[-1][0]]) == _rooted(lengths[index]):
            padded = (len(batches[-1]) + 1) * keys * max(wide, queries)
            needs = needed + keys * queries
            fits = _rooted(lengths[index]) or padded <= MASK_ELEMENTS_MAX
            if fits and padded <= WASTE_MAX * needs + CALL_COST:
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
    scaling: float | None = None,
    *,
    tree: TrieAttention | ShapeRecorder | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention: query [1, heads, T, d], key [1, kv heads, T, d], value [1, kv heads, T, e] -> [1, T, heads,
    e].

    transformers calls this for every layer with the keyword arguments of its own backends; `tree` is our own argument,
    passed through the model's forward. Raises `EngineFault` for a layer whose options `Scoring` does not support.
    """
    scoring = read_scoring(query, attention_mask, scaling, options)
    if tree is None:
        raise EngineFault(NOT_PASSED_ON)
    if isinstance(tree, ShapeRecorder):
        return tree.note(module, query, key, value), None
    heads, kv_heads = query.shape[1], key.shape[1]
    query_TE, key_TE, value_TE = (side[0].transpose(0, 1).flatten(1) for side in (query, key, value))
    results = []
    for block in tree.blocks:
        out_BHQE = _attend(
            block,
            _take(query_TE, block.queries_BQ, heads),
            _take(key_TE, block.keys_BK, kv_heads),
            _take(value_TE, block.keys_BK, kv_heads),
            scoring,
        )
        results.append(out_BHQE.transpose(1, 2).flatten(2).flatten(0, 1))
    flat = torch.cat(results) if len(results) > 1 else results[0]
    return flat.index_select(0, tree.where_T).unflatten(1, (heads, -1))[None], None


def _attend(block: Block, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention within a block: query [B, H, Q, D], key [B, N, K, D], value [B, N, K, E] -> [B, H, Q, E].

    With a mask, CUDA's fused kernels need as many key heads as query heads. The query heads of a key head are therefore
    folded into its rows. In a block of one segment, the key heads become the batch instead, which needs no larger mask.
    """
    rows, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    window = scoring.window
    if block.in_full or not scoring.fused:
        by_group = query.view(rows, kv_heads, groups, queries, size)
        mask = block.mask(window, 1, torch.float32)
        return attend_in_full(by_group, key, value, mask, scoring).flatten(1, 2)
    if block.is_plain(window):
        shared = groups > 1
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=shared)
    folds = groups > 1 and rows > 1
    mask = block.mask(window, groups if folds else 1, query.dtype)[:, None]
    if folds:
        query = query.reshape(rows, kv_heads, groups * queries, size)
    elif groups > 1:
        query = query.reshape(kv_heads, groups, queries, size)
        key, value = (side.transpose(0, 1).expand(-1, groups, -1, -1) for side in (key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scoring.scaling)
    return out.reshape(rows, heads, queries, -1)


def _take(rows_TE: Tensor, index_BL: Tensor, heads: int) -> Tensor:
    """Gather rows [T, heads x d] at [B, L] -> [B, heads, L, d]."""
    taken = rows_TE.index_select(0, index_BL.reshape(-1))
    return taken.view(*index_BL.shape, heads, -1).transpose(1, 2)


AttentionInterface.register(NAME, tree_attention)
