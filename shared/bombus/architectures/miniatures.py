"""Builds a tiny model with random weights and the architecture of a given model. Code that runs the miniature correctly
also runs the full model correctly.

A miniature keeps everything that characterises a family: kinds of layers, caps, scales, sinks, rotary embeddings,
groups of heads. Widths, counts and windows shrink, so that a short probe is longer than the windows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bombus.architectures.probing import cuts_attention
from bombus.errors import EngineFault, in_one_line
from bombus.weights.models import persistent_buffers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYERS, LAYERS_MAX = 2, 12
PARAMETERS_MAX = 50_000_000
WINDOW = 16
CONTEXT = 512
HEAD_DIM = 8
SPREAD = 0.2  # std of the weights; makes output distributions far from uniform, so that errors show
NUDGE = 0.1  # std of the noise added to biases, norms, sinks and buffers, which are initialised to zeros or ones

SIZES = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "encoder_hash_byte_group_vocab": 96,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "d_model": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "n_embd": 32,
    "n_ctx": CONTEXT,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 2 * HEAD_DIM,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "head_dim": HEAD_DIM,
    "d_head": HEAD_DIM,
    "attention_head_dim": 2 * HEAD_DIM,
    "attention_hidden_size": 64,
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
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "laurel_rank": 4,
    "adapter_in_dim": 32,
    "adapter_out_dim": 32,
    "adapter_input_size": 32,
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
    "kv_n_heads": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COUNTS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER = "per_layer_config"
# Sizes for families whose numbers depend on each other in special ways.
OF_FAMILY: Mapping[str | None, Mapping[str, Any]] = {
    "dots3_note_text": {"head_dim": 32, "qk_nope_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [8, 24], "attention_head_size": HEAD_DIM},
}
TIED_LAYERS = ("zamba",)  # families that share weights among layers of a kind and so need two of each kind


def miniature_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return a small configuration of the same architecture."""
    document = config.to_dict()
    document = _shrunken(document)
    small = type(config).from_dict(document)
    small.dtype = torch.float32
    return small


def write_miniature(config: "PretrainedConfig", folder: Path, seed: int = 0) -> None:
    """Write a small random model of `config`'s architecture. Raises `EngineFault` if the family's code cannot create
    one."""
    with _trying(config):
        small = miniature_config(config)
        _miniature(small, seed).save_pretrained(folder)
        small.save_pretrained(folder)  # in some families, the saved model's own config is only the text part


def miniature(config: "PretrainedConfig", attn: str, seed: int = 0) -> "PreTrainedModel":
    """Return a small random model of `config`'s architecture, in evaluation mode, with the attention function `attn`.

    Raises `EngineFault` if the family's code cannot create one.
    """
    with _trying(config):
        model = _miniature(miniature_config(config), seed).eval()
        model.set_attn_implementation(attn)
        return model


@contextmanager
def _trying(config: "PretrainedConfig") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a family's own code may raise anything
        raise EngineFault(
            f"this model's architecture ({config.model_type}) cannot be tried with a small model: {in_one_line(error)}"
        ) from error


def _miniature(small: "PretrainedConfig", seed: int) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(small).parameters())
    if size > PARAMETERS_MAX:
        raise EngineFault(f"even the small model would have {size} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(SPREAD * noise if parameter.ndim > 1 else parameter + NUDGE * noise)
            for buffer in persistent_buffers(model).values():
                if buffer.is_floating_point():
                    buffer.add_(NUDGE * torch.randn_like(buffer))
    return model


def empty_model(config: "PretrainedConfig") -> "PreTrainedModel":
    """Create a float32 model of `config` on the meta device, where its weights have no values and take no memory.

    Raises `EngineFault` if transformers cannot create it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # a family's own code may raise anything
        raise EngineFault(
            f"this model's architecture ({config.model_type}) cannot be loaded here: {in_one_line(error)}"
        ) from error
    return model


def _shrunken(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, as a document, with smaller numbers and fewer layers."""
    before = _count_of_layers(document)
    kept = _kept_layers(document, before)
    tail = before - (document.get("num_kv_shared_layers") or 0)
    own = {"num_kv_shared_layers": sum(layer >= tail for layer in kept), **_of_family(document)}
    small: dict[str, Any] = {}
    for name, value in document.items():
        if name in own:
            small[name] = own[name]
        elif isinstance(value, dict):
            small[name] = _inner(name, value)
        elif isinstance(value, list) and before and len(value) == before:
            small[name] = [_number(name, value[layer], document) for layer in kept]
        elif name in COUNTS_OF_LAYERS:
            small[name] = len(kept)
        else:
            small[name] = _number(name, value, document)
    if PER_LAYER in document:
        small[PER_LAYER] = _per_layer(document, small, kept)
    return small


def _inner(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    if "rope" in name:
        return _rope(value)
    return _shrunken(value) if name.endswith("config") and name != PER_LAYER else value


def _of_family(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return OF_FAMILY.get(document.get("model_type"), {})


def _count_of_layers(document: Mapping[str, Any]) -> int:
    return next((document[name] for name in COUNTS_OF_LAYERS if isinstance(document.get(name), int)), 0)


def _kept_layers(document: Mapping[str, Any], before: int) -> list[int]:
    """Return the layers to keep: the first of each kind.

    Layers are of the same kind if they agree in every list that has an entry per layer. Layers that share other layers'
    keys are a separate kind.
    """
    columns = [value for value in document.values() if isinstance(value, list) and len(value) == before]
    tail = before - (document.get("num_kv_shared_layers") or 0)
    kinds: dict[str, list[int]] = {}
    for layer in range(before):
        kinds.setdefault(repr([layer >= tail, *(column[layer] for column in columns)]), []).append(layer)
    of_each = 2 if document.get("model_type") in TIED_LAYERS else 1
    kept = sorted(layer for layers in kinds.values() for layer in layers[:of_each])[:LAYERS_MAX]
    more = [layer for layer in range(before) if layer not in kept]
    return sorted([*kept, *more[: LAYERS - len(kept)]]) if len(kept) < LAYERS else kept


def _per_layer(document: Mapping[str, Any], small: Mapping[str, Any], kept: list[int]) -> dict[str, dict[str, Any]]:
    """Return the settings that override the general ones in single layers, scaled down in the same proportion."""
    given = {int(layer): instead for layer, instead in document[PER_LAYER].items()}
    return {
        str(place): {
            name: _in_proportion(value, document.get(name), small.get(name)) for name, value in given[layer].items()
        }
        for place, layer in enumerate(kept)
        if layer in given
    }


def _in_proportion(value: Any, before: Any, after: Any) -> Any:
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in (value, before, after))
    return max(1, value * after // before) if numbers and before else value


def _number(name: str, value: Any, document: Mapping[str, Any]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return 1 if name.endswith("_token_id") and isinstance(value, list) else value
    if name in ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"):
        heads = document.get("num_attention_heads") or document.get("n_head") or value
        return 4 if value == heads else min(value, 2)
    if name in SIZES:
        return value and SIZES[name]
    if name in EXPERTS:
        return min(value, 8)
    if name in AT_MOST:
        return min(value, AT_MOST[name])
    return min(value, WINDOW) if cuts_attention(name) else value


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten those lists in the rotary parameters that have a number for each pair of a head's elements."""
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
