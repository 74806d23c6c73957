"""A second copy of the keys and values of decoding sequences, laid out for the CPU's matrix products.

Gathering a sequence's blocks costs as much as attending to them. Therefore each decoding sequence gets a row, which is
filled once from its blocks and then grows by one token per step. A step attends to all rows together, without a copy.
Rows of similar length share a lane. The blocks stay complete, so a row may be dropped at any time.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bombus.architectures.scoring import Scoring, hidden
from bombus_inference.backends.torch.pool import KvPool, SequenceChunk

CAPACITY_MIN = 64
SPARE_TOKENS = 16  # a new row has at least this much room to grow
ROWS_MIN = 8


@dataclass(slots=True)
class Lane:
    """Rows of equal capacity. Each layer has keys [rows, kv_heads, key_dim, capacity] and values [.., capacity,
    value_dim]."""

    capacity: int
    keys: list[Tensor]
    values: list[Tensor]
    free: list[int] = field(default_factory=list)  # a heap: low rows are used first, to leave few gaps
    used: int = 0

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]


@dataclass(slots=True)
class _Row:
    lane: Lane
    number: int
    filled: int


@dataclass(frozen=True, slots=True)
class LaneStep:
    """The next token of each sequence in a lane. Rows without a token are computed too, and their results discarded.

    `pad_R` maps the rows [0, top) to this step's tokens (None if every row has a token), and `rows_T` maps the tokens
    to their rows.
    """

    first: int
    tokens: int
    lane: Lane
    top: int
    rows_T: Tensor
    positions_T: Tensor
    reach_R: Tensor  # the last position that each row may see
    length: int
    pad_R: Tensor | None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # made when a layer needs them

    def write(self, layer: int, key_1HTD: Tensor, value_1HTD: Tensor) -> None:
        here = slice(self.first, self.first + self.tokens)
        self.lane.keys[layer][self.rows_T, :, :, self.positions_T] = key_1HTD[0, :, here].transpose(0, 1)
        self.lane.values[layer][self.rows_T, :, self.positions_T] = value_1HTD[0, :, here].transpose(0, 1)

    def attend(self, query_HTD: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Return the attention's output [T, H, E]. Query heads that share a key head are rows of one matrix product."""
        keys, values = self.lane.keys[layer], self.lane.values[layer]
        heads, dim = query_HTD.shape[0], query_HTD.shape[2]
        batch = self.top * keys.shape[1]
        mask = self._mask(scoring.window, keys.shape[1])
        query_RHD = query_HTD.transpose(0, 1)
        if self.pad_R is not None:
            query_RHD = query_RHD.index_select(0, self.pad_R)
        query = query_RHD.reshape(batch, -1, dim)
        keys_flat = keys[: self.top].view(batch, dim, -1)[:, :, : self.length]
        if scoring.fused:
            shares = torch.softmax(torch.baddbmm(mask, query, keys_flat, alpha=scoring.scaling), dim=-1)
        else:
            scores = scoring.capped(torch.bmm(query, keys_flat) * scoring.scaling) + mask
            by_head = scores.view(self.top, keys.shape[1], -1, self.length)
            shares = scoring.shares(by_head, heads_first=1).view(batch, -1, self.length)
        out = torch.bmm(shares, values[: self.top].view(batch, -1, values.shape[3])[:, : self.length])
        out_RHE = out.view(self.top, heads, -1)
        return out_RHE if self.pad_R is None else out_RHE.index_select(0, self.rows_T)

    def _mask(self, window: int | None, kv_heads: int) -> Tensor:
        """Return the mask that is added to the scores, [top * kv_heads, 1, length]."""
        mask = self.masks.get((window, kv_heads))
        if mask is None:
            back_RL = self.reach_R[:, None] - torch.arange(self.length, device=self.reach_R.device)
            mask_RL = torch.zeros(back_RL.shape, device=back_RL.device)
            mask_RL.masked_fill_(hidden(back_RL, window), -torch.inf)
            mask = self.masks[window, kv_heads] = mask_RL.repeat_interleave(kv_heads, dim=0)[:, None]
        return mask


