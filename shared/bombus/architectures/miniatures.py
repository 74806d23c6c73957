"""A tiny model with random weights of the same architecture as another: what computes it computes the other.

Everything that makes a family what it is stays: kinds of layers, caps, scales, sinks, rotary embeddings, groups of
heads. Widths and counts shrink, and so do windows, so that a short probe reaches beyond them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bombus.architectures.probing import cuts_attention
from bombus.errors import EngineFault

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYERS, LAYERS_MAX = 2, 12
WINDOW = 16
CONTEXT = 512
HEAD_DIM = 8
SPREAD = 0.2  # of the weights: distributions far from uniform, so that mistakes show
NUDGE = 0.1  # of biases, norms and sinks, which are otherwise born as zeros or ones

SIZES = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "d_model": 32,
    "n_embd": 32,
    "n_ctx": CONTEXT,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "head_dim": HEAD_DIM,
    "global_head_dim": 2 * HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "qk_head_dim": 2 * HEAD_DIM,
    "v_head_dim": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "n_inner": 48,
    "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "laurel_rank": 4,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "rotary_dim": HEAD_DIM,
}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
AT_MOST = {
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_kv_shared_layers": 2,
    "zero_expert_num": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COUNTS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def miniature_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return a small configuration of the same architecture."""
    document = config.to_dict()
    document = _shrunken(document)
    small = type(config).from_dict(document)
    small.dtype = torch.float32
    return small


def miniature(config: "PretrainedConfig", seed: int = 0) -> "PreTrainedModel":
    """Make a small random model of `config`'s architecture. Raises `EngineFault` where its code cannot make one."""
    from transformers import AutoModelForCausalLM

    try:
        small = miniature_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn_like(parameter)
                    parameter.copy_(SPREAD * noise if parameter.ndim > 1 else parameter + NUDGE * noise)
    except Exception as error:  # a family's own code may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise EngineFault(
            f"this model's architecture ({config.model_type}) cannot be tried in a small size: {why}"
        ) from error
    return model.eval()


def _shrunken(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, as a document, with smaller numbers."""
    before = next((document[name] for name in COUNTS_OF_LAYERS if isinstance(document.get(name), int)), 0)
    layers = min(before, _layers_needed(document))
    small: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            small[name] = _inner(name, value)
        elif isinstance(value, list) and before and len(value) == before:
            small[name] = value[:layers]
        elif name in COUNTS_OF_LAYERS:
            small[name] = layers
        else:
            small[name] = _number(name, value, document)
    return small


def _inner(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    if "rope" in name:
        return _rope(value)
    return _shrunken(value) if name.endswith("config") else value


def _number(name: str, value: Any, document: Mapping[str, Any]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return 1 if name.endswith("_token_id") and isinstance(value, list) else value
    if name in ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"):
        heads = document.get("num_attention_heads") or document.get("n_head") or value
        return 4 if value == heads else min(value, 2)
    if name in SIZES:
        return SIZES[name]
    if name in EXPERTS:
        return min(value, 8)
    if name in AT_MOST:
        return min(value, AT_MOST[name])
    return min(value, WINDOW) if cuts_attention(name) else value


def _layers_needed(document: Mapping[str, Any]) -> int:
    """Return how many of the first layers show every kind of layer."""
    needed = LAYERS
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = document.get(name) or []
        if isinstance(kinds, list):
            needed = max(needed, *(kinds.index(kind) + 1 for kind in kinds), 0)
    return min(needed, LAYERS_MAX)


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten what has a number for each pair of a head's elements."""
    small: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            small[name] = _rope(value)
        elif name in ("short_factor", "long_factor"):
            small[name] = value[: HEAD_DIM // 2]
        elif name == "mrope_section":
            small[name] = [2, 1, 1]
        else:
            small[name] = value
    return small
