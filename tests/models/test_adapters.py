"""Adapters for each row of a batch are computed in every family as if they were merged, and those that are trained here
are loaded by peft on the same layers: `make test-models`."""

from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from bombus.architectures.miniatures import write_miniature
from bombus.errors import EngineFault
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, PREFIX, AdapterConfig
from bombus.weights.models import load_model
from bombus_inference.backends.torch.adapters.fitting import adaptable_layers
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank
from bombus_inference.backends.torch.backend import load_policy
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings
from bombus_trainer.backends.torch.lora import LoraLinear, layers_to_adapt, target_modules
from bombus_trainer.backends.torch.trained import factors
from tests.inference.backends.small_engines import finish, request
from tests.models.families import full_config
from tests.models.test_families import COMPUTED, EVERY

A_FEW = ("cohere2", "deepseek_v3", "gemma3_text", "gpt_oss", "longcat_flash", "phimoe")
CONVOLUTIONS = ("gpt-sw3", "gpt2")  # their layers are not linear ones to torch, and an adapter on them is refused
A_FEW_NAMES = ("afmoe", "beam", "ctrl", "gemma2", "gemma3n_text", "llama")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SETTINGS = ComputeSettings(kv_cache_bytes=4 << 20, max_model_len=64)
PROMPT = [(7 * number + 3) % 90 for number in range(24)]
ADDRESS = "a" * 64


def scores(engine: Engine, adapter: str) -> torch.Tensor:
    """Score the prompt beside another sequence, which has no adapter."""
    engine.add(1, msgspec.structs.replace(request(PROMPT, max_tokens=0), prompt_logprobs=True, adapter=adapter))
    engine.add(2, request(PROMPT[:5]))
    return torch.tensor(finish(engine)[1].prompt_logprobs[1:])


@pytest.mark.parametrize("family", sorted(COMPUTED) if EVERY else A_FEW)
def test_an_adapter_on_all_layers_that_take_one_gives_what_the_merged_model_gives(family: str, tmp_path: Path) -> None:
    write_miniature(full_config(family), tmp_path)
    model = load_policy(tmp_path, SETTINGS)
    output = model.get_output_embeddings()
    random = torch.Generator().manual_seed(0)
    layers = {
        name: LowRank(0.1 * torch.randn(2, inside, generator=random), 0.1 * torch.randn(out, 2, generator=random))
        for name, (out, inside) in adaptable_layers(model).items()
        if model.get_submodule(name) is not output  # its weight may be that of the embeddings too
    }
    if family in CONVOLUTIONS:
        assert not layers
        return
    engine = Engine(model, SETTINGS, run=1, version=0)
    engine.add_adapter(ADDRESS, LoadedAdapter(layers, dict.fromkeys(layers, 1.0)))
    plain, adapted = scores(engine, ""), scores(engine, ADDRESS)
    merged = load_policy(tmp_path, SETTINGS)
    with torch.no_grad():
        for name, low_rank in layers.items():
            merged.get_parameter(f"{name}.weight").add_(low_rank.low_b @ low_rank.low_a)
    expected = scores(Engine(merged, SETTINGS, run=1, version=0), "")
    moved = float((expected - plain).abs().max())
    assert moved > 0.01
    assert float((adapted - expected).abs().max()) < 1e-3 * moved


@pytest.mark.parametrize("targets", [(), ATTENTION], ids=["all-linear", "attention"])
@pytest.mark.parametrize("family", sorted(COMPUTED) if EVERY else A_FEW_NAMES)
def test_peft_loads_an_adapter_on_the_layers_that_were_trained(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    write_miniature(full_config(family), tmp_path)
    model = load_model(tmp_path, attn="eager")
    try:
        layers = layers_to_adapt(model, targets)
    except EngineFault as fault:
        pytest.skip(str(fault))
    folder = tmp_path / "adapter"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    adapters = {name: LoraLinear(layer, 2, 4.0, generator) for name, layer in layers.items()}
    weights = {name: factor.detach() for name, factor in factors(adapters).items()}
    save_file(weights, folder / ADAPTER_FILE)
    config = AdapterConfig(r=2, lora_alpha=4.0, target_modules=target_modules(model, layers))
    (folder / ADAPTER_CONFIG).write_text(config.to_json())
    theirs = PeftModel.from_pretrained(load_model(tmp_path, attn="eager"), folder)
    adapted = {name for name, module in theirs.named_modules() if isinstance(module, LoraLayer)}
    assert adapted == {PREFIX + layer for layer in layers}
    for name, value in theirs.named_parameters():
        if ".lora_" in name:
            assert torch.equal(value, weights[name.replace(".default.", ".")])
