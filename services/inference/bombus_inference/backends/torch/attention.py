"""Attention over a paged KV cache, plugged into transformers' models through its attention interface.

One forward pass takes the new tokens of all sequences in one row. Each layer first writes the keys and values of all
these tokens to the cache and then attends, so a sequence may use a block that another sequence fills in the same pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from bombus.architectures.scoring import Scoring, attend_in_full, hidden, read_scoring
from bombus.architectures.shapes import NOT_PASSED_ON, ShapeRecorder
from bombus.errors import EngineFault
from bombus_inference.backends.torch.pool import KvPool, SequenceChunk
from bombus_inference.backends.torch.rows import LaneStep, Rows

NAME = "bombus_paged"
PLAN = "kv_plan"  # name of the attention function's keyword argument
SHORT_CONTEXT_TOKENS = 256  # below this, padding costs less than another kernel call
SHORT_QUERY_TOKENS = 16
RECTANGLE_MAX = 1 << 22  # elements in one bucket's mask


def register() -> None:
    """Register `attn_implementation="bombus_paged"` with transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Chunks that attend as one rectangle: B rows of up to Q new tokens over up to L tokens of context.

    `pad_BQ` maps the rectangle to this bucket's tokens, and `take_T` maps back. Both are None if no padding is needed.
    """

    first: int
    tokens: int
    rows: int
    table_N: Tensor
    reach_BQ: Tensor  # the last position that each query may see
    pad_BQ: Tensor | None
    take_T: Tensor | None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # made when a layer needs them

    def mask(self, window: int | None, length: int, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, G x Q, L] to add to the scores. G is `groups`, the number of query heads folded into the
        rows."""
        mask = self.masks.get((window, groups))
        if mask is None:
            back_BQL = self.reach_BQ[:, :, None] - torch.arange(length, device=self.reach_BQ.device)
            mask = torch.zeros(back_BQL.shape, dtype=dtype, device=back_BQL.device)
            mask = mask.masked_fill_(hidden(back_BQL, window), -torch.inf)
            if groups > 1:
                mask = mask[:, None].expand(-1, groups, -1, -1).reshape(self.rows, -1, length)
            self.masks[window, groups] = mask
        return mask


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """One forward pass: its tokens in one row, where their keys and values go, and what each token attends to."""

    pool: KvPool
    order: list[int]  # chunk numbers, in the order of their tokens
    tokens_1T: Tensor
    positions_1T: Tensor
    slots_T: Tensor
    lanes: list[LaneStep]
    buckets: list[Bucket]


def plan_pass(pool: KvPool, rows: Rows | None, chunks: Sequence[SequenceChunk], heads: int) -> ForwardPlan:
    """Lay out `chunks` for one forward pass of a model with `heads` query heads, lanes first, then buckets."""
    device = pool.layers[0].device
    groups = heads // pool.kv_heads_min
    order: list[int] = []
    lanes: list[LaneStep] = []
    buckets: list[Bucket] = []
    tokens = 0
    rest = list(range(len(chunks)))
    if rows is not None:
        by_lane, rest = rows.place(chunks)
        for capacity, members in by_lane.items():
            lanes.append(rows.step(capacity, [chunks[number] for number in members], len(order)))
            order += members
            tokens += len(members)
    for members in _buckets(chunks, rest, groups):
        bucket = _bucket([chunks[number] for number in members], tokens, pool, device)
        buckets.append(bucket)
        order += members
        tokens += bucket.tokens
    return _laid_out(pool, chunks, order, lanes, buckets)


