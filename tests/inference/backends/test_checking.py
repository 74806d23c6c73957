"""The engine's check of itself: windows, caps and sinks are computed, and what is not computed is refused by name."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from bombus.architectures.logits import LogitsForm
from bombus.architectures.probing import Disagreement, probe_tokens
from bombus.errors import EngineFault
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.checking import check_faithful, disagreement
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings
from tests import small_models
from tests.inference.backends.small_engines import finish, request

SHAPE = small_models.SHAPE | {"head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0}
FAMILIES = {
    "a window": MistralConfig(**SHAPE, sliding_window=16),
    "a window, caps on scores and logits": Gemma2Config(
        **SHAPE, sliding_window=16, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "sinks and experts": GptOssConfig(**SHAPE, sliding_window=16, num_local_experts=4),
}


def small(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    attention.register()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return model.eval()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("block_tokens", [4, 32])
def test_pages_chunks_and_rows_give_the_logprobs_of_transformers(config: PretrainedConfig, block_tokens: int) -> None:
    assert disagreement(small(config), block_tokens, limit=200).worst < 1e-5


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_what_the_engine_samples_beyond_a_window_has_the_logprobs_of_the_whole_sequence(
    config: PretrainedConfig,
) -> None:
    model = small(config)
    engine = Engine(model, ComputeSettings(kv_cache_bytes=4 << 20, block_tokens=4), run=1, version=0)
    prompt = [(number * 7) % 60 for number in range(30)]
    engine.add(0, request(prompt, max_tokens=40))
    answer = finish(engine)[0].only
    model.set_attn_implementation("eager")
    line = torch.tensor([prompt + answer.tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=line[:, :-1]).logits[0, len(prompt) - 1 :].float(), dim=-1)
    expected = logprobs.gather(1, line[0, len(prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(list(answer.logprobs)), expected, atol=1e-5, rtol=0)


def test_a_model_without_attention_is_refused_by_its_name_in_one_sentence() -> None:
    config = MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=8)
    with pytest.raises(EngineFault, match=r"this model's architecture \(mamba\) cannot be served here: ") as caught:
        check_faithful(small(config), block_tokens=4, limit=200)
    assert "\n" not in str(caught.value)


def test_a_factor_that_the_configuration_does_not_state_is_refused() -> None:
    model = small(LlamaConfig(**SHAPE))
    assert LogitsForm.of(model.config) == LogitsForm()
    model.get_output_embeddings().register_forward_hook(lambda module, given, out: out * given[0].ndim)
    with pytest.raises(EngineFault, match="its logprobs differ by up to"):
        check_faithful(model, block_tokens=4, limit=200)


def test_a_window_that_no_sequence_reaches_needs_no_longer_probe() -> None:
    config = MistralConfig(**(SHAPE | {"max_position_embeddings": 32768}), sliding_window=4096)
    assert probe_tokens(config, limit=4000) == 48
    assert probe_tokens(config, limit=8192) == 4096 + 24
    assert probe_tokens(config, limit=4100) == 4100


def test_rotary_embeddings_that_change_with_the_length_are_refused_beyond_it() -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    model = small(LlamaConfig(**SHAPE, rope_parameters=scaled))
    settings = ComputeSettings(kv_cache_bytes=4 << 20, block_tokens=4)
    Engine(model, settings, run=1, version=0, job_tokens=64)
    with pytest.raises(EngineFault, match=r"set rollout\.max_model_len to at most 64"):
        Engine(model, settings, run=1, version=0, job_tokens=65)


def test_one_token_at_another_expert_is_no_reason_to_refuse_a_model_in_half_precision() -> None:
    exact = torch.zeros(190)
    flipped = exact + 0.01
    flipped[[7, 100]] = 1.2
    found = Disagreement.between([flipped], [exact])
    found.check(torch.bfloat16)
    with pytest.raises(EngineFault, match=r"differ by up to 1\.2"):
        found.check(torch.float32)


@pytest.mark.parametrize(("every", "by"), [(5, 0.4), (1, 0.12), (50, 8.0)])
def test_a_model_that_is_wrong_in_many_tokens_or_on_average_is_refused_in_half_precision_too(
    every: int, by: float
) -> None:
    exact = torch.zeros(190)
    other = exact.clone()
    other[::every] = by
    with pytest.raises(EngineFault, match="differ by up to"):
        Disagreement.between([other], [exact]).check(torch.bfloat16)
