"""The packed, shared and chunked computation against plain transformers, one sequence at a time."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    VaultGemmaConfig,
)

from bombus.architectures.miniatures import write_miniature
from bombus.errors import EngineFault
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.backends.torch.trained import TrainedModel
from bombus_trainer.data.packing import Bin, TrainingItem, pack
from tests.small_models import SHAPE, small_llama
from tests.trainer.small_batches import VOCAB, item, tiny_model_folder, tiny_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def branching_items() -> list[TrainingItem]:
    """Make three prompts, and completions that share prompts, share each other's beginnings, or are equal."""
    random = np.random.default_rng(0)
    items: list[TrainingItem] = []
    first_id = 0
    for _ in range(3):
        prompt = random.integers(0, VOCAB, random.integers(20, 60)).tolist()
        turn = prompt + random.integers(0, VOCAB, 25).tolist()
        lines = [prompt + random.integers(0, VOCAB, random.integers(2, 30)).tolist() for _ in range(4)]
        lines += [turn + random.integers(0, VOCAB, random.integers(2, 10)).tolist() for _ in range(3)]
        lines += [lines[0], turn, prompt[:7]]
        for number, line in enumerate(lines):
            trained = range(max(1, min(len(prompt), len(line) - 2)), len(line))
            items.append(item(line, list(trained), first_id, temperature=0.7 if number % 2 else 1.0))
            first_id += len(items[-1].terms)
    return items


def plain_logprobs(model: torch.nn.Module, wanted: TrainingItem) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(wanted.tokens_T)[None]).logits[0].double()
    at = torch.from_numpy(wanted.positions_N)
    scaled = logits[at - 1] / torch.from_numpy(wanted.terms.temperatures_N).double()[:, None]
    return torch.log_softmax(scaled, dim=-1).gather(1, torch.from_numpy(wanted.terms.targets_N)[:, None])[:, 0]


