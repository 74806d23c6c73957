"""LoRA's layers: what they add in half precision, and what `all-linear` covers."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from bombus.architectures.miniatures import miniature_config
from bombus.errors import EngineFault
from bombus_trainer.backends.torch.lora import LoraLinear, layers_to_adapt, target_modules

WIDTH, RANK, TOKENS = 256, 8, 256
RELATIVE = 3e-4  # the norm of what is added, relative to the weight's: that of some steps at a learning rate of 1e-4


def adapted_layer(random: torch.Generator) -> LoraLinear:
    """Make a bfloat16 layer whose adapter adds little."""
    base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
    layer = LoraLinear(base, RANK, 16.0, random)
    low_b = torch.randn(WIDTH, RANK, generator=random)
    product = layer.scale * low_b @ layer.lora_a.detach()
    layer.lora_b.data = low_b * float(RELATIVE * base.weight.float().norm() / product.norm())
    return layer


def test_what_an_adapter_adds_is_left_in_half_precision() -> None:
    random = torch.Generator().manual_seed(0)
    layer = adapted_layer(random)
    x = torch.randn(TOKENS, WIDTH, generator=random).bfloat16()
    with torch.no_grad():
        without = x.double() @ layer.base.weight.double().T + layer.base.bias.double()
        wanted = x.double() @ (layer.merged() - layer.base.weight.float()).double().T
        moved = layer(x).double() - without
    share = float((moved * wanted).sum() / (wanted * wanted).sum())
    assert 0.9 < share < 1.1


def test_its_gradients_in_half_precision_are_those_of_float32() -> None:
    random = torch.Generator().manual_seed(0)
    layer = adapted_layer(random)
    x = torch.randn(2, TOKENS, WIDTH, generator=random).bfloat16()
    target = torch.randn(2, TOKENS, WIDTH, generator=random)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        layer.zero_grad()
        layer.base.to(dtype)
        given = x.to(dtype, copy=True).requires_grad_()
        (layer(given).float() * target).sum().backward()
        grads = (given.grad, layer.lora_a.grad, layer.lora_b.grad)
        found.append([grad.float().clone() for grad in grads if grad is not None])
    for half, single in zip(*found, strict=True):
        assert float((half - single).norm() / single.norm()) < 0.02


def test_experts_that_all_linear_leaves_out_are_named_and_the_job_has_to_choose() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **shape))
    with pytest.raises(EngineFault, match=r"would leave 8\d % of .* down_proj and gate_up_proj") as refused:
        layers_to_adapt(model, ())
    assert "model.layers.0.mlp.experts.gate_up_proj" in str(refused.value)
    assert len(layers_to_adapt(model, ("q_proj", "v_proj"))) == 4


def test_a_model_without_linear_layers_is_refused_and_its_layers_are_named() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(EngineFault, match=r"\(gpt2\) has none: its layers are Conv1D; set trainer\.lora_rank to 0"):
        layers_to_adapt(model, ())


def test_the_output_layer_gets_no_adapter_whatever_it_is_called() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BioGptForCausalLM(BioGptConfig(vocab_size=32, **shape))
    found = layers_to_adapt(model, ())
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    assert "output_projection" not in found
    assert len(found) == 6


def test_adapters_are_on_the_language_model_and_not_on_the_tower_for_images() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(miniature_config(AutoConfig.for_model("gemma3")))
    assert any(isinstance(layer, nn.Linear) for layer in model.model.vision_tower.modules())
    found = layers_to_adapt(model, ())
    assert found
    assert all(name.startswith("model.language_model.layers.") for name in found)


def test_an_adapter_names_layers_by_their_last_parts_and_in_full_where_others_end_alike() -> None:
    """A layer of ctrl's is `ffn.0`, and its blocks are `h.0`, `h.1`."""
    model = AutoModelForCausalLM.from_config(miniature_config(AutoConfig.for_model("ctrl")))
    found = target_modules(model, layers_to_adapt(model, ()))
    assert {name for name in found if "." not in name} == {"Wq", "Wk", "Wv", "dense", "2"}
    assert {name for name in found if "." in name} == {f"transformer.h.{layer}.ffn.0" for layer in (0, 1)}
