"""Which part of a transformer a layer belongs to, whatever its family calls it."""

import pytest

from bombus.operations import AdapterPart
from bombus_trainer.tenants.base import part_of


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