def _laid_out(
    pool: KvPool, chunks: Sequence[SequenceChunk], order: list[int], lanes: list[LaneStep], buckets: list[Bucket]
) -> ForwardPlan:
    device = pool.layers[0].device
    size = pool.block_tokens
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for number in order:
        chunk = chunks[number]
        blocks = chunk.blocks
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.end)
        slots += [blocks[at // size] * size + at % size for at in range(chunk.start, chunk.end)]
    return ForwardPlan(
        pool=pool,
        order=order,
        tokens_1T=torch.tensor([tokens], device=device),
        positions_1T=torch.tensor([positions], device=device),
        slots_T=torch.tensor(slots, device=device),
        lanes=lanes,
        buckets=buckets,
    )


def _buckets(chunks: Sequence[SequenceChunk], numbers: Sequence[int], groups: int) -> Iterator[list[int]]:
    """Group chunks of similar shape, to keep padding low. Single tokens never share a group with longer chunks."""
    members: list[int] = []
    queries = shortest = longest = 0
    for number in sorted(numbers, key=lambda number: _shape(chunks[number]), reverse=True):
        chunk = chunks[number]
        count = len(chunk.tokens)
        if members:
            low, high = min(shortest, chunk.end), max(longest, chunk.end)
            area = (len(members) + 1) * queries * groups * high
            alike = count.bit_length() == queries.bit_length() or 1 < count <= queries <= SHORT_QUERY_TOKENS
            fits = (
                alike and (low * 2 >= high or high <= SHORT_CONTEXT_TOKENS) and (queries == 1 or area <= RECTANGLE_MAX)
            )
            if not fits:
                yield members
                members = []
        if members:
            queries, shortest, longest = max(queries, count), low, high
        else:
            queries, shortest, longest = count, chunk.end, chunk.end
        members.append(number)
    if members:
        yield members


def _shape(chunk: SequenceChunk) -> tuple[int, int]:
    return len(chunk.tokens).bit_length(), chunk.end


def _bucket(chunks: Sequence[SequenceChunk], first: int, pool: KvPool, device: torch.device) -> Bucket:
    rows = len(chunks)
    size = pool.block_tokens
    counts = [len(chunk.tokens) for chunk in chunks]
    queries = max(counts)
    width = (max(chunk.end for chunk in chunks) + size - 1) // size
    table: list[int] = []
    reach: list[int] = []  # the last position that each query may see; for padding, the first position
    for chunk, count in zip(chunks, counts):
        used = (chunk.end + size - 1) // size
        table += chunk.blocks[:used]
        table += [0] * (width - used)
        reach += range(chunk.start, chunk.end)
        reach += [0] * (queries - count)
    reach_BQ = torch.tensor(reach, device=device).view(rows, queries)
    ragged = any(count != queries for count in counts)
    pad, take = _gaps(counts, queries, device) if ragged else (None, None)
    return Bucket(first, sum(counts), rows, torch.tensor(table, device=device), reach_BQ, pad, take)


def _gaps(counts: list[int], queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pad: list[int] = []
    take: list[int] = []
    at = 0
    for row, count in enumerate(counts):
        pad += range(at, at + count)
        pad += [at] * (queries - count)
        take += range(row * queries, row * queries + count)
        at += count
    return torch.tensor(pad, device=device), torch.tensor(take, device=device)


def paged_attention(  # noqa: PLR0913  # the signature is transformers'
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    kv_plan: ForwardPlan | ShapeRecorder | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention for one layer: query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, E] -> [1, T, H, E].

    Raises `EngineFault` for a layer that needs an option that `Scoring` does not support.
    """
    scoring = read_scoring(query, attention_mask, scaling, options)
    if kv_plan is None:
        raise EngineFault(NOT_PASSED_ON)
    if isinstance(kv_plan, ShapeRecorder):
        return kv_plan.note(module, query, key, value), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    pool = kv_plan.pool
    pool.write(layer, kv_plan.slots_T, key, value)
    parts: list[Tensor] = []
    for lane in kv_plan.lanes:
        lane.write(layer, key, value)
        parts.append(lane.attend(query[0, :, lane.first : lane.first + lane.tokens], layer, scoring))
    for bucket in kv_plan.buckets:
        here = query[:, :, bucket.first : bucket.first + bucket.tokens]
        parts.append(_attend(here, bucket, pool, layer, scoring))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend(query_1HTD: Tensor, bucket: Bucket, pool: KvPool, layer: int, scoring: Scoring) -> Tensor:
    """Return the attention output [T, H, E] of one bucket."""
    keys, values = pool.gather(layer, bucket.table_N, bucket.rows)
    heads, dim = query_1HTD.shape[1], query_1HTD.shape[3]
    kv_heads, length = keys.shape[1:3]
    groups = heads // kv_heads
    query_HTD = query_1HTD[0]
    if bucket.pad_BQ is not None:
        query_HTD = query_HTD.index_select(1, bucket.pad_BQ)
    query = query_HTD.view(heads, bucket.rows, -1, dim).transpose(0, 1)  # [B, H, Q, D]
    queries = query.shape[2]
    folds = groups > 1 and queries > 1 and bucket.rows > 1 and scoring.fused
    mask = bucket.mask(scoring.window, length, groups if folds else 1, query.dtype)
    if not scoring.fused:
        by_group = query.reshape(bucket.rows, kv_heads, groups, queries, dim)
        out = attend_in_full(by_group, keys, values, mask, scoring)
    else:
        if groups > 1 and bucket.rows == 1:
            # The key and value heads become the batch, so that their query heads share them without a copy.
            query = query.reshape(kv_heads, groups, queries, dim)
            keys, values = (side.transpose(0, 1).expand(-1, groups, -1, -1) for side in (keys, values))
        elif groups > 1:
            query = query.reshape(bucket.rows, kv_heads, groups * queries, dim)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None], scale=scoring.scaling)
    out_BQHE = out.reshape(bucket.rows, heads, queries, -1).transpose(1, 2)
    out_THE = out_BQHE.reshape(bucket.rows * queries, heads, -1)
    return out_THE if bucket.take_T is None else out_THE.index_select(0, bucket.take_T)
