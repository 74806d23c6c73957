"""The canary of each family: one pass in float64, whatever the precision of the model, and the same sum of bits."""

from pathlib import Path

import pytest
import torch

from bombus.architectures.canary import canary_logprobs, sum_of_bits
from bombus.architectures.miniatures import write_miniature
from bombus.hive.events import Canary
from bombus.weights.canary import CONSTANTS_ROUNDED, IN_FLOAT64, SERVED, Expected, compare
from bombus.weights.models import load_model, persistent_buffers
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.adapters.serving import tensors_of
from bombus_inference.backends.torch.checking import check_model
from tests.models.families import full_config
from tests.models.test_families import COMPUTED, EVERY

A_FEW = ("gemma3_text", "gpt2", "llama", "minimax_m2", "qwen3_moe")
ROUNDED = ("gemma", "vaultgemma")  # families with constants in the model's precision
LOADED = sorted(set(COMPUTED) - {"emu3"})  # its miniature names a part of it, which transformers does not load alone


@pytest.mark.parametrize("family", LOADED if EVERY else A_FEW)
def test_an_engine_in_half_precision_and_a_trainer_in_float32_agree_on_the_same_weights(
    family: str, tmp_path: Path
) -> None:
    attention.register()
    write_miniature(full_config(family), tmp_path / "made")
    load_model(tmp_path / "made", "bfloat16", attention.NAME).save_pretrained(tmp_path / "model")
    whole, half = (load_model(tmp_path / "model", dtype, attention.NAME) for dtype in ("float32", "bfloat16"))
    bits = sum_of_bits(tensors_of(whole).items())
    logprobs = canary_logprobs(whole)
    own = load_model(tmp_path / "model", "float32", "eager")
    assert compare(Expected(0, Canary(logprobs=logprobs, dtype="float32")), canary_logprobs(own), IN_FLOAT64)
    found = check_model(half, "bfloat16", Expected(0, Canary(logprobs=logprobs, dtype="bfloat16", bits=bits)))
    assert found is not None
    assert found.way == (CONSTANTS_ROUNDED if family.startswith(ROUNDED) else IN_FLOAT64).way
    assert found.way == CONSTANTS_ROUNDED.way or found.difference < 1e-9
    assert whole.config._attn_implementation == attention.NAME
    assert {value.dtype for value in half.parameters() if value.is_floating_point()} <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("adapted", [False, True])
def test_a_router_whose_biases_an_engine_rounds_is_compared_as_it_is_served(adapted: bool, tmp_path: Path) -> None:
    attention.register()
    write_miniature(full_config("minimax_m2"), tmp_path / "made")
    made = load_model(tmp_path / "made", "bfloat16").float()
    for bias in persistent_buffers(made).values():
        bias.copy_(torch.rand_like(bias))
    made.save_pretrained(tmp_path / "model")
    whole, half = (load_model(tmp_path / "model", dtype, attention.NAME) for dtype in ("float32", "bfloat16"))
    bits = "" if adapted else sum_of_bits(tensors_of(whole).items())
    found = check_model(
        half, "bfloat16", Expected(0, Canary(logprobs=canary_logprobs(whole), dtype="bfloat16", bits=bits))
    )
    assert found is not None
    assert found.way == SERVED["bfloat16"].way


def test_a_model_that_cannot_compute_its_experts_in_float64_keeps_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.register()
    write_miniature(full_config("qwen3_moe"), tmp_path)
    model = load_model(tmp_path, "float32", attention.NAME)
    experts = model.config._experts_implementation

    def refuse(implementation: str) -> None:
        if implementation == "eager":
            raise RuntimeError("it is chosen at load time")

    monkeypatch.setattr(model, "set_experts_implementation", refuse)
    with pytest.raises(RuntimeError):
        canary_logprobs(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == (attention.NAME, experts)
