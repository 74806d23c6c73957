"""Llamas small enough for a test, one declaration for all of them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Make a Llama of two layers with grouped-query attention, its weights from `seed`.

    `changes` are fields of its `LlamaConfig`. A wide `initializer_range` keeps its distributions far from uniform, so
    that mistakes show.
    """
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
