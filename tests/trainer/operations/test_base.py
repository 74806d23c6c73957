"""Which layers an adapter is for, whatever a family calls them."""

from pathlib import Path

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from bombus.errors import Refused
from bombus.operations import AdapterPart, AdapterSpec
from bombus_trainer.backends.torch.base import Base, part_of
from bombus_trainer.operations.specs import check_adapter
from tests.trainer.small_batches import tiny_settings, tiny_tokenizer


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        ("model.layers.0.self_attn.q_proj", AdapterPart.ATTENTION),
        ("model.layers.0.linear_attn.in_proj", AdapterPart.ATTENTION),
        ("gpt_neox.layers.1.attention.dense", AdapterPart.ATTENTION),
        ("model.layers.0.mlp.down_proj", AdapterPart.MLP),
        ("model.layers.0.block_sparse_moe.gate", AdapterPart.MLP),
        ("model.layers.3.feed_forward.attn_out", AdapterPart.MLP),
    ],
)
def test_layers_inside_of_attention_are_its_part_and_all_others_the_mlps(layer: str, part: AdapterPart) -> None:
    assert part_of(layer) is part


def test_fused_experts_have_no_adapter_and_attention_beside_them_may(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    MixtralForCausalLM(
        MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, **shape)
    ).save_pretrained(tmp_path)
    base = Base(tiny_tokenizer(tmp_path), tiny_settings(), all_weights=False)
    with pytest.raises(Refused, match=r"the experts in .*\. Leave mlp out of the adapter's parts, or give its targets"):
        check_adapter(base, AdapterSpec(rank=2, alpha=4.0), rank_max=8)
    attention = AdapterSpec(rank=2, alpha=4.0, parts=(AdapterPart.ATTENTION,))
    check_adapter(base, attention, rank_max=8)
    found = base.adapters(attention)
    assert sorted(name.rpartition(".")[2] for name in found) == ["k_proj", "o_proj", "q_proj", "v_proj"]
