"""Both clients, unmodified, sample from what they train on a whole hive."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xorl_client
from xorl_client import types as xorl_types

import tinker
from tests.tinker.test_hive import BASE, ROOT, SENTENCES, learn, logprobs, made, settled, step
from tests.tinker.whole_hive import PYTHON, Hive, running
from tinker import types

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


PROMPT = [5, 6, 7]


def sampled(sampler: Any, count: int, **params: Any) -> list[Any]:
    asked = types.SamplingParams(**{"max_tokens": 6, "temperature": 1.0, **params})
    sequences: list[Any] = (
        sampler.sample(prompt=types.ModelInput.from_ints(PROMPT), num_samples=count, sampling_params=asked)
        .result()
        .sequences
    )
    return sequences


def rewards_of(sequence: Any) -> list[float]:
    """Return the reward of each token: 1 for the first eight of the vocabulary."""
    return [float(token < 8) for token in sequence.tokens]


def reinforced(sequence: Any, mean: float) -> Any:
    """Return a sample as it is trained on, with the logprobs that it was drawn with."""
    tokens, before = list(sequence.tokens), len(PROMPT) - 1
    inputs = {
        "target_tokens": PROMPT[1:] + tokens,
        "logprobs": [0.0] * before + list(sequence.logprobs),
        "advantages": [0.0] * before + [each - mean for each in rewards_of(sequence)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]), loss_fn_inputs=inputs)


def test_a_rule_is_learnt_from_samples_of_the_model_itself(service: Any) -> None:
    model = made(service, rank=8, seed=10)
    rewards = []
    for number in range(12):
        sampler = model.save_weights_and_get_sampling_client().result()
        sequences = sampled(sampler, 64, seed=number)
        earned = [reward for each in sequences for reward in rewards_of(each)]
        rewards.append(sum(earned) / len(earned))
        data = [reinforced(each, rewards[-1]) for each in sequences]
        scored = model.forward_backward(data, "importance_sampling")
        stepped = step(model)
        ratios = [
            math.exp(now - then)
            for datum, output in zip(data, scored.result().loss_fn_outputs, strict=True)
            for now, then, advantage in zip(
                output["logprobs"].data,
                datum.loss_fn_inputs["logprobs"].data,
                datum.loss_fn_inputs["advantages"].data,
                strict=True,
            )
            if advantage
        ]
        assert all(abs(ratio - 1.0) < 1e-3 for ratio in ratios), "trainer and sampler are one policy"
        stepped.result()
    assert min(rewards[-3:]) > 2 * rewards[0], rewards  # with its unembedding frozen, this model gets little further


def test_the_example_of_a_loop_earns_more_and_more(hive: Hive) -> None:
    command = [sys.executable, str(ROOT / "examples/tinker_rl.py")]
    environment = {**os.environ, "TINKER_BASE_URL": hive.url, "TINKER_TELEMETRY": "0"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    rewards = [float(line.split()[3]) for line in said.splitlines()]
    assert len(rewards) == 15
    assert rewards[-1] > 1.5 * rewards[0], rewards


def test_logprobs_of_a_prompt_are_those_of_forward_and_stay_while_training_goes_on(service: Any) -> None:
    model = made(service, rank=8, seed=11)
    learn(model, 2)
    sampler = model.save_weights_and_get_sampling_client().result()
    tokens = SENTENCES[0]
    prompt = types.ModelInput.from_ints(tokens)
    first, *found = sampler.compute_logprobs(prompt).result()
    assert first is None
    assert found == pytest.approx(logprobs(model)[0], abs=1e-4)
    before = [list(each.tokens) for each in sampled(sampler, 4, seed=1)]
    learn(model, 3)
    assert sampler.compute_logprobs(prompt).result()[1:] == found, "a snapshot does not change"
    assert [list(each.tokens) for each in sampled(sampler, 4, seed=1)] == before
    assert found != pytest.approx(logprobs(model)[0], abs=1e-2)
    base = service.create_sampling_client(base_model=BASE).result()
    assert base.compute_logprobs(prompt).result()[1:] != pytest.approx(found, abs=1e-2)


def test_a_base_is_sampled_before_there_is_any_model_and_is_the_reference_of_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with running(tmp_path, "--base", f"org/named={BASE}") as hive:
        service = tinker.ServiceClient(base_url=hive.url, api_key="tml-key")
        base = service.create_sampling_client(base_model="org/named").result()
        assert [len(each.tokens) for each in sampled(base, 3, seed=1)] == [6, 6, 6]
        prompt = types.ModelInput.from_ints(SENTENCES[0])
        before = base.compute_logprobs(prompt).result()
        model = service.create_lora_training_client(base_model="org/named", rank=4, seed=15).result()
        assert logprobs(model)[0] == pytest.approx(before[1:], abs=1e-4), "an adapter begins as its base"
        learn(model, 2)
        assert logprobs(model)[0] != pytest.approx(before[1:], abs=1e-2)
        assert base.compute_logprobs(prompt).result() == before
        with pytest.raises(tinker.NotFoundError, match="serves models on tiny in run 1, not on another"):
            service.create_sampling_client(base_model="another").result()


def test_a_sampler_of_a_checkpoint_is_what_was_saved_and_an_inflight_one_moves(service: Any) -> None:
    model = made(service, rank=4, seed=12)
    learn(model, 1)
    path = model.save_weights_for_sampler("kept").result().path
    kept = service.create_sampling_client(model_path=path).result()
    moving = model.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = types.ModelInput.from_ints(SENTENCES[0])
    before = kept.compute_logprobs(prompt).result()
    assert moving.compute_logprobs(prompt).result() == before
    learn(model, 2)
    model.save_weights_and_get_sampling_client(kind="inflight").result()
    assert kept.compute_logprobs(prompt).result() == before
    assert moving.compute_logprobs(prompt).result()[1:] == pytest.approx(logprobs(model)[0], abs=1e-4)


def test_a_client_finds_the_tokenizer_in_a_folder(service: Any) -> None:
    model = made(service, rank=4, seed=14)
    assert Path(model.get_info().model_data.tokenizer_id, "tokenizer.json").is_file()


def test_a_gateway_that_is_killed_loses_no_sampler(hive: Hive, service: Any) -> None:
    model = made(service, rank=4, seed=13)
    sampler = model.save_weights_and_get_sampling_client().result()
    before = [list(each.tokens) for each in sampled(sampler, 2, seed=5)]
    hive.kill("gateway")
    assert [list(each.tokens) for each in sampled(sampler, 2, seed=5)] == before


def test_xorls_client_samples_from_the_base_and_from_a_checkpoint(hive: Hive) -> None:
    client = xorl_client.ServiceClient(base_url=hive.url, api_key="key")
    model = settled(client.create_lora_training_client(base_model=BASE, rank=4, model_id="sampled"))
    path = settled(model.save_weights_for_sampler("step-1")).path
    sampler = client.create_sampling_client(base_url=hive.url, model_path=path)
    params = xorl_types.SamplingParams(max_tokens=4, temperature=1.0)
    answer = settled(sampler.sample(xorl_types.ModelInput.from_ints(PROMPT), params, num_samples=2))
    ended = [len(each.tokens) for each in answer.sequences if each.stop_reason == "stop"]
    cut_off = [len(each.tokens) for each in answer.sequences if each.stop_reason == "length"]
    assert len(ended) + len(cut_off) == 2
    assert all(1 <= length <= 4 for length in ended)
    assert set(cut_off) <= {4}
    assert all(len(each.logprobs) == len(each.tokens) for each in answer.sequences)


def test_a_sampler_that_was_cloned_draws_and_a_prompt_of_one_token_has_no_logprob(service: Any) -> None:
    assert BASE in [each.model_name for each in service.get_server_capabilities().supported_models]
    sampler = service.create_sampling_client(base_model=BASE).result()
    clone = pickle.loads(pickle.dumps(sampler))
    for each in (sampler, clone):
        assert each.compute_logprobs(types.ModelInput.from_ints([5])).result() == [None]
        assert sampled(each, 2)
    alike = clone.sample(
        prompt=types.ModelInput.from_ints([5]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    assert list(alike.prompt_logprobs) == [None]


def test_one_session_has_forty_models_at_once(service: Any) -> None:
    models = [made(service, rank=1, seed=number) for number in range(40)]
    assert len({model.model_id for model in models}) == 40
    steps = [step(model) for model in (models[0], models[-1])]
    assert [each.result().metrics["optimizer_step"] for each in steps] == [1.0, 1.0]
