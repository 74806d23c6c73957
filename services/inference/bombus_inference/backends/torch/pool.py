"""The tensors of the paged KV cache, in blocks, and the chunks of sequences that are written to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bombus.architectures.shapes import LayerShape


class KvPool:
    """The keys and values of every layer, each [blocks, block_tokens, width]: a token's keys, then its values.

    They are initialized to zero, because padded rows read blocks that were never written, and masked values must not be
    NaN.
    """

    def __init__(self, shapes: Sequence[LayerShape], blocks: int, block_tokens: int, like: Tensor) -> None:
        self.block_tokens = block_tokens
        self.shapes = tuple(shapes)
        self.layers = [
            torch.zeros((blocks, block_tokens, shape.width), dtype=like.dtype, device=like.device) for shape in shapes
        ]
        self._gathered = torch.empty(0, dtype=like.dtype, device=like.device)

    @property
    def kv_heads_min(self) -> int:
        return min(shape.kv_heads for shape in self.shapes)

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape], block_tokens: int, dtype: torch.dtype) -> int:
        return block_tokens * sum(shape.width for shape in shapes) * dtype.itemsize

    def wipe(self, blocks: Sequence[int]) -> None:
        """Set these blocks to zero."""
        index = torch.tensor(blocks, dtype=torch.long, device=self.layers[0].device)
        for pool in self.layers:
            pool.index_fill_(0, index, 0)

    def write(self, layer: int, slots_T: Tensor, key_1HTD: Tensor, value_1HTD: Tensor) -> None:
        sides = [side[0].transpose(0, 1).flatten(1) for side in (key_1HTD, value_1HTD)]
        self.layers[layer].view(-1, self.shapes[layer].width).index_copy_(0, slots_T, torch.cat(sides, dim=1))

    def gather(self, layer: int, table_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return the keys [rows, kv_heads, tokens, key_dim] and the values in `rows` equally long lists of blocks.

        Both are in a buffer that the next call overwrites, since allocating memory for each layer would cost as much as
        the copy.
        """
        pool, shape = self.layers[layer], self.shapes[layer]
        flat = pool.view(pool.shape[0], -1)
        wanted = table_N.shape[0] * flat.shape[1]
        if self._gathered.numel() < wanted:
            self._gathered = torch.empty(wanted * 5 // 4, dtype=pool.dtype, device=pool.device)
        out = self._gathered[:wanted].view(table_N.shape[0], flat.shape[1])
        torch.index_select(flat, 0, table_N, out=out)
        tokens = out.view(rows, -1, shape.width)
        keys = tokens[:, :, : shape.kv_heads * shape.key_dim].unflatten(2, (shape.kv_heads, shape.key_dim))
        values = tokens[:, :, shape.kv_heads * shape.key_dim :].unflatten(2, (shape.kv_heads, shape.value_dim))
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens [start, start + len(tokens)) of one sequence. The chunk's blocks cover at least all tokens up to its
    end."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    owner: object = None  # identifies the holder of these blocks while it holds them

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
