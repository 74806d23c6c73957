"""Llamas small enough for a test, one declaration for all of them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Of two layers with grouped-query attention.
SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def small_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Make a Llama of `SHAPE`, its weights from `seed`.

    `changes` are fields of its `LlamaConfig`. A wide `initializer_range` keeps its distributions far from uniform, so
    that mistakes show.
    """
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.2, **changes}))