def check_scores_and_gradients(policy: PolicyModel, folder: Path, items: list[TrainingItem], bins: list[Bin]) -> None:
    """Compare what a policy makes of `bins` with what transformers makes of their `items` one by one."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    pull = torch.randn(sum(len(each.terms) for each in items), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([plain_logprobs(plain, each) for each in items])
    (expected * pull).sum().backward()
    actual = torch.zeros(len(expected))
    policy.network.zero_grad()
    for packed in bins:
        scored = policy.score(packed).logprobs_N
        actual[packed.terms.ids_N] = scored.detach()
        (scored * pull[packed.terms.ids_N]).sum().backward()
    torch.testing.assert_close(actual, expected.detach().float(), atol=1e-5, rtol=0)
    gradients = policy.trainable()
    for name, parameter in plain.named_parameters():
        mine = gradients[name].grad
        assert mine is not None
        assert parameter.grad is not None
        assert (mine - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


class Called(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[object] = set()

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs=None
    ) -> object:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["auto", "sdpa", "native", "eager"])
def test_a_job_says_what_computes_attention_and_the_result_is_the_same(folder: Path, name: str) -> None:
    (packed,) = pack(branching_items(), bin_tokens=1 << 20, shared_tokens_min=4)
    with Called() as called, torch.no_grad():
        found_N = PolicyModel.load(folder, tiny_settings(attn_implementation=name)).score(packed).logprobs_N
    assert (scaled_dot_product_attention in called.functions) == (name != "eager")
    wanted_N = PolicyModel.load(folder, tiny_settings()).score(packed).logprobs_N
    torch.testing.assert_close(found_N, wanted_N.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bin_tokens", [100, 1 << 20])
@pytest.mark.parametrize("share", [True, False])
def test_logprobs_and_gradients_are_those_of_the_sequences_alone(folder: Path, bin_tokens: int, share: bool) -> None:
    items = branching_items()
    policy = PolicyModel.load(folder, tiny_settings(logits_bytes_max=1 << 16))
    bins = pack(items, bin_tokens, share)
    check_scores_and_gradients(policy, folder, items, bins)
    computed = sum(len(packed.tokens_T) for packed in bins)
    unshared = sum(len(each.tokens_T) - 1 for each in items)
    assert computed < 0.6 * unshared if share and bin_tokens > 100 else computed <= unshared


def test_entropy_is_that_of_the_distribution_at_its_temperature(folder: Path) -> None:
    policy = PolicyModel.load(folder, tiny_settings())
    wanted = item([5, 6, 7, 8], [2], temperature=0.5)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    (packed,) = pack([wanted], 100)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, 1] / 0.5
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(policy.score(packed).entropy_N[0], expected)


@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": True}, {"lora_rank": 4}, {"lora_rank": 4, "model": {"dtype": "bfloat16"}}]
)
def test_other_ways_to_compute_give_gradients_to_every_trained_parameter(
    folder: Path, changes: dict[str, object]
) -> None:
    settings = tiny_settings(**changes)
    base = Base(folder, settings, all_weights=settings.adapter is None)
    model = TrainedModel(base, settings.adapter)
    (packed,) = pack(branching_items(), 1 << 20)
    with base.switched_on(model.adapters):
        base.policy.score(packed).logprobs_N.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters.values())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters.values())


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    (packed,) = pack(branching_items(), 1 << 20)
    found = []
    for checkpointing in (False, True):
        policy = PolicyModel.load(folder, tiny_settings(gradient_checkpointing=checkpointing))
        policy.score(packed).logprobs_N.sum().backward()
        found.append([parameter.grad for parameter in policy.trainable().values()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_gradient_checkpointing_keeps_less_for_the_backward_pass(folder: Path) -> None:
    (packed,) = pack(branching_items(), 1 << 20)
    kept: list[int] = []
    for checkpointing in (False, True):
        policy = PolicyModel.load(folder, tiny_settings(gradient_checkpointing=checkpointing))
        own = {parameter.untyped_storage().data_ptr() for parameter in policy.trainable().values()}
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor, own: set[int] = own, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs_N = policy.score(packed).logprobs_N
        kept.append(sum(storages.values()))
        logprobs_N.sum().backward()
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("family", ["gpt2", "seed_oss"])
def test_gradient_checkpointing_switches_no_dropout_on(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(family)
    assert (config.resid_pdrop if family == "gpt2" else config.residual_dropout) > 0.0
    write_miniature(config, tmp_path)
    line = np.arange(40, dtype=np.int64)
    (packed,) = pack([item(line.tolist(), list(range(1, 40)))], 1 << 20)
    plain = PolicyModel.load(tmp_path, tiny_settings()).score(packed).logprobs_N
    policy = PolicyModel.load(tmp_path, tiny_settings(gradient_checkpointing=True))
    first, second = policy.score(packed).logprobs_N, policy.score(packed).logprobs_N
    assert torch.equal(first, second)
    assert torch.equal(first, plain)


def test_gradient_checkpointing_of_a_model_that_names_no_layers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_miniature(AutoConfig.for_model("ctrl"), tmp_path)
    with pytest.raises(EngineFault, match=r"trainer\.gradient_checkpointing .* \(ctrl\) .*: set it to false"):
        PolicyModel.load(tmp_path, tiny_settings(gradient_checkpointing=True))


def test_a_job_longer_than_a_dynamic_rotary_embedding_allows_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    small_llama(vocab_size=VOCAB, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(EngineFault, match=r"set rollout\.max_model_len to at most 64"):
        PolicyModel.load(tmp_path, tiny_settings())


def test_under_autocast_layers_multiply_in_bfloat16_and_weights_and_gradients_stay_in_float32(folder: Path) -> None:
    """A GPU does this with a bfloat16 model; here it runs on the CPU."""
    (packed,) = pack(branching_items(), 1 << 20)
    policy = PolicyModel.load(folder, tiny_settings(model={"dtype": "bfloat16"}))
    exact = policy.score(packed).logprobs_N.detach()
    policy._autocast = True
    rounded = policy.score(packed).logprobs_N
    rounded.sum().backward()
    assert all(parameter.dtype == torch.float32 for parameter in policy.trainable().values())
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32
        for parameter in policy.trainable().values()
    )
    difference = (rounded.detach() - exact).abs().max()
    assert 1e-5 < difference < 0.2
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in policy.dense_weights())


def test_a_folder_without_a_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="cannot be loaded"):
        PolicyModel.load(tmp_path, tiny_settings())


def test_a_context_shorter_than_the_jobs_length_ends_its_sequences_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        PolicyModel.load(folder, tiny_settings({"max_model_len": 18000}))
    (said,) = [message for message in caplog.messages if "sequences end at" in message]
    assert said.endswith("the context of this model (llama), not at rollout.max_model_len, which is 18000")


def apart_items() -> list[TrainingItem]:
    """Make long answers to a short prompt, and short answers to a prompt that is longer than prompt and window."""
    random = np.random.default_rng(0)
    items: list[TrainingItem] = []
    for prompt, answer, count in ((4, 40, 4), (60, 3, 2)):
        trunk = random.integers(0, VOCAB, prompt).tolist()
        for _ in range(count):
            line = trunk + random.integers(0, VOCAB, answer).tolist()
            items.append(item(line, list(range(prompt, len(line))), sum(len(each.terms) for each in items)))
    return items


WINDOWED = SHAPE | {"vocab_size": VOCAB, "head_dim": 8, "initializer_range": 0.2, "sliding_window": 16}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("kind", [MistralConfig, Gemma3TextConfig, VaultGemmaConfig])
def test_windows_slide_over_shared_prefixes_as_over_the_sequences_alone(
    tmp_path: Path, kind: type[PretrainedConfig], attention: str, share: bool
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(**WINDOWED)).save_pretrained(tmp_path)
    policy = PolicyModel.load(tmp_path, tiny_settings(attn_implementation=attention))
    for items in (branching_items(), apart_items()):
        check_scores_and_gradients(policy, tmp_path, items, pack(items, 1 << 20, share))


def test_a_model_whose_backward_pass_alone_is_wrong_is_refused_at_load(tmp_path: Path) -> None:
    """Hidden states of zeros have logprobs, and through a normalisation without an epsilon no gradients."""
    shape = {**SHAPE, "vocab_size": VOCAB, "embedding_multiplier": 0.0, "rms_norm_eps": 1e-38}
    AutoModelForCausalLM.from_config(GraniteConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(EngineFault, match="its gradients differ by nan times their size from those of transformers"):
        PolicyModel.load(tmp_path, tiny_settings())


def test_an_architecture_without_attention_is_refused_in_one_sentence_that_names_it(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EngineFault, match=r"this model's architecture \(mamba\) cannot be trained here: .*") as caught:
        PolicyModel.load(tmp_path, tiny_settings())
    assert "\n" not in str(caught.value)
