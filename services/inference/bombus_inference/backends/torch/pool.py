"""The tensors of the paged KV cache, in blocks, and the chunks of sequences that are written to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig


class KvPool:
    """Keys and values of every layer, each [blocks, block_tokens, 2, kv_heads, head_dim].

    They start as zeros, because padded rows read blocks that were never written, and what is masked must not be NaN.
    """

    def __init__(self, config: PretrainedConfig, blocks: int, block_tokens: int, like: Tensor) -> None:
        self.block_tokens = block_tokens
        self.kv_heads = config.num_key_value_heads
        self.head_dim = _head_dim(config)
        shape = (blocks, block_tokens, 2, self.kv_heads, self.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.num_hidden_layers)
        ]
        self._gathered = torch.empty(0, dtype=like.dtype, device=like.device)

    @staticmethod
    def block_bytes(config: PretrainedConfig, block_tokens: int, dtype: torch.dtype) -> int:
        values = block_tokens * 2 * config.num_key_value_heads * _head_dim(config)
        return int(config.num_hidden_layers * values * dtype.itemsize)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Set these blocks to zero."""
        index = torch.tensor(blocks, dtype=torch.long, device=self.layers[0].device)
        for pool in self.layers:
            pool.index_fill_(0, index, 0)

    def write(self, layer: int, slots_T: Tensor, key_1HTD: Tensor, value_1HTD: Tensor) -> None:
        pool = self.layers[layer]
        both_T2HD = torch.stack((key_1HTD[0], value_1HTD[0])).permute(2, 0, 1, 3)
        pool.view(-1, 2, self.kv_heads, self.head_dim).index_copy_(0, slots_T, both_T2HD)

    def gather(self, layer: int, table_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, kv_heads, tokens, head_dim] of `rows` equally long lists of blocks.

        They are in a buffer that the next call overwrites: new memory for each layer would cost as much as the copy.
        """
        pool = self.layers[layer]
        flat = pool.view(pool.shape[0], -1)
        wanted = table_N.shape[0] * flat.shape[1]
        if self._gathered.numel() < wanted:
            self._gathered = torch.empty(wanted * 5 // 4, dtype=pool.dtype, device=pool.device)
        out = self._gathered[:wanted].view(table_N.shape[0], flat.shape[1])
        torch.index_select(flat, 0, table_N, out=out)
        both = out.view(rows, -1, 2, self.kv_heads, self.head_dim)
        return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens [start, start + len(tokens)) of one sequence. Its blocks reach at least to their end."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    owner: object = None  # identifies the holder of these blocks, for as long as it holds them

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