class Rows:
    """Assigns rows to sequences, using at most `bytes_max` of memory. A sequence without a row is served from its
    blocks."""

    def __init__(self, pool: KvPool, bytes_max: int) -> None:
        self._pool = pool
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lanes: dict[int, Lane] = {}
        self._rows: dict[object, _Row] = {}
        self._ends: dict[object, int] = {}  # where each sequence ended in the previous pass

    def place(self, chunks: Sequence[SequenceChunk]) -> tuple[dict[int, list[int]], list[int]]:
        """Return the indices of the chunks that have a row, by lane capacity and in row order, and the indices of all
        other chunks.

        A sequence gets a row when it computes a single token for the second time in succession, since blocks that this
        pass fills cannot be copied yet. A sequence that is not in this pass loses its row.
        """
        ends, self._ends = self._ends, {chunk.owner: chunk.end for chunk in chunks}
        here = {chunk.owner for chunk in chunks}
        for owner in [owner for owner in self._rows if owner not in here]:
            self._free_row(owner)
        by_lane: dict[int, list[int]] = {}
        rest: list[int] = []
        for number, chunk in enumerate(chunks):
            goes_on = len(chunk.tokens) == 1 and ends.get(chunk.owner) == chunk.start
            row = self._row_for(chunk) if goes_on else None
            if row is None:
                rest.append(number)
            else:
                by_lane.setdefault(row.lane.capacity, []).append(number)
        for members in by_lane.values():
            members.sort(key=lambda number: self._rows[chunks[number].owner].number)
        return by_lane, rest

    def step(self, capacity: int, chunks: Sequence[SequenceChunk], first: int) -> LaneStep:
        """Return a lane's step for these chunks, which must be in row order."""
        lane = self._lanes[capacity]
        device = lane.keys[0].device
        numbers = [self._rows[chunk.owner].number for chunk in chunks]
        top = numbers[-1] + 1
        size = self._pool.block_tokens
        length = min((max(chunk.end for chunk in chunks) + size - 1) // size * size, capacity)
        reach = [0] * top  # an empty row attends to its first position; the result is not used
        pad = [0] * top
        for index, (number, chunk) in enumerate(zip(numbers, chunks)):
            reach[number] = chunk.start
            pad[number] = index
        return LaneStep(
            first=first,
            tokens=len(chunks),
            lane=lane,
            top=top,
            rows_T=torch.tensor(numbers, device=device),
            positions_T=torch.tensor([chunk.start for chunk in chunks], device=device),
            reach_R=torch.tensor(reach, device=device),
            length=length,
            pad_R=torch.tensor(pad, device=device) if top > len(chunks) else None,
        )

    def clear(self) -> None:
        """Forget all rows and their contents."""
        self._rows.clear()
        self._ends.clear()
        self._lanes.clear()
        self._bytes = 0

    def _row_for(self, chunk: SequenceChunk) -> _Row | None:
        row = self._rows.get(chunk.owner)
        if row is not None and row.filled == chunk.start and chunk.end <= row.lane.capacity:
            row.filled = chunk.end
            return row
        if row is not None:
            self._free_row(chunk.owner)
        lane = self._lane_with_room(chunk.end + SPARE_TOKENS)
        if lane is None:
            return None
        row = _Row(lane, heapq.heappop(lane.free), chunk.end)
        lane.used += 1
        self._rows[chunk.owner] = row
        self._fill(row, chunk)
        return row

    def _fill(self, row: _Row, chunk: SequenceChunk) -> None:
        size = self._pool.block_tokens
        used = chunk.blocks[: (chunk.start + size - 1) // size]
        table = torch.tensor(used, dtype=torch.long, device=row.lane.keys[0].device)
        for layer, (keys, values) in enumerate(zip(row.lane.keys, row.lane.values)):
            key, value = self._pool.gather(layer, table, rows=1)
            keys[row.number, :, :, : chunk.start] = key[0, :, : chunk.start].transpose(1, 2)
            values[row.number, :, : chunk.start] = value[0, :, : chunk.start]

    def _free_row(self, owner: object) -> None:
        row = self._rows.pop(owner)
        row.lane.used -= 1
        heapq.heappush(row.lane.free, row.number)

    def _lane_with_room(self, tokens: int) -> Lane | None:
        capacity = max(CAPACITY_MIN, 1 << (tokens - 1).bit_length())
        lane = self._lanes.get(capacity)
        if lane is None or not lane.free:
            lane = self._widen(capacity, lane)
        return lane

    def _widen(self, capacity: int, lane: Lane | None) -> Lane | None:
        """Return the lane with twice as many rows, or None if that would exceed the limit even with all unused lanes
        dropped."""
        before = 0 if lane is None else lane.rows
        rows = max(ROWS_MIN, before * 2)
        wanted = self._lane_bytes(capacity, rows)  # includes the old rows, which stay until they are copied
        if self._bytes + wanted > self._bytes_max:
            self._drop_unused()
        if self._bytes + wanted > self._bytes_max:
            return None
        wide = Lane(capacity, *self._tensors(capacity, rows))
        if lane is None:
            self._lanes[capacity] = lane = wide
        else:
            for side, wider in ((lane.keys, wide.keys), (lane.values, wide.values)):
                for layer, tensor in enumerate(wider):
                    tensor[:before] = side[layer]
                    side[layer] = tensor
        for number in range(before, rows):
            heapq.heappush(lane.free, number)
        self._bytes += wanted - self._lane_bytes(capacity, before)
        return lane

    def _tensors(self, capacity: int, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        like, shapes = self._pool.layers[0], self._pool.shapes
        keys = [like.new_zeros(rows, shape.kv_heads, shape.key_dim, capacity) for shape in shapes]
        return keys, [like.new_zeros(rows, shape.kv_heads, capacity, shape.value_dim) for shape in shapes]

    def _drop_unused(self) -> None:
        for capacity in [capacity for capacity, lane in self._lanes.items() if lane.used == 0]:
            self._bytes -= self._lane_bytes(capacity, self._lanes.pop(capacity).rows)

    def _lane_bytes(self, capacity: int, rows: int) -> int:
        pool = self._pool
        return sum(shape.width for shape in pool.shapes) * capacity * rows * pool.layers[0].dtype.itemsize
